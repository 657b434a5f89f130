"""Propagation: what the ranks compute of their parts are their parts of what the whole gives."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from modelsummary import Statistics
from modelsummary.parallel.placements import Blocked, Partial, Section, Shard, WrongPlacement
from modelsummary.parallel.propagation import Propagation
from modelsummary.parallel.record_calls import TRACE_RULES, Calls
from modelsummary.record.runs import record_of
from tests.parallel.parts import part

RANKS = 2
HEADS, OUTER = Shard(2), Shard(2, outer=2)
UNEQUAL = Shard(1, pieces=(Section(8), Section(4), Section(2, is_whole=True)))


class Summed(Propagation):
    """A propagation in which the results of the ranks may sum up to a value."""

    sums: ClassVar[bool] = True


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def placement_after(function, tensors, placements, kind=Summed):
    """The placement of the result."""
    model = Function(function).eval()
    calls = Calls(model, record_of(Statistics(model, tensors).live, TRACE_RULES))
    values = calls.record.root.args
    starts = {value: placement for value, placement in zip(values, placements, strict=True) if placement is not None}
    propagation = kind(calls, starts)
    propagation.follow(0, len(calls.events))
    return propagation.placement(calls.record.root.result)


CASES = [
    (lambda x: F.gelu(x).mul(2), [(2, 4, 8)], [HEADS], HEADS),
    (lambda x, y: x + y, [(2, 4, 8), (8,)], [HEADS, Shard(0)], HEADS),
    (lambda x: x.view(2, 4, -1, 2).transpose(1, 2), [(2, 4, 8)], [HEADS], Shard(1)),
    (lambda x: x.movedim(2, 0).unsqueeze(0).adjoint().ravel(), [(1, 1, 8)], [HEADS], Shard(0)),
    (lambda x: x.permute(dims=(2, 0, 1)).squeeze().count_nonzero(dim=1), [(2, 1, 8)], [HEADS], Shard(0)),
    (lambda x: x.softmax(1).sum(1), [(2, 4, 8)], [HEADS], Shard(1)),
    (lambda x: torch.view_as_real(torch.view_as_complex(x)), [(2, 4, 2)], [Shard(1)], Shard(1)),
    (lambda x: x.chunk(2, -1)[0], [(2, 4, 8)], [OUTER], HEADS),
    (F.glu, [(2, 4, 8)], [OUTER], HEADS),
    (nn.GLU(), [(2, 4, 8)], [OUTER], HEADS),
    (nn.Softmax(1), [(2, 4, 8)], [HEADS], HEADS),
    (nn.LayerNorm(8, elementwise_affine=False), [(2, 4, 8)], [Shard(1)], Shard(1)),
    (nn.Dropout(), [(2, 4, 8)], [Shard(1)], Shard(1)),
    (lambda x: x[:, -2:].exp(), [(3, 14)], [UNEQUAL], None),
    (lambda x: x[:, :-2].exp(), [(3, 14)], [UNEQUAL], Shard(1, pieces=(Section(8), Section(4)))),
    (lambda q, k: q @ k.transpose(-1, -2), [(2, 4, 3, 5), (2, 4, 6, 5)], [Shard(1), Shard(1)], Shard(1)),
    (F.linear, [(2, 4, 8), (6, 8)], [None, Shard(0)], HEADS),
    (F.linear, [(2, 4, 8), (6, 8)], [Shard(1), None], Shard(1)),
    (F.linear, [(2, 4, 8), (6, 8)], [HEADS, Shard(1)], Partial()),
    (F.linear, [(2, 4, 8), (6, 8), (6,)], [HEADS, Shard(1), Partial()], Partial()),
    (torch.addmm, [(6,), (4, 8), (8, 6)], [Shard(0), None, Shard(1)], Shard(1)),
    (torch.addmm, [(6,), (4, 8), (8, 6)], [Partial(), Shard(1), Shard(0)], Partial()),
    (lambda x, w: torch.einsum("bd,edf->bef", x, w), [(4, 8), (3, 8, 6)], [None, Shard(2)], HEADS),
    (lambda x, w: torch.einsum("bd,edf->bef", x, w), [(4, 8), (3, 8, 6)], [Shard(1), Shard(1)], Partial()),
    (lambda *xs: torch.einsum("bd,b,df->bf", *xs), [(4, 8), (4,), (8, 6)], [Shard(1), None, Shard(0)], Partial()),
    (lambda x: (2 * x).sum(1), [(2, 4, 8)], [Partial()], Partial()),
    (lambda x, s: x.transpose(0, 1) * s, [(4, 2), (4,)], [Partial(), None], Partial()),
    (lambda x, i: torch.zeros(5, 3).index_add(0, i, x), [(2, 3), "index"], [Partial(), None], Partial()),
    (lambda x: torch.cat([x, torch.zeros(2, 3)]), [(2, 3)], [Partial()], Partial()),
    (lambda x, y: sum([0.5 * x.detach(), y]), [(2, 3), (2, 3)], [Partial(), Partial()], Partial()),
    (lambda x, y: 2 * x + y - 1, [(2, 3), (3,)], [Partial("avg"), None], Partial("avg")),
    (lambda x, y: 1 - torch.stack([x, y]), [(2, 3), (2, 3)], [Partial("avg"), None], Partial("avg")),
]  # fmt: skip


@pytest.mark.parametrize(("function", "shapes", "placements", "expected"), CASES)
def test_ranks_compute_their_parts_of_the_whole(function, shapes, placements, expected):
    torch.manual_seed(0)
    tensors = tuple(torch.tensor([3, 1]) if shape == "index" else torch.randn(shape) for shape in shapes)
    assert placement_after(function, tensors, placements) == expected
    whole = function(*tensors)
    local_tensors = [
        [part(*pair, rank, RANKS) for pair in zip(tensors, placements, strict=True)] for rank in range(RANKS)
    ]
    results = [function(*tensors_of_rank) for tensors_of_rank in local_tensors]
    if isinstance(expected, Partial):
        torch.testing.assert_close(sum(results) / (RANKS if expected.reduce_op == "avg" else 1), whole)
    for rank, result in enumerate(() if isinstance(expected, Partial) else results):
        torch.testing.assert_close(result, part(whole, expected, rank, RANKS))


@pytest.mark.parametrize(
    ("function", "shapes", "placements", "reason"),
    [
        (lambda x: x.sort(1)[0], [(2, 4)], [Shard(1)], "sort() in the model works along the sharded dimension"),
        (nn.Softmax(1), [(2, 4)], [Shard(1)], "function works along the sharded dimension"),
        (nn.Conv1d(4, 4, 1), [(2, 4, 8)], [Shard(1)], "function (Conv1d) takes no sharded tensor"),
        (torch.relu, [(2, 4)], [Partial()], "relu() in the model takes a sum over the ranks"),
        (nn.ReLU(), [(2, 4)], [Partial()], "function takes a sum over the ranks"),
        (lambda x, y: x * y, [(2, 4), (2, 4)], [Partial(), Partial()], "mul() in the model takes a sum over the ranks"),
        (lambda x: x + 1.0, [(2, 4)], [Partial()], "adds a number to a sum over the ranks"),
        (
            lambda x: x.div(2.0, rounding_mode="floor"),
            [(2, 4)],
            [Partial()],
            "div() in the model takes a sum over the ranks",
        ),
        (torch.exp, [()], [Partial("avg")], "exp() in the model takes a mean over the ranks"),
        (lambda x: x * x, [()], [Partial("avg")], "mul() in the model takes a mean over the ranks"),
        (
            lambda x, y: x + y,
            [(2, 4), (4,)],
            [Partial(), Shard(0)],
            "takes a sharded tensor and a sum over",
        ),
        (torch.fft.fft, [(2, 4)], [Shard(1)], "has no rule for sharded tensors"),
    ],
)
def test_reasons(function, shapes, placements, reason):
    with pytest.raises(Blocked) as blocked:
        placement_after(function, tuple(map(torch.randn, shapes)), placements)
    assert reason in str(blocked.value)


@pytest.mark.parametrize(
    ("function", "shapes", "placements", "position", "expected"),
    [
        (lambda x, y: x + y, [(2, 4), (4,)], [Shard(1), None], 1, Shard(0)),
        (F.linear, [(2, 4, 8), (6, 8)], [HEADS, None], 1, Shard(1)),
        (F.linear, [(2, 4, 8), (6, 8), (6,)], [None, Shard(0), None], 2, Shard(0)),
        (F.linear, [(2, 4, 8), (6, 8), (6,)], [HEADS, Shard(1), None], 2, Partial()),
        (lambda x, y: x + y, [(2, 4), (4,)], [Partial(), None], 1, Partial()),
    ],
)
def test_a_rule_asks_for_the_placement_of_an_operand(function, shapes, placements, position, expected):
    with pytest.raises(WrongPlacement) as wrong:
        placement_after(function, tuple(map(torch.randn, shapes)), placements)
    assert wrong.value.value.index == position
    assert wrong.value.placement == expected


def test_results_sum_up_only_where_something_reduces_them():
    shapes, placements = [(2, 4, 8), (6, 8)], [HEADS, Shard(1)]
    with pytest.raises(Blocked, match=r"linear\(\) in the model sums over the sharded dimension"):
        placement_after(F.linear, tuple(map(torch.randn, shapes)), placements, Propagation)


def test_reasons_name_what_is_sharded():
    class Chunks(Propagation):
        dimension: ClassVar[str] = "the sequence"

    with pytest.raises(Blocked, match=r"sort\(\) in the model works along the sequence"):
        placement_after(lambda x: x.sort(1)[0], (torch.randn(2, 4),), [Shard(1)], Chunks)
