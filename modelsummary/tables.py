"""Tables of text. Every printed table of the library is made here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from tabulate import DataRow, Line, TableFormat, tabulate

from modelsummary.errors import MissingExtraError, harmless

if TYPE_CHECKING:
    import pandas

__all__ = ["PAGE", "Printed", "Report", "data_frame", "ruled_table", "table"]

PAGE = 100  # characters; a wider table of stages is printed in short


def data_frame(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return records as a ``pandas.DataFrame``.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("pandas", "pandas") from error
    frame: pandas.DataFrame = pandas.DataFrame(records)
    return frame


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], align: str, style: str | TableFormat = "plain") -> str:
    """Return rows as a text table; each cell is its ``str``, with spaces kept and control characters escaped.

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
    cells = [[harmless(str(cell)) for cell in row] for row in rows]
    return tabulate(cells, [harmless(header) for header in headers], style, **options)


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
    return "\n".join([*lines, *(harmless(line) for section in sections for line in [*section, rule])])


@dataclass(frozen=True)
class Report:
    """A table with lines above and below it, as text for ``print`` and as HTML for notebooks.

    Attributes:
        rows: cells of each row.
        headers: titles of the columns.
        align: one letter per column, ``l`` or ``r``.
        above, below: lines of text.
        totals: cells of a last row; only with rules.
        ruled: the text has double rules.

    >>> report = Report([["conv", 9408]], ["Layer", "Params"], "lr", above=["Stages"])
    >>> print(report.text())
    Stages
    Layer      Params
    conv         9408
    >>> [line for line in report.html().splitlines() if "conv" in line]
    ['<tr><td>conv   </td><td style="text-align: right;">    9408</td></tr>']
    """

    rows: Sequence[Sequence[Any]]
    headers: Sequence[str]
    align: str
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    totals: Sequence[Any] = ()
    ruled: bool = False

    @property
    def width(self) -> int:
        """Characters of the table, without the lines above and below it."""
        rows = [*self.rows, self.totals] if self.totals else self.rows
        return len(table(rows, self.headers, self.align, _RULED if self.ruled else "plain").partition("\n")[0])

    def without(self, *headers: str) -> Report:
        """Return the report without columns: as many of these, in order, as it takes to fit on a page.

        >>> report = Report([["conv", 1, 2]], ["Layer", "Calls", "Share" * 20], "lrr")
        >>> report.without("Calls", "Share" * 20).headers
        ['Layer']
        """
        report = self
        for header in headers:
            if report.width <= PAGE:
                break
            index = report.headers.index(header)
            rows, titles, align, totals = (
                [_left(row, index) for row in report.rows],
                _left(report.headers, index),
                "".join(_left(report.align, index)),
                _left(report.totals, index),
            )
            report = replace(report, rows=rows, headers=titles, align=align, totals=totals)
        return report

    def text(self) -> str:
        """Return the report as text; without rows, only its lines."""
        above = [harmless(line) for line in self.above]
        if self.ruled:
            body = [ruled_table(self.rows, self.headers, self.align, [self.below], totals=self.totals)]
            return "\n".join([*above, *body])
        body = [table(self.rows, self.headers, self.align)] if self.rows else []
        return "\n".join([*above, *body, *(harmless(line) for line in self.below)])

    def html(self) -> str:
        """Return the report as HTML; a table that is too wide or too long for the page scrolls."""
        rows = [[str(cell).replace(" ", _SPACE) for cell in row] for row in self.rows]
        if self.totals:
            rows.append([str(cell).replace(" ", _SPACE) for cell in self.totals])
        body = table(rows, self.headers, self.align, "html") if rows else ""
        around = (self.above, self.below)
        above, below = ("".join(f"<div>{escape(harmless(line))}</div>" for line in lines) for lines in around)
        return f'<div>{above}<div style="overflow: auto; max-height: 40em">{body}</div>{below}</div>'


def _left(items: Sequence[Any], index: int) -> list[Any]:
    return [item for position, item in enumerate(items) if position != index]


class Printed(ABC):
    """A result that prints as a table, and that a notebook shows as one."""

    @abstractmethod
    def _report(self) -> Report:
        """Return the table."""

    def __str__(self) -> str:
        return self._report().text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._report().html()


_SPACE = "\N{NO-BREAK SPACE}"
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
