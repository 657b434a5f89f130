from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary.memory import least_cost as module
from modelsummary.memory.least_cost import Option, least_cost, least_peak, peak_of, undominated_options

LEAVE = Option(0, 0)
OPTIONS = st.lists(st.builds(Option, st.integers(0, 9), st.integers(0, 9), st.integers(0, 30)), max_size=3)


@st.composite
def steps(draw):
    """Return the options of blocks, and the bytes between them."""
    blocks = [
        [LEAVE._replace(peak=draw(st.integers(0, 30))), *options] for options in draw(st.lists(OPTIONS, max_size=5))
    ]
    return blocks, draw(st.lists(st.integers(0, 30), min_size=len(blocks) + 1, max_size=len(blocks) + 1))


def bytes_alive(options, between):
    """Return the bytes alive in each block, and between blocks, written out."""
    saved = [sum(option.saving for option in options[:number]) for number in range(len(options) + 1)]
    inside = [option.peak - saving for option, saving in zip(options, saved, strict=False)]
    return [*inside, between[0], *(nbytes - saving for nbytes, saving in zip(between[1:], saved[1:], strict=True))]


def chosen(blocks, numbers):
    return [options[number] for options, number in zip(blocks, numbers, strict=True)]


def cost_of(options):
    return sum(option.cost for option in options)


@settings(deadline=None)
@given(steps(), st.integers(0, 35))
def test_against_brute_force(step, budget):
    blocks, between = step
    fitting = [choice for choice in itertools.product(*blocks) if max(bytes_alive(choice, between)) <= budget]
    numbers = least_cost(blocks, between, budget)
    if not fitting:
        assert numbers is None
    else:
        options = chosen(blocks, numbers)
        assert peak_of(options, between) == max(bytes_alive(options, between)) <= budget
        assert cost_of(options) == min(map(cost_of, fitting))
    assert least_peak(blocks, between) == min(
        max(bytes_alive(choice, between)) for choice in itertools.product(*blocks)
    )


def integer_programme(blocks, between, budget):
    """Return the least cost of a fitting choice by an integer linear programme: one variable for each option."""
    optimize = pytest.importorskip("scipy.optimize")
    options = [(number, option) for number, block in enumerate(blocks) for option in block]
    rows, least, most = [], [], []
    for number in range(len(blocks)):  # each block has one option
        rows.append([float(block == number) for block, _ in options])
        least.append(1)
        most.append(1)
    for number in range(len(blocks) + 1):
        savings = [-option.saving if block < number else 0 for block, option in options]
        rows.append(savings)
        least.append(-math.inf)
        most.append(budget - between[number])
        if number < len(blocks):
            inside = [
                option.peak if block == number else saving
                for (block, option), saving in zip(options, savings, strict=True)
            ]
            rows.append(inside)
            least.append(-math.inf)
            most.append(budget)
    result = optimize.milp(
        [option.cost for _, option in options],
        integrality=[1] * len(options),
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(rows, least, most),
        options={"mip_rel_gap": 0.0},
    )
    return round(result.fun) if result.success else None


@pytest.mark.parametrize("seed", range(12))
def test_against_an_integer_linear_programme(seed):
    """Costs and bytes of sizes as in a step of a model, and equal blocks, as in a decoder."""
    draw = random.Random(seed)
    kinds = []
    for _ in range(draw.choice([1, 2, 4])):
        costs = sorted(draw.sample(range(50_000), 6))
        savings = sorted(draw.sample(range(3_000), 6))
        kinds.append(
            [(0, 0, 0), *((cost, saving, draw.randrange(400)) for cost, saving in zip(costs, savings, strict=True))]
        )
    n_blocks = 8
    rising = [1_000 + 3_000 * number for number in range(n_blocks + 1)]
    blocks = [
        [Option(cost, saving, rising[number] + 2_500 + more) for cost, saving, more in draw.choice(kinds)]
        for number in range(n_blocks)
    ]
    low, high = least_peak(blocks, rising), peak_of([options[0] for options in blocks], rising)
    assert integer_programme(blocks, rising, low - 1) is None is least_cost(blocks, rising, low - 1)
    for budget in (low, *(low + (high - low) * share // 5 for share in range(1, 6))):
        assert cost_of(chosen(blocks, least_cost(blocks, rising, budget))) == integer_programme(blocks, rising, budget)


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
    assert {(option.cost, option.saving) for option, _ in result} == best
    for option, numbers in result:
        options = chosen(blocks, numbers)
        assert option == Option(cost_of(options), sum(option.saving for option in options))


def test_early_blocks_run_again_first():
    assert least_cost([[LEAVE, Option(1, 5)]] * 4, between=[0, 0, 0, 0, 30], budget=20) == [1, 1, 0, 0]


def test_many_choices_are_thinned(monkeypatch):
    """Of more than 64 choices, the result costs at most one cell per block more than the exact one."""
    blocks = [[LEAVE, Option(101 + 7 * index, 1000 + 13 * index), Option(257, 1900)] for index in range(12)]
    between = [0] * 12 + [9_000]
    exact = chosen(blocks, least_cost(blocks, between, 0))
    monkeypatch.setattr(module, "_MOST", 64)
    thinned = chosen(blocks, least_cost(blocks, between, 0))
    largest = sum(max(option.cost for option in options) for options in blocks)
    assert cost_of(exact) <= cost_of(thinned) <= cost_of(exact) + 12 * largest / 64
    assert peak_of(thinned, between) <= 0
