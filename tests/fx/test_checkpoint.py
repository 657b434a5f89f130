"""Activation checkpointing in graphs, and biases as nodes of their own."""

from __future__ import annotations

import copy
import operator
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from modelsummary import CheckpointPlan, InputError, Statistics, symbolic_trace
from modelsummary.fx import checkpoint_graph, sim_env
from tests.graphs import assert_same, tensors
from tests.idioms import Gpt2, ids
from tests.untouched import untouched


class Regions(nn.Module):
    """A function and a module under checkpointing, and one region inside another."""

    def __init__(self, *, use_reentrant=False):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = checkpoint(self._first, self.a(x), use_reentrant=self.use_reentrant)
        return checkpoint(self._outer, x, use_reentrant=self.use_reentrant).sum(1)

    def _first(self, x):
        return F.dropout(torch.sigmoid(self.b(x)), 0.5, self.training)

    def _outer(self, x):
        y = torch.tanh(x)
        z = checkpoint(self._inner, y, y * 2, use_reentrant=self.use_reentrant)
        z = checkpoint(self.d, z, use_reentrant=self.use_reentrant) + z
        return z * x.shape[0]

    def _inner(self, x, y):
        return torch.exp(self.c(x)) * y


def regions(graph):
    return {node.name: node.meta.get("activation_checkpoint") for node in graph.graph.nodes if node.op != "placeholder"}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # re-entrant regions inside of others
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_regions_are_marked_and_run(use_reentrant):
    model, x = Regions(use_reentrant=use_reentrant), torch.rand(3, 4)
    with untouched(model):
        graph = symbolic_trace(model, meta_args={"x": x}, trace_act_ckpt=True)
    marks = regions(graph)
    assert marks["b"] == marks["sigmoid"] == marks["dropout"] == (0,)
    assert marks["tanh"] == (1,)
    assert marks["c"] == marks["exp"] == (1, 0)
    assert marks["d"] == (1, 1)
    assert marks["a"] is None
    names = [line.split("(")[0].split()[1] for line in graph.code.splitlines() if line.strip().startswith("def ")]
    assert names == ["forward", "checkpoint_0", "checkpoint_1", "checkpoint_1_0", "checkpoint_1_1"]
    for batch in (3, 5):
        for train in (True, False):
            assert_same(model, graph, {"x": torch.rand(batch, 4)}, train=train)
    assert_same(model, copy.deepcopy(graph), {"x": torch.rand(2, 4)})
    assert_same(model, pickle.loads(pickle.dumps(graph)), {"x": torch.rand(2, 4)})


def test_regions_free_memory():
    model = Regions()
    x = torch.rand(3, 4)
    kept = []
    for marked in (True, False):
        graph = symbolic_trace(model, meta_args={"x": x}, trace_act_ckpt=marked)
        with sim_env(model) as env:
            result = graph(x)
        kept.append(env.ctx.nbytes)
        del result
    assert kept[0] < kept[1]


def test_without_the_flag_nothing_is_marked():
    graph = symbolic_trace(Regions(), meta_args={"x": torch.rand(3, 4)})
    assert not any(regions(graph).values())
    assert "checkpoint" not in graph.code


def test_a_plan_that_keeps_results_is_refused():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
    plan = CheckpointPlan(("0",), 10, 20, 0, {"0": ("aten.addmm.default#0",)})
    gm = symbolic_trace(model, meta_args={"input": torch.rand(4, 8)})
    with pytest.raises(InputError, match=r"a region of a graph keeps none; pass a plan of suggest_checkpoint"):
        checkpoint_graph(gm, plan)


def test_a_mark_by_hand_applies_checkpointing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), nn.Linear(4, 2))
    graph = symbolic_trace(model, meta_args={"input": torch.rand(3, 4)})
    for node in graph.graph.nodes:
        if node.name in ("_1", "_2_0"):
            node.meta["activation_checkpoint"] = 7
    graph.recompile()
    lines = [line.strip() for line in graph.code.splitlines()]
    assert "def checkpoint_7(_0):" in lines
    assert "_2_0 = torch.utils.checkpoint.checkpoint(checkpoint_7, _0, use_reentrant=False);  _0 = None" in lines
    assert_same(model, graph, {"input": torch.rand(5, 4)})


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([None, (0,), (0, 0), (0, 1), (1,), (2, 0, 0)]), min_size=9, max_size=9))
def test_any_marks_give_the_same(marks):
    torch.manual_seed(0)
    model = Regions()
    graph = symbolic_trace(model, meta_args={"x": torch.rand(3, 4)})
    inner = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    for node, mark in zip(inner, marks, strict=False):
        node.meta["activation_checkpoint"] = mark
    graph.recompile()
    assert_same(model, graph, {"x": torch.rand(4, 4)})


def test_a_plan_is_applied_to_a_graph():
    model = Gpt2()
    stats = Statistics(model, {"ids": ids(2)})
    graph = checkpoint_graph(stats.graph_module(), ["h.1", "h.3"])
    assert graph.code.count("torch.utils.checkpoint.checkpoint(") == 2
    with pytest.raises(InputError, match=r"'h.1' has the node .*, which is already in a region"):
        checkpoint_graph(graph, ["h.1"])
    with pytest.raises(InputError, match=r"no node of the graph belongs to 'h.9'"):
        checkpoint_graph(graph, ["h.9"])
    with pytest.raises(InputError, match="must be a list of module names"):
        checkpoint_graph(graph, "h.0")
    with pytest.raises(InputError, match="must be names of modules, got int: 3"):
        checkpoint_graph(graph, [3])
    assert_same(model, graph, {"ids": ids(3)})


def test_a_segment_is_one_region():
    model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), nn.Linear(4, 4))
    graph = symbolic_trace(model, meta_args={"input": torch.rand(3, 4)})
    checkpoint_graph(graph, ["0[1:4]"])
    assert [name for name, mark in regions(graph).items() if mark == (0,)] == ["_0_1", "_0_2", "_0_3"]
    assert_same(model, graph, {"input": torch.rand(5, 4)})


# ------------------------------------------------------------------------------------------------- biases

CONVOLUTIONS = [
    (nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9)),
    (nn.Conv2d(4, 6, 3, stride=2, dilation=2), (2, 4, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    (nn.Conv2d(4, 6, (3, 5), padding="same"), (2, 4, 9, 9)),
    (nn.Conv3d(4, 6, 3), (2, 4, 5, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 9)),
    (nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2), (2, 4, 9, 9)),
    (nn.ConvTranspose3d(4, 6, 3), (2, 4, 5, 5, 5)),
    (nn.Linear(4, 6), (2, 3, 4)),
]


@pytest.mark.parametrize(("layer", "size"), CONVOLUTIONS, ids=lambda each: type(each).__name__)
def test_layers_become_product_and_bias(layer, size):
    model = nn.Sequential(layer)
    x = {"input": torch.rand(size)}
    assert [node.op for node in symbolic_trace(model, meta_args=x).graph.nodes][1:-1] == ["call_module"]
    graph = symbolic_trace(model, meta_args=x, bias_addition_split=True)
    assert not list(graph.graph.find_nodes(op="call_module"))
    assert graph.graph.output_node().args[0].target is operator.add
    assert graph.state_dict().keys() == model.state_dict().keys()
    shapes = {
        node.meta["tensor_meta"].shape for node in graph.graph.nodes if node.name.startswith(("conv", "linear", "add"))
    }
    assert shapes == {model(**x).shape}
    out, expected = graph(**x), model(**x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), list(model.parameters())) for each in (out, expected)))


@pytest.mark.parametrize("alpha", [1, 0.5])
@pytest.mark.parametrize("beta", [1, 2])
def test_functions_become_product_and_bias(alpha, beta):
    def forward(x, a, b):
        one = torch.addmm(x, a, b, alpha=alpha, beta=beta)
        two = x.addmm(a, b, beta=beta)
        three = torch.addbmm(x, a.expand(2, -1, -1), b.expand(2, -1, -1), beta=beta, alpha=alpha)
        return (
            one + two + three + F.linear(a, b.T, x[0]) + F.conv1d(a[:, :, None], b.T[:, :, None], bias=x[0]).squeeze(2)
        )

    given = {"x": torch.rand(3, 5), "a": torch.rand(3, 4), "b": torch.rand(4, 5)}
    graph = symbolic_trace(forward, meta_args=given, bias_addition_split=True)
    called = {getattr(node.target, "__name__", node.target) for node in graph.graph.nodes}
    assert {"mm", "bmm", "linear", "conv1d"} <= called
    assert not {"addmm", "addbmm"} & called
    torch.testing.assert_close(graph(**given), forward(**given))


def test_functions_that_are_no_sum_stay():
    def forward(x, a, b):
        return torch.addmm(x, a, b, beta=0) + torch.addmm(x, a, b, out=torch.empty(3, 3))

    square = torch.ones(3, 3)
    graph = symbolic_trace(forward, meta_args={"x": square, "a": square, "b": square}, bias_addition_split=True)
    assert len(graph.graph.find_nodes(op="call_function", target=torch.addmm)) == 2


def test_layers_without_bias_or_with_hooks_stay():
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, out: out * 2)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), hooked)
    x = {"input": torch.rand(2, 4)}
    graph = symbolic_trace(model, meta_args=x, bias_addition_split=True)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert torch.equal(*tensors((graph(**x), model(**x))))
