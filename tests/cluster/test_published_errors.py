"""The errors that a prediction states: weights by hand, and ranges on tables that are left out."""

from __future__ import annotations

import pickle

import pytest

from modelsummary.cluster import Cluster, Plan, Recipe
from modelsummary.cluster.published_errors import Case, PublishedErrors, PublishedTable, error_of, published_tables
from tests.cluster.models import statistics

HERE = Case("ampere", "eager", "bfloat16", "none", False, "one")


def test_a_table_counts_three_times_for_each_attribute_in_common():
    """One table agrees in all six attributes, the other in five: 3 / 4 and 1 / 4, however many runs they have."""
    tables = [
        PublishedTable("same", HERE, (0.8, 1.0, 0.8, 1.0)),
        PublishedTable("larger", HERE._replace(nodes="several"), (1.2,), (1.1,)),
    ]
    error = error_of(HERE, tables=tables)
    assert error.typical == pytest.approx(3 / 4 * 0.1 + 1 / 4 * 0.2)
    assert error.bias == pytest.approx(3 / 4 * -0.1 + 1 / 4 * 0.2)
    assert (error.runs, error.tables) == (4, ("same",))
    assert 0.8 <= error.low < error.high <= 1.2
    peaks = error_of(HERE, of_peaks=True, tables=tables)  # the first table has none
    assert (peaks.low, peaks.high, peaks.runs, peaks.tables) == (1.1, 1.1, 1, ("larger",))
    assert peaks.bias == pytest.approx(0.1)


def test_a_range_has_four_of_five_runs():
    error = error_of(HERE, tables=[PublishedTable("one", HERE, tuple(0.5 + number / 100 for number in range(101)))])
    assert error.low == pytest.approx(0.6, abs=0.006)
    assert error.high == pytest.approx(1.4, abs=0.006)
    assert error.range(1.0) == pytest.approx((1 / 1.4, 1 / 0.6), rel=0.01)


def test_tables_left_out_are_in_the_range_of_the_others():
    tables, shares = published_tables(), []
    for table in tables:
        error = error_of(table.case, tables=[other for other in tables if other.name != table.name])
        inside = [error.low <= ratio <= error.high for ratio in table.seconds]
        shares.append(sum(inside) / len(inside))
    assert len({table.name for table in tables}) >= 14
    assert sum(shares) / len(shares) == pytest.approx(0.8, abs=0.08)


def test_estimates_say_how_sure_they_are():
    stats, cluster = statistics(), Cluster("A100", nodes=2)
    step = stats.simulate(Plan(shard=16), cluster, 16, recipe=Recipe(kernels="eager"))
    assert step.case == Case("ampere", "eager", "bfloat16", "parameters", False, "several")
    assert step.error == error_of(step.case)
    assert isinstance(step.memory_error, PublishedErrors)
    assert step.to_record()["typical_error"] == step.error.typical
    lines = [line for line in str(step).splitlines() if line.startswith("Four of five ")]
    assert len(lines) == 2
    assert all(name in lines[0] for name in step.error.tables)
    assert pickle.loads(pickle.dumps(step)).error == step.error
    one = stats.simulate(Plan(data=8), cluster, 16)
    assert one.case == Case("ampere", "compiled", "bfloat16", "none", False, "one")
