"""Sorted tables: the rows with the most of an amount, largest first."""

from __future__ import annotations

import pytest
from torch import nn

from modelsummary import InputError, Statistics


@pytest.fixture(scope="module")
def stats():
    """2 x (4 x 8 = 32), 2 x (8 x 8 = 64) and 2 x (8 x 1 = 8) multiply-adds; ReLU has none."""
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    return Statistics(nn.Sequential(nn.Linear(4, 8), inner), (2, 4))


def names(text):
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("=")]
    return [line.split(" (")[0] for line in lines[rules[1] + 1 : rules[2]]]


def test_largest_first(stats):
    assert names(stats.table(sort="macs")) == ["1.0", "0", "1.2"]
    assert names(stats.table(sort="params")) == ["1.0", "0", "1.2"]  # 72, 40 and 9
    assert names(stats.table(sort="bytes_written")) == ["0", "1.0", "1.1", "1.2"]  # 2 x 8 floats thrice, 2 x 1


def test_hidden_rows_count_for_the_row_above(stats):
    """The inner Sequential has 2 x 72 multiply-adds."""
    table = stats.table(sort="macs", depth=1)
    assert names(table) == ["1", "0"]
    assert "144" in table


def test_the_amount_is_a_column_unless_columns_were_chosen(stats):
    assert "Own Bytes Read" in stats.table(sort="bytes_read")
    assert "Own Bytes Read" not in stats.table(["fqn"], sort="bytes_read")
    assert stats.table(sort="macs").count("Mult-Adds") == 1


def test_a_large_table_shows_the_largest_rows():
    stats = Statistics(nn.Sequential(*(nn.Linear(4, 4) for _ in range(120))), (2, 4))
    table = stats.table(sort="macs")
    assert len(names(table)) == 40
    assert "Shown: the 40 largest of 121 rows; all of them: table(depth=None, sort='macs')" in table
    assert len(names(stats.table(depth=None, sort="macs"))) == 120


def test_errors(stats):
    with pytest.raises(InputError, match=r"sort='macs' shows rows one by one; leave out fold=True"):
        stats.table(sort="macs", fold=True)
    with pytest.raises(InputError, match=r"sort='latency' was not measured; call measure_latency\(\) first"):
        stats.table(sort="latency")
    with pytest.raises(InputError, match=r"sort must be an amount .* got 'mac'; expected .*; did you mean 'macs'"):
        stats.table(sort="mac")
