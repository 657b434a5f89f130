"""Products in tiles, in ONNX and in PyTorch: counted by hand, and compared with the whole on onnxruntime."""

from __future__ import annotations

import copy
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from modelsummary import InputError, ModelFileError, Statistics, load
from modelsummary.tiling import TiledLinear
from modelsummary.tiling import tile_linear as tile_modules
from tests.onnx_models import TensorProto, distinct_values, export, helper, model, onnx, saved, value, weight

pytest.importorskip("onnxruntime")
from modelsummary.onnx import linear_graph, not_tiled, tile_linear, tiled_matmul_graph, verify

node = helper.make_node


def types(proto):
    return Counter(each.op_type for each in proto.graph.node)


def test_product_in_tiles(tmp_path):
    whole, tiled = linear_graph(128, 128, 128), tiled_matmul_graph(128, 128, 128, 64)
    onnx.checker.check_model(tiled, full_check=True)
    # A and B each in two bands, each band in two: 3 + 3; 2 x 2 results of 2 products; each row put together, and all
    assert types(tiled) == Counter(Split=6, MatMul=8, Sum=4, Concat=3)
    assert len(tiled.graph.node) == 21
    found = verify(whole, tiled)
    assert found.equal
    assert found.mse < 1e-10
    macs = [load(saved(each, tmp_path)).total_mult_adds for each in (whole, tiled)]
    assert macs == [128**3] * 2


@pytest.mark.parametrize(
    "sizes", [(100, 70, 33, 32), (5, 64, 64, 64), (1, 1, 1, 1), (64, 200, 64, 64), (65, 64, 1, 64)]
)
def test_remainders(sizes):
    m, k, n, tile = sizes
    tiled = tiled_matmul_graph(m, k, n, tile)
    onnx.checker.check_model(tiled, full_check=True)
    assert types(tiled)["MatMul"] == -(-m // tile) * -(-k // tile) * -(-n // tile)
    assert verify(linear_graph(m, k, n), tiled).equal


def layers():
    """A Gemm with bias and scales, one with the weight the other way, a MatMul with a weight, one without."""
    return model(
        [
            node("Gemm", ["x", "w", "b"], ["h"], name="/fc/Gemm", transB=1, alpha=0.5, beta=2.0),
            node("Gemm", ["h", "v"], ["g"], name="other"),
            node("MatMul", ["g", "u"], ["p"], name="matmul"),
            node("Transpose", ["p"], ["q"], name="transpose"),
            node("MatMul", ["p", "q"], ["y"], name="product"),
        ],
        [value("x", 4, 100)], [value("y", 4, 4)],
        [weight("w", 70, 100), weight("b", 70), weight("v", 70, 50), weight("u", 50, 33)],
    )  # fmt: skip


def test_tiles_of_any_size(tmp_path):
    original = layers()
    before = original.SerializeToString()
    tiled = tile_linear(original, 32)
    assert original.SerializeToString() == before
    onnx.checker.check_model(tiled, full_check=True)
    # 70 x 100: 3 x 4; 70 x 50: 2 columns of 3; 50 x 33: 2 columns of 2
    assert types(tiled)["Gemm"] == 3 * 4 + 2 * 3
    assert types(tiled)["MatMul"] == 2 * 2 + 1
    kept = {each.name: list(each.dims) for each in tiled.graph.initializer if "parts" not in each.name}
    assert kept == {"w": [70, 100], "b": [70], "v": [70, 50], "u": [50, 33]}  # no weight twice
    assert {"h", "g", "p", "q", "y"} <= {name for each in tiled.graph.node for name in each.output}
    found = verify(original, tiled)
    assert found.equal
    assert found.first_diverging is None
    stats, cut = load(saved(original, tmp_path)), load(saved(tiled, tmp_path, "tiled.onnx"))
    assert cut.total_mult_adds == stats.total_mult_adds
    assert cut.total_params == stats.total_params
    assert cut["fc.Gemm"].macs == stats["fc"].macs


def test_chosen_nodes():
    tiled = tile_linear(layers(), 64, ["other"])
    assert types(tiled)["Gemm"] == 1 + 2
    assert verify(layers(), tiled).equal
    assert len(tile_linear(layers(), 1000).graph.node) == 5  # nothing is larger
    for names, said in {
        "product": "not a weight with two dimensions", "transpose": "only Gemm and MatMul can be tiled",
        "none": "names of nodes of the model, got 'none'",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=said):
            tile_linear(layers(), 64, [names])
    with pytest.raises(InputError, match="tile must be an integer >= 1, got 0"):
        tile_linear(layers(), 0)
    with pytest.raises(InputError, match=r"must be an onnx\.ModelProto or a path, got int"):
        tile_linear(3)
    old = layers()
    old.opset_import[0].version = 10
    with pytest.raises(InputError, match="the opset must be >= 11, got 10"):
        tile_linear(old)


def test_older_operators_and_what_is_not_tiled():
    old = layers()
    old.opset_import[0].version = 11
    tiled = tile_linear(old, 64)
    assert any(each.op_type == "Split" and len(each.input) == 1 for each in tiled.graph.node)
    assert verify(old, tiled).equal
    assert not_tiled(layers()) == {"product": "its second operand is not a weight with two dimensions"}


def test_first_diverging_node(tmp_path):
    wrong = layers()
    changed = next(each for each in wrong.graph.initializer if each.name == "v")
    changed.float_data[7] += 1
    found = verify(saved(layers(), tmp_path), wrong)
    assert not found.equal
    assert found.first_diverging == "other"
    assert found.max_abs_error**2 >= found.mse > 0
    x = torch.ones(4, 100)
    assert verify(layers(), layers(), {"x": x}) == (0.0, 0.0, True, None)
    with pytest.raises(InputError, match="must have the same outputs"):
        verify(layers(), linear_graph(1, 1, 1))
    with pytest.raises(InputError, match="onnxruntime rejects the model"):
        verify(layers(), layers(), {"x": torch.ones(4, 99)})
    (tmp_path / "broken.onnx").write_bytes(b"?")
    with pytest.raises(ModelFileError, match="not an ONNX file"):
        verify(layers(), tmp_path / "broken.onnx")


@pytest.fixture(scope="module")
def alexnet(tmp_path_factory):
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("alexnet") / "alexnet.onnx"
    return export(models.alexnet().eval(), torch.rand(1, 3, 224, 224), path)


@pytest.mark.slow
def test_alexnet_in_tiles(alexnet, tmp_path):
    tiled = tile_linear(alexnet)
    # 9216 = 144 x 64 to 4096 = 64 x 64; 64 x 64; 64 x 16, the last of 40 columns
    assert types(tiled)["Gemm"] == 144 * 64 + 64 * 64 + 64 * 16 == 14_336
    # besides: 17 other operators; inputs and biases split by 3 + 3, weights by 65 + 65 + 17; 144 sums; 3 Concat
    assert len(tiled.graph.node) == 14_336 + 17 + 6 + 147 + 144 + 3 == 14_653
    path = saved(tiled, tmp_path)
    stats = load(path)
    assert stats.total_mult_adds == 714_188_480
    assert stats.total_params == 61_100_840
    found = verify(alexnet, path)
    assert found.equal
    assert found.mse < 1e-10


@pytest.mark.slow
def test_alexnet_in_large_tiles(alexnet):
    tiled = tile_linear(alexnet, 1024)
    assert types(tiled)["Gemm"] == 9 * 4 + 4 * 4 + 4 * 1 == 56
    assert verify(alexnet, tiled).mse < 1e-10


# --------------------------------------------------------------------------------------------- PyTorch


@pytest.mark.parametrize(("sizes", "bias"), [((100, 70), True), ((64, 64), False), ((5, 3), True)])
def test_tiled_linear_is_the_layer(sizes, bias):
    torch.manual_seed(0)
    whole = nn.Linear(*sizes, bias=bias).double()
    tiled = TiledLinear(*sizes, bias, tile=32).double()
    tiled.load_state_dict(whole.state_dict())
    x = torch.randn(2, 7, sizes[0], dtype=torch.double, requires_grad=True)
    results = []
    for layer in (whole, tiled):
        x.grad = None
        layer(x).square().sum().backward()
        results.append([layer(x), x.grad, *(each.grad for each in layer.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    stats = Statistics(tiled, (2, 7, sizes[0]), dtypes=torch.double)
    assert stats.total_mult_adds == 14 * sizes[0] * sizes[1]


def test_all_layers_of_a_module():
    torch.manual_seed(0)
    shared = nn.Linear(40, 40)
    net = nn.Sequential(nn.Linear(100, 40), nn.ReLU(), shared, nn.Sequential(shared, nn.Linear(40, 8))).eval()
    hooked = net[0].register_forward_hook(lambda *_: None)
    whole, parameters = copy.deepcopy(net), dict(net.named_parameters())
    assert tile_modules(net, 32) is net
    hooked.remove()
    assert [type(each).__name__ for each in net.modules()] == [
        *("Sequential", "Linear", "ReLU", "TiledLinear", "Sequential", "TiledLinear")
    ]  # fmt: skip
    assert net[2] is net[3][0]
    assert all(value is parameters[name] for name, value in net.named_parameters())
    x = torch.randn(3, 100)
    torch.testing.assert_close(net(x), whole(x))
    assert str(net[2]) == "TiledLinear(in_features=40, out_features=40, bias=True, tile=32)"
    assert isinstance(tile_modules(nn.Linear(3, 3), 2), TiledLinear)
    with pytest.raises(InputError, match="tile must be an integer >= 1, got 0"):
        tile_modules(nn.Linear(3, 3), 0)
    with pytest.raises(InputError, match=r"module must be a torch\.nn\.Module, got int"):
        tile_modules(3, 2)


def test_export_of_a_tiled_module(tmp_path):
    net = distinct_values(nn.Sequential(nn.Linear(100, 70), nn.ReLU(), nn.Linear(70, 8)))
    whole = export(net, torch.rand(2, 100), tmp_path / "whole.onnx")
    tiled = export(tile_modules(net, 64), torch.rand(2, 100), tmp_path / "tiled.onnx")
    assert load(tiled).total_mult_adds == load(whole).total_mult_adds == 2 * (7000 + 560)


def test_names_and_operands_that_repeat(tmp_path):
    """Two nodes of one name, a bias of two dimensions, and a weight multiplied with itself."""
    made = model(
        [
            node("Gemm", ["x", "w", "b"], ["a"], name="same"),
            node("MatMul", ["x", "v"], ["c"], name="same"),
            node("MatMul", ["w", "w"], ["d"], name="square"),
            node("MatMul", ["c", "d"], ["e"]),
            node("Add", ["a", "e"], ["y"]),
        ],
        [value("x", 3, 5)],
        [value("y", 3, 5)],
        [weight("w", 5, 5), weight("v", 5, 5), weight("b", 1, 5)],
    )
    tiled = tile_linear(made, 2)
    onnx.checker.check_model(tiled, full_check=True)
    assert [each.op_type for each in tiled.graph.node].count("Gemm") == 9
    made.graph.node[1].name = "other"  # onnxruntime wants distinct ones
    assert verify(made, tiled).equal
    with pytest.raises(InputError, match="cannot be tiled: both operands are the same tensor"):
        tile_linear(made, 2, nodes=["square"])
    for nodes in ("same", 5):
        with pytest.raises(InputError, match="nodes must be a list of names"):
            tile_linear(made, 2, nodes=nodes)


def test_values_that_are_no_numbers():
    log = model([node("Log", ["x"], ["y"], name="log")], [value("x", 8)], [value("y", 8)])
    assert verify(log, log) == (0, 0, True, None)  # NaN in both
    both = model([node("Abs", ["x"], ["y"], name="abs")], [value("x", 8)], [value("y", 8)])
    assert verify(log, both) == (float("inf"), float("inf"), False, "log")
    wider = model([node("Concat", ["x", "x"], ["y"], axis=0)], [value("x", 8)], [value("y", 16)])
    assert verify(wider, both).max_abs_error == float("inf")
    texts = [[value(name, 2, kind=TensorProto.STRING)] for name in "xy"]
    once, twice = (
        model([node(op_type, ["x"] * count, ["y"])], *texts)
        for op_type, count in (("Identity", 1), ("StringConcat", 2))
    )
    words = {"x": np.array(["a", ""], dtype=object)}
    assert verify(twice, twice, words).equal
    assert verify(once, twice, words).max_abs_error == 1
    with pytest.raises(InputError, match="cannot make random values for the input 'x'"):
        verify(once, once)
    with pytest.raises(InputError, match="inputs must be a dict"):
        verify(log, log, [torch.ones(8)])


def test_tiled_linear_of_a_device_and_dtype():
    layer = TiledLinear(5, 3, tile=2, device="meta", dtype=torch.float16)
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.float16, "meta")
    assert layer(torch.empty(2, 5, dtype=torch.float16, device="meta")).shape == (2, 3)
    for size in ((2, 4), (2, 6), ()):
        with pytest.raises(InputError, match=r"size \[\.\.\., 5\], got"):
            layer(torch.empty(size, device="meta"))


@pytest.mark.parametrize("tolerance", [-1, math.nan, "1e-3", None])
def test_verify_refuses_tolerances_that_nothing_keeps(tolerance):
    for name in ("rtol", "atol"):
        with pytest.raises(InputError, match=f"{name} must be a number >= 0, got "):
            verify(linear_graph(4, 8, 2), linear_graph(4, 8, 2), **{name: tolerance})
