"""The differences between two trees, module by module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modelsummary.layer_info import LayerInfo, Sizes
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, auto_prefix, decimals, format_number, grouped, number_of, symbol
from modelsummary.views.labels import one_line, settings
from modelsummary.views.pairing import Structure, paired

__all__ = ["DiffRow", "ModelDiff", "ModuleSide", "diff_trees"]

_SIGNS = {"added": "+", "removed": "-", "changed": "~", "renamed": ">", "same": ""}
_MEASURES = {"params": "Params", "macs": "MACs", "bytes": "Bytes", "latency_ms": "Latency (ms)"}
_OPTIONAL = ("latency_ms", "bytes")  # measures for wide pages
_TOTALS = (*_MEASURES, "params_bytes", "buffer_bytes")
Number = int | float | None
Change = tuple[Number, Number, Number]  # before, after, difference


@dataclass(frozen=True)
class ModuleSide:
    """One module with all its calls, without its submodules; the figures of all modules add up to the model's.

    Attributes:
        fqn, class_name: of the module.
        parameters: shape of each parameter that the module registers itself; None while uninitialised.
        settings: the module's ``extra_repr()``; None without the live module.
        trainable: elements of its own parameters with ``requires_grad``.
        params, params_bytes, buffer_bytes: own elements and bytes; a tied tensor counts in its first module.
        macs: own multiply-adds of all calls; None without a forward.
        calls: number of calls.
        input_size, output_size: shapes in the first call; None without a forward.
        latency_ms: own time of all calls; None if it was not measured.
    """

    fqn: str
    class_name: str
    parameters: dict[str, list[int] | None]
    settings: str | None
    trainable: int
    params: int
    params_bytes: int
    buffer_bytes: int
    macs: int | None
    calls: int
    input_size: Sizes
    output_size: Sizes
    latency_ms: float | None

    @property
    def bytes(self) -> int:
        """The bytes of its own parameters and buffers."""
        return self.params_bytes + self.buffer_bytes

    @property
    def structure(self) -> Structure:
        """The class and the parameter shapes; modules with different names match if these are equal."""
        return self.class_name, str(self.parameters)


@dataclass(frozen=True)
class DiffRow:
    """A module before and after.

    Attributes:
        status: ``"same"``, ``"changed"``, ``"renamed"`` (only the name differs), ``"added"`` or ``"removed"``.
        before, after: the module in each model; None if the model does not have it.
        differs: names of the attributes that differ; latency is not compared.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> row = Statistics(nn.Linear(4, 8)).diff(Statistics(nn.Linear(4, 16))).rows[0]
    >>> row.status, row.change("params")
    ('changed', (40, 80, 40))
    """

    status: str
    before: ModuleSide | None
    after: ModuleSide | None
    differs: tuple[str, ...] = ()

    def change(self, measure: str) -> Change:
        """Return a measure before, after, and the difference; None if it is unknown or the module is missing."""
        if self.before is None:
            after = getattr(self.after, measure)
            return None, after, after
        before = getattr(self.before, measure)
        if self.after is None:
            return before, None, None if before is None else -before
        return _with_change(before, getattr(self.after, measure))

    @property
    def follows(self) -> bool:
        """Return True if the input shape differs and nothing but shapes does: other modules are the cause."""
        return "input_size" in self.differs and set(self.differs) <= {"input_size", "output_size"}


@dataclass(frozen=True, repr=False)
class ModelDiff(Printed):
    """The differences between two models, printed as a table; true if there are any.

    Attributes:
        rows: all modules, in the order of the second model; removed modules stand where they were.
        models: class names of the two models.
        totals: ``"params"``, ``"macs"``, ``"bytes"`` (``"params_bytes"`` and ``"buffer_bytes"`` together),
            ``"latency_ms"`` -> the figures of the two models and their difference; None if unknown.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> before = Statistics(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (1, 4))
    >>> after = Statistics(nn.Sequential(nn.Linear(4, 16), nn.ReLU()), (1, 4))
    >>> diff = before.diff(after)
    >>> diff.totals["params"]
    (40, 80, 40)
    >>> [(row.after.fqn, row.differs) for row in diff.rows if row.status == "changed" and not row.follows]
    [('', ('output_size',)), ('0', ('parameters', 'macs', 'output_size'))]
    """

    rows: list[DiffRow]
    models: tuple[str, str]
    totals: dict[str, Change]

    @property
    def changed(self) -> bool:
        """Return True if anything but times differs."""
        return any(row.status != "same" for row in self.rows)

    def __bool__(self) -> bool:
        return self.changed

    def to_records(self) -> list[dict[str, Any]]:
        """Return one flat dict per module, with ``<fact>_before``, ``<fact>_after`` and ``<fact>_change``."""
        return [_record(row) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as a dict that can be written as JSON."""
        totals = {
            measure: dict(zip(("before", "after", "change"), total, strict=True))
            for measure, total in self.totals.items()
        }
        before, after = self.models
        return {"before": before, "after": after, "changed": self.changed, "totals": totals, "rows": self.to_records()}

    def table(self, all: bool = False) -> str:
        """Return the modules that differ as a table of changes with totals; ``to_records`` has all figures.

        Args:
            all: also show modules that are the same, modules whose name differs only because their parent was renamed,
                and modules that differ only in input and output shapes. Default: False.
        """
        return self._report(all).text()

    def _report(self, all: bool = False) -> Report:
        shown = [row for row in self.rows if all or not (row.status == "same" or self._goes_without_saying(row))]
        measures = [name for name in _MEASURES if self._is_shown(name)]
        prefixes = {name: self._prefix(name) for name in measures}
        headers = ["", "Module", "Class", "Differs in", *(_header(name, prefixes[name]) for name in measures)]

        def cells(changes: Mapping[str, Change]) -> list[str]:
            return [_signed(name, changes[name][2], prefixes[name]) for name in measures]

        rows = [
            [
                _SIGNS[row.status],
                _both(row, lambda side: one_line(side.fqn) or "(model)"),
                _both(row, lambda side: side.class_name),
                ", ".join(_causes(row)),
                *cells({name: row.change(name) for name in measures}),
            ]
            for row in shown
        ]
        below = ["Figures are changes; in all:"]
        below += [f"{_MEASURES[name]}: {' -> '.join(_cells({name: self.totals[name]})[:2])}" for name in measures]
        below.append(self._verdict())
        totals = ["", "Total", "", "", *cells(self.totals)]
        optional = [*(_header(name, prefixes[name]) for name in _OPTIONAL if name in measures), "Class"]
        report = Report(rows, headers, f"llll{'r' * len(measures)}", sections=[below], totals=totals, optional=optional)
        return report.folded("Module")

    def _prefix(self, measure: str) -> str:
        if measure == "latency_ms":
            return ""
        return auto_prefix(max((abs(row.change(measure)[2] or 0) for row in self.rows), default=0))

    def _is_shown(self, measure: str) -> bool:
        before, after, change = self.totals[measure]
        return change is not None or (measure != "latency_ms" and (before is not None or after is not None))

    def _goes_without_saying(self, row: DiffRow) -> bool:
        """Return True if the row follows from others: its parent was renamed, or only its shapes differ."""
        if row.follows:
            return True
        if row.status != "renamed" or row.before is None or row.after is None:
            return False
        (parent, _, name), (other, _, new_name) = row.before.fqn.rpartition("."), row.after.fqn.rpartition(".")
        return bool(name) and name == new_name and (parent, other) in self._moved

    @cached_property
    def _moved(self) -> set[tuple[str, str]]:
        pairs = {(row.before.fqn, row.after.fqn) for row in self.rows if row.before and row.after}
        return {(before, after) for before, after in pairs if before != after}

    def _verdict(self) -> str:
        before, after = self.models
        counts = {status: sum(row.status == status for row in self.rows) for status in _SIGNS}
        counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        text = f"{before} -> {after}: {counted}"
        if not self.changed:
            text = f"Nothing differs: {before} and {after} have the same {number_of(counts['same'], 'module')}"
        if following := sum(row.follows for row in self.rows):
            text += f"; {following} of them only in input and output shapes"
        if self.totals["macs"][2] is None:
            text += "; MACs and shapes are not compared, as they need an input"
        blind = any(side is not None and side.settings is None for row in self.rows for side in (row.before, row.after))
        return f"{text}; settings of modules are not compared, as they need the live models" if blind else text


def diff_trees(before: LayerInfo, after: LayerInfo) -> ModelDiff:
    """Compare two trees. Facts that one side lacks, without an input or a measurement, are not compared."""
    before_sides, after_sides = _facts_of(before), _facts_of(after)
    sides = before_sides, after_sides
    pairs = paired(*({fqn: side.structure for fqn, side in facts.items()} for facts in sides))
    figures, new_figures = _figures(before), _figures(after)
    totals = {name: _with_change(figures[name], new_figures[name]) for name in _TOTALS}
    return ModelDiff(list(_rows(before_sides, after_sides, pairs)), (before.class_name, after.class_name), totals)


def _facts_of(root: LayerInfo) -> dict[str, ModuleSide]:
    calls: dict[str, list[LayerInfo]] = {}
    for row in root.walk():
        calls.setdefault(row.fqn, []).append(row)
    return {fqn: _facts(rows, root) for fqn, rows in calls.items()}


def _facts(rows: Sequence[LayerInfo], root: LayerInfo) -> ModuleSide:
    first, ran = rows[0], root.executed
    times = [row.self_latency_ms for row in rows if row.self_latency_ms is not None]
    return ModuleSide(
        fqn=first.fqn,
        class_name=first.class_name,
        parameters=dict(first.inner_layers),
        settings=settings(first),
        trainable=sum(row.self_trainable_params for row in rows),
        params=sum(row.self_params for row in rows),
        params_bytes=sum(row.self_params_bytes for row in rows),
        buffer_bytes=sum(row.self_buffer_bytes for row in rows),
        macs=sum(row.self_macs for row in rows) if ran else None,
        calls=sum(row.executed for row in rows),
        input_size=first.input_size if ran else None,
        output_size=first.output_size if ran else None,
        latency_ms=sum(times) if times else None,
    )


def _figures(root: LayerInfo) -> dict[str, Number]:
    return {
        "params": root.num_params,
        "macs": root.macs if root.executed else None,
        "bytes": root.params_bytes + root.buffer_bytes,
        "latency_ms": root.latency_ms,
        "params_bytes": root.params_bytes,
        "buffer_bytes": root.buffer_bytes,
    }


def _with_change(before: Number, after: Number) -> Change:
    return before, after, None if before is None or after is None else after - before


def _rows(
    before_sides: dict[str, ModuleSide], after_sides: dict[str, ModuleSide], pairs: dict[str, str]
) -> Iterator[DiffRow]:
    source = {after: before for before, after in pairs.items()}
    position = {fqn: index for index, fqn in enumerate(before_sides)}
    in_order, start = list(before_sides.values()), 0

    def removed(end: int) -> Iterator[DiffRow]:
        return (DiffRow("removed", row, None) for row in in_order[start:end] if row.fqn not in pairs)

    for fqn, after in after_sides.items():
        if fqn not in source:
            yield DiffRow("added", None, after)
            continue
        index = position[source[fqn]]
        yield from removed(index)
        start = max(start, index)
        yield _compared(in_order[index], after)
    yield from removed(len(in_order))


_COMPARED = ("class_name", "parameters", "buffer_bytes")
_SAID_BY_PARAMETERS = ("trainable", "params", "params_bytes")
_OF_FORWARD = ("macs", "calls", "input_size", "output_size")


def _compared(before: ModuleSide, after: ModuleSide) -> DiffRow:
    names = list(_COMPARED)
    if before.parameters == after.parameters:
        names += _SAID_BY_PARAMETERS
    if before.structure == after.structure and before.settings is not None and after.settings is not None:
        names.append("settings")
    if before.macs is not None and after.macs is not None:
        names += _OF_FORWARD
    differs = tuple(name for name in names if getattr(before, name) != getattr(after, name))
    same = "same" if before.fqn == after.fqn else "renamed"
    return DiffRow("changed" if differs else same, before, after, differs)


# --------------------------------------------------------------------------------------------- writing


def _record(row: DiffRow) -> dict[str, Any]:
    record: dict[str, Any] = {"status": row.status, "differs": list(row.differs)}
    for name in ("fqn", "class_name"):
        for side, facts in (("before", row.before), ("after", row.after)):
            record[f"{name}_{side}"] = None if facts is None else getattr(facts, name)
    for name in _TOTALS:
        record.update(zip((f"{name}_before", f"{name}_after", f"{name}_change"), row.change(name), strict=True))
    return record


def _both(row: DiffRow, text_of: Callable[[ModuleSide], str]) -> str:
    """Return a text of the module before and after; one if they are the same."""
    texts = [text_of(side) for side in (row.before, row.after) if side is not None]
    return " -> ".join(dict.fromkeys(texts))


def _header(measure: str, prefix: str) -> str:
    unit = symbol(prefix, "B" if measure == "bytes" else "")
    return f"{_MEASURES[measure]} ({unit})" if prefix else _MEASURES[measure]


def _signed(measure: str, change: Number, prefix: str) -> str:
    if change is None:
        return NOTHING
    text = decimals(change, 3) if measure == "latency_ms" else format_number(int(change), prefix)
    return f"+{text}" if change > 0 else text if change else "0"


def _causes(row: DiffRow) -> tuple[str, ...]:
    """Return what differs, without the shapes of inputs and outputs if anything else does."""
    return tuple(name for name in row.differs if name not in ("input_size", "output_size")) or row.differs


def _cells(changes: dict[str, Change]) -> list[str]:
    return [
        decimals(figure, 3) if measure == "latency_ms" else grouped(figure)
        for measure, change in changes.items()
        for figure in change
    ]
