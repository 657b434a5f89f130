"""Tables of text. Every printed table of the library is made here."""

from __future__ import annotations

import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain
from textwrap import wrap
from typing import Any, NamedTuple, TextIO

from tabulate import MIN_PADDING, DataRow, Line, TableFormat, tabulate

from modelsummary.errors import harmless

__all__ = [
    "Printed",
    "Report",
    "Screen",
    "folded_names",
    "is_terminal",
    "name_range",
    "screen_of_output",
    "starred",
    "table",
]

_WIDTH = 120  # characters of a line that is not printed on a terminal
_READABLE = 26  # characters of a text that is shortened before a column is left out
_ASCII = {"…": "~", "≥": ">=", "│": "|", "├": "+", "└": "+", "─": "-", "×": "x", "█": "#"}
_DOTTED = re.compile(r"[\w.]*[A-Za-z_][\w.]*")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_WORD = re.compile(r"\S+")
_LEAST = 8  # characters of a text that is shortened
_TEXT, _NAME = 12, 20  # characters of a text, and of the names of rows, before the other is shortened further
_MOST = 30  # rows that are shown one by one
_PROSE = 24  # characters of a line of prose
_BRANCH = re.compile(r"[ │├└─|+-]*")  # before a name in a tree


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], align: str, style: str | TableFormat = "plain") -> str:
    """Return rows as a text table; each cell is its ``str``, with spaces kept and control characters escaped.

    Args:
        align: one letter per column: ``l`` or ``r``, or ``p`` for prose, which may have several lines.
        style: a format of tabulate: ``"plain"``, ``"simple"``, ``"pipe"``, ``"latex_booktabs"``, ``"html"`` ...

    >>> print(table([["conv", 9408], ["fc", 513]], ["Layer", "Params"], "lr"))
    Layer      Params
    conv         9408
    fc            513
    """
    sides = ["right" if letter == "r" else "left" for letter in align]
    options: dict[str, Any] = {"colalign": sides, "disable_numparse": True, "preserve_whitespace": True}
    cells = [[harmless(str(cell)) for cell in row] for row in rows]
    return tabulate(cells, [harmless(header) for header in headers], style, **options)


class Screen(NamedTuple):
    """What a text is printed on.

    Attributes:
        width: characters of a line.
        encoding: name of the encoding, which decides what characters there are.
        is_terminal: whether it is a terminal, whose width is obeyed also by columns that were asked for.
    """

    width: int = _WIDTH
    encoding: str = "utf-8"
    is_terminal: bool = False

    def written(self, text: str) -> str:
        """Return a text in characters that the screen has.

        >>> Screen(80, "ascii").written("├─Linear ≥ 12"), Screen(80, "utf-8").written("├─Linear")
        ('+-Linear >= 12', '├─Linear')
        """
        missing = {character for character in set(text) if not self._has(character)}
        return text.translate({ord(character): _ASCII.get(character, "?") for character in missing})

    def _has(self, character: str) -> bool:
        try:
            character.encode(self.encoding)
        except UnicodeEncodeError:
            return False
        return True

    def wrapped(self, line: str) -> list[str]:
        """Return a line as several that are not wider than the screen; long names stay whole.

        >>> Screen(12).wrapped("one two three four")
        ['one two', '  three four']
        """
        if len(line) <= self.width:
            return [line]
        indent = " " * min(len(line) - len(line.lstrip()) + 2, self.width // 2)
        return wrap(line, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    def printed(self, lines: Iterable[str]) -> str:
        r"""Return lines as one text: wrapped, in characters that the screen has and that do not act on it.

        >>> Screen(12, "ascii").printed(["├─one two three", "\x1b[31m"])
        '+-one two\n  three\n\\x1b[31m'
        """
        return "\n".join(part for line in lines for part in self.wrapped(self.written(harmless(line))))


def is_terminal(stream: TextIO | None) -> bool:
    """Return True if a stream is a terminal; one that is closed, or that a program put there to write alone, is none.

    >>> from io import StringIO
    >>> is_terminal(StringIO()), is_terminal(None)
    (False, False)
    """
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def screen_of_output() -> Screen:
    """Return what ``print`` writes on: the terminal; 120 characters where the output is not one.

    >>> screen_of_output().width >= 20
    True
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    if not is_terminal(sys.stdout):
        return Screen(encoding=encoding)
    return Screen(max(shutil.get_terminal_size().columns, _READABLE), encoding, True)


@dataclass(frozen=True)
class Report:
    """A table with lines above and below it, as text for ``print`` and as HTML for notebooks.

    Attributes:
        rows: cells of each row.
        headers: titles of the columns.
        align: one letter per column: ``l``, ``r``, or ``p`` for prose, which is wrapped where others are shortened.
        above, below: lines of text.
        sections: groups of lines below a table between double rules, each with a rule below it; None: no rules.
        totals: cells of a last row; only with rules.
        optional: titles of columns that a narrow screen lacks, the first to be left out first.

    >>> report = Report([["conv", 9408]], ["Layer", "Params"], "lr", above=["Stages"])
    >>> print(report.text())
    Stages
    Layer      Params
    conv         9408
    >>> [line for line in report.html().splitlines() if "conv" in line]
    ['<tr><td style="text-align: left;">conv   </td><td style="text-align: right;">    9408</td></tr>']
    >>> print(replace(report, above=(), sections=[["Execution: real"]], totals=["", 9408]).text())
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

    rows: Sequence[Sequence[Any]]
    headers: Sequence[str]
    align: str
    above: Sequence[str] = ()
    below: Sequence[str] = ()
    sections: Sequence[Sequence[str]] | None = None
    totals: Sequence[Any] = ()
    optional: Sequence[str] = ()

    @property
    def width(self) -> int:
        """Characters of the longest line of the table, without the lines above and below it."""
        return max(map(len, self._lines()))

    def leaving_out(self, width: int, *headers: str, least: int = _READABLE, name: int = _READABLE) -> Report:
        """Return the report without columns: as many of these, in order, as it takes to be at most so wide.

        Texts of more than ``least`` characters, and names of rows of more than ``name``, may have to be cut for it.

        >>> report = Report([["conv", 1, 2]], ["Layer", "Calls", "Share" * 20], "lrr")
        >>> report.leaving_out(100, "Calls", "Share" * 20).headers
        ['Layer']
        """
        report = self
        for header in headers:
            if header in report.headers and report.shortened(width, least, name).width > width:
                index = report.headers.index(header)
                report = replace(
                    report,
                    rows=[_left(row, index) for row in report.rows],
                    headers=_left(report.headers, index),
                    align="".join(_left(report.align, index)),
                    totals=_left(report.totals, index),
                )
        return report

    def shortened(self, width: int, least: int = _LEAST, name: int = _LEAST) -> Report:
        """Return the report with an ellipsis in texts that make it wider than ``width``; numbers stay whole.

        It is as wide as its numbers, and ``least`` characters of each text, where these take more. The first text names
        the row: it is shortened last, to ``name`` characters.

        >>> Report([["encoder.layer.output", 1]], ["Layer", "n"], "lr").shortened(20).rows
        [['encoder….output', 1]]
        """
        report = self
        others = [index for index, letter in enumerate(self.align) if letter != "r"]
        names = [index for index in others if self.headers[index]][:1]
        others = [index for index in others if index not in names]
        steps = ((others, max(least, _TEXT)), (names, max(name, _NAME)), (others, least), (names, name))
        for columns, floor in steps:
            for index in sorted(columns, key=lambda index: (self.align[index] != "p", -self._column_width(index))):
                excess, least_room = report.width - width, max(floor, _PROSE) if self.align[index] == "p" else floor
                if excess > 0 and report._column_width(index) > least_room:
                    report = report._with_room(index, max(report._column_width(index) - excess, least_room))
        return report

    def fitted(self, screen: Screen) -> Report:
        """Return the report in the characters of a screen, with the columns for which it has room, and what it lacks.

        Empty columns go first, which no line names, and then optional ones; then, if short texts and all numbers have
        no room, the last numbers but the first.

        >>> report = Report([["conv", 1, "x" * 20]], ["Layer", "Calls", "Share"], "lrr", optional=["Share", "Calls"])
        >>> print(report.fitted(Screen(30)).text())
        Layer      Calls
        conv           1
        Left out, as 30 characters have no room: Share
        """
        report = self._translated(screen)
        if not report.rows and not report.totals:
            return report
        numbers = [header for header, letter in zip(report.headers, report.align, strict=True) if letter == "r"]
        blank = [
            header
            for index, header in enumerate(report.headers)
            if header and not any(row[index].strip() for row in (*report.rows, report.totals) if row)
        ]
        kept = report.leaving_out(screen.width, *blank, *report.optional)
        first = next((index for index, letter in enumerate(kept.align) if letter != "r" and kept.headers[index]), 0)
        cells = max((len(str(row[first])) for row in kept.rows), default=0)  # its title may be cut further
        name = min(_NAME, max(cells, _LEAST))
        kept = kept.leaving_out(screen.width, *reversed(numbers[1:]), least=_LEAST, name=name)
        narrow = kept.shortened(screen.width)
        order = [*report.optional, *report.headers]
        shown = {*kept.headers, *blank}
        missing = [header for header in dict.fromkeys(order) if header in report.headers and header not in shown]
        if not missing:
            return narrow
        line = f"Left out, as {screen.width} characters have no room: {', '.join(missing)}"
        if narrow.sections is None:
            return replace(narrow, below=[*narrow.below, line])
        return replace(narrow, sections=[*narrow.sections, [line]])

    def _translated(self, screen: Screen) -> Report:
        """Return the report in the characters of a screen."""

        def written(cells: Sequence[Any]) -> list[str]:
            return [screen.written(str(cell)) for cell in cells]

        names = ("headers", "above", "below", "totals", "optional")
        lines: dict[str, Any] = {name: written(getattr(self, name)) for name in names}
        sections = None if self.sections is None else [written(section) for section in self.sections]
        return replace(self, rows=[written(row) for row in self.rows], sections=sections, **lines)

    def folded(self, header: str, most: int = _MOST) -> Report:
        """Return the report with one row for rows that differ only in numbers within the names of a column.

        A report of at most ``most`` rows stays as it is.

        >>> rows = [["layers.0.fc", 8], ["layers.1.fc", 8], ["head", 9]]
        >>> Report(rows, ["Layer", "n"], "lr").folded("Layer", most=2).rows
        [['layers.*.fc x 2', 8], ['head', 9]]
        """
        if len(self.rows) <= most:
            return self
        index = list(self.headers).index(header)
        groups: dict[tuple[Any, ...], list[Sequence[Any]]] = {}
        for row in self.rows:
            groups.setdefault((starred(row[index]), *_left(row, index)), []).append(row)
        rows = []
        for (name, *_), group in groups.items():
            cells = list(group[0])
            cells[index] = f"{name} x {len(group)}" if len(group) > 1 else cells[index]
            rows.append(cells)
        return replace(self, rows=rows)

    def _column_width(self, index: int) -> int:
        cells = [
            max(map(len, str(row[index]).split("\n"))) for row in (*self.rows, *([self.totals] if self.totals else []))
        ]
        return max([len(self.headers[index]) + MIN_PADDING, *cells])

    def _with_room(self, index: int, room: int) -> Report:
        """Return the report with at most ``room`` characters for a column."""
        headers = list(self.headers)
        headers[index] = _with_ellipsis(headers[index], room - MIN_PADDING)
        rows, totals = [list(row) for row in self.rows], list(self.totals)
        for row in [*rows, totals] if totals else rows:
            text = str(row[index])
            if self.align[index] == "p":
                words = _WORD.sub(lambda word: _with_ellipsis(word[0], room - MIN_PADDING), text)
                row[index] = "\n".join(Screen(room).wrapped(words))
            else:
                row[index] = _with_ellipsis(text, room)
        return replace(self, rows=rows, headers=headers, totals=totals)

    def with_column(self, header: str, texts: Sequence[str], align: str) -> Report:
        """Return the report with one more column, which has no total."""
        rows = [[*row, text] for row, text in zip(self.rows, texts, strict=True)]
        totals = [*self.totals, ""] if self.totals else ()
        return replace(self, rows=rows, headers=[*self.headers, header], align=self.align + align, totals=totals)

    def _lines(self) -> list[str]:
        """Return the lines of the table; between rules if it has sections."""
        if self.sections is None:
            return table(self.rows, self.headers, self.align).split("\n")
        lines = table([*self.rows, self.totals] if self.totals else self.rows, self.headers, self.align, _RULED)
        ruled = lines.split("\n")
        if self.totals and self.rows:
            ruled.insert(-2, ruled[0])
        return ruled

    def text(self, screen: Screen | None = None) -> str:
        """Return the report as text, on a screen if one is passed; without rows and rules, only its lines."""
        if screen is not None:
            return screen.written(self.fitted(screen)._text(screen))
        return self._text(Screen(sys.maxsize))

    def _text(self, screen: Screen) -> str:
        def written(texts: Sequence[str]) -> list[str]:
            return [line for text in texts for one in harmless(text).split("\n") for line in screen.wrapped(one)]

        lines = self._lines() if self.rows or self.sections is not None else []
        below = [line for section in self.sections or () for line in [*written(section), lines[0]]]
        return "\n".join([*written(self.above), *lines, *below, *written(self.below)])

    def document(self, form: str) -> str:
        r"""Return the table alone for a document: ``"markdown"`` of GitHub, ``"latex"`` for booktabs, or ``"html"``.

        >>> print(Report([["conv_1", 9408]], ["Layer", "Params"], "lr").document("markdown"))
        | Layer   |   Params |
        |:--------|---------:|
        | conv\_1 |     9408 |
        """
        style, characters = _FORMS[form]
        rows = [*self.rows, self.totals] if self.totals else self.rows
        cells = [[str(cell).translate(characters) for cell in row] for row in rows]
        return table(cells, self.headers, self.align, style)

    def html(self) -> str:
        """Return the report as HTML; a table that is too wide or too long for the page scrolls."""
        body = self.document("html") if self.rows or self.totals else ""
        for tag in ("th", "td"):  # notebooks align cells to the right, browsers center headers
            body = body.replace(f"<{tag}>", f'<{tag} style="text-align: left;">')
        around = (self.above, [*chain(*self.sections or ()), *self.below])
        above, below = ("".join(f"<div>{escape(harmless(line))}</div>" for line in lines) for lines in around)
        return f'<div>{above}<div style="overflow: auto; max-height: 40em">{body}</div>{below}</div>'


def name_range(first: str, last: str, between: str = " .. ") -> str:
    """Return the names of equal siblings as one text: the first, and what differs in the last.

    >>> name_range("layers.0", "layers.31"), name_range("k_proj", "v_proj"), name_range("fc", "fc")
    ('layers.0 .. 31', 'k_proj .. v_proj', 'fc')
    """
    if first == last:  # calls of one module
        return first
    around, dot, name = first.rpartition(".")
    last = last.removeprefix(around + dot)
    return f"{first}{between}{last.removeprefix(name.rstrip('0123456789')) or last}"


def folded_names(names: Iterable[str]) -> str:
    """Return names as a list in which ascending numbers at the end are one range.

    >>> folded_names(["layers.0", "layers.1", "layers.2", "layers.8", "head"])
    'layers.0 .. 2, layers.8, head'
    """
    runs: list[list[str]] = []
    for name in names:
        stem = name.rstrip("0123456789")
        number = name.removeprefix(stem)
        is_next = bool(runs and number) and runs[-1][-1] == f"{stem}{int(number) - 1}"
        if is_next:
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(name_range(run[0], run[-1]) for run in runs)


def starred(text: str) -> str:
    """Return a text with stars for the numbers within names of modules, so that the texts of equal blocks are equal.

    >>> starred("layers.3.norm takes 2 of 4.5 parts of 0.weight")
    'layers.*.norm takes 2 of 4.5 parts of *.weight'
    """
    return _DOTTED.sub(lambda match: _NUMBER.sub("*", match[0]), text)


def _left(items: Sequence[Any], index: int) -> list[Any]:
    return [item for position, item in enumerate(items) if position != index]


def _with_ellipsis(text: str, room: int) -> str:
    """Return a text of at most ``room`` characters: its branch if it is in a tree, its beginning and its end.

    The end holds the last name of a path, if that leaves a character for the beginning.

    >>> _with_ellipsis("encoder.layers.0.projection_head", 28)
    'encoder.lay….projection_head'
    """
    if len(text) <= room:
        return text
    branch = _BRANCH.match(text)
    if branch is not None and 0 < branch.end() <= room - _LEAST:
        return branch[0] + _with_ellipsis(text[branch.end() :], room - branch.end())
    last = len(text) - text.rfind(".") if "." in text else 0
    end = max((room - 1) // 2, last if last <= room - 2 else 0)
    return f"{text[: room - 1 - end]}…{text[len(text) - end :]}"


class Printed(ABC):
    """A result that prints as a table, and that a notebook shows as one."""

    __slots__ = ()

    @abstractmethod
    def _report(self) -> Report:
        """Return the table."""

    def __str__(self) -> str:
        return self._report().text(screen_of_output())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._report().html()


_SPACE = "\N{NO-BREAK SPACE}"
# style of a table, and what its cells are written with: spaces are kept, markup is escaped
_FORMS = {
    "markdown": (
        "pipe",
        str.maketrans({" ": _SPACE, "\n": _SPACE, **{mark: f"\\{mark}" for mark in "\\`*_[]<>|&#~$"}}),
    ),
    "latex": ("latex_booktabs", str.maketrans({"\n": " "})),
    "html": ("html", str.maketrans({" ": _SPACE})),
}
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
