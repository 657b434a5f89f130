"""TorchScript: read without running anything, and run only where that is asked for, in a process of its own."""

from __future__ import annotations

import pickle
import pickletools
import warnings
import zipfile

import pytest
import torch
from torch import nn

from modelsummary import InputError, ModelFileError, Statistics, load
from modelsummary.files.torch import script_run
from modelsummary.files.torch.script_pickle import ScriptObject, ScriptTensor, read_pickle
from tests.files.torchscript import run_here, scripted


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


# ----------------------------------------------------------------------------------------- in a process


def test_run_in_a_process(tmp_path):
    x = torch.zeros(2, 3, dtype=torch.long)
    path = scripted(Tied(), tmp_path / "net.pt")
    stats, here = load(path, {"x": x}, run=True), run_here(path, x)
    assert stats.total_mult_adds == here.total_mult_adds == 240
    assert "Stored in the file: 44 elements, 176 B" in str(stats)
    assert stats.table().splitlines()[:-2] == here.table().splitlines()[:-2]  # up to what is stored
    assert (stats["head"].macs, stats["words"].macs, stats.total_params) == (240, 0, 40)
    assert stats.bandwidth().total == here.bandwidth().total > 0
    assert stats.activations() == here.activations()


@pytest.mark.slow
def test_a_run_has_a_time_limit(tmp_path, monkeypatch):
    class Endless(nn.Module):
        def forward(self, x):
            while bool(torch.isfinite(x).all()):
                x = x + 0
            return x

    monkeypatch.setattr(script_run, "_SECONDS", 4)
    with pytest.raises(InputError, match=r"does not run on \[\[2\]\] within 4 s"):
        load(scripted(Endless(), tmp_path / "net.pt"), (2,), run=True)


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


def test_code_that_reaches_files_is_not_run(tmp_path):
    made = tmp_path / "made"
    path = scripted(WritesAFile(str(made)), tmp_path / "net.pt")
    assert load(path).total_buffer_bytes == 8  # its state, as it is
    with pytest.raises(ModelFileError, match="its code has 'from_file', which can reach outside; it is not run"):
        load(path, (2,), run=True)
    assert not made.exists()


@pytest.mark.parametrize(
    "code",
    [
        "torch.save(x, 'a')",
        "ops.aten . save(x, 'a')",
        "ops.image.read_file('a')",
        "torch.classes.dist_c10d.Store()",
        r'getattr(torch, "from\x5ffile")("a")',
        "getattr(torch, name)",
    ],
)
def test_code_is_searched(tmp_path, code):
    source = scripted(nn.Linear(2, 2), tmp_path / "net.pt")
    path = rewritten(source, tmp_path / "trap.pt", {"code/other.py": code.encode()})
    with pytest.raises(ModelFileError, match="which can reach outside; it is not run"):
        load(path, (2, 2), run=True)


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
    # The norm returns what it keeps for the backward; a traced one of torch 2.6 returns empty tensors instead.
    kept = 2 * 16
    assert stats.activations().total - 4 * (3 * 288 + 10) in ((kept, 0) if traced else (kept,))
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


def test_whole_layers_are_one_operator(tmp_path):
    """Width 8, 5 tokens in 2 samples: 4 projections, scores and their product, a network of 16."""
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.rand(2, 5, 8)
    with torch.no_grad():
        stats = run_here(scripted(layer, tmp_path / "net.pt", x), x)
    assert list(stats.operators()) == ["aten._transformer_encoder_layer_fwd"]
    assert stats.total_mult_adds == 2 * 5 * (4 * 64 + 2 * 5 * 8 + 2 * 8 * 16)
