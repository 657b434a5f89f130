"""The table as text: one row per call, branches as in ``torchinfo``, totals below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from modelsummary.layer_info import UNKNOWN, LayerInfo, leaf_output_bytes, ledger
from modelsummary.tables import Report, Screen, screen_of_output
from modelsummary.units import auto_prefix, format_number, grouped, symbol
from modelsummary.views.cells import TableOptions, lay_out, rows_shown
from modelsummary.views.columns import COLUMNS, FILLED_BY
from modelsummary.views.terminal import paint, share_bars, shares

__all__ = ["footer", "render"]

_MAX_NOTES = 5
_LEFT_OUT = ("Input Shape", "Bwd Latency (ms)", "Latency %", "Output Shape")  # where a screen is too narrow, in order
_BARS = "Share of MACs"
_FIRST_ROW = 3  # line of a ruled table, after the headers between their rules


def render(
    root: LayerInfo,
    options: TableOptions,
    *,
    execution: str = "none",
    fallback_reason: str | None = None,
    batch_dim: int | None = None,
    remarks: Sequence[str] = (),
    colours: bool = False,
) -> str:
    """Return the table of the tree below ``root`` with its totals.

    Args:
        colours: for a terminal: add a bar for each row's share of the multiply-adds, and colour expensive rows.

    Raises:
        InputError: a column is unknown.
    """
    chosen, screen = options.fitted_to(root), screen_of_output()
    if options.ascii_only:
        screen = screen._replace(encoding="ascii")
    table = lay_out(root, chosen, executed=execution != "none", batch_dim=batch_dim)
    shares_of_rows = shares(rows_shown(root, chosen), root, chosen.level) if colours and root.macs else []
    remarks = [*remarks, *_unmeasured(root, chosen), *_left_out(root, chosen, len(table.rows))]
    sections = footer(root, execution=execution, fallback_reason=fallback_reason, remarks=remarks)
    if options.columns is not None and not screen.is_terminal:
        screen = screen._replace(width=max(screen.width, table.width))  # these columns were asked for
    elif table.width > screen.width:
        is_short = not options.var_names
        short = lay_out(root, chosen, executed=execution != "none", batch_dim=batch_dim, short_names=is_short)
        table = _narrow(table, short, options, screen)
    if shares_of_rows:
        barred = table.with_column(_BARS, share_bars(shares_of_rows), "l")
        table = barred if barred.width <= screen.width else table
    lines = replace(table, sections=sections).text(screen).split("\n")
    for index, (_, share) in enumerate(shares_of_rows, _FIRST_ROW):
        lines[index] = paint(lines[index], share)
    return "\n".join(lines)


def _narrow(table: Report, short: Report, options: TableOptions, screen: Screen) -> Report:
    """Return a table for a narrow screen: without the shapes of inputs, then with short names, then without the others.

    Columns and names of attributes that were asked for stay.
    """
    if options.columns is not None:
        return short
    plain = table.leaving_out(0, _LEFT_OUT[0])
    return plain if plain.width <= screen.width else replace(short, optional=_LEFT_OUT)


def _unmeasured(root: LayerInfo, options: TableOptions) -> Iterator[str]:
    """Yield a line per column that was asked for and is empty, because nothing measured it."""
    for name in options.columns or ():
        call = FILLED_BY.get(name)
        if call is not None and COLUMNS[name].of(root) is None:
            yield f"{name} is not known yet: call stats.{call}"


def _left_out(root: LayerInfo, options: TableOptions, shown: int) -> Iterator[str]:
    """Yield a line about the rows that a folded table does not show."""
    rows = sum(1 for _ in root.walk())
    if options.most is not None and shown == options.most:
        yield f"Shown: the {shown} largest of {rows} rows; all of them: table(depth=None, sort={options.sort!r})"
    if options.fold and shown < rows:
        levels = "" if options.level is None else f", {options.level} of {max(row.depth for row in root.walk())} levels"
        yield f"Shown: {shown} of {rows} rows (equal ones once{levels}); all of them: table(depth=None, fold=False)"


# ---------------------------------------------------------------------------------------------- footer


def footer(
    root: LayerInfo, *, execution: str, fallback_reason: str | None, remarks: Sequence[str] = ()
) -> list[list[str]]:
    """Return the lines below a table in sections: totals, sizes, remarks on how the numbers were found."""
    totals = list(_totals(root, execution))
    if execution == "none":
        return [totals, list(remarks)] if remarks else [totals]
    return [totals, list(_sizes(root)), [*_remarks(root, execution, fallback_reason), *remarks]]


def _totals(root: LayerInfo, execution: str) -> Iterator[str]:
    remark = f" (and {UNKNOWN}: not initialised yet)" if root.has_uninitialized else ""
    yield f"Total params: {grouped(root.num_params)}{remark}"
    yield f"Trainable params: {grouped(root.trainable_params)}"
    yield f"Non-trainable params: {grouped(root.num_params - root.trainable_params)}"
    yield f"Buffers: {grouped(root.num_buffers)}"
    if execution != "none":
        at_least = ">= " if ledger(root) else ""
        yield f"Total mult-adds{_with_unit(root.macs, at_least)}"


def _with_unit(value: int, at_least: str) -> str:
    prefix = auto_prefix(value)
    return f"{f' ({prefix})' if prefix else ''}: {at_least}{format_number(value, prefix)}"


def _sizes(root: LayerInfo) -> Iterator[str]:
    for title, value in (
        ("Input size", root.input_bytes),
        ("Forward activations", leaf_output_bytes(root)),
        ("Params size", root.params_bytes),
        ("Buffers size", root.buffer_bytes),
    ):
        prefix = auto_prefix(value)
        yield f"{title} ({symbol(prefix, 'B')}): {format_number(value, prefix)}"


def _remarks(root: LayerInfo, execution: str, fallback_reason: str | None) -> Iterator[str]:
    if execution == "shape":
        yield "Execution: shape-only, nothing was computed"
    elif execution == "file":
        yield "Execution: none, read from the file"
    else:
        yield f"Execution: real{f', because {fallback_reason}' if fallback_reason else ''}"
    uncounted = ledger(root)
    if uncounted:
        counts = {operator: f"{operator} ({count}x)" for operator, count in uncounted.items()}
        unclear = [calls for operator, calls in counts.items() if operator.endswith(")")]  # with the reason
        without = [calls for operator, calls in counts.items() if not operator.endswith(")")]
        if without:
            yield f"Not in mult-adds, no formula (see register_op_cost): {', '.join(without)}"
        if unclear:
            yield f"Not in mult-adds, the file does not say enough: {', '.join(unclear)}"
    notes = [f"{row.fqn or row.class_name}: {row.note}" for row in root.walk() if row.note]
    yield from notes[:_MAX_NOTES]
    if len(notes) > _MAX_NOTES:
        yield f"... and {len(notes) - _MAX_NOTES} more rows with a note"
