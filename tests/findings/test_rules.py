"""Every rule finds its planted defects, and is silent on models without one."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import Statistics, _torch
from modelsummary.findings import RULES
from tests.findings.planted import IMAGES, PLANTED, TEXT, Attention, Block, Branching, Counting, Deciding, Images, sound
from tests.untouched import untouched


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: f"{planted.code}-{planted.words}")
def test_planted(planted):
    model = planted.make()
    stats = Statistics(model, planted.inputs)
    with untouched(model):
        findings = stats.check(select=planted.code)
    assert any(planted.words in finding.what for finding in findings)
    if planted.fqn is not None:
        assert {finding.fqn for finding in findings} == {planted.fqn}


def test_every_rule_has_three_planted_defects():
    counts = Counter(planted.code for planted in PLANTED)
    assert {code for code in RULES if counts[code] < 3} == set()


@pytest.mark.parametrize("case", sound(), ids=lambda case: type(case[0]).__name__)
def test_silence(case):
    model, inputs = case
    assert [(finding.code, finding.fqn, finding.what) for finding in Statistics(model, inputs).check()] == []


@pytest.mark.parametrize("options", [{"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}])
def test_silence_in_half_precision(options):
    for model, inputs in ((Block(), TEXT), (Images(), IMAGES)):
        assert list(Statistics(model, inputs).check(**options)) == []


@pytest.mark.parametrize("case", sound(), ids=lambda case: type(case[0]).__name__)
def test_silence_on_request(case):
    model, inputs = case
    assert [(finding.code, finding.fqn, finding.what) for finding in Statistics(model, inputs).check(select="B")] == []


def test_rules_on_request_are_asked_by_name_alone(monkeypatch):
    """They would compile the model, run it for real, or plan with it."""
    monkeypatch.setattr(torch, "compile", None)
    monkeypatch.setattr(Statistics, "split", None)
    findings = Statistics(nn.Sequential(Block(), Branching()), TEXT).check()
    assert not [code for code in findings.rules if code.startswith("B")]
    assert "B951" not in Statistics(nn.Sequential(Block(), Counting()), TEXT).check(select="R").rules


def test_graph_breaks_have_their_lines():
    (finding,) = Statistics(nn.Sequential(Block(), Branching()), TEXT).check(select="graph-break")
    assert finding.fqn == "1"
    with open(finding.file, encoding="utf-8") as file:
        assert "if x.sum() > 0:" in file.readlines()[finding.line - 1]


def test_equal_blocks_have_one_line():
    """Their reasons differ in the numbers of the blocks alone; remedies of several reasons say where they belong."""
    model = next(planted for planted in PLANTED if "blocks.0.up.weight" in planted.words).make()
    findings = Statistics(model, TEXT).check(select=["B955", "B956"])
    lines = str(findings).splitlines()
    (line,) = [line for line in lines if line.startswith("B955  ")]
    assert "blocks.0, ..., blocks.2  " in line
    words = " ".join(str(findings).split())
    assert "Repeated reads blocks.*.up.weight, which a unit gathers for its own forward alone" in words
    assert "B956 (blocks.0.up, ..., blocks.2.up): a weight of its own works" in lines
    assert "B956 (stem, ..., blocks.2.down): along another dimension it can be split" in lines


def test_a_model_of_which_no_layer_is_divided():
    """Each layer has its own reason and remedy, as in a model of which others are divided."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            return self.fc(x).softmax(-1)

    (finding,) = Statistics(nn.Sequential(Gate(), nn.LayerNorm(64)), TEXT).check(select="B956")
    assert (finding.fqn, finding.remedy) == ("0.fc", "along another dimension it can be split")
    assert finding.what == "is not divided by tensor parallelism: softmax() in 0 works along the sharded dimension"


def test_compiled_functions_stay_compiled():
    model, graphs = nn.Sequential(Block(), Branching()), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    x = torch.ones(TEXT)
    with torch.no_grad():
        compiled(x)
        number = len(graphs)
        Statistics(model, TEXT).check(select=["B951", "B952"])
        compiled(x)
    assert len(graphs) == number


def test_a_compiler_that_raises(monkeypatch):
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            if torch.compiler.is_compiling():
                raise ValueError("not here")
            return self.fc(x)

    model = Fickle()
    stats = Statistics(model, TEXT)

    def compile_runs(function, *_):
        function()
        raise RuntimeError("backend lost. More of it")

    monkeypatch.setattr(_torch, "compile_runs", compile_runs)
    with untouched(model):
        findings = {finding.code: finding for finding in stats.check(select=["B951", "B952", "B953"])}
    assert findings.keys() == {"B951", "B953"}
    assert findings["B951"].what == "torch.compile raises RuntimeError: backend lost"
    assert findings["B953"].what == "torch.export raises ValueError: not here"
    with open(findings["B953"].file, encoding="utf-8") as file:
        assert 'raise ValueError("not here")' in file.readlines()[findings["B953"].line - 1]


def test_a_model_on_meta_is_exported_and_not_compiled():
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block())
    findings = Statistics(model, TEXT).check(select="B95")
    assert list(findings) == []
    assert any("they need values" in note for note in findings.notes)


# -------------------------------------------------------------------------------------------------------- silence


class _Halves(nn.Module):
    """Equal operators on two halves of one storage."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 128)

    def forward(self, x):
        first, second = self.fc(x).chunk(2, -1)
        return first.sigmoid() * second.sigmoid()


class _Changing(nn.Module):
    """An operator that is repeated after its argument was written in place."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = self.fc(x)
        first = torch.floor(y)
        y = y.add_(1)
        return first + torch.floor(y) + y


class _Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = self.fc(x)
        return F.dropout(y, 0.5) + F.dropout(y, 0.5)


class _Kept(nn.Module):
    """A clone that is needed, as its source is written."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = self.fc(x)
        before = y.clone()
        y += 1
        return before * y


class _Caching(nn.Module):
    """A model that stores a result."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = self.fc(x)
        self.last = y.detach().abs().mean(-1)
        return y


class _Asking(nn.Module):
    """A result that a condition reads."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        return self.fc(x) if (positions.diff() == 1).all() else x


class _Reading(nn.Module):
    """Results that become numbers of Python, without an operator."""

    def __init__(self, read):
        super().__init__()
        self.fc, self.read = nn.Linear(64, 64), read
        self.register_buffer("sizes", torch.tensor([3, 5]))

    def forward(self, x):
        return self.fc(x)[:, : int(self.read(self.sizes * 2 - 1))]


READS = {
    "tolist": lambda sizes: sizes.tolist()[0],
    "numpy": lambda sizes: sizes.numpy()[0],
    "torch.tensor": lambda sizes: torch.tensor([sizes.sum(), sizes.max()])[1],
    "shape": lambda sizes: sizes.nonzero().shape[0],
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("is_real", [False, True])
def test_what_python_reads_is_read(name, is_real):
    model = _Reading(READS[name])
    findings = Statistics(Deciding(model) if is_real else model, TEXT).check(select="U203")
    assert list(findings) == []


def test_what_nobody_reads_in_a_real_run():
    model = Deciding(Block(lambda _, x: x.expand(64, *x.shape).exp() is x or x))
    findings = Statistics(model, TEXT).check(select="U203,C902".split(","))
    assert {finding.code: finding.what for finding in findings}["U203"] == "computes exp, which nobody reads"
    assert {finding.code for finding in findings} == {"U203", "C902"}


class _Square(nn.Module):
    """The same positions for rows and columns, as their numbers are equal here, and a repetition of one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        rows = (torch.arange(4 * x.shape[1]) > 5).long()
        columns = (torch.arange(x.shape[2]) > 5).long()
        scales = [(torch.arange(size) * 2 + 1).float() for size in (4 * x.shape[1], x.shape[2])]
        return self.fc(x).tanh().repeat_interleave(len(x) // 4, dim=0) * (rows + columns) * scales[0] * scales[1]


class _Summed(nn.Module):
    """A tensor of which ``einsum`` makes the same copy for two products."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = self.fc(x).unflatten(-1, (4, 16))
        a, b = y.tanh(), y.sigmoid()
        return torch.einsum("blhn,bkhn->bhlk", y, a) + torch.einsum("blhn,bkhn->bhlk", y, b)


class _Masked(nn.Module):
    """Torch's attention with a mask."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = (x + self.fc(x))[:, None]
        scores = torch.zeros(x.shape[1], x.shape[1], requires_grad=True)
        return F.scaled_dot_product_attention(y, y, y, attn_mask=scores)


def test_casts_of_attention_that_the_cpu_runs_in_parts_are_torchs():
    findings = Statistics(Deciding(_Masked()), TEXT).check(select="D", autocast=torch.bfloat16)
    assert list(findings) == []


class _Weights(nn.Module):
    """Attention that returns its weights."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = self.fc(x)
        weights = (y @ y.transpose(1, 2)).softmax(-1)
        return weights @ y, weights


class _Capped(nn.Module):
    """Attention with capped scores, which torch's fused kernels do not compute."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        y = self.fc(x)
        scores = torch.tanh(y @ y.transpose(1, 2) / 50) * 50
        return scores.softmax(-1) @ y


@pytest.mark.parametrize(
    "kind", [_Halves, _Changing, _Dropping, _Kept, _Caching, _Asking, _Square, _Summed, _Weights, _Capped]
)
def test_silence_where_the_work_is_needed(kind):
    assert [(finding.code, finding.what) for finding in Statistics(kind(), TEXT).check()] == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_rounding_is_no_cast_and_back(dtype):
    model = Block(lambda _, x: x + (x.detach() * 8).to(dtype).to(x.dtype))
    assert list(Statistics(model, (64, 512, 64)).check(select="D403")) == []
    wider = Block(lambda _, x: x + (x.detach() * 8).double().to(x.dtype))
    assert [finding.code for finding in Statistics(wider, (64, 512, 64)).check(select="D403")] == ["D403"]


def test_a_small_buffer_is_silent():
    """256 of 2^26 bytes are less than 1/100,000; of the same bytes in a small model, more."""
    for width, found in ((4096, []), (64, ["U202"])):
        model = nn.Sequential(nn.Linear(width, width, device="meta"), nn.ReLU())
        model[1].register_buffer("frequencies", torch.empty(64, device="meta"))
        assert [finding.code for finding in Statistics(model, (4, width)).check(select="U202")] == found


def test_fused_attention_is_silent():
    for model in (Attention(4, 16), Attention(4, 16).bfloat16(), Attention(4, 16, groups=2).bfloat16()):
        assert list(Statistics(model, (4, 128, 64)).check(select="S")) == []


def test_torchs_own_copies_are_silent():
    """A user cannot change what torch's modules do inside."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    transformer = nn.Transformer(64, 4, 1, 2, 128, batch_first=True)
    for model, inputs in ((spectral, (4, 64)), (transformer, [(4, 16, 64), (4, 8, 64)])):
        assert list(Statistics(model, inputs).check(select=["R", "U"])) == []


# ----------------------------------------------------------------------------------------------------- what is said


def _only(model, inputs, code, **options):
    (finding,) = Statistics(model, inputs).check(select=code, **options)
    return finding


def test_a_detached_layer_has_its_line():
    model = next(planted for planted in PLANTED if planted.code == "G103").make()
    finding = _only(model, TEXT, "G103")
    assert (finding.level, finding.fqn, finding.call_index) == ("error", "extra", None)
    assert finding.file is not None
    assert finding.file.endswith("planted.py")
    with open(finding.file, encoding="utf-8") as file:
        assert ".detach()" in file.readlines()[finding.line - 1]


def test_the_overwriting_line_is_named():
    model = next(planted for planted in PLANTED if planted.code == "G100").make()
    finding = _only(model, TEXT, "G100")
    with open(finding.file, encoding="utf-8") as file:
        assert "gate.add_(1)" in file.readlines()[finding.line - 1]
    assert "aten.add_ wrote it" in finding.what


def test_bytes_of_a_bias_and_seconds_of_its_gradient():
    finding = _only(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), IMAGES, "N601")
    assert finding.nbytes == 8 * 4
    assert finding.seconds > 0


def test_bytes_of_activations_that_a_frozen_layer_keeps():
    """The leaf is kept for its gradient, and the sigmoid keeps its result; frozen products keep nothing.

    The trained layer keeps its input in any case.
    """

    class Wanting(nn.Module):
        def forward(self, x):
            return x.clone().requires_grad_()

    first, second = nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 16).requires_grad_(False)
    model = nn.Sequential(Wanting(), first, nn.Sigmoid(), second, nn.Linear(16, 8))
    findings = Statistics(model, (4, 64)).check(select="G106")
    assert {finding.fqn: finding.nbytes for finding in findings} == {"0": 4 * 64 * 4, "2": 4 * 32 * 4}
    assert list(Statistics(model[1:], (4, 64)).check(select="G106")) == []


def test_a_loss_decides_which_results_count():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x):
            return self.a(x), self.b(x)

    stats = Statistics(Two(), (4, 64))
    assert list(stats.check()) == []
    findings = stats.check(loss=lambda output: output[0].sum())
    assert [(finding.code, finding.fqn) for finding in findings] == [("G104", "b")]


@pytest.mark.parametrize("part", [slice(None), slice(4)])
def test_a_constant_that_values_are_written_into_is_none(part):
    class Padded(nn.Module):
        def forward(self, x):
            padded = torch.zeros(2, 8, device=x.device)
            padded[:, part] = x[:, part]
            return padded.exp() * padded.exp().sin()

    findings = Statistics(Padded(), (2, 8)).check("A100", select="R301")
    assert [finding.what for finding in findings] == ["repeats exp, of values as before"]


def test_an_empty_part_of_a_result_is_not_read():
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x):
            return torch.cat([self.a(x), self.b(x)[:0]])

    findings = Statistics(Short(), (4, 64)).check(select=["G", "U"])
    assert [(finding.code, finding.fqn) for finding in findings] == [("U203", "b")]  # its gradient is zero, not missing


def test_a_model_without_any_gradient():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 8)

        def forward(self, x):
            return self.fc(x).detach()

    finding = _only(Cut(), (4, 64), "G100")
    assert "nothing in the model's result requires a gradient" in finding.what


def test_a_frozen_model_is_checked_by_its_forward():
    findings = Statistics(Images().requires_grad_(False), IMAGES).check()
    assert (findings.mode, list(findings)) == ("inference", [])


def test_a_mask_that_each_layer_makes_is_repeated_work():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            positions = torch.arange(x.shape[1], device=x.device)
            mask = (positions[:, None] >= positions).float().log()
            return self.fc(x) + mask.mean()

    findings = Statistics(nn.Sequential(*(Layer() for _ in range(3))), (4, 512, 64)).check(select="R301")
    assert [finding.fqn for finding in findings if "log" in finding.what] == ["1", "2"]


def test_the_mask_that_attention_makes_itself_is_no_repeated_work():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            queries = self.fc(x).unflatten(-1, (4, 16)).transpose(1, 2)
            keys = queries[:, :2]
            attended = nn.functional.scaled_dot_product_attention(queries, keys, keys, is_causal=True, enable_gqa=True)
            return attended.transpose(1, 2).flatten(2)

    findings = Statistics(nn.Sequential(Grouped(), Grouped()), (2, 64, 64)).check()
    assert [finding.code for finding in findings] == ["S503", "S503"]


def test_the_mask_that_attention_copies_for_its_kernel_is_no_repeated_work():
    """A mask that is expanded over the heads is copied within torch's function, in each call."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x, mask):
            queries = self.fc(x).unflatten(-1, (4, 16)).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(queries, queries, queries, attn_mask=mask)
            return attended.transpose(1, 2).flatten(2)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Masked(), Masked()

        def forward(self, x):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            return self.second(self.first(x, mask), mask)

    assert list(Statistics(Twice(), (2, 61, 64)).check()) == []


def test_weights_of_multihead_attention_that_nobody_reads():
    class Attending(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.attention, self.options = nn.MultiheadAttention(64, 4, batch_first=True), options

        def forward(self, x):
            return self.attention(x, x, x, **self.options)[0]

    finding = _only(Attending(), (4, 128, 64), "S503")
    assert finding.remedy == "pass need_weights=False, as nobody reads the weights that it returns"
    assert list(Statistics(Attending(need_weights=False), (4, 128, 64)).check(select="S503")) == []


def test_kernels_of_another_device_are_no_findings():
    """With a trained bias, attention runs in parts, and in float32, on the CPU; an A100 fuses it."""

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.bias = nn.Linear(64, 64), nn.Parameter(torch.zeros(4, 128, 128))

        def forward(self, x):
            queries = self.fc(x).unflatten(-1, (4, 16)).transpose(1, 2)
            attended = nn.functional.scaled_dot_product_attention(queries, queries, queries, self.bias)
            return attended.transpose(1, 2).flatten(2)

    stats = Statistics(Deciding(Biased()), (4, 128, 64))
    for options in ({}, {"autocast": torch.bfloat16}):
        findings = stats.check(select=["S503", "D402", "C902"], **options)
        assert [finding.code for finding in findings] == ["C902"]


def test_a_step_whose_forward_needs_to_run_without_gradients():
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 8)

        def forward(self, x):
            if torch.is_grad_enabled():
                raise ValueError("no gradients")
            return self.fc(x)

    finding = _only(Fickle(), TEXT, "G100")
    assert finding.what == "the forward of the step failed: ValueError: no gradients"
    assert finding.remedy == "mend the forward: without gradients it runs"


def test_a_bias_before_an_instance_norm():
    finding = _only(nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)), IMAGES, "N601")
    assert finding.what == "has a bias that the instance norm after it subtracts"


def test_float32_under_autocast():
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            hidden = self.a(x)
            with torch.autocast(x.device.type, enabled=False):
                return self.b(hidden.float())

    stats = Statistics(Island(), (512, 64))
    assert list(stats.check(select="D402")) == []
    findings = stats.check(select="D402", autocast=torch.bfloat16)
    assert [finding.fqn for finding in findings] == ["b"]
    assert 0 < findings[0].seconds < findings.step_seconds


def test_what_the_next_multiple_costs():
    """130 columns are compared with 136 by the predicted kernels: of a product and its two gradients."""
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 130)).to(torch.bfloat16)
    finding = _only(model, (4096, 4096), "S501")
    now, then = (sum(kernel.seconds for kernel in _products(width)) for width in (130, 136))
    numbers = re.fullmatch(
        r"pad to a multiple of 8, such as 136, .* ([\d.]+) us as it is and ([\d.]+) us padded", finding.remedy
    )
    assert [float(number) for number in numbers.groups()] == pytest.approx([1e6 * now, 1e6 * then], rel=0.02)
    assert finding.seconds == pytest.approx(max(now - then, 0.0), abs=1e-9)


@pytest.mark.parametrize("is_trained", [False, True])
def test_padded_widths_gain_what_was_measured(is_trained):
    """GPT-2's last product takes 8.52 ms on an H100, and 1.15 ms padded; both gradients load rows of these widths."""
    model = nn.Linear(1024, 50_257, bias=False, device="meta").to(torch.bfloat16).requires_grad_(is_trained)
    stats = Statistics(model, torch.empty(8192, 1024, device="meta", dtype=torch.bfloat16))
    (finding,) = stats.check(select="S501", device="H100")
    assert finding.seconds == pytest.approx((3 if is_trained else 1) * (8.52e-3 - 1.15e-3), rel=0.25)


def _products(width):
    """The kernels of a product and of its two gradients."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, width, bias=False)).to(torch.bfloat16)
    # the gradient of a mere sum is one expanded element
    kernels = Statistics(model, (4096, 4096)).kernels("A100", backward=True, loss=lambda y: (y * y).sum())
    return [kernel for kernel in kernels if kernel.fqn == "1"]
