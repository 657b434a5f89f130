"""Tables of text. Every printed table of the library is made here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import DataRow, Line, TableFormat, tabulate

__all__ = ["ruled_table", "table"]


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], align: str, style: str | TableFormat = "plain") -> str:
    """Return rows as a text table; each cell is its ``str``, with spaces kept.

    Args:
        align: one letter per column, ``l`` or ``r``.
        style: a format of tabulate: ``"plain"``, ``"simple"``, ``"pipe"``, ``"latex_booktabs"``, ``"html"`` ...

    >>> print(table([["conv", 9408], ["fc", 513]], ["Layer", "Params"], "lr"))
    Layer      Params
    conv         9408
    fc            513
    """
    sides = ["left" if letter == "l" else "right" for letter in align]
    options: dict[str, Any] = {"colalign": sides, "disable_numparse": True, "preserve_whitespace": True}
    return tabulate(rows, headers, style, **options)


def ruled_table(
    rows: Sequence[Sequence[Any]],
    headers: Sequence[str],
    align: str,
    sections: Iterable[Iterable[str]],
    *,
    totals: Sequence[Any] = (),
) -> str:
    """Return a table between double rules, followed by sections of lines, each with a rule below it.

    Args:
        totals: cells of a last row, separated by a rule.

    >>> print(ruled_table([["conv", 9408]], ["Layer", "Params"], "lr", [["Execution: real"]], totals=["", 9408]))
    =================
    Layer      Params
    =================
    conv         9408
    =================
                 9408
    =================
    Execution: real
    =================
    """
    lines = table([*rows, totals] if totals else rows, headers, align, _RULED).split("\n")
    rule = lines[0]
    if totals and rows:
        lines.insert(-2, rule)
    return "\n".join([*lines, *(line for section in sections for line in [*section, rule])])


_RULE = Line("", "=", "==", "")
_ROW = DataRow("", "  ", "")
_RULED = TableFormat(
    lineabove=_RULE,
    linebelowheader=_RULE,
    linebetweenrows=None,
    linebelow=_RULE,
    headerrow=_ROW,
    datarow=_ROW,
    padding=0,
    with_header_hide=None,
)
