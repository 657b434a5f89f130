"""TorchScript: read without running anything, and interpreted only where that is asked for."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import random
import warnings
import zipfile
from enum import Enum
from typing import NamedTuple

import pytest
import torch
from torch import nn

from benchmarks.fuzz_files import mutated_archive, outcome
from modelsummary import InputError, ModelFileError, Statistics, load
from modelsummary.files.torch import archive_file as reader
from modelsummary.files.torch.script_pickle import ScriptObject, ScriptTensor, read_pickle
from tests.files.hostile_scripts import (
    DEFINITIONS,
    ENDLESS,
    LARGE,
    OTHER_ARCHIVES,
    OTHER_PICKLES,
    PICKLES,
    REACHES_OUT,
    hostile_archive,
    hostile_script,
)
from tests.files.torchscript import Loops, run_here, scripted


class Tied(nn.Module):
    """A look-up and a product that share their weight, a buffer, and attributes of other kinds."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.ones(4))
        self.names, self.nothing = ["a", "b"], None

    def forward(self, x):
        return self.head(self.words(x) * self.scale)


def sequential():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()


class Point(NamedTuple):
    x: torch.Tensor
    n: int


class Color(Enum):
    RED = 1
    BLUE = 2


class Counter:
    """An object of the program."""

    def __init__(self, n: int):
        self.n = n

    def inc(self):
        self.n += 1
        return self.n


def added(x: torch.Tensor):
    return x + 1


# ------------------------------------------------------------------------------------ without running it


@pytest.mark.parametrize(
    ("make", "x"), [(sequential, torch.rand(2, 3, 8, 8)), (Tied, torch.zeros(2, 3, dtype=torch.long))]
)
@pytest.mark.parametrize("traced", [False, True])
def test_parameters_and_modules(tmp_path, make, x, traced):
    model = make()
    stats = load(scripted(model, tmp_path / "net.pt", x if traced else None))
    assert stats.total_params == sum(each.numel() for each in model.parameters())
    assert stats.total_buffer_bytes == sum(each.nbytes for each in model.buffers())
    assert stats.root.class_name == type(model).__name__
    owns = {
        name: (type(each).__name__, sum(p.numel() for p in each.parameters())) for name, each in model.named_modules()
    }
    rows = {row.fqn: (row.class_name, row.num_params) for row in stats.root.walk()}
    assert rows == owns
    assert stats.execution == "none"
    assert "run=True" in stats.root.note


def test_frozen_parameters_and_dtypes(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half()).requires_grad_(False)
    stats = load(scripted(model, tmp_path / "net.pt"))
    assert (stats.total_params, stats.trainable_params, stats.total_param_bytes) == (40, 0, 20 * 4 + 20 * 2)


def test_constants_of_frozen_modules_are_buffers(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = torch.jit.freeze(torch.jit.script(nn.Linear(4, 3).eval()))
        torch.jit.save(frozen, tmp_path / "net.pt")
    stats = load(tmp_path / "net.pt")
    assert (stats.total_params, stats.total_buffer_bytes) == (0, 4 * 15)


def test_an_input_alone_runs_nothing(tmp_path):
    path = scripted(nn.Linear(2, 2), tmp_path / "net.pt")
    with pytest.raises(InputError, match=r"net\.pt.*, which is code; pass run=True \(--run\) to run it"):
        load(path, (3, 2))
    with pytest.raises(InputError, match="run=True needs the sizes of the inputs"):
        load(path, run=True)


class Trap:
    """Unpickling it runs code."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_call_nothing(protocol):
    with pytest.raises(ModelFileError, match="which TorchScript does not write; nothing of it is run"):
        read_pickle(pickle.dumps(Trap(), protocol))


def test_every_step_of_pickle_is_known_or_refused():
    """No opcode of the language, alone or after a mark and a value, raises anything else."""
    for opcode in pickletools.opcodes:
        for before in (b"", b"(K\x01", b"]K\x01", b")(K\x01K\x01"):
            for argument in (b"", b"\x01" * 8, b"a b\nc\n"):
                try:
                    read_pickle(before + opcode.code.encode("latin1") + argument + b".")
                except ModelFileError:
                    continue


def test_pickles_that_are_large_or_circular():
    with pytest.raises(ModelFileError, match="more than 1,000,000 steps"):
        read_pickle(b"N" * 1_200_000 + b".")
    circle = read_pickle(b"c__torch__\nNet\n)\x81q\x00}X\x01\x00\x00\x00aq\x01h\x00sb.")
    assert isinstance(circle, ScriptObject)
    assert circle.state == {"a": circle}


@pytest.mark.parametrize("kind", PICKLES)
def test_pickles_that_take_all_time(kind):
    with pytest.raises(ModelFileError, match=r"a key is neither|'BINPERSID'|63 bits|200,000 dimensions"):
        read_pickle(PICKLES[kind])


@pytest.mark.parametrize("kind", OTHER_PICKLES)
def test_pickles_with_values_of_other_kinds(tmp_path, kind):
    source = scripted(nn.Linear(2, 2), tmp_path / "net.pt")
    with pytest.raises(ModelFileError, match=r"a pickle|must hold a module|bytes by its size|63 bits|not an operator"):
        load(rewritten(source, tmp_path / "other.pt", {"data.pkl": OTHER_PICKLES[kind]}), (2, 2), run=True)


def rewritten(source, target, changes):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for each in old.infolist():
            name = each.filename.partition("/")[2]
            new.writestr(each.filename, changes.pop(name, old.read(each)))
        for name, data in changes.items():
            new.writestr(f"net/{name}", data)
    return target


def test_modules_in_a_circle_and_weights_that_are_not_there(tmp_path):
    source = scripted(Tied(), tmp_path / "net.pt")
    circle = b"c__torch__.torch.nn.modules.linear\nLinear\n)\x81q\x00}X\x01\x00\x00\x00aq\x01h\x00sb."
    assert load(rewritten(source, tmp_path / "circle.pt", {"data.pkl": circle})).total_params == 0
    with pytest.raises(ModelFileError, match=r"needs \d+ bytes by its size, and has 7"):
        load(rewritten(source, tmp_path / "short.pt", {"data/1": b"1234567", "data/0": b"1234567"}))
    with pytest.raises(ModelFileError, match=r"data\.pkl must hold a module"):
        load(rewritten(source, tmp_path / "none.pt", {"data.pkl": b"N."}))


def test_tensors_say_what_they_need():
    assert ScriptTensor("0", 2, (3, 4), (8, 1), torch.float16, False).bytes_needed == 2 * (2 + 2 * 8 + 3 + 1)
    assert ScriptTensor("0", 2, (0, 4), (8, 1), torch.float16, False).bytes_needed == 0


def test_archives_that_torch_would_read_otherwise(tmp_path):
    path = tmp_path / "net.pt"
    with zipfile.ZipFile(path, "w") as twice:  # torch ignores case
        twice.writestr("net/constants.pkl", b"N.")
        twice.writestr("net/Constants.pkl", b"N.")
    with pytest.raises(ModelFileError, match="two entries with the same name"):
        load(path)
    with zipfile.ZipFile(path, "w") as two:
        two.writestr("net/constants.pkl", b"N.")
        two.writestr("other/data.pkl", b"N.")
    with pytest.raises(ModelFileError, match="entries in several folders"):
        load(path)


# ------------------------------------------------------------------------------------- interpreted


def test_run(tmp_path):
    x = torch.zeros(2, 3, dtype=torch.long)
    stats = load(scripted(Tied(), tmp_path / "net.pt"), {"x": x}, run=True)
    assert stats.total_mult_adds == 240
    assert "Stored in the file: 44 elements, 176 B" in str(stats)
    assert (stats["head"].macs, stats["words"].macs, stats.total_params) == (240, 0, 40)
    assert stats.bandwidth().total > 0


class WritesAFile(nn.Module):
    """Its ``__setstate__`` makes a file, which torch runs as it reads the module."""

    def __init__(self, path: str):
        super().__init__()
        self.weight = torch.ones(2)
        self.path = path

    @torch.jit.export
    def __getstate__(self) -> tuple[torch.Tensor, str, bool]:
        return self.weight, self.path, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool]) -> None:
        self.weight = state[0] + torch.from_file(state[1], True, 2)
        self.path = state[1]
        self.training = state[2]

    def forward(self, x):
        return x * self.weight


def test_the_state_of_a_module_is_set_by_the_interpreter(tmp_path):
    made = tmp_path / "made"
    path = scripted(WritesAFile(str(made)), tmp_path / "net.pt")
    assert load(path).total_buffer_bytes == 8  # its state, as it is
    with pytest.raises(ModelFileError, match=r"its code has 'torch\.from_file', which is not an operator"):
        load(path, (2,), run=True)
    assert not made.exists()


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "victim"
    path.write_text("whole")
    return path


@pytest.mark.parametrize("kind", REACHES_OUT)
def test_nothing_but_operators_is_called(victim, kind):
    path = victim.with_name("net.pt")
    path.write_bytes(hostile_script(REACHES_OUT[kind], victim))
    with pytest.raises(
        ModelFileError, match=r"which is not an operator|TorchScript|has no attribute|the code sets|assigns|constants"
    ):
        load(path, (2, 2), run=True)
    assert victim.read_text() == "whole"
    assert {each.name for each in victim.parent.iterdir()} == {"victim", "net.pt"}


@pytest.mark.parametrize(
    "kind", [*ENDLESS, *DEFINITIONS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in LARGE)]
)
def test_nothing_is_endless(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(reader, "_STEPS", 20_000)
    path = tmp_path / "net.pt"
    body, definitions = DEFINITIONS.get(kind) or ((ENDLESS | LARGE)[kind], "")
    path.write_bytes(hostile_script(body, definitions=definitions))
    with contextlib.nullcontext() if kind in HARMLESS else pytest.raises((ModelFileError, InputError)):
        load(path, (2, 2), run=True)


# They print or return lists that share their parts, round, compute within the budget, or hold what is not run.
HARMLESS = {
    "printing lists of themselves",
    "returning lists of themselves",
    "one_hot",
    "nothing but bytes",
    "identity of tuples",
    "digits",
    "many fields",
    "blanks between signs",
    "functions within functions",
    "a template of many",
    "a product of integers",
    "a convolution of integers",
    "a product of complex numbers",
    "sums of sums",
    "sums along columns",
    "rows far apart",
    "a cubic enlargement",
    "a variance",
    "a soft maximum",
}


@pytest.mark.parametrize("kind", OTHER_ARCHIVES)
def test_only_one_reading_of_an_archive(victim, kind):
    path = victim.with_name("net.pt")
    path.write_bytes(hostile_archive(kind, victim))
    with contextlib.suppress(ModelFileError):
        assert load(path, (2, 2), run=True).total_mult_adds == 8  # the code at its place, and no other
    assert victim.read_text() == "whole"


def test_a_long_list_of_entries_is_not_read(tmp_path):
    path = scripted(nn.Linear(2, 2), tmp_path / "net.pt")
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(130):  # 130 comments of 65,535 bytes are more than 8 MiB, and compress well elsewhere
            entry = zipfile.ZipInfo(f"net/extra/{number}")
            entry.comment = bytes(65535)
            archive.writestr(entry, b"")
    with pytest.raises(ModelFileError, match=r"lists its entries in [\d,]+ bytes; more than 8,388,608 are not read"):
        load(path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))])
def test_mutants_end_cleanly(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(reader, "_STEPS", 20_000)
    rng = random.Random(seed)
    data = scripted(Loops(), tmp_path / "net.pt").read_bytes()
    outcomes = set()
    for _ in range(40):
        (tmp_path / "mutant.pt").write_bytes(mutated_archive(data, rng))
        outcomes.add(outcome(tmp_path / "mutant.pt", (3, 2, 4)))
    assert "ModelFileError" in outcomes <= {"read", "ModelFileError", "InputError"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mutant.pt", "net.pt"]


# ---------------------------------------------------------------------------------------- what a run says


def test_constants_that_are_compared_while_the_file_is_read(tmp_path):
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.rand(2, 5, 8)
    path = scripted(model, tmp_path / "net.pt", x)
    assert load(path).total_params == Statistics(model).total_params == 600
    assert run_here(path, x).total_mult_adds == Statistics(model, x).total_mult_adds


@pytest.mark.parametrize("traced", [False, True])
def test_figures_of_a_run(tmp_path, traced):
    model, x = sequential(), torch.rand(2, 3, 8, 8)
    path = scripted(model, tmp_path / "net.pt", x if traced else None)
    stats, eager = run_here(path, (2, 3, 8, 8)), Statistics(model, x)
    assert stats.total_mult_adds == eager.total_mult_adds == 7776 + 1440
    assert (stats.total_params, stats.total_buffer_bytes) == (eager.total_params, eager.total_buffer_bytes)
    assert [stats[name].macs for name in ("0", "1", "4")] == [7776, 0, 1440]
    assert [stats[name].num_params for name in ("0", "1", "2", "4")] == [112, 8, 0, 725]
    assert stats.root.output_size == [2, 5]
    assert stats["1"].elementwise_ops == eager["1"].elementwise_ops
    assert stats.activations().total == 4 * (3 * 288 + 10)
    names = {"aten.convolution", "aten._convolution"}
    assert sum(count for name, count in stats.operators().items() if name in names) == 1


def test_values_decide(tmp_path):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            if bool(x.sum() < 1):
                x = self.layer(x)
            return x

    assert run_here(scripted(Branch(), tmp_path / "net.pt"), (3, 4)).total_mult_adds == 48


class Everything(nn.Module):
    """What scripted code is made of, with a product of 2 x 3 x 4 for each of its calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        self.by_name = nn.ModuleDict({"a": nn.ReLU()})
        self.color, self.limit = Color.RED, float("inf")

    def forward(self, x, flag: bool = True, name: str = "é\n'\"x"):
        with torch.no_grad():
            y = x * 2
        counter = Counter(3)
        for layer in self.layers:
            x = layer(x)
        for _, module in self.by_name.items():
            x = module(x)
        point = Point(x, counter.inc())
        if self.color == Color.RED:
            x = point.x + point.n
        assert x.shape[0] > 0, f"bad {x.shape[0]} {name}"
        words: dict[str, int] = {}
        words["a"] = counter.n
        for value in words.values():
            x = x + value
        sizes = [size * 2 for size in range(3)]
        sizes += [1]
        text = "a" + name.upper() + str(3) + f"{1.5} {3}"
        rest = x.shape[0] // 2 + x.shape[0] % 2
        while rest < len(text):
            rest += 1
        x = torch.jit.wait(torch.jit.fork(added, x[:, None, :4] + sizes[-1] + self.limit))
        x[0] = 1.0
        x[:, 0] += 2
        return x.to(torch.float16).to("cpu").float(), (y, words), text, rest, sizes, min(1, 2), sorted([3, 1]), x.dtype


def test_the_language(tmp_path):
    stats = load(scripted(Everything(), tmp_path / "net.pt"), (2, 4), run=True)
    assert stats.total_mult_adds == 3 * 2 * 4 * 4
    assert [stats[f"layers.{number}"].macs for number in range(3)] == [32] * 3
    assert stats.root.output_size == ([2, 1, 4], [2, 4])


class OfLists(nn.Module):
    """A layer on each tensor of a list, as detection models have for their images."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, images: list[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
        return [self.layer(images[i]) + mask for i in range(len(images))]


def test_lists_of_sizes_and_of_tensors(tmp_path):
    path = scripted(OfLists(), tmp_path / "net.pt")
    stats = load(path, [[(2, 3), (4, 3)], (5,)], run=True)
    assert stats.total_mult_adds == (2 + 4) * 3 * 5
    assert stats.root.input_size == ([2, 3], [4, 3], [5])
    assert stats.root.output_size == ([2, 5], [4, 5])
    named = {"mask": (5,), "images": [torch.rand(7, 3), torch.rand(1, 3, dtype=torch.float32)]}
    assert load(path, named, run=True).total_mult_adds == (7 + 1) * 3 * 5
    with pytest.raises(InputError, match=r"'images' is List\[Tensor\], which takes a list of sizes: .*\[\(2, 3\)\]"):
        load(path, [(2, 3), (5,)], run=True)
    with pytest.raises(InputError, match="'mask' is Tensor, which no list of sizes fits"):
        load(path, [[(2, 3)], [(5,)]], run=True)
    with pytest.raises(InputError, match="input must be a size such as"):
        load(path, [[[(2, 3)]], (5,)], run=True)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_overloads(tmp_path, make):
    layer, x = make(4, 8, 2, batch_first=True), torch.rand(2, 5, 4)
    stats = load(scripted(layer, tmp_path / "net.pt"), x, run=True)
    assert stats.total_mult_adds == Statistics(layer, x).total_mult_adds


def test_quantized_layers(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's quantisation is deprecated
        layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        model = torch.ao.quantization.quantize_dynamic(layers, {nn.Linear}, torch.qint8)
    stats = load(scripted(model, tmp_path / "net.pt"), (2, 4), run=True)
    assert stats.total_mult_adds == stats["0"].macs == 2 * 4 * 4
    assert stats.operators() == {"quantized.linear_dynamic": 1, "aten.relu": 1}


def test_operators_belong_to_the_module_whose_method_runs(tmp_path):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            weights = nn.functional.linear(x, self.keys.weight, self.keys.bias)
            return self.norm(weights @ weights.transpose(0, 1) @ x)

    layer = nn.Sequential(Attention())
    stats, eager = (
        load(scripted(layer, tmp_path / "net.pt"), (3, 4), run=True),
        Statistics(layer, torch.rand(3, 4)),
    )
    scopes = {operation.scopes[-1].fqn for operation in stats.operations if operation.macs}
    assert scopes == {"0"}
    assert stats["0"].macs == eager["0"].macs == 3 * 4 * 4 + 2 * 3 * 3 * 4


def test_whole_layers_are_one_operator(tmp_path):
    """Width 8, 5 tokens in 2 samples: 4 projections, scores and their product, a network of 16."""
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.rand(2, 5, 8)
    with torch.no_grad():
        stats = run_here(scripted(layer, tmp_path / "net.pt", x), x)
    assert list(stats.operators()) == ["aten._transformer_encoder_layer_fwd"]
    assert stats.total_mult_adds == 2 * 5 * (4 * 64 + 2 * 5 * 8 + 2 * 8 * 16)


def test_what_an_operator_writes_in_place_stays_in_a_buffer(tmp_path):
    class Doubled(nn.Module):
        def forward(self, x):
            return torch.cat([x.relu_(), x])

    stats = run_here(scripted(Doubled(), tmp_path / "net.pt"), (2, 4))
    assert [tuple(row) for row in stats.program.traffic(64)] == [("relu__0", 32, 32), ("cat_1", 0, 64)]
