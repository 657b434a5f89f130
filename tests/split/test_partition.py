from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary.split.partition import Chain, fewest_parts, partitions


def bottleneck_of(costs: Sequence[int], cuts: Sequence[int]) -> int:
    """Return the cost of the most expensive part."""
    return max(sum(costs[begin:end]) for begin, end in pairwise([0, *cuts, len(costs)]))


def partition(chain: Chain, n_parts: int, caps: Sequence[int] | None = None) -> list[int] | None:
    """Return the cuts that the fewest bytes cross; None if there are none."""
    return next(partitions(chain, n_parts, caps), None)


def _best(chain: Chain, n_parts: int, caps: list[int] | None) -> tuple[int, int] | None:
    """Return bottleneck and bytes crossing of the best partition, by trying all of them."""
    best = None
    for cuts in combinations(sorted(chain.crossing), n_parts - 1):
        bounds = [0, *cuts, len(chain.costs)]
        parts = [range(*pair) for pair in pairwise(bounds)]
        held = [sum(chain.sizes[key] for key in {k for call in part for k in chain.holds[call]}) for part in parts]
        if not set(chain.required) <= set(cuts) or (caps and any(map(int.__gt__, held, caps))):
            continue
        value = (bottleneck_of(chain.costs, cuts), sum(chain.crossing[cut] for cut in cuts))
        best = value if best is None else min(best, value)
    return best


@st.composite
def _chains(draw):
    n_calls = draw(st.integers(1, 9))
    costs = draw(st.lists(st.integers(0, 9), min_size=n_calls, max_size=n_calls))
    legal = draw(st.sets(st.integers(1, max(1, n_calls - 1)))) if n_calls > 1 else set()
    crossing = {cut: draw(st.integers(0, 5)) for cut in legal}
    required = draw(st.sets(st.sampled_from(sorted(legal)), max_size=2)) if legal else set()
    holds = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=n_calls, max_size=n_calls))
    sizes = {key: draw(st.integers(0, 6)) for key in range(6)}
    return Chain(costs, crossing, required, holds, sizes)


@settings(max_examples=400)
@given(_chains(), st.integers(1, 6), st.data())
def test_is_as_good_as_trying_all(chain, n_parts, data):
    caps = data.draw(
        st.one_of(
            st.none(),
            st.integers(0, 25).map(lambda cap: [cap] * n_parts),
            st.lists(st.integers(0, 25), min_size=n_parts, max_size=n_parts),
        )
    )
    cuts = partition(chain, n_parts, caps)
    best = _best(chain, n_parts, caps)
    assert (cuts is None) == (best is None)
    if cuts is not None:
        assert (bottleneck_of(chain.costs, cuts), sum(chain.crossing[cut] for cut in cuts)) == best


@settings(max_examples=200)
@given(_chains(), st.integers(0, 25))
def test_fewest_parts(chain, cap):
    possible = [n for n in range(1, len(chain.costs) + 1) if _best(chain, n, [cap] * n) is not None]
    assert fewest_parts(chain, cap) == (possible[0] if possible else None)


@settings(max_examples=200)
@given(_chains(), st.integers(1, 6))
def test_the_other_partitions_have_the_same_bottleneck_and_one_has_more_up_front(chain, n_parts):
    found = list(partitions(chain, n_parts))
    if found:
        fewest, front, _ = found
        assert len({bottleneck_of(chain.costs, cuts) for cuts in found}) == 1
        before = [sum(sum(chain.costs[:cut]) for cut in cuts) for cuts in (fewest, front)]
        assert before[0] <= before[1]


def test_what_a_large_call_leaves_is_divided_evenly():
    # 1 x 12 and a call of 9: the largest part is 9; three others share 12. Fewer bytes cross the first cuts.
    costs = [1] * 12 + [9]
    crossing = {cut: cut for cut in range(1, 13)}
    *_, even = partitions(Chain(costs, crossing), 4)
    assert even == [4, 8, 12]
    *_, even = partitions(Chain(costs[::-1], crossing), 4)
    assert even == [1, 5, 9]
    assert partition(Chain(costs, crossing), 4) == [1, 3, 12]  # the second cut lies at 3 or later, the third at 12


def test_by_hand():
    # 5 + 4 | 3 + 6 | 2 + 7: every other pair of cuts makes a part of 10 or more
    chain = Chain([5, 4, 3, 6, 2, 7], dict.fromkeys(range(1, 6), 0))
    assert partition(chain, 3) == [2, 4]
    # without a cut before the third call: 5 + 4 + 3 is the most expensive part, wherever the rest is cut
    assert partition(Chain(chain.costs, {1: 0, 3: 0, 4: 1, 5: 0}), 3) == [3, 5]


def test_fewer_bytes_win_among_equal_bottlenecks():
    # 4 | 1 1 1 1 | 4 and 4 1 1 1 | ... : the cost of one part is 4 at least; zero-cost calls can go either way
    assert partition(Chain([4, 0, 0, 4], {1: 30, 2: 10, 3: 20}), 2) == [2]


def test_a_shared_tensor_counts_once_in_a_part():
    # "w" is used by the first and the last call: one part of all three holds 10 + 3, two parts hold it twice
    chain = Chain([1, 1, 1], {1: 0, 2: 0}, (), [["w"], ["a"], ["w"]], {"w": 10, "a": 3})
    assert partition(chain, 1, [13]) == []
    assert partition(chain, 2, [12, 12]) is None
    assert partition(chain, 2, [10, 13]) == [1]
