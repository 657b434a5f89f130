"""Layers that are linear by what they call, and layers whose columns are several pieces."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.parallel.applied_rank import fake_world
from modelsummary.parallel.linear_layers import LinearLayer
from modelsummary.parallel.record_calls import TRACE_RULES, Calls
from modelsummary.record.runs import record_once
from tests.parallel.models import Conv1D, make


class Own(nn.Module):
    """A layer with a weight of 8 x 12, or 12 x 8, that computes what a function says."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.w, self.b = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(12))

    def forward(self, x):
        return self.function(x, self.w, self.b)


class Beside(nn.ModuleList):
    """Layers that take the same tensor."""

    def forward(self, x):
        return [layer(x) for layer in self]


LINEAR = [
    (F.linear, (12, 8), 0),
    (lambda x, w, b: F.linear(x, w) + b, (12, 8), 0),
    (lambda x, w, b: F.linear(x, w.t(), b), (8, 12), 1),
    (lambda x, w, b: x @ w + b, (8, 12), 1),
    (lambda x, w, b: b + torch.matmul(x, w.transpose(0, 1)), (12, 8), 0),
    (lambda x, w, b: torch.addmm(b, x.reshape(-1, 8), w).view(*x.shape[:-1], 12), (8, 12), 1),
    (lambda x, w, b: torch.addmm(b, x.reshape(-1, 8).to(w.dtype), w).view(*x.shape[:-1], 12), (8, 12), 1),
    (lambda x, w, b: F.linear(x, w * 0.5, b), (12, 8), 0),  # equalised learning rate
]
RESHAPES = {5, 6}  # positions of those whose forward reshapes tensors
OTHERS = [
    lambda x, w, b: F.linear(x, w, b).relu(),
    lambda x, w, b: torch.add(x @ w.t(), b, alpha=2),
    lambda x, w, b: F.linear(x, w, b) + b,
    lambda x, w, b: F.linear(x, w, b).flatten(1),
    lambda x, w, b: F.linear(x, w),
    lambda x, w, b: F.linear(x.exp(), w, b),
    lambda x, w, b: torch.addmm(b, x.reshape(-1, 8), w.t() * 0.5).view(*x.shape[:-1], 12),
    lambda x, w, b: F.linear(x.reshape(-1, 8).double(), w.double(), b.double()).view(*x.shape[:-1], 12),
]


def test_a_product_with_a_weight_is_a_linear_layer_and_nothing_else_is():
    model = Beside([Own(function, *shape) for function, shape, _ in LINEAR] + [Own(each, 12, 8) for each in OTHERS])
    live = Statistics(model, (2, 3, 8)).live
    found = Calls(model, record_once(model, live.call, "shape", rules=TRACE_RULES)).linears
    expected = {
        str(number): LinearLayer("w", "b", dim, is_torch=False, reshapes=number in RESHAPES)
        for number, (*_, dim) in enumerate(LINEAR)
    }
    assert found == expected


@pytest.fixture(scope="module")
def fused():
    return Statistics(*make("fused"))


def test_fused_layers_are_split_in_pieces(fused):
    plan = fused.parallel_plan(tensor=2)
    layers = {layer.fqn: layer for layer in plan.layers}
    assert layers["h.0.attention.c_attn"].style == "LinearParallel"
    assert layers["h.0.attention.c_attn"].options == {
        "weight": "weight",
        "shards": {"weight": "_StridedShard(1, split_factor=3)", "bias": "_StridedShard(0, split_factor=3)"},
    }
    assert layers["h.0.attention.c_proj"].options == {
        "shards": {"weight": "Shard(0)"},
        "by_rows": True,
        "bias": "bias",
        "weight": "weight",
    }
    assert layers["h.0.mlp.0"].options["shards"]["weight"] == "_StridedShard(0, split_factor=2)"
    assert layers["h.0.mlp.2"].style == "RowwiseParallel"
    changed = {(each.fqn, each.name, each.whole, each.local) for each in plan.attributes if each.fqn.startswith("h.0")}
    assert changed == {("h.0.attention", "split_size", 16, 8)}
    assert not any(layer.reason for layer in plan.layers)
    # As by hand: a block reduces the results of two layers, and the gradients of two inputs; the embedding and the head
    # reduce one each. Activations are 4 x 8 tokens of 16 features of 8 bytes.
    activation = 4 * 8 * 16 * 8
    assert plan.collectives["forward", "all_reduce"] == (5, 5 * activation)
    assert plan.collectives["backward", "all_reduce"] == (5, 5 * activation)
    code = plan.to_code()
    compile(code, "plan", "exec")
    assert "class LinearParallel(LocalParallel)" in code


def test_a_model_whose_parameters_are_not_tied_is_refused(fused):
    plan = fused.parallel_plan(tensor=2)
    model = copy.deepcopy(fused.live.model)
    model.head.weight = nn.Parameter(model.wte.weight.detach().clone())
    with fake_world(0, 2):
        mesh = plan.device_mesh("cpu")
        with pytest.raises(InputError, match=r"'wte.weight' and 'head.weight' are one parameter in the plan and two"):
            plan.apply(model, mesh)
    assert model.h[0].attention.split_size == 16


def test_linear_layers_gather_and_scatter_chunks_of_the_sequence(fused):
    plan = fused.parallel_plan(tensor=2, sequence=True)
    layers = {layer.fqn: layer for layer in plan.layers if layer.style == "LinearParallel"}
    assert layers["h.0.attention.c_proj"].options["output_layouts"] == "Shard(1)"
    # As above, with an all-gather and a reduce-scatter instead of each all-reduce.
    activation = 4 * 8 * 16 * 8
    assert plan.collectives["forward", "reduce_scatter"] == (5, 5 * activation)
    assert plan.collectives["backward", "reduce_scatter"] == (5, 5 * activation)


def test_pieces_that_do_not_divide_keep_whole_activations(fused):
    plan = fused.parallel_plan(tensor=8)  # 4 heads
    reasons = {layer.fqn: layer.reason for layer in plan.layers if layer.reason}
    assert set(reasons) == {f"h.{block}.attention.c_{name}" for block in (0, 1) for name in ("attn", "proj")}
    reason = "4 heads or features of each piece of h.0.attention.c_attn do not divide by 8; divisors of 4 work"
    assert reasons["h.0.attention.c_attn"] == reason
    *_, last = [line for line in str(plan).splitlines() if "Parallel" in line]
    assert len(last) < 120  # the reason stands below the table and does not widen it
    assert f"\n* whole activations: {reason}\n" in str(plan)
    assert "x 2" in next(line for line in str(plan).splitlines() if "c_attn" in line)  # equal blocks are one row
    gathered = next(layer for layer in plan.layers if layer.fqn == "h.0.attention.c_attn")
    shards = {"weight": "Shard(1)", "bias": "Shard(0)"}
    assert gathered.options == {"shards": shards, "weight": "weight", "output_layouts": "Replicate()"}


class Attention(nn.Module):
    """Attention whose fused projection is taken apart in one of three ways."""

    def __init__(self, taken):
        super().__init__()
        self.taken, self.width, self.qkv, self.out = taken, 16, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.qkv(x)
        if self.taken == "slices":
            parts = (qkv[..., : self.width], qkv[..., self.width : 2 * self.width], qkv[..., 2 * self.width :])
            q, k, v = (each.view(b, t, -1, 4).transpose(1, 2) for each in parts)
        else:
            qkv = qkv.view(b, t, 3, -1, 4).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0) if self.taken == "unbind" else (qkv[0], qkv[1], qkv[2])
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


def test_pieces_are_found_however_they_are_taken():
    model = nn.Sequential(*(Attention(taken) for taken in ("unbind", "index", "slices")))
    plan = Statistics(model, (2, 6, 16)).parallel_plan(tensor=2)
    assert [(layer.fqn, layer.style, layer.reason) for layer in plan.layers] == [
        (f"{number}.{name}", style, "")
        for number in range(3)
        for name, style in (("qkv", "LinearParallel"), ("out", "RowwiseParallel"))
    ]
    assert all("split_factor=3" in layer.options["shards"]["weight"] for layer in plan.layers[::2])


def test_a_slice_that_begins_at_a_number_is_taken_from_its_own_piece():
    class Literal(nn.Module):
        def __init__(self):
            super().__init__()
            self.fused, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            fused = self.fused(x)
            return self.out(fused.chunk(3, -1)[0] * fused[..., 16:32])  # of 24 local columns, 8 to 15

    (sizes, *layers) = Statistics(Literal(), (2, 6, 16)).parallel_plan(tensor=2).layers
    assert [layer.reason for layer in layers] == ["", ""]
    (call,) = sizes.options["calls"]
    assert (call["name"], call["numbers"], call["local"]) == ("getitem", ((1, 16, 8), (2, 32, 16)), 24)


def test_pieces_that_fsdp_cannot_gather_are_exchanged(fused):
    plan = fused.parallel_plan(tensor=2, shard=2)
    layers = {layer.fqn: layer for layer in plan.layers}
    assert not [layer.reason for layer in plan.layers if layer.reason]
    assert layers["h.0.attention.c_attn"].options == {
        "shards": {"weight": "Shard(1)", "bias": "Shard(0)"},
        "weight": "weight",
        "pieces": dict.fromkeys(("weight", "bias"), ((16, False), (16, False), (16, False))),
    }
    # Half of 16 x 48 weights and of 48 elements of the bias.
    of_layer = (each for each in plan.communication if each.fqn == "h.0.attention.c_attn")
    moved = {(each.phase, each.operation): each for each in of_layer if each.group == "tensor"}
    assert (moved["forward", "all_to_all"].count, moved["forward", "all_to_all"].nbytes) == (2, 24 * 17 * 8)


class Flat(nn.Module):
    """A linear layer that writes both of its sizes into views, and may scale its weight by one of them."""

    def __init__(self, n_in, n_out, scale=None):
        super().__init__()
        self.n_in, self.n_out, self.scale = n_in, n_out, scale
        self.w, self.b = nn.Parameter(torch.randn(n_in, n_out)), nn.Parameter(torch.randn(n_out))

    def forward(self, x):
        w = self.scale(self.w, self.n_in) if self.scale else self.w
        return torch.addmm(self.b, x.reshape(-1, self.n_in), w).view(*x.shape[:-1], self.n_out)


def test_layers_that_write_sizes_into_views_are_computed_as_products():
    plan = Statistics(nn.Sequential(Flat(8, 12), nn.ReLU(), Flat(12, 8)), (2, 3, 8)).parallel_plan(tensor=2)
    assert [layer.options["shards"]["w"] for layer in plan.layers] == ["Shard(1)", "Shard(0)"]
    assert [layer.options["weight"] for layer in plan.layers] == ["w", "w"]
    assert plan.attributes == ()  # no size is divided


@pytest.mark.parametrize("scale", [lambda w, n: w * n**-0.5, lambda w, n: w / n])
def test_a_layer_that_scales_its_weight_and_writes_sizes_is_whole(scale):
    model = nn.Sequential(Flat(8, 12), nn.ReLU(), Flat(12, 8, scale))
    with pytest.raises(InputError, match=r"0: addmm\(\) in 2 sums over the sharded dimension"):
        Statistics(model, (2, 3, 8)).parallel_plan(tensor=2)


def test_a_number_of_heads_that_values_are_computed_with_is_not_divided():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.qkv, self.out = 4, nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).view(2, 6, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
            return self.out(((q @ k.mT / self.heads).softmax(-1) @ v).transpose(1, 2).flatten(2))

    plan = Statistics(Scaled(), (2, 6, 16)).parallel_plan(tensor=2)
    assert plan.attributes == ()
    assert [(layer.role, layer.reason) for layer in plan.layers] == [("sizes", ""), ("column", ""), ("row", "")]


def test_a_layer_that_is_called_in_two_ways_is_not_linear():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = Conv1D(12, 8), nn.Linear(12, 4)

        def forward(self, x):
            return self.last(self.layer(x) + F.relu(x @ self.layer.weight))

    statistics = Statistics(Both(), (2, 3, 8))
    with pytest.raises(InputError, match="no layer of Both can be split"):
        statistics.parallel_plan(tensor=2)


def test_the_reason_of_a_module_that_stays_whole_names_the_function():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))

        def forward(self, x):
            return x + (x @ self.up).relu() @ self.down

    statistics = Statistics(nn.Sequential(Residual()), (2, 3, 8))
    with pytest.raises(InputError, match=r"0: add\(\) in 0 takes a whole tensor and a sharded tensor; one that is"):
        statistics.parallel_plan(tensor=2)


def test_a_cast_to_the_dtype_of_a_whole_tensor_keeps_its_shards():
    model, inputs = make("named")
    plan = Statistics(model, inputs).parallel_plan(tensor=2)
    assert [layer.reason for layer in plan.layers if layer.reason] == []
    assert [layer.style for layer in plan.layers].count("LinearParallel") == 8  # four in each block
