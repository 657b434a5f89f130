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
    assert 0.8 ** (3.078 * 1.5**0.5 / 1.282) <= error.low < error.high <= 1.2 ** (3.078 * 1.5**0.5 / 1.282)
    peaks = error_of(HERE, of_peaks=True, tables=tables)  # the first table has none
    assert (peaks.low, peaks.high, peaks.runs, peaks.tables) == (1.1, 1.1, 1, ("larger",))
    assert peaks.bias == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("sources", "wider"), [(2, 3.078 * (3 / 2) ** 0.5 / 1.282), (11, 1.372 * (12 / 11) ** 0.5 / 1.282)]
)
def test_a_range_is_for_one_more_source(sources, wider):
    """Four of five ratios are between 0.6 and 1.4, and the prediction interval of Student's distribution is wider."""
    ratios = tuple(0.5 + number / 100 for number in range(101))
    tables = [PublishedTable(f"source {number}, table", HERE, ratios) for number in range(sources)]
    error = error_of(HERE, tables=tables)
    assert error.low == pytest.approx(0.6**wider, abs=0.006)
    assert error.high == pytest.approx(1.4**wider, rel=0.01)
    assert error.range(1.0) == pytest.approx((1 / error.high, 1 / error.low))
    same_source = [table._replace(name=f"source, {table.name}") for table in tables]  # counts as two
    assert error_of(HERE, tables=same_source).low == pytest.approx(0.6 ** (3.078 * 1.5**0.5 / 1.282), abs=0.006)


@pytest.mark.parametrize(("steps", "of_peaks"), [(0, False), (1, False), (5, False), (0, True)])
def test_sources_left_out_are_in_the_range_of_the_others(steps, of_peaks):
    """Averaged over tables, four of five are; of all runs, half are of one source."""
    tables, shares, runs = published_tables(), {}, []
    for table in tables:
        source = table.name.partition(",")[0]
        others = [other for other in tables if other.name.partition(",")[0] != source]
        ratios = table.peaks if of_peaks else table.calibrated.get(steps, ()) if steps else table.seconds
        if ratios:
            error = error_of(table.case, of_peaks=of_peaks, steps=steps, tables=others)
            inside = [error.low <= ratio <= error.high for ratio in ratios]
            shares.setdefault(table.name, []).extend(inside)
            runs += inside
    assert len(shares) >= (3 if of_peaks else 7 if steps else 14)
    assert sum(sum(inside) / len(inside) for inside in shares.values()) / len(shares) == pytest.approx(0.8, abs=0.06)
    assert 0.7 < sum(runs) / len(runs) < 0.87


def test_estimates_say_how_sure_they_are():
    stats, cluster = statistics(), Cluster("A100", nodes=2)
    step = stats.simulate(Plan(shard=16), cluster, 16, recipe=Recipe(kernels="eager"))
    assert step.case == Case("ampere", "eager", "bfloat16", "parameters", False, "several")
    assert step.error == error_of(step.case)
    assert isinstance(step.memory_error, PublishedErrors)
    assert step.to_record()["typical_error"] == step.error.typical
    _, seconds, _ = " ".join(str(step).split()).split("Four of five ")  # of steps, and of peaks
    assert all(name in seconds for name in step.error.tables)
    assert pickle.loads(pickle.dumps(step)).error == step.error
    one = stats.simulate(Plan(data=8), cluster, 16)
    assert one.case == Case("ampere", "compiled", "bfloat16", "none", False, "one")
