from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary.memory import least_cost as module
from modelsummary.memory.least_cost import Option, least_cost, undominated_options

LEAVE = Option(0, 0)
OPTIONS = st.lists(st.builds(Option, st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=3)


def saves_enough(options, needed):
    saved = [sum(option.saving for option in options[:number]) for number in range(len(options) + 1)]
    return all(saving >= least for saving, least in zip(saved, needed, strict=True))


@settings(deadline=None)
@given(st.data())
def test_against_brute_force(data):
    blocks = [[LEAVE, *options] for options in data.draw(st.lists(OPTIONS, max_size=5))]
    needed = data.draw(st.lists(st.integers(-9, 25), min_size=len(blocks) + 1, max_size=len(blocks) + 1))
    enough = [choice for choice in itertools.product(*blocks) if saves_enough(choice, needed)]
    numbers = least_cost(blocks, needed)
    if not enough:
        assert numbers is None
    else:
        chosen = [options[number] for options, number in zip(blocks, numbers, strict=True)]
        assert saves_enough(chosen, needed)
        assert sum(option.cost for option in chosen) == min(sum(option.cost for option in c) for c in enough)


@settings(deadline=None)
@given(st.lists(OPTIONS, max_size=5))
def test_undominated_options(blocks):
    blocks = [[LEAVE, *options] for options in blocks]
    sums = {
        (sum(option.cost for option in choice), sum(option.saving for option in choice))
        for choice in itertools.product(*blocks)
    }
    best = {
        (cost, saving)
        for cost, saving in sums
        if not any(c <= cost and s >= saving and (c, s) != (cost, saving) for c, s in sums)
    }
    result = undominated_options(blocks)
    assert {tuple(option) for option, _ in result} == best
    for option, numbers in result:
        chosen = [options[number] for options, number in zip(blocks, numbers, strict=True)]
        assert option == (sum(o.cost for o in chosen), sum(o.saving for o in chosen))


def test_early_blocks_run_again_first():
    assert least_cost([[LEAVE, Option(1, 5)]] * 4, needed=[0, 0, 0, 0, 10]) == [1, 1, 0, 0]


def test_many_choices_are_thinned(monkeypatch):
    """Of more than 64 choices, the result costs at most one cell per block more than the exact one."""
    blocks = [[LEAVE, Option(101 + 7 * index, 1000 + 13 * index), Option(257, 1900)] for index in range(12)]
    needed = [0] * 12 + [9_000]
    exact = least_cost(blocks, needed)
    monkeypatch.setattr(module, "_MOST", 64)
    thinned = least_cost(blocks, needed)
    costs = [sum(options[number].cost for options, number in zip(blocks, n, strict=True)) for n in (exact, thinned)]
    largest = sum(max(option.cost for option in options) for options in blocks)
    assert costs[0] <= costs[1] <= costs[0] + 12 * largest / 64
    assert saves_enough([options[number] for options, number in zip(blocks, thinned, strict=True)], needed)
