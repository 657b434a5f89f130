"""Registries, tensors without data, and what communication costs."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, RegistrationError, symbolic_trace
from modelsummary.fx import (
    CommunicationProfiler,
    MeshSpec,
    MetaInfo,
    MetaTensorMode,
    ShapeProp,
    flop_count,
    register_flop_count_impl,
    register_leaf_module,
    register_leaf_module_impl,
    register_non_leaf_module,
    register_profile_impl,
    register_shape_impl,
    register_tracer_impl,
    registry,
    symbolic_profile,
)
from tests.graphs import assert_same, written


@pytest.fixture(autouse=True)
def _registrations():
    """Undo the registrations of a test."""
    names = ("_tracer_impls", "leaf_impls", "_leaves", "shape_impls", "flop_impls", "profile_impls")
    before = {name: dict(getattr(registry, name)) for name in names}
    yield
    for name, known in before.items():
        getattr(registry, name).clear()
        getattr(registry, name).update(known)


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output")]


class Square(torch.autograd.Function):
    """The square of x, with its own backward: 3x instead of 2x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * grad


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Square.apply(self.layer(x)) + 1


def test_an_autograd_function_is_one_node_with_its_own_backward(tmp_path, monkeypatch):
    model = Squares()
    graph = symbolic_trace(model, meta_args={"x": torch.rand(3, 4)})
    assert [getattr(each, "__name__", each) for each in targets(graph)] == ["layer", "Square_apply", "add"]
    assert_same(model, graph, {"x": torch.rand(5, 4)})
    assert_same(model, written(graph, tmp_path, monkeypatch), {"x": torch.rand(5, 4)})


def test_a_tracer_impl_stands_for_an_autograd_function():
    @register_tracer_impl(Square.apply)
    def square(x):
        return x.pow(2)

    graph = symbolic_trace(Squares(), meta_args={"x": torch.rand(3, 4)})
    assert [getattr(each, "__name__", each) for each in targets(graph)] == ["layer", "pow", "add"]


def python_function(x):
    return x.numpy()  # nothing that could be traced


def calls_python(x):
    return python_function(x) * 2


class CallsPython(nn.Module):
    def forward(self, x):
        return calls_python(x)


def test_a_tracer_impl_stands_for_functions_of_torch_and_of_python():
    @register_tracer_impl(torch.relu)
    def relu(x):
        return torch.relu(x) * 1.0  # the original: an implementation does not stand for itself

    @register_tracer_impl(python_function)
    def python_impl(x):
        return x.exp()

    graph = symbolic_trace(lambda x: torch.relu(x) + 1, meta_args={"x": torch.rand(3)})
    assert [getattr(each, "__name__", each) for each in targets(graph)] == ["relu", "mul", "add"]
    graph = symbolic_trace(CallsPython(), meta_args={"x": torch.rand(3)})
    x = torch.rand(3)
    assert torch.equal(graph(x), x.exp() * 2)
    assert torch.equal(symbolic_trace(calls_python, meta_args={"x": x})(x), x.exp() * 2)
    assert isinstance(python_function(x), np.ndarray)


def test_leaves_and_what_is_opened():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).relu()

    model = nn.Sequential(Block(), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True))
    x = {"input": torch.rand(2, 3, 4)}
    assert targets(symbolic_trace(model, meta_args=x)) == ["0.layer", "relu", "1"]
    assert register_leaf_module(Block) is Block
    register_non_leaf_module(nn.TransformerEncoderLayer)
    graph = symbolic_trace(model, meta_args=x)
    found = [each for each in targets(graph) if isinstance(each, str)]
    assert found[0] == "0"
    assert {"1.self_attn", "1.linear1", "1.norm2"} <= set(found)
    assert_same(model, graph, x)


@pytest.fixture(scope="module")
def operator():
    """Define an operator with a CPU kernel only, as C++ extensions do."""
    library = torch.library.Library("fx_test", "DEF")
    library.define("scale(Tensor x, Tensor w) -> Tensor")
    library.impl("scale", lambda x, w: x @ w, "CPU")
    yield torch.ops.fx_test.scale
    library._destroy()


def test_an_operator_without_a_kernel_for_shapes(operator):
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("w", torch.rand(4, 6))

        def forward(self, x):
            return operator(self.layer(x), self.w) * 2

    @register_shape_impl(operator)
    def scale_shape(x, w):
        return x.new_empty(*x.shape[:-1], w.shape[-1])

    @register_flop_count_impl(operator)
    def scale_flops(x, w):
        return 2 * x.numel() * w.shape[-1], 4 * x.numel() * w.shape[-1]

    model = Calls()
    graph = symbolic_trace(model, meta_args={"x": torch.rand(3, 4)})
    assert operator in targets(graph)
    x = torch.rand(5, 4)
    assert torch.equal(graph(x), model(x))
    symbolic_profile(graph, x)
    costs = {node.name: node.meta["info"] for node in graph.graph.nodes}
    assert costs["scale"].shape == (5, 6)
    assert (costs["scale"].fwd_flop, costs["scale"].bwd_flop) == (2 * 120, 4 * 120)
    assert (costs["layer"].fwd_flop, costs["layer"].bwd_flop) == (2 * 80, 2 * 80)  # gradients pass through

    @register_profile_impl(operator)
    def scale_profile(x, w):
        return 1, 2, 3, 4

    info = next(node.meta["info"] for node in symbolic_profile(graph, x).graph.nodes if node.name == "scale")
    assert (info.fwd_flop, info.bwd_flop, info.fwd_comm, info.bwd_comm) == (1, 2, 3, 4)


def test_a_layer_that_only_its_author_knows():
    class Opaque(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.detach().numpy()[:, :2].copy())

    @register_leaf_module_impl(Opaque)
    def shape(module, x):
        assert isinstance(module, Opaque)
        return x.new_empty(x.shape[0], 2)

    model = nn.Sequential(nn.Linear(4, 4), Opaque())
    graph = symbolic_trace(model, meta_args={"input": torch.rand(3, 4)})
    assert targets(graph) == ["0", "1"]
    assert next(iter(reversed(graph.graph.nodes))).meta["tensor_meta"].shape == (3, 2)
    x = torch.rand(5, 4)
    assert torch.equal(graph(x), model(x))
    assert ShapeProp(graph).propagate(torch.rand(7, 4)).shape == (7, 2)


def test_a_graph_may_hold_what_is_known_by_its_shape_alone():
    def fused(x):
        raise NotImplementedError("compiled later")

    register_shape_impl(fused)(lambda x: torch.empty_like(x[..., :1]))
    graph = symbolic_trace(lambda x: x.relu() + 1, meta_args={"x": torch.rand(3, 4)})
    node = next(iter(graph.graph.find_nodes(op="call_method", target="relu")))
    with graph.graph.inserting_after(node):
        node.replace_all_uses_with(graph.graph.call_function(fused, node.args))
    graph.graph.erase_node(node)
    graph.recompile()
    assert ShapeProp(graph).propagate(torch.rand(3, 4)).shape == (3, 1)


@pytest.mark.parametrize(
    "register", [register_tracer_impl, register_shape_impl, register_flop_count_impl, register_profile_impl]
)
def test_registries_refuse_duplicates_and_what_is_no_function(register):
    register(math.sqrt)(lambda x: x)
    with pytest.raises(RegistrationError, match="already has an implementation"):
        register(math.sqrt)(lambda x: x)
    with pytest.raises(RegistrationError, match="expected a function, got int: 3"):
        register(3)


def test_registries_of_modules_refuse_duplicates():
    class Own(nn.Module):
        pass

    register_leaf_module(Own)
    for register in (register_leaf_module, register_non_leaf_module):
        with pytest.raises(RegistrationError, match="Own is already registered as a leaf"):
            register(Own)
    with pytest.raises(RegistrationError, match="expected a module class, got function"):
        register_leaf_module(lambda: None)
    register_non_leaf_module(nn.MultiheadAttention)
    with pytest.raises(RegistrationError, match="is already registered as opened"):
        register_leaf_module_impl(nn.MultiheadAttention)


def test_einops_layers():
    layers = pytest.importorskip("einops.layers.torch")
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        layers.Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2),
        nn.Linear(16, 5),
        layers.Reduce("b t c -> b c", "mean"),
    )
    inputs = {"input": torch.rand(2, 3, 8, 8)}
    assert_same(model, symbolic_trace(model, meta_args=inputs), {"input": torch.rand(3, 3, 8, 8)})
    register_leaf_module(layers.Rearrange)
    register_leaf_module(layers.Reduce)
    graph = symbolic_trace(model, meta_args=inputs)
    assert targets(graph) == ["0", "1", "2", "3"]
    assert_same(model, graph, {"input": torch.rand(3, 3, 8, 8)})


# ----------------------------------------------------------------------------------- tensors without data


def test_meta_tensor_mode_keeps_devices_that_are_not_there():
    with MetaTensorMode():
        model = nn.Sequential(nn.Linear(4, 10**6), nn.BatchNorm1d(10**6)).cuda()
        x = torch.rand(10**7, 4).to("cuda:0")
        nn.init.trunc_normal_(model[0].weight)
        y = torch.zeros(3, device="cuda") + 1
        moved = y.cpu()
    assert model[0].weight.device == x.device == y.device == torch.device("cuda", 0)
    assert {each.device.type for each in (*model.parameters(), *model.buffers())} == {"cuda"}
    assert moved.device.type == "cpu"
    assert isinstance(model[0].weight, nn.Parameter)
    assert torch.rand(2).sum() > 0  # outside all is as before
    assert nn.Linear(2, 2).double().weight.dtype is torch.float64


def test_shared_parameters_move_together():
    with MetaTensorMode():
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight = one.weight
        model = nn.Sequential(one, nn.Sequential(other, nn.LSTM(3, 3))).cuda().double()
        assert one(torch.rand(2, 3).cuda().double()).device.type == "cuda"
    assert one.weight is other.weight
    assert {(each.device.type, each.dtype) for each in model.parameters()} == {("cuda", torch.float64)}


def test_a_model_without_data_is_traced_and_profiled():
    with MetaTensorMode():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
        x = torch.rand(3, 4).cuda()
    graph = symbolic_profile(symbolic_trace(model, meta_args={"input": x}), x)
    assert sum(node.meta["info"].macs for node in graph.graph.nodes) == 144
    assert graph.get_submodule("0").weight is model[0].weight


def test_collectives_do_nothing():
    with MetaTensorMode():
        x = torch.rand(4)
        assert dist.all_reduce(x) is None
        assert dist.all_gather([x, x], x, async_op=True).wait()
    with pytest.raises(ValueError, match="process group"):
        dist.all_reduce(torch.rand(4))


# ----------------------------------------------------------------------------------------- communication


def test_times_of_collectives():
    """8 devices, 1 MB, 1 GB/s, 10 us: a ring moves 7/8 of it in 7 steps, a tree all of it in 3."""
    mesh, nbytes = MeshSpec(8, 1e9, 1e-5), 10**6
    assert mesh.sent_bytes("all_gather", nbytes) == 875_000
    assert mesh.seconds("all_gather", nbytes) == pytest.approx(7e-5 + 875e-6)
    assert mesh.seconds("reduce_scatter", nbytes) == mesh.seconds("all_gather", nbytes)
    assert mesh.seconds("all_reduce", nbytes) == pytest.approx(2 * (7e-5 + 875e-6))
    assert mesh.seconds("p2p", nbytes) == pytest.approx(1e-5 + 1e-3)
    assert mesh.seconds("broadcast", nbytes) == pytest.approx(3 * (1e-5 + 1e-3))
    tree = MeshSpec(8, 1e9, 1e-5, "tree")
    assert tree.seconds("all_reduce", nbytes) == pytest.approx(6 * (1e-5 + 1e-3))
    with pytest.raises(InputError, match=r"kind must be one of .* got 'gossip'"):
        mesh.seconds("gossip", 1)


@given(st.integers(1, 4096), st.integers(0, 10**9), st.floats(1e6, 1e12), st.floats(0, 1e-3))
def test_a_ring_all_reduce_is_reduce_scatter_and_all_gather(devices, nbytes, bandwidth, latency):
    mesh = MeshSpec(devices, bandwidth, latency)
    two = mesh.seconds("reduce_scatter", nbytes) + mesh.seconds("all_gather", nbytes)
    assert mesh.seconds("all_reduce", nbytes) == pytest.approx(two, abs=3 / bandwidth)
    if devices == 1:
        assert mesh.seconds("all_reduce", nbytes) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0, "bandwidth": 1.0}, "devices must be an integer >= 1, got 0"),
        ({"devices": 2, "bandwidth": 0}, "bandwidth must be .* got 0 and"),
        ({"devices": 2, "bandwidth": 1.0, "algorithm": "star"}, "algorithm must be 'ring' or 'tree', got 'star'"),
    ],
)
def test_bad_meshes(options, message):
    with pytest.raises(InputError, match=message):
        MeshSpec(**options)


def test_communication_of_a_graph():
    graph = symbolic_trace(lambda x: x.relu().to("meta") + 1, meta_args={"x": torch.rand(3, 4)})
    node = next(iter(graph.graph.find_nodes(op="call_method", target="relu")))
    with graph.graph.inserting_after(node):
        new = graph.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (node, "sum", "0"))
    new.meta["tensor_meta"] = node.meta["tensor_meta"]
    new.meta["info"] = MetaInfo()
    mesh = MeshSpec(4, 1e3, 1.0)
    total, seconds = CommunicationProfiler(graph, mesh).propagate()
    moved = next(iter(graph.graph.find_nodes(op="call_method", target="to"))).meta["info"]
    assert (moved.fwd_comm, moved.fwd_time) == (48, 1 + 0.048)
    assert (new.meta["info"].fwd_comm, new.meta["info"].fwd_time) == (72, pytest.approx(6 + 0.072))
    assert total == 48 + 72
    assert seconds == pytest.approx(7.12)
    with pytest.raises(InputError, match="mesh must be a MeshSpec"):
        CommunicationProfiler(graph, 4)


@pytest.mark.parametrize("costs", [(1, 2, 3), 3, None, (1.5, 2), (-1, 2)])
def test_flops_that_were_registered_must_be_two_or_four_integers(costs):
    register_flop_count_impl(nn.Linear)(lambda module, x: costs)
    graph = symbolic_trace(nn.Sequential(nn.Linear(2, 2)), meta_args={"input": torch.rand(1, 2)})
    with pytest.raises(InputError, match=rf"gave {re.escape(str(costs))} for _0; expected \(fwd_flop, bwd_flop\)"):
        symbolic_profile(graph, torch.rand(1, 2))
    assert flop_count(nn.Linear(2, 2), torch.rand(1, 2)) == (8, 8)


def test_methods_of_tensors_are_registered_too():
    register_flop_count_impl(torch.Tensor.exp)(lambda x: (5, 6))
    register_shape_impl(torch.Tensor.exp)(lambda x: x.new_empty(1))
    graph = symbolic_trace(lambda x: x.exp(), meta_args={"x": torch.rand(3)})
    info = next(iter(symbolic_profile(graph, torch.rand(3)).graph.find_nodes(op="call_method"))).meta["info"]
    assert (info.shape, info.fwd_flop, info.bwd_flop) == ((1,), 5, 6)


def test_an_implementation_is_a_function():
    with pytest.raises(RegistrationError, match=r"expected a function for .*Linear.*, got NoneType: None"):
        register_flop_count_impl(nn.Linear)(None)
