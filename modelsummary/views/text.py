"""The table as text: one row a call, branches as in ``torchinfo``, totals below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import DataRow, Line, TableFormat, tabulate

from modelsummary.layer_info import UNKNOWN, LayerInfo, leaf_output_bytes, ledger
from modelsummary.units import auto_prefix, format_number, symbol
from modelsummary.views.cells import TableOptions, lay_out

__all__ = ["footer", "render"]

_MAX_NOTES = 5


def render(
    root: LayerInfo,
    options: TableOptions,
    *,
    execution: str = "none",
    fallback_reason: str | None = None,
    batch_dim: int | None = None,
    remarks: Sequence[str] = (),
) -> str:
    """The table of the tree below ``root``, with its totals.

    Raises:
        InputError: an unknown column.
    """
    table = lay_out(root, options, executed=execution != "none", batch_dim=batch_dim)
    text = tabulate(
        table.cells,
        headers=table.headers,
        tablefmt=_FORMAT,
        colalign=table.align,
        disable_numparse=True,
        preserve_whitespace=True,
    )
    rule = text.partition("\n")[0]
    sections = footer(root, execution=execution, fallback_reason=fallback_reason, remarks=remarks)
    return "\n".join([text, *(line for section in sections for line in [*section, rule])])


_RULE = Line("", "=", "==", "")
_ROW = DataRow("", "  ", "")
_FORMAT = TableFormat(
    lineabove=_RULE,
    linebelowheader=_RULE,
    linebetweenrows=None,
    linebelow=_RULE,
    headerrow=_ROW,
    datarow=_ROW,
    padding=0,
    with_header_hide=None,
)


# ---------------------------------------------------------------------------------------------- footer


def footer(
    root: LayerInfo, *, execution: str, fallback_reason: str | None, remarks: Sequence[str] = ()
) -> list[list[str]]:
    """What is said below a table, in sections of lines: totals, sizes, how the numbers came about."""
    totals = list(_totals(root, execution))
    if execution == "none":
        return [totals]
    return [totals, list(_sizes(root)), [*_remarks(root, execution, fallback_reason), *remarks]]


def _totals(root: LayerInfo, execution: str) -> Iterator[str]:
    known = f" (and {UNKNOWN}: not initialised yet)" if root.has_uninitialized else ""
    yield f"Total params: {root.num_params:,}{known}"
    yield f"Trainable params: {root.trainable_params:,}"
    yield f"Non-trainable params: {root.num_params - root.trainable_params:,}"
    yield f"Buffers: {root.num_buffers:,}"
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
        said = {operator: f"{operator} ({count}x)" for operator, count in uncounted.items()}
        unclear = [calls for operator, calls in said.items() if operator.endswith(")")]  # with the reason
        without = [calls for operator, calls in said.items() if not operator.endswith(")")]
        if without:
            yield f"Not in mult-adds, no formula (see register_op_cost): {', '.join(without)}"
        if unclear:
            yield f"Not in mult-adds, the file does not say enough: {', '.join(unclear)}"
    notes = [f"{row.fqn or row.class_name}: {row.note}" for row in root.walk() if row.note]
    yield from notes[:_MAX_NOTES]
    if len(notes) > _MAX_NOTES:
        yield f"... and {len(notes) - _MAX_NOTES} more rows with a note"
