"""Pairs of modules of two trees."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary.views.pairing import _longest_common

ITEMS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("01")), max_size=5)


def all_pairings(left, right):
    """Every set of pairs of equal keys in order."""
    for size in range(min(len(left), len(right)) + 1):
        for rows in combinations(range(len(left)), size):
            for columns in combinations(range(len(right)), size):
                if all(left[row][0] == right[column][0] for row, column in zip(rows, columns, strict=True)):
                    yield list(zip(rows, columns, strict=True))


@settings(deadline=None, max_examples=50)
@given(ITEMS, ITEMS)
def test_no_sequence_is_longer_or_has_more_equal_names(left, right):
    def rank(pairs):
        return len(pairs), sum(left[row][1] == right[column][1] for row, column in pairs)

    pairings = list(all_pairings(left, right))
    pairs = list(_longest_common(left, right))
    assert pairs in pairings
    assert rank(pairs) == max(map(rank, pairings))
