"""ONNX files: shapes, multiply-adds, the tree, traffic and storage. Expected numbers are derived beside the graphs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from modelsummary import InputError, ModelFileError, ModelStatistics, Statistics, load
from modelsummary.cli import run
from modelsummary.errors import RegistrationError
from modelsummary.files.onnx import node_costs
from tests.models import Call
from tests.onnx_models import TensorProto, distinct_values, export, graph, helper, model, saved, value, weight

node = helper.make_node


@pytest.fixture(scope="session")
def mobilenet():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    return distinct_values(models.mobilenet_v2())


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("onnx")


@pytest.fixture(scope="session")
def by_torchscript(mobilenet, folder):
    return load(export(mobilenet, torch.rand(1, 3, 224, 224), folder / "script.onnx", dynamo=False, opset=12))


@pytest.fixture(scope="session")
def by_dynamo(mobilenet, folder):
    return load(export(mobilenet, torch.rand(1, 3, 224, 224), folder / "dynamo.onnx"))


def conv(folder, batch=2, **rest):
    """Conv 3 -> 4, 3x3 on 8x8 without padding: 6x6. Then ReLU, and a product of 144 with 144 x 5."""
    return saved(
        model(
            [
                node("Conv", ["x", "w", "b"], ["c"], name="/features/0/Conv"),
                node("Relu", ["c"], ["r"], name="/features/1/Relu"),
                node("Flatten", ["r"], ["f"], name="/Flatten"),
                node("Gemm", ["f", "v"], ["y"], name="/head/Gemm", transB=1),
            ],
            [value("x", batch, 3, 8, 8)],
            [value("y", batch, 5)],
            [weight("w", 4, 3, 3, 3), weight("b", 4), weight("v", 5, 144)],
        ),
        folder,
    )


def test_every_figure_of_a_small_graph(tmp_path):
    stats = load(conv(tmp_path))
    assert isinstance(stats, ModelStatistics)
    assert [row.fqn for row in stats] == [
        *("features", "features.0", "/features/0/Conv", "features.1", "/features/1/Relu"),
        *("/Flatten", "head", "/head/Gemm"),
    ]
    assert stats["/features/0/Conv"].macs == stats["features"].macs == 2 * 4 * 6 * 6 * 27
    assert stats["head"].macs == 2 * 144 * 5
    assert stats.total_mult_adds == stats.total_mult_adds_expr == 7776 + 1440
    assert stats.total_params == 108 + 4 + 720
    assert stats["features.0"].num_params == 112
    assert stats["features"].input_size == [2, 3, 8, 8]
    assert stats["features"].output_size == [2, 4, 6, 6]
    assert stats["features.0"].is_leaf is False
    assert stats["/features/1/Relu"].elementwise_ops == 2 * 144
    assert stats.total_input_bytes == 4 * 2 * 192
    assert stats.total_output_bytes == stats.activations().total == 4 * (3 * 288 + 10)
    assert stats.operators() == Counter(Conv=1, Relu=1, Flatten=1, Gemm=1)
    assert stats.uncounted_ops == {}
    table = stats.table()
    assert "Execution: none, read from the file" in table
    assert "7,776" in table


def test_bandwidth_and_buffer(tmp_path):
    stats = load(conv(tmp_path))
    plain = stats.bandwidth()
    x, c, y = 4 * 384, 4 * 288, 4 * 10
    expected = {
        "/head/Gemm": (c + 4 * 720, y),
        "/features/0/Conv": (x + 4 * 112, c),
        "/features/1/Relu": (c, c),
        "/Flatten": (c, c),
    }
    assert {row.layer: (row.read, row.write) for row in plain.rows} == expected
    assert [row.layer for row in plain.rows] == list(expected)
    assert plain.total == plain.read + plain.write == 4 * 384 + 4 * 112 + 7 * c - c + 4 * 720 + y
    assert plain.unknown == []
    assert stats.root.bytes_read == plain.read
    assert str(plain).splitlines()[0].split() == ["layer", "read_bw", "write_bw", "total_bw"]
    assert f"{plain.total} bytes ({plain.total / 1e6:.6f} MB)" in str(plain)
    everything = stats.bandwidth(buffer_bytes=10**6)  # only what comes from outside is read, each once
    assert everything.read == x + 4 * 832
    assert everything.write == plain.write
    one = stats.bandwidth(buffer_bytes=c)  # a result is still there for the next operator
    assert one.read == x + 4 * 832
    none = stats.bandwidth(buffer_bytes=c - 1)  # no activation fits
    assert none.read == plain.read
    with pytest.raises(InputError, match="buffer_bytes must be an integer >= 0, got -1"):
        stats.bandwidth(-1)


def test_a_graph_without_operators(tmp_path):
    made = model([node("Constant", [], ["y"], value=weight("c", 2))], [], [value("y", 2)])
    stats = load(saved(made, tmp_path))
    assert (stats.total_mult_adds, stats.stored_elements, stats.bandwidth().total, stats.execution) == (0, 2, 0, "file")


def test_storage_by_liveness(tmp_path):
    """x -> a, b; b lives on while c and d are made of a: x 16, a 16 | a, b | a, b, c | b, c, d."""
    nodes = [
        node("Relu", ["x"], ["a"], name="a"),
        node("Neg", ["x"], ["b"], name="b"),
        node("Concat", ["a", "a"], ["c"], name="c", axis=0),
        node("Add", ["c", "c"], ["d"], name="d"),
        node("Concat", ["d", "b"], ["y"], name="y", axis=0),
    ]
    stats = load(saved(model(nodes, [value("x", 4)], [value("y", 12)]), tmp_path))
    found = stats.activations()
    # x a: 32; x a b: 48; a b c: 64; b c d: 80; b d y: 16 + 32 + 48 = 96
    assert found == (16 + 16 + 32 + 32 + 48, 96, "y")


def test_mobilenet_bandwidth(by_torchscript):
    found = by_torchscript.bandwidth()
    assert len(found.rows) == 100
    assert (found.read, found.write, found.total) == (67_430_304, 52_015_392, 119_445_696)
    assert found.unknown == []
    records = found.to_records()
    assert records[0] == {
        "layer": "/classifier/classifier.1/Gemm", "read_bw": 5129120, "write_bw": 4000, "total_bw": 5133120
    }  # fmt: skip
    assert records[-1]["layer"] == "/Flatten"
    rows = {record["layer"]: tuple(record.values())[1:] for record in records}
    assert rows["/features/features.2/conv/conv.0/conv.0.2/Clip"] == (4816896, 4816896, 9633792)
    assert rows["/features/features.17/conv/conv.2/Conv"] == (1418240, 62720, 1480960)
    assert rows["/GlobalAveragePool"] == (250880, 5120, 256000)
    assert rows["/features/features.3/Add"] == (602112, 301056, 903168)
    assert "119445696 bytes (119.445696 MB)" in str(found)


def test_mobilenet_rows_follow_from_the_shapes(by_torchscript):
    """All rows but the pooling: an operator reads its input and its weights, and writes its result."""
    rows = {row.layer: row for row in by_torchscript.bandwidth().rows}
    assert len(rows) == 100
    for operation in by_torchscript.operations:
        sizes = [torch.Size(tensor.size).numel() for tensor in operation.inputs if tensor.size]
        assert rows[operation.name].read == 4 * sum(sizes)
        assert rows[operation.name].write == 4 * torch.Size(operation.outputs[0].size).numel()


def test_mobilenet_by_the_newer_exporter(by_dynamo):
    # ReduceMean and Reshape read two integers each of 8 bytes
    assert by_dynamo.bandwidth().total == 119_445_696 + 2 * 16
    assert by_dynamo.operators() == Counter(Conv=52, Clip=35, Add=10, ReduceMean=1, Reshape=1, Gemm=1)
    assert by_dynamo.root.class_name == "MobileNetV2"
    assert "52 norms are in the weights of convolutions" in by_dynamo.root.note
    assert by_dynamo["features.18"].class_name == "Conv2dNormActivation"


def test_mobilenet_operators_and_attributes(by_torchscript):
    operators = by_torchscript.operators()
    constants = operators.pop("Constant")
    assert operators == Counter(Conv=52, Clip=35, Add=10, GlobalAveragePool=1, Flatten=1, Gemm=1)
    assert constants == 70
    convolutions = by_torchscript.attributes("Conv")
    assert len(convolutions) == 52
    names = {"channel", "height", "width", "dilations", "group", "kernel_shape", "pads", "strides"}
    assert all(names <= set(found) for found in convolutions.values())
    first, second = list(convolutions.values())[:2]
    assert {name: first[name] for name in names} == {
        "channel": 3, "height": 224, "width": 224, "dilations": [1, 1], "group": 1, "kernel_shape": [3, 3],
        "pads": [1, 1, 1, 1], "strides": [2, 2],
    }  # fmt: skip
    assert (second["channel"], second["height"], second["group"]) == (32, 112, 32)
    assert all(found == {"min": 0.0, "max": 6.0} for found in by_torchscript.attributes("Clip").values())
    (gemm,) = by_torchscript.attributes("Gemm").values()
    assert gemm == {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}


def test_mobilenet_activations_in_three_ways(mobilenet, by_torchscript):
    eager = Statistics(mobilenet, (1, 3, 224, 224))
    rows = [row for row in eager.root.walk() if row.executed]
    leaves = [row for row in rows if row.is_leaf]
    assert (len(rows), len(leaves)) == (213, 141)
    containers = sum(row.output_bytes for row in rows if not row.is_leaf)
    assert eager.total_output_bytes == 77_857_184
    assert eager.total_output_bytes + containers == 107_117_792  # what the lab says: containers once more
    normed = sum(row.output_bytes for row in leaves if row.class_name == "BatchNorm2d")
    dropped = sum(row.output_bytes for row in leaves if row.class_name == "Dropout")
    added = sum(
        4 * torch.Size(each.outputs[0].size).numel() for each in by_torchscript.operations if each.op_type == "Add"
    )
    pooled = 2 * 4 * 1280  # the mean and the flattening are functions, not modules
    assert by_torchscript.total_output_bytes == 52_015_392 == 77_857_184 - normed - dropped + added + pooled
    assert "52 norms are in the weights of convolutions" in by_torchscript.root.note
    # BatchNorm is in the weights of the convolutions: their gains go, their shifts become biases
    assert by_torchscript.total_params == eager.total_params - sum(
        row.self_params // 2 for row in rows if row.class_name == "BatchNorm2d"
    )
    assert by_torchscript.total_mult_adds == eager.total_mult_adds == 300_774_272


def test_open_dimensions(tmp_path):
    path = conv(tmp_path, batch="batch")
    stats = load(path)
    assert stats.root.input_size == ["batch", 3, 8, 8]
    assert "[batch, 4, 6, 6]" in stats.table()
    assert stats.total_mult_adds == 4608  # of one
    assert "open dimensions (batch) count as 1" in str(stats)
    expression = stats.total_mult_adds_expr
    assert str(expression) == "4608*batch"
    assert expression.subs("batch", 2) == 9216
    bound = load(path, input=(2, 3, 8, 8))
    assert bound.total_mult_adds == 9216
    assert bound.root.output_size == [2, 5]
    assert bound.root.note == ""
    by_name = load(path, input={"x": (3, 3, 8, 8)})
    assert by_name.total_mult_adds == 3 * 4608
    assert load(conv(tmp_path), input=(7, 3, 8, 8)).total_mult_adds == 7 * 4608  # in place of a number


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((2, 3, 8), r"has 4 dimensions, \(2, 3, 8, 8\); got the size \[2, 3, 8\]"),
        ({"z": (1,)}, "no input 'z'; it has 'x'"),
        ((2, 4, 8, 8), "its shapes do not fit"),
        ((2, -1, 8, 8), "input must be a size"),
        ("2,3", "input must be a size"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, size, said):
    with pytest.raises(InputError, match=said):
        load(conv(tmp_path), input=size)


COUNTS = {  # sizes of inputs and weights, attributes, size of the result, multiply-adds
    "grouped": ("Conv", [(2, 32, 28, 28)], [(64, 8, 3, 3)], {"group": 4, "pads": [1] * 4}, (2, 64, 28, 28), 7_225_344),
    "transposed": (
        "ConvTranspose", [(2, 32, 28, 28)], [(32, 16, 4, 4)], {"strides": [2, 2], "pads": [1] * 4}, (2, 16, 56, 56),
        12_845_056,
    ),
    "batched": ("MatMul", [(2, 3, 4, 5), (2, 3, 5, 6)], [], {}, (2, 3, 4, 6), 2 * 3 * 4 * 5 * 6),
    "row": ("MatMul", [(5,), (5, 6)], [], {}, (6,), 30),
    "gemm": ("Gemm", [(5, 4)], [(5, 6)], {"transA": 1}, (4, 6), 120),
    "einsum": ("Einsum", [(2, 50, 8, 64)], [(8, 64, 96)], {"equation": "bshi,hio->bsho"}, (2, 50, 8, 96), 4_915_200),
    "lstm": ("LSTM", [(50, 2, 64)], [(1, 512, 64), (1, 512, 128)], {"hidden_size": 128}, (50, 1, 2, 128), 9_830_400),
    "gru": ("GRU", [(50, 2, 64)], [(1, 384, 64), (1, 384, 128)], {"hidden_size": 128}, (50, 1, 2, 128), 7_372_800),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_multiply_adds(name, tmp_path):
    op_type, inputs, weights, attributes, result, macs = COUNTS[name]
    named = [f"i{place}" for place in range(len(inputs))], [f"w{place}" for place in range(len(weights))]
    made = model(
        [node(op_type, [*named[0], *named[1]], ["y"], name="op", **attributes)],
        [value(each, *size) for each, size in zip(named[0], inputs, strict=True)],
        [value("y", *result)],
        [weight(each, *size) for each, size in zip(named[1], weights, strict=True)],
    )
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == macs
    assert stats.uncounted_ops == {}


def test_attention_operator(tmp_path):
    sizes = [("q", 8), ("k", 2), ("v", 2)]  # grouped queries
    made = model(
        [node("Attention", ["q", "k", "v"], ["y"], name="op")],
        [value(name, 2, heads, 128, 64) for name, heads in sizes],
        [value("y", 2, 8, 128, 64)],
        opset=23,
    )
    assert load(saved(made, tmp_path)).total_mult_adds == 33_554_432


def test_quantised_operators(tmp_path):
    """4 x 6 by 6 x 5 in whole numbers, and by scales around a product of floats."""
    u8, i8 = TensorProto.UINT8, TensorProto.INT8
    scales = [weight("s"), helper.make_tensor("z", u8, [], [0]), helper.make_tensor("zi", i8, [], [0])]
    linear = ["x", "s", "z", "w", "s", "zi", "s", "z"]
    made = model(
        [
            node("QLinearMatMul", linear, ["a"], name="q"),
            node("DequantizeLinear", ["a", "s", "z"], ["d"], name="d"),
            node("DequantizeLinear", ["v", "s", "zi"], ["w2"], name="dw"),
            node("MatMul", ["d", "w2"], ["y"], name="mm"),
        ],
        [value("x", 4, 6, kind=u8)],
        [value("y", 4, 3)],
        [*scales, weight("w", 6, 5, kind=i8), weight("v", 5, 3, kind=i8)],
    )
    stats = load(saved(made, tmp_path))
    assert stats["q"].macs == 120
    assert stats.total_mult_adds == 120 + 60
    assert (stats.total_params, stats.total_param_bytes) == (45, 45)
    assert stats.root.num_buffers == 3


def test_contrib_operators_are_counted_or_in_the_ledger(tmp_path):
    ms = "com.microsoft"
    made = model(
        [
            node("FusedMatMul", ["x", "w"], ["a"], name="fused", domain=ms, transA=1),
            node("BiasGelu", ["a", "b"], ["c"], name="gelu", domain=ms),
            node("QMoE", ["c"], ["d"], name="experts", domain=ms),
            node("Anything", ["d"], ["y"], name="own", domain="my.own"),
        ],
        [value("x", 6, 4)],
        [value("y", 4, 5)],
        [weight("w", 6, 5), weight("b", 5)],
        domains=[ms, "my.own"],
        value_info=[value("a", 4, 5), value("c", 4, 5)],
    )
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == 120
    assert stats.uncounted_ops == {"com.microsoft.QMoE": 1, "my.own.Anything": 1}
    assert stats.bandwidth().unknown == []  # QMoE has the shape of its input; the file describes y


EINSUMS = [  # equation, sizes, multiply-adds
    ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)], 2 * 3 * 4 + 2 * 4 * 5),
    ("bn,anm,bm->ba", [(2, 5), (3, 5, 4), (2, 4)], 2 * 3 * 5 * 4 + 2 * 3 * 4),
    ("...ij,...jk", [(2, 3, 4), (2, 4, 5)], 2 * 3 * 4 * 5),
    ("ii,ij->j", [(3, 3), (3, 4)], 12),
    ("i,j->ij", [(3,), (4,)], 0),  # element-wise
    ("i,j->", [(3,), (4,)], 0),
    ("ij->ji", [(3, 4)], 0),
]


@pytest.mark.parametrize(("equation", "sizes", "macs"), EINSUMS)
def test_products_of_any_number(equation, sizes, macs, tmp_path):
    names = [f"x{place}" for place in range(len(sizes))]
    made = model(
        [node("Einsum", names, ["y"], equation=equation)],
        [value(name, *size) for name, size in zip(names, sizes, strict=True)],
        [value("y", *torch.einsum(equation, *map(torch.ones, sizes)).shape)],
    )
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == macs
    assert stats.uncounted_ops == {}
    live = Statistics(Call(lambda self, *x: torch.einsum(equation, *x), nothing=nn.Identity()), sizes)
    assert live.total_mult_adds == macs


def test_contrib_attention_with_a_past(tmp_path):
    """2 x 3 new positions after 7, of 4 heads of 8: 2 products of 2 x 3 x 10 x 32."""
    macs = 2 * 2 * 3 * 10 * 32
    past = [value(name, 2, 4, 7, 8) for name in ("pk", "pv")]
    x, few = [value(name, 2, 3, 32) for name in "qkv"], [value(name, 2, 3, 16) for name in "kv"]
    few_past = [value(name, 2, 2, 7, 8) for name in ("pk", "pv")]
    groups = {"num_heads": 4, "kv_num_heads": 2}
    packed = [value("x", 2, 3, 24), value("past", 2, 2, 4, 7, 8)]
    experts = [weight("w1", 6, 64, 32), weight("w2", 6, 32, 64)]
    for op_type, inputs, weights, names, attributes, expected in [
        ("MultiHeadAttention", [*x, *past], [], ["q", "k", "v", "", "", "", "pk", "pv"], {"num_heads": 4}, macs),
        ("GroupQueryAttention", [x[0], *few, *few_past], [], ["q", "k", "v", "pk", "pv"], groups, macs),
        ("GroupQueryAttention", [value("x", 2, 3, 64)], [], ["x"], groups, 2 * 2 * 3 * 3 * 32),
        ("Attention", packed, [weight("w", 24, 96)], ["x", "w", "", "", "past"], {}, 2 * 3 * 24 * 96 + macs),
        ("QAttention", packed, [weight("w", 24, 96)], ["x", "w", *[""] * 6, "past"], {}, 2 * 3 * 24 * 96 + macs),
        (
            "Attention", packed[:1], [weight("w", 24, 80)], ["x", "w"], {"qkv_hidden_sizes": [24, 24, 32]},
            2 * 3 * (24 * 80 + 3 * (24 + 32)),
        ),
        ("MoE", [*x[:1], value("r", 6, 6)], experts, ["q", "r", "w1", "", "w2"], {"k": 2}, 6 * 2 * 2 * 64 * 32),
    ]:  # fmt: skip
        op = node(op_type, names, ["y"], domain="com.microsoft", **attributes)
        stats = load(saved(model([op], inputs, [value("y", 2, 3, 32)], weights, domains=["com.microsoft"]), tmp_path))
        assert (op_type, stats.total_mult_adds) == (op_type, expected)
        assert stats.uncounted_ops == {}


def test_sizes_that_the_graph_computes(tmp_path):
    """Half of the channels, as the TorchScript exporter writes it; inference of onnx follows no division."""
    made = model(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "one"], ["channels"]),
            node("Div", ["channels", "two"], ["half"]),
            node("Unsqueeze", ["half", "axis"], ["end"]),
            node("Slice", ["x", "axis", "end", "dim"], ["part"]),
            node("Conv", ["part", "w"], ["y"]),
        ],
        [value("x", 1, 8, 4, 4)],
        [value("y", *"abcd")],
        [
            helper.make_tensor("one", TensorProto.INT64, [], [1]),
            helper.make_tensor("two", TensorProto.INT64, [], [2]),
            helper.make_tensor("axis", TensorProto.INT64, [1], [0]),
            helper.make_tensor("dim", TensorProto.INT64, [1], [1]),
            weight("w", 5, 4, 1, 1),
        ],
    )
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == 4 * 5 * 16
    assert stats.root.output_size == [1, 5, 4, 4]
    assert stats.root.note == ""
    assert stats.operators()["Div"] == 1
    assert load(saved(made, tmp_path), (3, 8, 6, 6)).total_mult_adds == 3 * 4 * 5 * 36


def test_sizes_that_values_decide_are_in_the_ledger(tmp_path):
    made = model(
        [node("NonZero", ["x"], ["at"]), node("Cast", ["at"], ["f"], to=1), node("MatMul", ["x", "f"], ["y"])],
        [value("x", 4, 2)],
        [value("y", 4, "n")],
    )
    stats = load(saved(made, tmp_path))
    assert stats.uncounted_ops == {"MatMul (size unknown)": 1}
    assert stats.total_mult_adds == 0
    assert "open dimensions" not in stats.root.note


def test_contrib_operators_are_followed(tmp_path):
    """onnx does not know their shapes: a sum, then a pooling, then a product, all of integers."""
    ms, scale = "com.microsoft", ["s", "z"]
    made = model(
        [
            node("QLinearAdd", ["x", *scale, "x", *scale, *scale], ["a"], domain=ms),
            node("QLinearConcat", [*scale, "a", *scale, "x", *scale], ["c"], domain=ms, axis=1),
            node("QLinearGlobalAveragePool", ["c", *scale, *scale], ["g"], domain=ms, channels_last=0),
            node("Flatten", ["g"], ["f"]),
            node("QGemm", ["f", *scale, "w", *scale, "", *scale], ["q"], domain=ms, transB=1),
            node("FastGelu", ["q"], ["y"], domain=ms),
        ],
        [value("x", 2, 3, 8, 8, kind=TensorProto.UINT8)],
        [value("y", 2, 5, kind=TensorProto.UINT8)],
        [
            helper.make_tensor("s", TensorProto.FLOAT, [], [1]),
            helper.make_tensor("z", TensorProto.UINT8, [], [0]),
            weight("w", 5, 6, kind=TensorProto.UINT8),
        ],
        domains=[ms],
    )
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == 2 * 5 * 6
    assert stats.uncounted_ops == {}
    assert stats.bandwidth().unknown == []
    assert [operation.op_type.rpartition(".")[2] for operation in stats.operations] == [
        "QLinearAdd", "QLinearConcat", "QLinearGlobalAveragePool", "Flatten", "QGemm", "FastGelu"
    ]  # fmt: skip


def test_sparse_weights_count_as_dense(tmp_path):
    sparse = helper.make_sparse_tensor(weight("w", 2), weight("i", 2, kind=TensorProto.INT64), [3, 4])
    made = model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", 2, 3)], [value("y", 2, 4)], sparse_initializer=[sparse]
    )
    stats = load(saved(made, tmp_path))
    assert (stats.total_mult_adds, stats.total_params) == (24, 12)


def test_functions_have_rows(tmp_path):
    opset = [helper.make_opsetid("", 20), helper.make_opsetid("local", 1)]
    inner = helper.make_function(
        "local", "Linear", ["x", "w"], ["y"], [node("MatMul", ["x", "w"], ["y"], name="mm")], opset[:1]
    )
    scaled = node("LeakyRelu", ["a"], ["y"], name="act")
    scaled.attribute.add(name="alpha", ref_attr_name="slope", type=1)
    outer = helper.make_function(
        "local", "Block", ["x", "w"], ["y"],
        [node("Linear", ["x", "w"], ["a"], name="fc", domain="local"), scaled], opset, ["slope"],
    )  # fmt: skip
    made = model(
        [
            node("Block", ["x", "w"], ["h"], name="b1", domain="local", slope=0.5),
            node("Block", ["h", "w"], ["y"], name="b2", domain="local", slope=0.25),
        ],
        [value("x", 3, 4)], [value("y", 3, 4)], [weight("w", 4, 4)], functions=[inner, outer], domains=["local"],
    )  # fmt: skip
    stats = load(saved(made, tmp_path))
    assert [(row.fqn, row.class_name) for row in stats] == [
        ("b1", "Block"), ("b1.fc", "Linear"), ("b1/fc/mm", "MatMul"), ("b1/act", "LeakyRelu"),
        ("b2", "Block"), ("b2.fc", "Linear"), ("b2/fc/mm", "MatMul"), ("b2/act", "LeakyRelu"),
    ]  # fmt: skip
    assert stats.total_mult_adds == 2 * 48
    assert stats.total_params == 16
    assert stats["b2/fc/mm"].is_recursive
    assert [each["alpha"] for each in stats.attributes("LeakyRelu").values()] == [0.5, 0.25]
    with pytest.raises(InputError, match=r"the file has no operator of type 'LeakyReLU'; did you mean 'LeakyRelu'\?"):
        stats.attributes("LeakyReLU")
    with pytest.raises(InputError, match="the file has no operator of type 3; expected one of"):
        stats.attributes(3)


def test_the_dearer_branch_counts(tmp_path):
    branches = {
        "then_branch": graph([node("MatMul", ["x", "w"], ["t"], name="mm")], [], [value("t", 3, 4)]),
        "else_branch": graph([node("Relu", ["x"], ["e"], name="relu")], [], [value("e", 3, 4)]),
    }
    made = model(
        [node("If", ["c"], ["y"], name="if", **branches)],
        [value("c", kind=TensorProto.BOOL), value("x", 3, 4)], [value("y", 3, 4)], [weight("w", 4, 4)],
    )  # fmt: skip
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == 48
    assert stats["if"].class_name == "If"
    assert stats["if.then_branch"].executed
    assert not stats["if.else_branch"].executed
    assert stats["relu"].elementwise_ops == 0
    assert stats.operations[0].attributes["counted"] == "then_branch"


@pytest.mark.parametrize("times", [5, None])
def test_loops_count_their_runs(tmp_path, times):
    body = graph(
        [node("MatMul", ["h", "w"], ["g"], name="mm"), node("Identity", ["c"], ["k"], name="id")],
        [value("i", kind=TensorProto.INT64), value("c", kind=TensorProto.BOOL), value("h", 3, 4)],
        [value("k", kind=TensorProto.BOOL), value("g", 3, 4)],
    )
    many = value("n", kind=TensorProto.INT64)
    made = model(
        [node("Loop", ["n", "", "x"], ["y"], name="loop", body=body)],
        [value("x", 3, 4), *([many] if times is None else [])], [value("y", 3, 4)],
        [weight("w", 4, 4), *([] if times is None else [helper.make_tensor("n", TensorProto.INT64, [], [times])])],
    )  # fmt: skip
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == 48 * (times or 1)
    assert stats.uncounted_ops == ({} if times else {"Loop (unknown number of runs)": 1})
    assert stats["mm"].bytes_written == 48 * (times or 1)
    assert stats["loop.body"].executed


def test_views_and_exports(tmp_path):
    stats = load(conv(tmp_path))
    again = ModelStatistics.from_json(stats.to_json())
    assert again.table() == stats.table()
    assert "Stored in the file: 832 elements, 3.33 kB" in again.table()
    assert len(stats.to_records()) == 9
    assert "head" in stats.to_html(foldable=True)
    assert not stats.diff(load(conv(tmp_path)))
    with pytest.raises(InputError, match=r"needs a live model, got the file .*; pass the model that it was made from"):
        stats.memory()


@pytest.mark.parametrize("kind", [str, Path])
def test_statistics_of_a_path(tmp_path, kind):
    path = kind(conv(tmp_path, batch="batch"))
    stats = Statistics(path, (2, 3, 8, 8), depth=1, branching=False)
    assert str(stats) == load(path, (2, 3, 8, 8)).table(depth=1, branching=False)
    assert Statistics(path).operators()["Conv"] == 1
    assert isinstance(Statistics(model=path), ModelStatistics)
    for args, options in [((), {"batch_dim": 0}), ((), {"execution": "real"}), (((1,),), {})]:
        with pytest.raises(InputError, match=r"is a file, which takes .* run only; got \w+"):
            Statistics(path, (2, 3, 8, 8), *args, **options)
    with pytest.raises(ModelFileError, match="does not exist"):
        Statistics(kind(tmp_path / "nothing.onnx"))


def test_sizes_by_position(tmp_path):
    product = node("MatMul", ["a", "b.1"], ["y"])
    path = saved(model([product], [value("a", "m", "k"), value("b.1", "k", "n")], [value("y", "m", "n")]), tmp_path)
    for given in ([(2, 3), (3, 4)], {"a": (2, 3), "b.1": (3, 4)}, [torch.empty(2, 3), (3, 4)]):
        assert load(path, given).total_mult_adds == 24
    with pytest.raises(InputError, match=r"one size for each of the inputs 'a' \(m, k\), 'b\.1' \(k, n\), got 1"):
        load(path, (2, 3))
    assert run([str(path), "--input", "2,3", "--input", "3,4", "--max-macs", "23"]) == 1
    assert run([str(path), "--input", "a=2,3", "--input", "b.1=3,4", "--max-macs", "24"]) == 0


def test_a_second_formula_for_an_operator_is_refused():
    with pytest.raises(RegistrationError, match="'Conv' already has the formula _conv"):
        node_costs._counts("MadeUp", "Conv")(len)
    assert "MadeUp" not in node_costs.FORMULAS


def test_copies_of_weights_stand_before_what_takes_them(tmp_path):
    """Exporters put an Identity for each shared weight at the beginning, outside all modules."""
    made = model(
        [
            node("Identity", ["w"], ["w2"], name="Identity_1"),
            node("Identity", ["w2"], ["w3"], name="Identity_2"),
            node("MatMul", ["x", "w"], ["a"], name="/first/MatMul"),
            node("MatMul", ["a", "w3"], ["y"], name="/second/MatMul"),
        ],
        [value("x", 3, 4)], [value("y", 3, 4)], [weight("w", 4, 4)],
    )  # fmt: skip
    stats = load(saved(made, tmp_path))
    names = [(row.depth, row.name) for row in stats.root.walk()][1:]
    assert names == [
        (1, "first"), (2, "/first/MatMul"),
        (1, "second"), (2, "Identity_1"), (2, "Identity_2"), (2, "/second/MatMul"),
    ]  # fmt: skip
    assert (stats.total_params, stats.total_mult_adds) == (16, 96)
