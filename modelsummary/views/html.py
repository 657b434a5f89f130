"""The tree for notebooks: foldable, sortable, with bars for shares; self-contained HTML.

Rows that are open at first, and some rows below them, are plain ``<details>`` and work without scripts. The other rows
are stored in the page as data and are drawn when their parent is opened, so that a page with thousands of rows stays
small.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from itertools import chain

from modelsummary.layer_info import LayerInfo
from modelsummary.views.cells import TableOptions, lay_out
from modelsummary.views.columns import Column, find_columns

__all__ = ["notebook_columns", "to_notebook"]

# Columns whose values are shares of a total of the model.
_TOTALS = (
    "trainable_params params_bytes num_buffers buffer_bytes macs flops elementwise_ops bytes_read bytes_written"
    " activation_bytes latency_ms backward_latency_ms estimated_latency_ms"
).split()
_WHOLES = {
    **{name: name for name in _TOTALS},
    **{f"self_{name}": name for name in _TOTALS},
    **dict.fromkeys(["num_params", "total_params", "self_params"], "num_params"),
    "mult_adds": "macs",
    "backward_self_latency_ms": "backward_latency_ms",
}

_MAX_OPEN = 40
_MAX_STATIC = 300
_MAX_NAME = 70  # characters; longer text is cut off on the screen
_MAX_TEXT = 40


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


class _Page:
    def __init__(self, root: LayerInfo, options: TableOptions, executed: bool, batch_dim: int | None) -> None:
        names = options.columns if options.columns is not None else notebook_columns(root)
        shown = TableOptions(columns=names, units=options.units, all_shapes=options.all_shapes)
        self._columns = find_columns(names, root, executed=executed)
        self._rows = list(root.walk())
        self._numbers = {id(row): number for number, row in enumerate(self._rows)}
        self._table = lay_out(root, shown, executed=executed, batch_dim=batch_dim)
        self._numeric = [column.is_number for _, column in self._columns]
        self._shares = [self._shares_of(row) for row in self._rows]
        self._values = [[self._value_of(column, row) for _, column in self._columns] for row in self._rows]
        self._levels = options.level
        self._widths = f"{self._width_of_names()}ch {' '.join(f'{width}ch' for width in self._widths_of_cells())}"

    def _width_of_names(self) -> int:
        longest = max(len(f"{_label(row)} {_type(row)}") + 2 * row.depth for row in self._rows)
        return min(longest + 4, _MAX_NAME)

    def _widths_of_cells(self) -> list[int]:
        lines = [[f"{header}  " for header in self._table.headers], *self._table.cells]  # room for the sorting arrow
        return [min(max(map(len, column)) + 1, _MAX_TEXT) for column in list(zip(*lines, strict=True))[1:]]

    def _shares_of(self, row: LayerInfo) -> list[float]:
        """Return each cell's share of the model's total in percent; 0 for columns that are not additive."""
        shares = []
        for name, column in self._columns:
            whole = getattr(self._rows[0], _WHOLES[name]) if name in _WHOLES else None
            part = column.value(row)
            shares.append(round(min(100 * part / whole, 100.0), 1) if whole and part else 0.0)
        return shares

    @staticmethod
    def _value_of(column: Column, row: LayerInfo) -> float:
        """Return the number to sort by; -1 if the row has none."""
        value = column.value(row) if column.is_number else None
        return -1 if value is None else value

    def html(self, footer: Sequence[str]) -> str:
        static = resources.files("modelsummary.views") / "static"
        style, script = ((static / name).read_text(encoding="utf-8") for name in ("tree.css", "tree.js"))
        written, opened = self._first_rows()
        titles = ["Layer", *self._table.headers[1:]]
        head = "".join(
            f'<span class="{_kind(numeric)}"><button type="button">{escape(title)}</button></span>'
            for title, numeric in zip(titles, [False, *self._numeric], strict=True)
        )
        lines = "".join(f"<div>{escape(line)}</div>" for line in footer)
        return (
            f'<div class="modelsummary" style="--columns: {self._widths}"><style>{style}</style>'
            f'<div class="ms-grid ms-head">{head}</div>'
            f'<div class="ms-body">{"".join(self._elements(0, written, opened))}</div>'
            f'<div class="ms-foot">{lines}</div>'
            f'<script type="application/json" class="ms-data">{self._data(written)}</script>'
            f"<script>{script}</script></div>"
        )

    def _first_rows(self) -> tuple[set[int], set[int]]:
        """Return the numbers of the rows written into the page, and of the rows that are open at first."""
        written = {0}
        opened = {0}  # the script fills it if its children are too many
        level = [self._rows[0]]
        visible, depth = 1, 0
        while level:
            below = list(chain.from_iterable(row.children for row in level))
            if len(written) + len(below) > _MAX_STATIC:
                break
            written.update(self._numbers[id(row)] for row in below)
            visible += len(below)
            wanted = visible <= _MAX_OPEN if self._levels is None else depth < self._levels
            if wanted:
                opened.update(self._numbers[id(row)] for row in level)
            level, depth = below, depth + 1
        return written, opened

    def _elements(self, number: int, written: set[int], opened: set[int]) -> Iterator[str]:
        """Yield the elements of a row and of the written rows below it; without recursion, as trees can be deep."""
        pending: list[int | str] = [number]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                yield item
                continue
            children = [self._numbers[id(child)] for child in self._rows[item].children]
            if not children:
                yield self._grid(item, f' data-order="{item}"')
                continue
            lazy = children[0] not in written
            attributes = f' data-order="{item}"{" open" if item in opened else ""}{f" data-row={item}" if lazy else ""}'
            yield f"<details{attributes}><summary>{self._grid(item)}</summary>"
            pending.append("</details>")
            if lazy:
                pending.append(f'<div class="ms-more">{len(children)} rows; enable scripts to show them</div>')
            else:
                pending.extend(reversed(children))

    def _grid(self, number: int, attributes: str = "") -> str:
        row = self._rows[number]
        cells = "".join(
            f'<span class="{_kind(numeric)}"{f" data-value={value}" if numeric else ""}'
            f"{f' style=--share:{share}%' if share else ''}>{escape(text)}</span>"
            for text, numeric, value, share in zip(
                self._table.cells[number][1:], self._numeric, self._values[number], self._shares[number], strict=True
            )
        )
        name = f'{escape(_label(row))} <span class="ms-class">{escape(_type(row))}</span>'
        return (
            f'<div class="ms-grid"{attributes}>'
            f'<span class="ms-name" style="--depth: {row.depth}">{name}</span>{cells}</div>'
        )

    def _data(self, written: set[int]) -> str:
        """Return the JSON data for the script: rows not written into the page, by number; each text is stored once."""
        strings: dict[str, int] = {}

        def place(text: str) -> int:
            return strings.setdefault(text, len(strings))

        lazy = [number for number in range(len(self._rows)) if number not in written]
        rows = {}
        for number in lazy:
            row, shares = self._rows[number], self._shares[number]
            texts = [place(text) for text in self._table.cells[number][1:]]
            rows[number] = [_label(row), place(_type(row)), row.depth, texts, shares, self._values[number]]
        parents = {*lazy, *(self._numbers[id(self._rows[number].parent_info)] for number in lazy)}
        children = {
            number: [self._numbers[id(child)] for child in self._rows[number].children]
            for number in sorted(parents)
            if self._rows[number].children
        }
        data = {
            "numeric": self._numeric,
            "strings": list(strings),
            "rows": rows,
            "children": children,
        }
        text = json.dumps(data, separators=(",", ":"))
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _kind(numeric: bool) -> str:
    return "ms-number" if numeric else "ms-text"


def _label(row: LayerInfo) -> str:
    return row.name or row.class_name


def _type(row: LayerInfo) -> str:
    again = " (recursive)" if row.is_recursive else ""
    uncalled = "" if row.executed or row.children else " (not called)"
    return f"{row.class_name if row.name else ''}{again}{uncalled}"
