"""Exported programs and TorchScript: the same figures as of the live model, and nothing in a file is trusted."""

from __future__ import annotations

import io
import json
import pickle
import random
import zipfile
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.fuzz_files import mutated, outcome
from modelsummary import InputError, ModelFileError, ModelStatistics, Statistics, load
from tests.files.torchscript import Loops, run_here, scripted
from tests.models import Call
from tests.onnx_models import export


class Net(nn.Module):
    """A layer that is called twice, attention, a product without a module, and a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(8, 8), nn.ReLU()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        x = self.act(self.layer(x))
        x = self.layer(x) * self.scale
        x = self.attention(x, x, x, need_weights=False)[0]
        return x @ x.transpose(1, 2)


def exported(model, x, path, **rest):
    program = torch.export.export(model, (x,), **rest)
    torch.export.save(program, path)
    with zipfile.ZipFile(path) as archive:
        if "serialized_exported_program.json" in archive.namelist():
            pytest.skip("torch 2.6 saves weights as a pickle, which is not read")
    return path


# per sample of length 5: twice 8 x 8; in attention 8 x 24, two products of 5 x 5 x 8, 8 x 8; then 5 x 5 x 8
PER_SAMPLE = 5 * (2 * 64 + 192 + 64) + 3 * 200


def test_exported_program(tmp_path):
    model = Net().eval()
    stats = load(exported(model, torch.rand(3, 5, 8), tmp_path / "net.pt2"))
    eager = Statistics(model, (3, 5, 8))
    assert stats.total_mult_adds == stats.total_mult_adds_expr == eager.total_mult_adds == 3 * PER_SAMPLE
    assert (stats.total_params, stats.trainable_params) == (eager.total_params, eager.total_params)
    assert stats.total_buffer_bytes == 32
    assert stats.root.class_name == "Net"
    assert [row.macs for row in stats.calls("layer")] == [row.macs for row in eager.calls("layer")] == [960, 960]
    assert stats["attention"].macs == eager["attention"].macs
    assert stats["layer"].input_size == stats["layer"].output_size == [3, 5, 8]
    assert stats.root.output_size == [3, 5, 5]
    assert stats.uncounted_ops == {}
    assert stats.execution == "file"
    assert str(stats) == str(ModelStatistics.from_json(stats.to_json()))
    linear = stats.bandwidth().rows
    assert next(row for row in linear if row.layer == "linear") == ("linear", 4 * (120 + 64 + 8), 4 * 120)


def test_open_dimensions(tmp_path):
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    path = exported(
        Net().eval(), torch.rand(3, 5, 8), tmp_path / "net.pt2", dynamic_shapes={"x": {0: batch, 1: length}}
    )
    stats = load(path)
    b, n = stats.root.input_size[:2]
    assert stats.root.input_size == [b, n, 8]
    assert stats.total_mult_adds == 3 * PER_SAMPLE
    expression = stats.total_mult_adds_expr
    assert expression.subs({b: 3, n: 5}) == 3 * PER_SAMPLE
    assert str(expression.subs({b: "b", n: "n"})) == "24*b*n**2 + 384*b*n"
    assert f"{b} = 3" in stats.root.note
    bound = load(path, (7, 5, 8))
    assert bound.total_mult_adds == 7 * PER_SAMPLE
    assert bound.root.output_size == [7, 5, 5]
    assert bound.root.note == ""
    with pytest.raises(InputError, match=r"got \[7, 5, 9\]"):
        load(path, (7, 5, 9))
    with pytest.raises(InputError, match=r"got \[7, 5\]"):
        load(path, (7, 5))
    with pytest.raises(InputError, match="no input 'y'; it has 'x'"):
        load(path, {"y": (7, 5, 8)})
    with pytest.raises(InputError, match=r"input 0 must be one size, got \[\(7, 5, 8\)\]; only TorchScript"):
        load(path, [[(7, 5, 8)]])


def test_tied_weights_count_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(self.words(x))

    x = torch.zeros(2, 3, dtype=torch.long)
    for strict in (True, False):
        stats = load(exported(Tied(), x, tmp_path / "net.pt2", strict=strict))
        assert (stats.total_params, stats.total_param_bytes, stats.total_mult_adds) == (40, 160, 240)


def test_containers_of_other_libraries(tmp_path):
    """As of transformers, whose registration a reader does not have."""
    Output = namedtuple("Output", "logits hidden")
    if not hasattr(pytree, "_deregister_pytree_node"):
        pytest.skip("torch 2.6 cannot take a container back")
    pytree._private_register_pytree_node(
        Output, lambda each: (list(each), None), lambda values, _: Output(*values), serialized_type_name="other.Output"
    )
    try:
        model = Call(lambda self, x: Output(self.layer(x), x), layer=nn.Linear(4, 4))
        path = exported(model, torch.rand(2, 4), tmp_path / "net.pt2")
    finally:
        pytree._deregister_pytree_node(Output)
    assert load(path).total_mult_adds == 32


def test_sizes_that_are_multiples(tmp_path):
    model = Call(lambda self, x: self.layer(x.reshape(-1, 2, 4)), layer=nn.Linear(4, 4))
    half = torch.export.Dim("half")
    path = exported(model, torch.rand(6, 4), tmp_path / "net.pt2", dynamic_shapes={"args": ({0: 2 * half},)})
    assert load(path).total_mult_adds == 6 * 16
    assert load(path, (20, 4)).total_mult_adds == 20 * 16
    with pytest.raises(InputError, match=r"net\.pt2.* got \[21, 4\]"):
        load(path, (21, 4))


def test_sizes_that_values_decide_are_in_the_ledger(tmp_path):
    model = Call(lambda self, x: self.layer(x[x.sum(1) > 0]), layer=nn.Linear(4, 4))
    stats = load(exported(model, torch.rand(6, 4), tmp_path / "net.pt2"))
    assert stats.total_mult_adds == 0
    assert list(stats.uncounted_ops) == ["aten.linear"]
    assert str(stats.total_mult_adds_expr) == "16*u0"
    assert "open dimensions" not in stats.root.note
    assert any(each.tensor == "linear" for each in stats.bandwidth().unknown)


def test_wrapped_regions_and_operators_without_formula(tmp_path):
    def forward(self, x):
        with torch.no_grad():
            y = self.layer(x)
        return torch.linalg.solve(y, x)

    stats = load(exported(Call(forward, layer=nn.Linear(8, 8)), torch.rand(8, 8), tmp_path / "net.pt2"))
    assert stats["layer"].macs == 512
    assert list(stats.uncounted_ops) == ["aten._linalg_solve_ex"]


class Branches(nn.Module):
    """A ``torch.cond`` of two layers or none, inside another one."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        def both(x):
            return torch.cond(x.sum() > 1, lambda x: self.two(self.one(x)), lambda x: self.two(x[:, :4]), (x,))

        return torch.cond(x.sum() > 0, both, lambda x: x * 2, (x,))


def test_branches_have_rows_and_the_dearer_one_counts(tmp_path):
    stats = load(exported(Branches(), torch.rand(3, 8), tmp_path / "net.pt2"))
    assert stats.total_mult_adds == 3 * (8 * 4 + 4 * 8)  # both layers, in the inner branch
    assert stats.total_params == 8 * 4 + 4 + 4 * 8 + 8
    assert stats.uncounted_ops == {}
    assert stats.operators()["aten.linear"] == 3
    assert [operation.executed for operation in stats.operations if operation.op_type == "aten.linear"] == [1, 1, 0]
    assert [operation.executed for operation in stats.operations if operation.op_type == "aten.mul"] == [False]
    for name in ("cond", "cond.true.cond"):
        assert f"{name!r}" in stats.root.note
    assert "the branch with more multiply-adds counts" in stats.root.note
    same = load(exported(Branches().one, torch.rand(3, 8), tmp_path / "one.pt2"))
    assert "branch" not in same.root.note


def test_views_move_nothing_and_in_place_takes_no_storage(tmp_path):
    model = Call(lambda self, x: torch.relu_(torch.neg(x)).reshape(8).t(), nothing=nn.Identity())
    stats = load(exported(model, torch.rand(2, 4), tmp_path / "net.pt2"))
    rows = {row.layer: (row.read, row.write) for row in stats.bandwidth().rows}
    assert rows == {"neg": (32, 32), "relu_": (32, 32), "reshape": (0, 0), "t": (0, 0)}
    assert stats.activations() == (32, 64, "neg")


@pytest.mark.slow  # test_comparing.py does the same with a small model
def test_alexnet_in_all_formats(tmp_path):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    model, x = models.alexnet().eval(), torch.rand(1, 3, 224, 224)
    stats = [
        Statistics(model, x),
        load(export(model, x, tmp_path / "alexnet.onnx")),
        load(exported(model, x, tmp_path / "alexnet.pt2")),
        run_here(scripted(model, tmp_path / "alexnet.pt"), (1, 3, 224, 224)),
    ]
    assert [each.total_mult_adds for each in stats] == [714_188_480] * 4
    assert [each.total_params for each in stats] == [61_100_840] * 4
    assert [each.total_param_bytes for each in stats] == [244_403_360] * 4
    assert [sum(row.self_macs for row in each if "onv" in row.class_name) for each in stats] == [655_566_528] * 4


def test_alexnet():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    with torch.device("meta"):
        model = models.alexnet().eval()
    eager = Statistics(model, (1, 3, 224, 224))
    leaves = [row for row in eager if row.is_leaf]
    assert len(leaves) == 21
    assert eager.total_output_bytes == 4_392_864
    containers = [eager["features"].output_bytes, eager["classifier"].output_bytes, eager.root.output_bytes]
    assert sum(containers) == 44_864 == 4 * (256 * 36 + 1000 + 1000)
    assert eager.total_output_bytes + sum(containers) == 4_437_728


# ------------------------------------------------------------------------------------------ broken files


class Trap:
    """Unpickling it runs code."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


def rewritten(source, target, edit):
    """A copy of an archive; ``edit`` gets the name and the bytes of an entry."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for each in old.infolist():
            new.writestr(each.filename, edit(each.filename, old.read(each)))
    return target


def test_no_pickle_is_run(tmp_path):
    path = exported(Net().eval(), torch.rand(3, 5, 8), tmp_path / "net.pt2")
    trap = io.BytesIO()
    torch.save({"inputs": Trap()}, trap)

    def plant(name, data):
        return trap.getvalue() if name.endswith(".pt") else data

    assert load(rewritten(path, tmp_path / "trap.pt2", plant)).total_mult_adds == 3 * PER_SAMPLE

    def only_pickle(name, data):
        if not name.endswith("weights_config.json"):
            return data
        facts = json.loads(data)
        facts["config"]["layer.weight"] |= {"use_pickle": True, "tensor_meta": None}
        return json.dumps(facts).encode()

    with pytest.raises(ModelFileError, match=r"'layer\.weight' is stored as a pickle, which is not run"):
        load(rewritten(path, tmp_path / "trap.pt2", only_pickle))
    (tmp_path / "legacy.pt").write_bytes(pickle.dumps(Trap()))
    torch.save(Trap(), tmp_path / "plain.pt")
    for name, said in {
        "legacy.pt": "not a torch archive",
        "plain.pt": "neither a tensor nor plain data, and is not run",
    }.items():
        with pytest.raises(ModelFileError, match=said):
            load(tmp_path / name)


@pytest.fixture(scope="module")
def open_program(tmp_path_factory):
    """A program whose batch size is open."""
    dims = {"x": {0: torch.export.Dim("batch")}}
    path = tmp_path_factory.mktemp("open") / "net.pt2"
    return exported(Net().eval(), torch.rand(3, 5, 8), path, dynamic_shapes=dims)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').getpid()",
        "s0.__class__",
        "9**9**9",
        "(9**9)**9",
        "Pow(Integer(9), Integer(9))",
        "test()",
        "s0" * 9999,
    ],
)
def test_no_text_is_evaluated(tmp_path, open_program, text):
    changed = []

    def change(each):
        if isinstance(each, dict):
            if "expr_str" in each:
                changed.append(each)
                each["expr_str"] = text
            for inner in each.values():
                change(inner)
        elif isinstance(each, list):
            for inner in each:
                change(inner)
        return each

    def edit(name, data):
        return json.dumps(change(json.loads(data))).encode() if "/models/" in name else data

    with pytest.raises(ModelFileError, match="expected a formula of sizes, got"):
        load(rewritten(open_program, tmp_path / "trap.pt2", edit))
    assert changed


def test_broken_archives(tmp_path):
    good = exported(Net().eval(), torch.rand(3, 5, 8), tmp_path / "good.pt2")
    data = good.read_bytes()
    path = tmp_path / "net.pt2"

    def without_model(name, data):
        return b"{}" if "/models/" in name else data

    def no_json(name, data):
        return b"[" * 100_000 if "/models/" in name else data

    for edit, said in ((without_model, "not an exported program"), (no_json, "is not JSON")):
        with pytest.raises(ModelFileError, match=said):
            load(rewritten(good, path, edit))
    for broken in (b"", b"PK" * 50, data[: len(data) // 2]):
        for name in ("net.pt2", "net.pt"):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(ModelFileError, match="not a torch archive"):
                load(tmp_path / name)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("net/models/model.json", b" " * 70_000_000)
    with pytest.raises(ModelFileError, match="more bytes than the file can hold"):
        load(path)
    with zipfile.ZipFile(path, "w") as empty:
        empty.writestr("net/other", b"")
    with pytest.raises(ModelFileError, match="holds no exported program"):
        load(path)
    with pytest.raises(ModelFileError, match=r"is an exported program; rename it to \.pt2"):
        load(good.rename(tmp_path / "good.pt"))
    with pytest.raises(ModelFileError, match=r"it is TorchScript: rename it to \.pt"):
        load(scripted(nn.Linear(2, 2), tmp_path / "net.pt").rename(path))


def write_samples(folder):
    x = torch.rand(3, 5, 8)
    dims = {"x": {0: torch.export.Dim("batch")}}
    script = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    return [
        exported(Net().eval(), x, folder / "net.pt2", dynamic_shapes=dims),
        scripted(script, folder / "net.pt"),
        scripted(Loops(), folder / "loops.pt"),
    ]


def test_mutated_programs(tmp_path):
    source = write_samples(tmp_path)[0]
    found = set()
    for number in range(10):
        rng = random.Random(number)

        def edit(name, data, rng=rng):
            return mutated(data, rng) if name.endswith(".json") and rng.random() < 0.5 else data

        found.add(outcome(rewritten(source, tmp_path / "fuzz.pt2", edit), None))
    assert found <= {"read", "ModelFileError"}
