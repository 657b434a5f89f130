"""torchinfo's table, to the character: widths, cells and totals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelsummary.statistics import ModelStatistics
from modelsummary.torchinfo.enums import ColumnSettings, RowSettings, Verbosity
from modelsummary.torchinfo.rows import SummaryRow
from modelsummary.units import ReadableNumbers, Units, in_parentheses
from modelsummary.views.columns import COLUMNS
from modelsummary.views.labels import branch

__all__ = ["FormattingOptions", "render_summary"]

_NAME_WIDTH = 40
_INDENT = 5


@dataclass
class FormattingOptions:
    """The format of ``summary``'s table; changes take effect at the next ``print``.

    Attributes:
        max_depth: deepest level shown.
        verbose: 2 lists every parameter below its row.
        col_names: columns, in this order.
        col_width: width of each column but the first, in characters.
        row_settings: the settings that the four flags below are set from.
        ascii_only, show_var_name, show_depth, hide_recursive_layers: flags, see ``RowSettings``.
        params_count_units: prefix of the numbers of parameters below the table. Default: none, full numbers.
        params_size_units: prefix of the sizes in bytes below the table. Default: M.
        macs_units: prefix of the mult-adds below the table. Default: M, G or T, by size.
        layer_name_width: width of the first column, in characters.
    """

    max_depth: int
    verbose: int
    col_names: tuple[ColumnSettings, ...]
    col_width: int
    row_settings: set[RowSettings]
    ascii_only: bool = field(init=False)
    show_var_name: bool = field(init=False)
    show_depth: bool = field(init=False)
    hide_recursive_layers: bool = field(init=False)
    params_count_units: Units = Units.NONE
    params_size_units: Units = Units.MEGABYTES
    macs_units: Units = Units.AUTO
    layer_name_width: int = _NAME_WIDTH

    def __post_init__(self) -> None:
        self.ascii_only = RowSettings.ASCII_ONLY in self.row_settings
        self.show_var_name = RowSettings.VAR_NAMES in self.row_settings
        self.show_depth = RowSettings.DEPTH in self.row_settings
        self.hide_recursive_layers = RowSettings.HIDE_RECURSIVE_LAYERS in self.row_settings

    @property
    def params_units(self) -> Units:
        """``params_count_units`` under its name in torchinfo 1.8."""
        return self.params_count_units

    @params_units.setter
    def params_units(self, units: Units) -> None:
        self.params_count_units = units

    def set_layer_name_width(self, rows: Sequence[SummaryRow]) -> None:
        """Widen the first column to the longest name, including hidden rows, in steps of five characters."""
        names = (row.get_layer_name(self.show_var_name, self.show_depth) for row in rows)
        longest = max((row.depth * _INDENT + 1 + len(name) for row, name in zip(rows, names, strict=True)), default=0)
        if longest >= self.layer_name_width:
            self.layer_name_width = math.ceil(longest / _INDENT) * _INDENT

    def get_total_width(self) -> int:
        """Return the width of a line in characters."""
        return self.layer_name_width + self.col_width * len(self.col_names)

    def get_start_str(self, depth: int) -> str:
        """Return the tree branch before the name of a row at this depth."""
        return branch(depth, ascii_only=self.ascii_only)

    def format_row(self, layer_name: str, row_values: Mapping[ColumnSettings, str]) -> str:
        """Return one line of the table, with the newline."""
        cells = [f"{row_values.get(column, ''):<{self.col_width}}" for column in self.col_names]
        return " ".join([f"{layer_name:<{self.layer_name_width}}", *cells]).rstrip() + "\n"

    def header_row(self) -> str:
        """Return the line of titles."""
        var_name = " (var_name)" if self.show_var_name else ""
        depth = ":depth-idx" if self.show_depth else ""
        titles = {column: COLUMNS[column].header for column in self.col_names}
        return self.format_row(f"Layer (type{var_name}{depth})", titles)

    def layers_to_str(self, rows: Sequence[SummaryRow], total_params: int) -> str:
        """Return the lines of the rows that are shown."""
        return "".join(
            line
            for row in rows
            if row.depth <= self.max_depth and not (self.hide_recursive_layers and row.is_recursive)
            for line in self._lines(row, total_params)
        )

    def _lines(self, row: SummaryRow, total_params: int) -> Iterator[str]:
        collapsed = row.depth == self.max_depth
        cells = {
            ColumnSettings.KERNEL_SIZE: _cell(row.kernel_size),
            ColumnSettings.GROUPS: _cell(row.groups),
            ColumnSettings.INPUT_SIZE: _cell(row.input_size),
            ColumnSettings.OUTPUT_SIZE: _cell(row.output_size),
            ColumnSettings.NUM_PARAMS: row.num_params_to_str(collapsed),
            ColumnSettings.PARAMS_PERCENT: row.params_percent(total_params, collapsed),
            ColumnSettings.MULT_ADDS: row.macs_to_str(collapsed),
            ColumnSettings.TRAINABLE: row.trainable,
        }
        name = row.get_layer_name(self.show_var_name, self.show_depth)
        yield self.format_row(f"{self.get_start_str(row.depth)}{name}", cells)
        if self.verbose == Verbosity.VERBOSE:
            for name, inner in row.inner_layers.items():
                count = inner[ColumnSettings.NUM_PARAMS]
                shown = {**inner, ColumnSettings.NUM_PARAMS: f"+ {count[2:]}" if self.ascii_only else count}
                yield self.format_row(f"{self.get_start_str(row.depth + 1)}{name}", shown)


def _cell(value: Any) -> str:
    return str(value) if value else "--"


# ------------------------------------------------------------------------------------------------- totals


def render_summary(stats: ModelStatistics, rows: Sequence[SummaryRow], options: FormattingOptions) -> str:
    """Return the table with its totals; without a forward, only totals of parameters."""
    rule = "=" * options.get_total_width()
    counts = {
        "Total params": stats.total_params,
        "Trainable params": stats.trainable_params,
        "Non-trainable params": stats.total_params - stats.trainable_params,
    }
    count_lines = [
        f"{title}{ReadableNumbers.format_output_num(count, options.params_count_units)}"
        for title, count in counts.items()
    ]
    lines = [rule, options.header_row() + rule, options.layers_to_str(rows, stats.total_params) + rule, *count_lines]
    if stats.execution != "none":
        macs = ReadableNumbers.format_output_num(stats.total_mult_adds, options.macs_units)
        lines += [f"Total mult-adds{macs}", rule, *_sizes(stats, rows, options.params_size_units)]
        lines += [f"Not in mult-adds, no formula: {name} ({n}x)" for name, n in stats.uncounted_ops.items()]
    return "\n".join([*lines, rule])


def _sizes(stats: ModelStatistics, rows: Sequence[SummaryRow], units: Units) -> Iterator[str]:
    outputs = sum(row.output_bytes for row in rows if row.is_leaf_layer and row.num_params)
    sizes = {
        "Input size": stats.total_input_bytes,
        "Forward/backward pass size": 2 * outputs,  # activations and their gradients
        "Params size": stats.total_param_bytes,
    }
    sizes["Estimated Total Size"] = sum(sizes.values())
    for title, size in sizes.items():
        unit, readable = ReadableNumbers.to_readable(size, units)
        yield f"{title}{in_parentheses(unit, is_bytes=True)}: {readable:.2f}"
