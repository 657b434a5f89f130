"""Placements after functions: what a rank computes of its chunk is its chunk of what the whole gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from modelsummary.parallel.placements import Blocked, Shard, reshaped

RANKS = 2


def chunk(tensor: torch.Tensor, placement: Shard, rank: int) -> torch.Tensor:
    """What a rank holds: of a dimension of ``outer`` pieces, its chunk of each."""
    before, size, after = tensor.shape[: placement.dim], tensor.shape[placement.dim], tensor.shape[placement.dim + 1 :]
    split = tensor.reshape(*before, placement.outer, size // placement.outer, *after)
    part = split.chunk(RANKS, dim=placement.dim + 1)[rank]
    return part.reshape(*before, size // RANKS, *after)


def shapes_of(number: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes with so many elements."""

    def cut(places: list[int]) -> tuple[int, ...]:
        shape, left = [], number
        for place in places:
            divisors = [each for each in range(1, left + 1) if left % each == 0]
            shape.append(divisors[place % len(divisors)])
            left //= shape[-1]
        return (*shape, left)

    return st.lists(st.integers(0, 50), max_size=4).map(cut)


@given(data=st.data(), number=st.sampled_from([8, 24, 48, 64]))
def test_a_view_of_a_chunk_is_a_chunk_of_the_view(data, number):
    before, after = data.draw(shapes_of(number)), data.draw(shapes_of(number))
    dim = data.draw(st.integers(0, len(before) - 1))
    outer = data.draw(st.sampled_from([each for each in (1, 2, 3) if before[dim] % (each * RANKS) == 0] or [0]))
    assume(outer > 0)
    placement, sizes = Shard(dim, outer), set()
    try:
        found = reshaped(before, after, placement, sizes)
    except Blocked:
        return
    assume(all(size % RANKS == 0 for size in sizes))
    whole = torch.arange(number).reshape(before)
    local = tuple(size // RANKS if place == found.dim else size for place, size in enumerate(after))
    for rank in range(RANKS):
        assert torch.equal(chunk(whole, placement, rank).reshape(local), chunk(whole.reshape(after), found, rank))


@pytest.mark.parametrize(
    ("before", "after", "placement", "expected", "sizes"),
    [
        ((2, 8, 64), (2, 8, 4, 16), Shard(2), Shard(2), {4}),  # heads
        ((2, 8, 4, 16), (2, 8, 64), Shard(2), Shard(2), {4}),
        ((2, 4, 8, 16), (8, 8, 16), Shard(1), Shard(0, 2), {4}),  # batch and heads in one
        ((8, 8, 16), (2, 4, 8, 16), Shard(0, 2), Shard(1), {4}),
        ((2, 8, 96), (2, 8, 4, 24), Shard(2), Shard(2), {4}),  # query, key and value of each head together
        ((2, 1, 64), (2, 64), Shard(2), Shard(1), {64}),
    ],
)
def test_heads(before, after, placement, expected, sizes):
    found: set[int] = set()
    assert reshaped(before, after, placement, found) == expected
    assert found == sizes


def test_a_view_across_the_shards_is_refused():
    with pytest.raises(Blocked, match=r"view of \(2, 8, 6\) as \(2, 12, 4\) cuts across the shards"):
        reshaped((2, 8, 6), (2, 12, 4), Shard(2), set())
    assert math.prod((2, 8, 6)) == math.prod((2, 12, 4))
