"""Colours in a terminal: which rows have them, and where there are none."""

from __future__ import annotations

import io
import re
import sys

import pytest
from torch import nn

from modelsummary import Statistics
from modelsummary.views.terminal import shows_colours

RED, YELLOW, DIM, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stats():
    """Three products with 18, 18 and 2 multiply-adds, and a layer without any."""
    layers = [nn.Linear(1, 18, bias=False), nn.ReLU(), nn.Linear(18, 1, bias=False), nn.Linear(1, 2, bias=False)]
    return Statistics(nn.Sequential(*layers), (1, 1))


def test_expensive_rows_are_marked(stats):
    """18 + 18 + 2 multiply-adds: 47 %, none, 47 %, 5 %."""
    lines = stats.printed(colours=True).split("\n")
    assert [next((mark for mark in (RED, YELLOW, DIM) if line.startswith(mark)), "") for line in lines[3:8]] == [
        DIM,  # the model's own
        RED,
        DIM,
        RED,
        YELLOW,
    ]
    assert all(line.endswith(PLAIN) for line in lines[3:8])
    found = [re.findall(r"\S+%", line) for line in lines[3:8]]
    assert found == [["100.0%"], ["47.4%"], [], ["47.4%"], ["5.3%"]]


def test_without_colours_the_bars_are_the_only_difference(stats):
    coloured = re.sub(r"\x1b\[\d+m", "", stats.printed(colours=True)).split("\n")
    plain = str(stats).split("\n")
    assert [line.split()[:2] for line in coloured[3:8]] == [line.split()[:2] for line in plain[3:8]]
    assert "\x1b" not in "".join(plain)
    assert "Share of MACs" not in "".join(plain)


def test_equal_rows_are_marked_for_all_of_them():
    stats = Statistics(nn.Sequential(*(nn.Linear(2, 2) for _ in range(101))), (1, 2))
    [line] = [line for line in stats.printed(colours=True).split("\n") if "101 x Linear" in line]
    assert line.startswith(RED)
    assert "100.0%" in line


@pytest.mark.parametrize(
    ("stream", "variables", "expected"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
        (None, {}, False),
    ],
)
def test_where_colours_are_shown(stream, variables, expected, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert shows_colours(stream) is expected


@pytest.mark.parametrize("columns", range(60, 124, 4))
def test_a_folded_table_is_not_wider_than_the_terminal(columns, monkeypatch):
    """A title takes two characters more than it has, which a sum of the cells' widths does not show."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    layers = [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for width in range(1, 40)]
    lines = str(Statistics(nn.Sequential(*layers), (2, 4))).split("\n")
    table = lines[: next(index for index, line in enumerate(lines) if line.startswith("Total params"))]
    assert max(map(len, table)) <= columns


def test_show_prints_what_print_does_where_there_is_no_terminal(stats, capsys):
    stats.show()
    assert capsys.readouterr().out == f"{stats}\n"
