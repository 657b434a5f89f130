"""The rows and the cell texts that all printed tables share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from modelsummary.errors import InputError
from modelsummary.layer_info import UNKNOWN, LayerInfo, Sizes, first_shape
from modelsummary.tables import Report
from modelsummary.units import NOTHING, check_prefix, decimals, format_number, percent, symbol
from modelsummary.views.amounts import column_of, find_amounts
from modelsummary.views.columns import COLUMNS, Column, find_columns
from modelsummary.views.folding import LARGE, Folding, Shown, deepest_fitting
from modelsummary.views.labels import branch, check_depth, one_line, sizes_label

__all__ = ["TableOptions", "lay_out", "rows_shown"]

_RECURSIVE = "(recursive)"
_FITTING = 40


@dataclass(frozen=True)
class TableOptions:
    """The rows and columns of a table, and their format.

    Attributes:
        columns: names from ``modelsummary.views.columns.COLUMNS``; None: shapes, parameters, mult-adds.
        depth: deepest level shown; deeper rows are added to the row above them. None: all. ``"auto"``: all, but in
            printed tables of more than 100 rows, folded, the levels that make at most 40 rows.
        fold: show consecutive siblings that are equal once, with their number. None: in printed tables of more than
            100 rows.
        branching: draw the tree; False prints fully qualified names.
        var_names: print the attribute name of each module after its class.
        ascii_only: draw the tree without box-drawing characters.
        hide_recursive: leave out rows whose modules, including all below them, are in earlier rows.
        all_shapes: print every tensor of an input or output, not only the first.
        units: prefix for the columns of counts and bytes (``"K"``, ``"M"``, ``"G"``, ``"T"``, ``"Ki"`` ...),
            written into their headers. None: full numbers. The totals below the table choose their own prefix.
        sort: amount that orders the rows, largest first, such as ``"macs"``; rows have fully qualified names then, and
            rows without any of it are left out. None: the order of the calls.
        most: largest number of rows shown; None: all. A printed table of more than 100 sorted rows shows 40, unless
            ``depth`` is given.
    """

    columns: Sequence[str] | None = None
    depth: int | Literal["auto"] | None = "auto"
    fold: bool | None = None
    branching: bool = True
    var_names: bool = False
    ascii_only: bool = False
    hide_recursive: bool = False
    all_shapes: bool = False
    units: str | None = None
    sort: str | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.depth != "auto":
            check_depth(self.depth)
        if self.units is not None:
            check_prefix(self.units)
        if self.fold not in (None, True, False):
            raise InputError(f"fold must be True, False or None, got {self.fold!r:.40}")
        if not isinstance(self.sort, (str, type(None))):
            raise InputError(f"sort must be the name of an amount such as 'macs', got {self.sort!r:.40}")

    @property
    def level(self) -> int | None:
        """The deepest level shown; None: all."""
        return None if self.depth == "auto" else self.depth

    def fitted_to(self, root: LayerInfo) -> TableOptions:
        """Return these options for a printed table of the tree below ``root``, with nothing left to be chosen."""
        rows = sum(1 for _ in root.walk(self.level))
        if self.sort is not None:
            return replace(self, depth=self.level, most=_FITTING if rows > LARGE and self.depth == "auto" else None)
        fold = rows > LARGE if self.fold is None else self.fold
        level = deepest_fitting(root, _FITTING) if fold and rows > LARGE and self.depth == "auto" else self.level
        return replace(self, depth=level, fold=fold, var_names=self.var_names or (fold and rows > LARGE))


def lay_out(
    root: LayerInfo,
    options: TableOptions,
    *,
    executed: bool,
    batch_dim: int | None,
    rows: Iterable[Shown] | None = None,
    short_names: bool = False,
) -> Report:
    """Return rows of the tree below ``root`` as a table: ``rows``, or if it is None, the ones that ``options`` select.

    The names of the layers come first; short ones lack the names of attributes and the numbers behind classes.

    Raises:
        InputError: a column is unknown.
    """
    columns = find_columns(options.columns, root, executed=executed, totals=bool(options.fold))
    if options.sort is not None:
        name = column_of(options.sort)
        options = replace(options, branching=False)
        if options.columns is None and name is not None and name not in dict(columns):
            columns.append((name, COLUMNS[name]))
    cells = _Cells(options, batch_dim, _batch_size(root, batch_dim), short_names)
    return Report(
        [
            [cells.name(shown), *(cells.cell(name, column, shown) for name, column in columns)]
            for shown in (rows_shown(root, options) if rows is None else rows)
        ],
        [cells.name_header(), *(cells.header(column) for _, column in columns)],
        "".join(["l", *("r" if column.is_number else "l" for _, column in columns)]),
    )


def rows_shown(root: LayerInfo, options: TableOptions) -> list[Shown]:
    """Return the rows that ``options`` show, in printed order.

    Raises:
        InputError: the amount to sort by is unknown or was not measured, or rows are to be sorted and folded.
    """
    if options.sort is not None and options.fold:
        raise InputError(f"sort={options.sort!r} shows rows one by one; leave out fold=True")
    rows = Folding(root, fold=bool(options.fold)).walk(options.level)
    if options.hide_recursive:  # rows whose modules, and all below them, are in earlier rows
        rows = (shown for shown in rows if not all(row.is_recursive for row in shown.row.walk()))
    shown = list(rows)
    return shown if options.sort is None else _sorted(shown, root, options)


def _sorted(shown: list[Shown], root: LayerInfo, options: TableOptions) -> list[Shown]:
    """Return the rows that have some of the amount, largest first; deeper rows count for the row above them."""
    amounts = find_amounts(root, options.sort or "", "sort")

    def amount(row: LayerInfo) -> float:
        return (amounts.total if row.depth == options.level else amounts.self_amount)[row]

    return sorted((entry for entry in shown if amount(entry.row)), key=lambda entry: -amount(entry.row))[: options.most]


class _Cells:
    """Formatter for the cells of one table."""

    def __init__(self, options: TableOptions, batch_dim: int | None, batch_size: int | None, short_names: bool) -> None:
        self._options = options
        self._short_names = short_names
        self._batch = (batch_dim, batch_size)
        self._at_least = ">= " if options.ascii_only else "≥ "

    def name_header(self) -> str:
        if not self._options.branching or self._short_names:
            return "Layer" if self._short_names else "Layer (type)"
        return "Layer (type (var_name):depth-idx)" if self._options.var_names else "Layer (type:depth-idx)"

    def header(self, column: Column) -> str:
        unit = "B" if column.kind == "bytes" else ""
        written = symbol(self._options.units or "", unit) if column.kind in ("bytes", "count") else ""
        return f"{column.header} ({written})" if written else column.header

    def name(self, shown: Shown) -> str:
        return one_line(self._name(shown))

    def _name(self, shown: Shown) -> str:
        info = shown.row
        text = f"{shown.times} x {info.class_name}" if shown.times > 1 else info.class_name
        if not self._options.branching:
            if self._short_names:
                return shown.names(info.fqn) if info.fqn else text
            return f"{shown.names(info.fqn)} ({text})" if info.fqn else text
        if self._options.var_names and info.name and not self._short_names:
            text += f" ({shown.names(info.name)})"
        if not info.depth:
            return text
        start = branch(info.depth, ascii_only=self._options.ascii_only, narrow=self._short_names)
        return f"{start}{text}" if self._short_names else f"{start}{text}: {info.depth}-{info.depth_index}"

    def cell(self, name: str, column: Column, shown: Shown) -> str:
        info = shown.row
        hides_children = info.depth == self._options.level and bool(info.children)
        value = column.of(info, hides_children) if len(shown.rows) == 1 else column.of_equal(shown.rows, hides_children)
        if column.kind == "shape":
            return self._shape(name, value, info)
        if name == "num_params":
            return self._params(value, info)
        if name in ("mult_adds", "macs"):
            is_total = hides_children or name == "macs"
            uncertain = info.is_uncertain or (is_total and any(row.is_uncertain for row in info.walk()))
            return self._bound(value, uncertain)
        if column.kind in ("ms", "rate"):
            return decimals(value and value / column.scale, 3 if column.kind == "ms" else 2)
        if column.kind == "figure":
            return NOTHING if value is None else f"{value:.3g}"
        if column.kind == "percent":
            return percent(value or None, 2)
        if column.is_number:
            return format_number(value, self._options.units or "") if value else NOTHING
        return self._text(value)

    def _shape(self, name: str, value: Sizes, info: LayerInfo) -> str:
        if name == "kernel_size":
            return str(value) if value else NOTHING
        if not info.executed:
            return UNKNOWN if info.note else NOTHING
        return sizes_label(value if self._options.all_shapes else first_shape(value), self._batch)

    def _params(self, value: int, info: LayerInfo) -> str:
        if not value and info.num_params and info.is_recursive:
            return _RECURSIVE
        uninitialized = any(shape is None for shape in info.inner_layers.values())
        text = self._bound(value, uninitialized)
        return f"({text})" if value and not info.trainable_params else text

    def _bound(self, value: int, uncertain: bool) -> str:
        if not value:
            return UNKNOWN if uncertain else NOTHING
        text = format_number(value, self._options.units or "")
        return f"{self._at_least}{text}" if uncertain else text

    @staticmethod
    def _text(value: object) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{key} {shape if shape is not None else UNKNOWN}" for key, shape in value.items())
        return NOTHING if value is None or value == "" else one_line(str(value))


def _batch_size(root: LayerInfo, batch_dim: int | None) -> int | None:
    """Return the size of the batch that ran; a dimension ``batch_dim`` of another size is not the batch."""
    shape = first_shape(root.input_size)
    if batch_dim is None or not isinstance(shape, list) or batch_dim >= len(shape):
        return None
    return shape[batch_dim]
