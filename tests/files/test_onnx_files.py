"""ONNX files that are broken, or lie: one line of an error, nothing read outside, no crash and no hang."""

from __future__ import annotations

import random
import sys
from itertools import islice

import numpy as np
import pytest

import modelsummary
from benchmarks.fuzz_files import mutated, outcome
from modelsummary import InputError, ModelFileError, load
from modelsummary.files.budget import Budget
from modelsummary.files.onnx.reading import _fields, import_onnx, without_weights
from tests.onnx_models import TensorProto, export, graph, helper, model, onnx, saved, value, weight

node = helper.make_node


def small():
    return model(
        [node("Conv", ["x", "w"], ["c"], name="conv"), node("Relu", ["c"], ["y"], name="relu")],
        [value("x", 1, 3, 8, 8)],
        [value("y", 1, 4, 6, 6)],
        [weight("w", 4, 3, 3, 3)],
        value_info=[value("c", 1, 4, 6, 6)],
    )


def nested():
    """Functions, a branch, a loop, quantised and contrib operators."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    inner = helper.make_function("local", "F", ["x"], ["y"], [node("Relu", ["x"], ["y"], name="r")], opsets[:1])
    outer = helper.make_function(
        "local", "G", ["x"], ["y"],
        [node("F", ["x"], ["t"], name="f1", domain="local"), node("F", ["t"], ["y"], name="f2", domain="local")],
        opsets,
    )  # fmt: skip
    body = graph(
        [node("MatMul", ["h", "w"], ["g"], name="mm"), node("Identity", ["c"], ["k"], name="id")],
        [value("i", kind=TensorProto.INT64), value("c", kind=TensorProto.BOOL), value("h", 3, 4)],
        [value("k", kind=TensorProto.BOOL), value("g", 3, 4)],
    )
    branches = {
        "then_branch": graph([node("Relu", ["u"], ["t1"])], [], [value("t1", 3, 4)]),
        "else_branch": graph([node("Neg", ["u"], ["e1"])], [], [value("e1", 3, 4)]),
    }
    return model(
        [
            node("G", ["x"], ["u"], name="g", domain="local"),
            node("Constant", [], ["n"], value_int=3),
            node("Loop", ["n", "", "u"], ["v"], name="loop", body=body),
            node("ReduceSum", ["v"], ["s"], name="sum", keepdims=0),
            node("Cast", ["s"], ["b"], name="cast", to=TensorProto.BOOL),
            node("If", ["b"], ["z"], name="if", **branches),
            node("FusedMatMul", ["z", "w"], ["m"], name="fused", domain="com.microsoft"),
            node("Shape", ["m"], ["shape"], name="shape"),
            node("Reshape", ["u", "shape"], ["y"], name="reshape"),
        ],
        [value("x", "rows", 4)], [value("y", "rows", 4)], [weight("w", 4, 4)],
        functions=[inner, outer], domains=["local", "com.microsoft"], value_info=[value("m", 3, 4)],
    )  # fmt: skip


def computed():
    """Sizes that operators compute, a weight that is not read, a sparse one, and an operator with a stand-in."""
    sparse = helper.make_sparse_tensor(weight("q", 2), weight("i", 2, kind=TensorProto.INT64), [75, 4])
    made = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Div", ["s", "two"], ["d"]),
            node("Concat", ["d", "minus"], ["t"], axis=0),
            node("Reshape", ["x", "t"], ["r"]),
            node("FastGelu", ["r"], ["g"], domain="com.microsoft"),
            node("MatMul", ["g", "w"], ["m"]),
            node("MatMul", ["m", "q"], ["y"]),
        ],
        [value("x", 4, 30)],
        [value("y", "a", "b", "c")],
        [onnx.numpy_helper.from_array(np.ones((4, 75), np.float32), "w")],
        domains=["com.microsoft"],
        sparse_initializer=[sparse],
    )
    numbers = {"two": [2, 2], "minus": [-1]}
    made.graph.initializer.extend(
        helper.make_tensor(name, TensorProto.INT64, [len(each)], each) for name, each in numbers.items()
    )
    return made


def write_samples(folder):
    samples = {"small.onnx": small(), "nested.onnx": nested(), "computed.onnx": computed()}
    return [saved(made, folder, name) for name, made in samples.items()]


def test_samples_are_read(tmp_path):
    assert [outcome(path, None) for path in write_samples(tmp_path)] == ["read"] * 3
    computed = load(tmp_path / "computed.onnx")
    assert computed.total_mult_adds == 2 * 15 * (4 * 75 + 75 * 4)
    assert computed.uncounted_ops == {}


def edited(edit, make=small):
    proto = make()
    edit(proto)
    return proto


def test_graphs_in_graphs_are_read(tmp_path):
    stats = load(saved(edited(deep_graphs), tmp_path))
    assert stats.operators()["If"] == 1 + 29 + 1  # the outer one, one a level, and the copy in the second level


def first_weight(proto):
    return proto.graph.initializer[0]


def loop_in_functions(proto):
    body = [node("F", ["x"], ["y"], domain="local")]
    proto.functions.append(helper.make_function("local", "F", ["x"], ["y"], body, [helper.make_opsetid("local", 1)]))


def many_calls(proto):
    """Each function calls the next one ten times: 10^12 operators from some hundred bytes."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    for level in range(12):
        calls = [node(f"F{level + 1}", [f"x{n}"], [f"x{n + 1}"], name=f"c{n}", domain="local") for n in range(10)]
        proto.functions.append(helper.make_function("local", f"F{level}", ["x0"], ["x10"], calls, opsets))
    last = [node("Relu", ["x0"], ["x10"])]
    proto.functions.append(helper.make_function("local", "F12", ["x0"], ["x10"], last, opsets))
    proto.graph.node[1].CopyFrom(node("F0", ["c"], ["y"], domain="local"))


def deep_graphs(proto):
    inner = graph([node("Relu", ["x"], ["r0"])], [], [value("r0", 1)])
    for level in range(1, 30):
        around = node("If", ["q"], [f"r{level}"], then_branch=inner, else_branch=inner if level < 3 else None)
        inner = graph([around], [], [value(f"r{level}", 1)])
    proto.graph.input.append(value("q", kind=TensorProto.BOOL))
    proto.graph.node.append(node("If", ["q"], ["deep"], then_branch=inner))


BROKEN = {
    "cycle": (lambda p: p.graph.node[0].input.__setitem__(0, "y"), "which is defined after it: the graph has a cycle"),
    "from nowhere": (lambda p: p.graph.node[0].input.__setitem__(0, "q"), "'conv' reads 'q', which is not defined"),
    "made twice": (lambda p: p.graph.node[1].output.__setitem__(0, "c"), "defines 'c', which is defined already"),
    "no result": (lambda p: p.graph.node.pop(), "the result 'y' is not defined"),
    "too little data": (lambda p: first_weight(p).dims.__setitem__(0, 5), "needs 135 elements by its shape, and"),
    "raw data": (lambda p: setattr(first_weight(p), "raw_data", b"123"), "needs 432 bytes by its shape, and has 3"),
    "oversized": (lambda p: first_weight(p).dims.__setitem__(0, 2**62), "needs .* elements by its shape, and has 108"),
    "negative": (lambda p: first_weight(p).dims.__setitem__(0, -4), r"has the negative shape \[-4, 3, 3, 3\]"),
    "type": (lambda p: setattr(first_weight(p), "data_type", 99), "has the unknown type 99"),
    "channels": (
        lambda p: setattr(p.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 5),
        r"Conv 'conv' has \[1, 5, 8, 8\] and \[4, 3, 3, 3\]",
    ),
    "no graph": (lambda p: p.ClearField("graph"), "the model has no graph"),
    "functions in a circle": (loop_in_functions, "call each other in a cycle"),
    "functions that explode": (many_calls, r"more than 1,5\d\d,\d+ steps"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_models(name, tmp_path):
    edit, said = BROKEN[name]
    path = saved(edited(edit), tmp_path)
    with pytest.raises(ModelFileError, match=said) as raised:
        load(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_no_onnx_file_at_all(tmp_path):
    path = tmp_path / "model.onnx"
    for data in (b"", b"nothing of the kind" * 100, small().SerializeToString()[:-20]):
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match=r"model\.onnx"):
            load(path)
    with path.open("r+b") as file:
        file.truncate(2**31)
    with pytest.raises(ModelFileError, match="2,147,483,648 bytes; an ONNX file has at most"):
        load(path)
    with pytest.raises(ModelFileError, match=r"file .*missing\.onnx' does not exist"):
        load(tmp_path / "missing.onnx")
    with pytest.raises(ModelFileError, match=r"folder .* is not a file; expected a file \.onnx"):
        load(tmp_path)
    with pytest.raises(InputError, match="path must be the path of a model file, got int"):
        load(3)
    (tmp_path / "model.txt").write_text("")
    with pytest.raises(InputError, match=r"expected a file \.onnx"):
        load(tmp_path / "model.txt")


@pytest.mark.parametrize(
    ("op", "facts", "said"),
    [
        ("MatMulNBits", {"N": -1, "K": 12, "bits": 4, "block_size": 16}, r"negative size \[2, 8, -1\]"),
        ("DynamicQuantizeLSTM", {"hidden_size": -1}, "negative size"),
        ("MoE", {"k": -1}, "attributes that no runtime takes: {'k': -1}"),
    ],
)
def test_negative_figures_are_refused(tmp_path, op, facts, said):
    names = ["x", "w", "w"] if op != "MoE" else ["x", "x", "w", "", "w"]
    made = model(
        [helper.make_node(op, names, ["y"], domain="com.microsoft", **facts)],
        [value("x", 2, 8, 12)],
        [helper.make_tensor_value_info("y", 1, None)],
        [weight("w", 12, 36)],
    )
    made.opset_import.add(domain="com.microsoft", version=1)
    with pytest.raises(ModelFileError, match=said):
        load(saved(made, tmp_path))


def external(location, offset=0, length=432):
    proto = small()
    tensor = first_weight(proto)
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=str(text))
    return proto


def test_external_data_stay_in_the_directory(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(432))
    (folder / "weights").write_bytes(bytes(500))
    (folder / "link").symlink_to(tmp_path / "secret")
    assert load(saved(external("weights"), folder)).total_params == 108
    for location in ("../secret", str(tmp_path / "secret"), "link", "", ".", "/dev/zero", "a/../../secret", "\0"):
        with pytest.raises(ModelFileError, match=r"must lie in the model's directory|cannot be at"):
            load(saved(external(location), folder))
    with pytest.raises(ModelFileError, match="end before byte 532"):
        load(saved(external("weights", offset=100), folder))
    with pytest.raises(ModelFileError, match="needs 432 bytes by its shape; its external data have 500"):
        load(saved(external("weights", length=500), folder))
    with pytest.raises(ModelFileError, match="cannot be at"):
        load(saved(external("weights", offset="many"), folder))
    absent = load(saved(external("absent"), folder))
    assert absent.total_mult_adds == 4 * 36 * 27
    assert "weights are missing: absent" in absent.root.note


def siblings(count):
    branch = graph([node("Relu", ["x"], ["t"])], [], [value("t", 1, 3, 8, 8)])
    proto = small()
    for number in range(count):
        proto.graph.node.append(node("If", ["q"], [f"o{number}"], then_branch=branch, else_branch=branch))
    proto.graph.input.append(value("q", kind=TensorProto.BOOL))
    proto.graph.input.append(value("z", 1))
    return proto


def steps_of(function):
    """Return how many lines a call runs: its work, however busy the machine is."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_many_siblings_take_linear_work(tmp_path):
    paths = [saved(siblings(count), tmp_path, f"{count}.onnx") for count in (10, 60, 120)]
    load(paths[0], {"q": ()})  # imports, and caches of onnx
    once, twice = (steps_of(lambda path=path: load(path, {"q": ()})) for path in paths[1:])
    assert once < twice < 2.2 * once
    assert load(paths[2], {"q": ()}).operators()["If"] == 120


def test_mutated_files(tmp_path):
    """Fifty in this process; benchmarks/fuzz_files.py reads many more, each where it may crash."""
    sources = [path.read_bytes() for path in write_samples(tmp_path)]
    found = set()
    for number in range(50):
        rng = random.Random(number)
        path = tmp_path / "fuzz.onnx"
        path.write_bytes(mutated(rng.choice(sources), rng))
        found.add(outcome(path, None))
    assert found <= {"read", "ModelFileError"}
    assert len(found) == 2


def test_without_onnx(monkeypatch, tmp_path):
    import_onnx.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(modelsummary.MissingExtraError, match=r"torch-modelsummary\[onnx\]"):
        load(saved(small(), tmp_path))


def test_exports_pass_strict_inference(tmp_path):
    import torch
    from torch import nn

    block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    stats = load(export(block, torch.rand(2, 16, 32), tmp_path / "block.onnx"))
    # projections 32 -> 96 and 32 -> 32, two products of 16 x 16 by 32, the network 32 -> 64 -> 32
    per_token = 32 * 96 + 32 * 32 + 2 * 16 * 32 + 2 * 32 * 64
    assert stats.total_mult_adds == 2 * 16 * per_token
    assert onnx.__version__


def test_weights_are_left_out_before_parsing(tmp_path):
    long, short = np.ones((30, 10), np.float32), np.ones(10, np.float32)  # 1200 and 40 bytes
    weights = [onnx.numpy_helper.from_array(each, name) for each, name in ((long, "w"), (short, "b"), (long, "v"))]
    made = model(
        [node("Gemm", ["x", "w", "b"], ["h"]), node("Gemm", ["h", "v"], ["y"], transB=1)],
        [value("x", 2, 30)],
        [value("y", 2, 30)],
        weights,
    )
    data = made.SerializeToString()
    outline, places = without_weights(data, Budget())
    assert {position: place.length for position, place in places.items()} == {0: 1200, 2: 1200}
    for position, (offset, length) in places.items():
        assert data[offset : offset + length] == made.graph.initializer[position].raw_data
    assert len(outline) < len(data) - 2400
    for position in places:
        made.graph.initializer[position].ClearField("raw_data")
    assert onnx.ModelProto.FromString(outline) == made
    path = tmp_path / "net.onnx"
    path.write_bytes(data)
    stats = load(path)
    assert (stats.total_mult_adds, stats.total_param_bytes) == (1200, 2440)
    for broken in (data[:-1], data + data, b"\xff" * 20, data[:100] + b"\x83" + data[100:]):
        assert without_weights(broken, Budget()) == (broken, {})
    made.graph.initializer[0].dims[0] = 31
    made.graph.initializer[0].raw_data = long.tobytes()
    path.write_bytes(made.SerializeToString())
    with pytest.raises(ModelFileError, match="'w' needs 1,240 bytes by its shape, and has 1,200"):
        load(path)


def test_zeros_are_no_fields():
    """Each pair of zeros would be a field without a number: a file of them must be given up at the first."""
    assert list(islice(_fields(b"\x3a\x01\x00", 0, 3), 1)) == [(7, 0, 2, 3)]
    with pytest.raises(ValueError, match="a field has no number"):
        next(_fields(bytes(2**20), 0, 2**20))
    assert without_weights(bytes(2**20), Budget()) == (bytes(2**20), {})
