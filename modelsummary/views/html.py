"""The tree for notebooks: foldable, sortable, with bars for shares; self-contained HTML.

Equal siblings are one row with a button that shows them one by one. Rows that are open at first, and some rows below
them, are plain ``<details>`` and work without scripts. The other rows are stored in the page as data and are drawn when
their parent is opened, so that a page with thousands of rows stays small.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain

from modelsummary.errors import harmless
from modelsummary.layer_info import LayerInfo
from modelsummary.views.amounts import total_of
from modelsummary.views.cells import TableOptions, lay_out
from modelsummary.views.columns import Column, find_columns
from modelsummary.views.export import Texts, in_script, static
from modelsummary.views.folding import Folding, Shown, is_folded

__all__ = ["notebook_columns", "to_notebook"]

_MAX_OPEN = 40
_MAX_STATIC = 300
_MAX_NAME = 70  # characters; longer text is cut off on the screen
_MAX_TEXT = 40
_UNFOLD = "Show them one by one"


def notebook_columns(root: LayerInfo) -> list[str]:
    """Return the default columns: totals, as a folded row includes the rows below it."""
    measured = {"latency_ms": root.latency_ms, "activation_bytes": root.activation_bytes}
    return ["input_size", "output_size", "total_params", "macs", *(name for name, value in measured.items() if value)]


def to_notebook(
    root: LayerInfo, options: TableOptions, footer: Sequence[str], *, executed: bool, batch_dim: int | None
) -> str:
    """Return HTML of the tree below ``root``; levels deeper than ``options.level`` are closed at first.

    Raises:
        InputError: a column is unknown.
    """
    return _Page(root, options, executed, batch_dim).html(footer)


class _Rows:
    """All rows that a page can show, by index: the folded tree, and what unfolding shows.

    Equal siblings can be shown one by one if no row around them represents several: these are unfolded first.

    Attributes:
        shown: the rows; the model is the first.
        below: indices of the rows below each row.
        unfolded: index of a row -> indices of the equal siblings that it represents.
        positions: position of each row among all rows of the tree, in printed order.
    """

    def __init__(self, root: LayerInfo, *, fold: bool) -> None:
        folding = Folding(root, fold=fold)
        position_of = {id(row): position for position, row in enumerate(root.walk())}
        self.shown: list[Shown] = [folding.top]
        self.below: list[list[int]] = []
        self.unfolded: dict[int, list[int]] = {}
        for index, shown in enumerate(self.shown):  # grows
            self.below.append(self._added(folding.below(shown)))
            if len(shown.rows) == shown.times > 1:
                self.unfolded[index] = self._added(Shown(row, 1, [row]) for row in shown.rows)
        self.positions = [position_of[id(shown.row)] for shown in self.shown]

    def _added(self, rows: Iterable[Shown]) -> list[int]:
        start = len(self.shown)
        self.shown.extend(rows)
        return list(range(start, len(self.shown)))


class _Page:
    def __init__(self, root: LayerInfo, options: TableOptions, executed: bool, batch_dim: int | None) -> None:
        names = options.columns if options.columns is not None else notebook_columns(root)
        layout = TableOptions(columns=names, units=options.units, all_shapes=options.all_shapes)
        self._root = root
        self._columns = find_columns(names, root, executed=executed)
        self._rows = _Rows(root, fold=is_folded(root, options.fold))
        shown = self._rows.shown
        self._table = lay_out(root, layout, executed=executed, batch_dim=batch_dim, rows=shown)
        self._cells = [[harmless(cell) for cell in row] for row in self._table.rows]
        self._numeric = [column.is_number for _, column in self._columns]
        self._shares = [self._shares_of(row) for row in shown]
        self._values = [[self._value_of(column, row) for _, column in self._columns] for row in shown]
        self._levels = options.level
        self._widths = f"{self._width_of_names()}ch {' '.join(f'{width}ch' for width in self._widths_of_cells())}"

    def _width_of_names(self) -> int:
        longest = max(
            len(f"{_label(row)} {_type(row.row)} {_times(row)}") + 2 * row.row.depth for row in self._rows.shown
        )
        return min(longest + 4, _MAX_NAME)

    def _widths_of_cells(self) -> list[int]:
        lines = [[f"{header}  " for header in self._table.headers], *self._table.rows]  # room for the sorting arrow
        return [min(max(map(len, column)) + 1, _MAX_TEXT) for column in list(zip(*lines, strict=True))[1:]]

    def _shares_of(self, shown: Shown) -> list[float]:
        """Return what a row represents, for each cell, in percent of the model; 0 for columns that are not additive."""
        shares = []
        for name, column in self._columns:
            total = total_of(name)
            whole = None if total is None else getattr(self._root, total)
            part = sum(column.value(row) or 0 for row in shown.rows) if whole else 0
            shares.append(round(min(100 * part / whole, 100.0), 1) if whole else 0.0)
        return shares

    @staticmethod
    def _value_of(column: Column, shown: Shown) -> float:
        """Return the number to sort by; -1 if the row has none."""
        value = column.of_equal(shown.rows) if column.is_number else None
        return -1 if value is None else value

    def html(self, footer: Sequence[str]) -> str:
        style, script = static("tree.css"), static("tree.js")
        written, opened = self._first_rows()
        titles = ["Layer", *self._table.headers[1:]]
        head = "".join(
            f'<span class="{_kind(numeric)}"><button type="button">{escape(title)}</button></span>'
            for title, numeric in zip(titles, [False, *self._numeric], strict=True)
        )
        lines = "".join(f"<div>{escape(harmless(line))}</div>" for line in footer)
        return (
            f'<div class="modelsummary" style="--columns: {self._widths}"><style>{style}</style>'
            f'<div class="ms-grid ms-head">{head}</div>'
            f'<div class="ms-body">{"".join(self._elements(0, written, opened))}</div>'
            f'<div class="ms-foot">{lines}</div>'
            f'<script type="application/json" class="ms-data">{self._data(written)}</script>'
            f"<script>{script}</script></div>"
        )

    def _first_rows(self) -> tuple[set[int], set[int]]:
        """Return the indices of the rows written into the page, and of the rows that are open at first."""
        written = {0}
        opened = {0}  # the script fills it if its children are too many
        level = [0]
        visible, depth = 1, 0
        while level:
            below = list(chain.from_iterable(self._rows.below[index] for index in level))
            if len(written) + len(below) > _MAX_STATIC:
                break
            written.update(below)
            visible += len(below)
            is_open = visible <= _MAX_OPEN if self._levels is None else depth < self._levels
            if is_open:
                opened.update(level)
            level, depth = below, depth + 1
        return written, opened

    def _elements(self, index: int, written: set[int], opened: set[int]) -> Iterator[str]:
        """Yield the elements of a row and of the written rows below it; without recursion, as trees can be deep."""
        pending: list[int | str] = [index]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                yield item
                continue
            children = self._rows.below[item]
            attributes = f' data-order="{self._rows.positions[item]}" data-row="{item}"'
            if not children:
                yield self._grid(item, attributes)
                continue
            lazy = children[0] not in written
            state = f"{' data-lazy' if lazy else ''}{' open' if item in opened else ''}"
            yield f"<details{attributes}{state}><summary>{self._grid(item)}</summary>"
            pending.append("</details>")
            if lazy:
                pending.append(f'<div class="ms-more">{len(children)} rows; enable scripts to show them</div>')
            else:
                pending.extend(reversed(children))

    def _grid(self, index: int, attributes: str = "") -> str:
        shown = self._rows.shown[index]
        cells = "".join(
            f'<span class="{_kind(numeric)}"{f" data-value={value}" if numeric else ""}'
            f"{f' style=--share:{share}%' if share else ''}>{escape(text)}</span>"
            for text, numeric, value, share in zip(
                self._cells[index][1:], self._numeric, self._values[index], self._shares[index], strict=True
            )
        )
        name = f'{escape(_label(shown))} <span class="ms-class">{escape(_type(shown.row))}</span>'
        if shown.times > 1 and index in self._rows.unfolded:
            name += f' <button type="button" class="ms-times" title="{_UNFOLD}">{_times(shown)}</button>'
        elif shown.times > 1:
            name += f' <span class="ms-class">{_times(shown)}</span>'
        return (
            f'<div class="ms-grid"{attributes}>'
            f'<span class="ms-name" style="--depth: {shown.row.depth}">{name}</span>{cells}</div>'
        )

    def _data(self, written: set[int]) -> str:
        """Return the JSON data for the script: rows that it can draw, by index; each text is stored once."""
        strings = Texts()
        drawn = self._drawn(written)
        rows = {}
        for index in drawn:
            shown, shares = self._rows.shown[index], self._shares[index]
            texts = strings.places(self._cells[index][1:])
            facts = [_label(shown), *strings.places((_type(shown.row), _times(shown))), shown.row.depth]
            rows[index] = [*facts, self._rows.positions[index], texts, shares, self._values[index]]
        lazy = {index for index, below in enumerate(self._rows.below) if below and below[0] not in written}
        data = {
            "numeric": self._numeric,
            "strings": strings.every,
            "rows": rows,
            "children": {
                index: self._rows.below[index] for index in sorted(lazy.union(drawn)) if self._rows.below[index]
            },
            "each": self._rows.unfolded,
        }
        return in_script(json.dumps(data, separators=(",", ":")))

    def _drawn(self, written: set[int]) -> list[int]:
        """Return the rows that the script draws: rows that are not written, and rows that unfolding draws anew."""
        again: set[int] = set()
        pending = list(self._rows.unfolded)
        while pending:
            index = pending.pop()
            if index not in again:
                again.add(index)
                pending += self._rows.below[index]
        return [row for row in range(len(self._rows.shown)) if row not in written or row in again]


def _kind(numeric: bool) -> str:
    return "ms-number" if numeric else "ms-text"


def _label(shown: Shown) -> str:
    return harmless(shown.names(shown.row.name) or shown.row.class_name)


def _times(shown: Shown) -> str:
    return f"× {shown.times}" if shown.times > 1 else ""


def _type(row: LayerInfo) -> str:
    again = " (recursive)" if row.is_recursive else ""
    uncalled = "" if row.executed or row.children else " (not called)"
    return harmless(f"{row.class_name if row.name else ''}{again}{uncalled}")
