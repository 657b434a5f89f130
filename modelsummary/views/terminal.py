"""Colours for terminals: which rows of a table are expensive, and a bar for the share of each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TextIO

from modelsummary.layer_info import LayerInfo
from modelsummary.tables import is_terminal
from modelsummary.units import percent
from modelsummary.views.folding import Shown

__all__ = ["paint", "red", "share_bars", "shares", "shows_colours"]

_RED, _YELLOW, _DIM, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
_EXPENSIVE, _NOTABLE = 0.1, 0.03  # shares of the model's multiply-adds
_WIDTH = 10  # characters of a full bar
_EIGHTHS = " ▏▎▍▌▋▊▉"


def shows_colours(stream: TextIO | None) -> bool:
    """Return True if ``stream`` is a terminal with colours; ``NO_COLOR`` (no-color.org) turns them off."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def red(text: str, stream: TextIO | None) -> str:
    """Return the text in red if ``stream`` shows colours."""
    return f"{_RED}{text}{_PLAIN}" if shows_colours(stream) else text


def shares(rows: Iterable[Shown], root: LayerInfo, level: int | None) -> list[tuple[float, float]]:
    """Return two shares of the model's multiply-adds for each row: with the rows below it, and of what it stands for.

    A row stands for its own multiply-adds, and for the ones below it if ``level`` hides them.
    """
    shares_of_rows = []
    for shown in rows:
        hides = shown.row.depth == level
        total = sum(row.macs for row in shown.rows)
        share = total if hides else sum(row.self_macs for row in shown.rows)
        shares_of_rows.append((total / root.macs, share / root.macs) if root.macs else (0.0, 0.0))
    return shares_of_rows


def share_bars(values: Iterable[tuple[float, float]]) -> list[str]:
    """Return a bar and a percentage for each share.

    >>> share_bars([(0.25, 0.25)])
    ['██▌         25.0%']
    """
    bars = []
    for total, _ in values:
        eighths = round(8 * _WIDTH * total)
        bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
        bars.append(f"{bar:<{_WIDTH}} {percent(total) if total else '':>6}")
    return bars


def paint(line: str, share: float) -> str:
    r"""Return a line of a table in red, yellow or dim, by what its row stands for.

    >>> paint("conv1", 0.2)
    '\x1b[31mconv1\x1b[0m'
    """
    colour = _RED if share >= _EXPENSIVE else _YELLOW if share >= _NOTABLE else "" if share else _DIM
    return f"{colour}{line}{_PLAIN}" if colour else line
