"""Compare forms of one model, such as live, exported and scripted: their figures, and why they differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from modelsummary.capture.observe import observed
from modelsummary.errors import InputError
from modelsummary.files.statistics import FileStatistics
from modelsummary.files.weights.matching import mismatches
from modelsummary.files.weights.stored import WeightStatistics
from modelsummary.memory.step_options import step_plan
from modelsummary.statistics import ModelStatistics, as_live
from modelsummary.tables import Printed, Report
from modelsummary.units import grouped

__all__ = ["Comparison", "Form", "compare"]


class Form(NamedTuple):
    """The figures of one form of a model.

    Attributes:
        operators: number of operators that read or write memory.
        activation_bytes: bytes of the results of all leaf modules of a live model, or of all operators of a file.
        bandwidth_bytes: bytes that operators read and write, with no buffer on the chip.
        norms: number of batch normalizations among the operators.
        in_place: number of operators that write into their first input.
        is_live: True for a live model, False for a file.

    Figures of a forward are None if there is none: in a file of weights, and in a model beside it that got no input.
    """

    name: str
    params: int
    param_bytes: int
    macs: int | None
    operators: int | None
    activation_bytes: int | None
    bandwidth_bytes: int | None
    norms: int
    in_place: int
    is_live: bool


class Comparison(Printed):
    """Forms of a model side by side; ``print`` shows a table, and below it why later forms differ from the first.

    Attributes:
        forms: the figures of each form.
        reasons: one line per known reason for a difference.
    """

    def __init__(self, forms: list[Form], mismatched: Sequence[str] = ()) -> None:
        self.forms = forms
        self.reasons = [f"{other.name}: {reason}" for other in forms[1:] for reason in _reasons(forms[0], other)]
        self.reasons += mismatched

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict per form."""
        return [form._asdict() for form in self.forms]

    def _report(self) -> Report:
        headers = ["", "Params", "Params (B)", "MACs", "Operators", "Activations (B)", "Bandwidth (B)"]
        cells = [[form.name, *map(grouped, form[1:7])] for form in self.forms]
        optional = ("Bandwidth (B)", "Activations (B)", "Operators", "Params (B)")
        return Report(cells, headers, "lrrrrrr", below=self.reasons, optional=optional)


def compare(models: Mapping[str, ModelStatistics]) -> Comparison:
    """Compare the figures of several forms of one model.

    Files of weights are matched with the first live model, or else with the first of them: missing tensors, names,
    shapes and dtypes.

    Args:
        models: name -> ``Statistics`` with an input, or the result of ``load``. Beside a file of weights, the input may
            be missing.

    Raises:
        InputError: ``models`` is empty, or one form was made without an input.

    >>> import modelsummary
    >>> from torch import nn
    >>> plain, normed = nn.Conv2d(3, 8, 3), nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> forms = {"plain": plain, "normed": normed}
    >>> models = {name: modelsummary.Statistics(form.eval(), (1, 3, 8, 8)) for name, form in forms.items()}
    >>> comparison = compare(models)
    >>> [form.params for form in comparison.forms]
    [224, 240]
    >>> comparison.reasons[0]
    'normed: 1 batch norms are operators of their own'
    """
    wrong: list[object] = [models]
    if isinstance(models, Mapping):
        wrong = [value for value in models.values() if not isinstance(value, ModelStatistics)]
    if wrong:
        raise InputError(
            f"models must be a dict of names and Statistics, or results of load, got {type(wrong[0]).__name__}; pass "
            '{"live": Statistics(model, input_data), "file": load(path)}'
        )
    if not models:
        raise InputError("models must hold at least one model to compare, got none")
    weights = {name: stats for name, stats in models.items() if isinstance(stats, WeightStatistics)}
    live = next((stats.root.module for stats in models.values() if stats.root.module is not None), None)
    reference = "the model" if live is not None else next(iter(weights), "")
    differences = {
        name: mismatches(stats, weights[reference] if live is None else live, reference)
        for name, stats in weights.items()
        if name != reference
    }
    forms = [_form(name, stats, needs_forward=not weights) for name, stats in models.items()]
    return Comparison(forms, [f"{name}: {line}" for name, lines in differences.items() for line in lines])


def _form(name: str, stats: ModelStatistics, *, needs_forward: bool) -> Form:
    if stats.execution == "none":
        if needs_forward:
            raise InputError(f"{name} was made without an input; pass the size of its input to compare forwards")
        is_live = not isinstance(stats, FileStatistics)
        return Form(name, stats.total_params, stats.total_param_bytes, None, None, None, None, 0, 0, is_live)
    if isinstance(stats, FileStatistics):
        ran = [operation for operation in stats.operations if operation.executed and not operation.is_free]
        counts = Counter(operation.op_type for operation in ran)
        in_place, bandwidth = sum(operation.aliases for operation in ran), stats.bandwidth().total
    else:
        counts, in_place = _operators_of(stats)
        bandwidth = stats.root.bytes_read + stats.root.bytes_written
    norms = sum(count for op, count in counts.items() if "batch_norm" in op or op == "BatchNormalization")
    return Form(
        name,
        stats.total_params,
        stats.total_param_bytes,
        stats.total_mult_adds,
        counts.total(),
        stats.total_output_bytes,
        bandwidth,
        norms,
        in_place,
        not isinstance(stats, FileStatistics),
    )


def _operators_of(stats: ModelStatistics) -> tuple[Counter[str], int]:
    """Return how often a live model runs each operator that moves data, and how many of them work in place."""
    live = as_live(stats, "comparing operators").live
    trace = observed(live, step_plan("inference", {"workspaces": False}))
    calls = [operator.run.call for operator in trace.operators]
    moving = [call for call in calls if call.cost.bytes_read or call.cost.bytes_written]
    return Counter(call.name for call in moving), sum(0 in call.rule.writes for call in moving)


def _reasons(first: Form, other: Form) -> list[str]:
    """Return the known reasons why the figures differ."""
    if first.macs is None or other.macs is None:
        return []
    reasons = []
    fewer_norms = first.norms - other.norms
    more_params = grouped(other.params - first.params)
    if fewer_norms < 0:
        reasons.append(f"{-fewer_norms} batch norms are operators of their own")
    elif fewer_norms and other.params < first.params:
        reasons.append(f"{fewer_norms} batch norms are in the weights and biases of layers next to them")
    elif fewer_norms:
        reasons.append(f"{fewer_norms} batch norms are written as other operators")
    elif first.params != other.params:
        reasons.append(f"parameters differ by {more_params}: constants may be merged or added, or be buffers")
    elif first.param_bytes != other.param_bytes:
        reasons.append(f"parameters have other dtypes: {grouped(other.param_bytes)} bytes, not {first.param_bytes:,}")
    if other.in_place < first.in_place:
        fewer = first.in_place - other.in_place
        reasons.append(f"{fewer} operators that work in place in {first.name} have results of their own")
    elif other.in_place > first.in_place:
        reasons.append(f"{_fewer(first.in_place, other.in_place)} work in place and need no storage of their own")
    if first.activation_bytes != other.activation_bytes and first.is_live != other.is_live:
        file, live = "results of all operators, views too", "results of leaf modules, without functions between them"
        reasons.append(
            f"activations are {live if other.is_live else file}; of {first.name}: {file if other.is_live else live}"
        )
    if first.macs != other.macs:
        what = f"multiply-adds differ by {grouped(other.macs - first.macs)}"
        reasons.append(f"{what}: operators without a formula are below each table; --diff compares models")
    if first.operators != other.operators:
        reasons.append(f"{_fewer(first.operators, other.operators)} read and write memory")
    return reasons


def _fewer(before: int | None, after: int | None) -> str:
    before, after = before or 0, after or 0
    return f"{abs(before - after)} {'fewer' if after < before else 'more'} operators"
