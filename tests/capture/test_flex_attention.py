"""Models with ``flex_attention``: on shapes, for real, compiled, split, traced; MACs that a block mask skips."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import Statistics, symbolic_trace
from modelsummary.operators.operator_rules import op_rule
from tests.untouched import untouched

flex = pytest.importorskip("torch.nn.attention.flex_attention")
operators = pytest.importorskip("torch._higher_order_ops.flex_attention")
if not hasattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"):
    pytest.skip("older versions compile themselves where they are called", allow_module_level=True)

LENGTH, WIDTH, HEADS, SIZE = 128, 32, 4, 8
# q, k and v of half as many heads, and out: 128 x 32 x (32 + 32 + 32); scores and values: 4 heads x 128 x 128 x (8 + 8)
LAYER_MACS = LENGTH * WIDTH * 3 * WIDTH + HEADS * LENGTH * LENGTH * 2 * SIZE


def causal(batch, head, query, key):
    return query >= key


class Attention(nn.Module):
    def __init__(self, kind, function):
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(HEADS))
        self.kind, self.function = kind, function

    def forward(self, x):
        query = self.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        key, value = self.kv(x).unflatten(-1, (2, HEADS // 2, SIZE)).permute(2, 0, 3, 1, 4)
        options = {}
        if "mask" in self.kind:
            length = x.shape[1]
            options["block_mask"] = flex.create_block_mask(
                causal, None, None, length, length, device=x.device, BLOCK_SIZE=32
            )
        if "bias" in self.kind:
            options["score_mod"] = lambda score, batch, head, q, k: score + self.bias[head] * (q - k)
        out = self.function(query, key, value, enable_gqa=True, **options)
        return self.out(out.transpose(1, 2).flatten(2))


def net(kind, function=flex.flex_attention):
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(kind, function) for _ in range(2)), nn.Linear(WIDTH, 8))


@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize("kind", ["", "mask", "bias", "mask bias"])
def test_counted(kind, execution):
    model, x = net(kind), torch.rand(2, LENGTH, WIDTH)
    with untouched(model):
        stats = Statistics(model, x, execution=execution)
    assert (stats.execution, stats.uncounted_ops) == (execution, {})
    assert stats["0"].macs == 2 * LAYER_MACS
    # 4 rows of 4 blocks of 32 x 32; the 6 blocks above the diagonal are skipped
    skipped = 2 * HEADS * 6 * 32 * 32 * 2 * SIZE if "mask" in kind else 0
    assert (stats["1"].skipped_macs, stats.root.skipped_macs) == (skipped, 2 * skipped)


def test_what_a_mask_of_unknown_values_spares_is_not_known():
    """On shapes, the values of masks are known up to 65,536 scores."""
    model, x = net("mask"), torch.rand(1, 288, WIDTH)
    shapes, real = (Statistics(model, x, execution=execution).root for execution in ("shape", "real"))
    assert (shapes.skipped_macs, shapes.macs) == (None, real.macs)
    assert real.skipped_macs == 2 * HEADS * (9 * 8 // 2) * 32 * 32 * 2 * SIZE


def test_the_last_block_may_reach_beyond_the_sequence():
    """40 positions in blocks of 32 leave 8 for the second block: 32 x 8 scores are above the diagonal."""
    stats = Statistics(net("mask"), (1, 40, WIDTH))
    assert stats["0"].skipped_macs == HEADS * 32 * 8 * 2 * SIZE


@pytest.mark.filterwarnings("ignore:`torch.jit")  # the compiler of torch 2.11
def test_compiled():
    model = net("mask bias", torch.compile(flex.flex_attention))
    stats = Statistics(model, (2, LENGTH, WIDTH))
    assert (stats.execution, stats["0"].macs) == ("shape", 2 * LAYER_MACS)


def test_on_meta():
    stats = Statistics(net("mask bias").to("meta"), torch.empty(2, LENGTH, WIDTH, device="meta"))
    assert (stats["0"].macs, stats.uncounted_ops) == (2 * LAYER_MACS, {})


@pytest.mark.parametrize("kind", ["", "mask bias"])
def test_split_and_traced(kind, monkeypatch):
    """Torch refuses gradients on a CPU, so the weights are frozen; the stages run uncompiled, too."""
    model, x = net(kind).requires_grad_(False), torch.rand(2, LENGTH, WIDTH)
    with untouched(model):
        stages = Statistics(model, x).split(2)
        graph = symbolic_trace(model, meta_args={"input": x})
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    assert stages.verify(x).outputs == 0.0
    assert torch.equal(graph(x), model(x))


def test_memory():
    """The fused kernel keeps query, key, value, output, and the sum and maximum of each row, in both layers.

    The output has the layout of the query, so flattening it copies nothing. Also kept are the inputs of the second
    layer and of the head, and the two blocks of an empty mask, as four integers of four bytes.
    """
    tokens = 2 * LENGTH
    kept = tokens * (WIDTH + WIDTH + WIDTH + 2 * HEADS)
    estimate = Statistics(net(""), (2, LENGTH, WIDTH)).memory()
    assert estimate.activations == 2 * (4 * kept + 4 * tokens * WIDTH + 4 * 4)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shapes_are_those_of_the_operator(order, dtype):
    sizes = (2, 4, 6, 8)
    query = torch.rand([sizes[dim] for dim in order], dtype=dtype).permute([order.index(dim) for dim in range(4)])
    key, value = torch.rand(2, 2, 5, 8, dtype=dtype), torch.rand(2, 2, 5, 3, dtype=dtype)
    mask = flex._create_empty_block_mask(query, key).as_tuple()
    args = (query, key, value, lambda score, *_: score, mask, 1.0, {})
    real = operators.flex_attention(*args)
    ours = op_rule(operators.flex_attention).facts.shape(*args)
    assert [(each.shape, each.stride(), each.dtype) for each in ours] == [
        (each.shape, each.stride(), each.dtype) for each in real
    ]


def test_backward():
    """A gradient computed inside a forward costs the scores again, and two products for each of the forward."""

    class Gradient(nn.Module):
        def forward(self, query, key, value):
            with torch.enable_grad():
                inputs = [each.detach().requires_grad_() for each in (query, key, value)]
                mask = flex.create_block_mask(causal, None, None, 64, 64, device=query.device, BLOCK_SIZE=32)
                out = flex.flex_attention(*inputs, block_mask=mask)
                return torch.autograd.grad(out.sum(), inputs)

    tensors = torch.rand(1, 2, 64, 8), torch.rand(1, 2, 64, 8), torch.rand(1, 2, 64, 4)
    stats = Statistics(Gradient(), tensors, execution="shape")
    scores = 2 * 64 * 64
    assert stats.total_mult_adds == scores * (8 + 4) + scores * (3 * 8 + 2 * 4)
    assert stats.uncounted_ops == {}
    assert stats.root.skipped_macs == 2 * 32 * 32 * ((8 + 4) + (3 * 8 + 2 * 4))  # one of four blocks
    assert [tuple(size) for size in stats.root.output_size] == [tuple(each.shape) for each in tensors]
