"""The same model in several forms: live, exported, scripted; what differs, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from modelsummary.capture.modules import modules_of
from modelsummary.capture.operators import Execution, Operators, Uncounted
from modelsummary.capture.run import running
from modelsummary.costs.operators import OpCost, OpRule
from modelsummary.errors import InputError
from modelsummary.files.statistics import FileStatistics
from modelsummary.statistics import ModelStatistics, as_live
from modelsummary.tables import table
from modelsummary.units import grouped

__all__ = ["Comparison", "Form", "compare"]


class Form(NamedTuple):
    """The figures of one form of a model; sizes in bytes.

    Attributes:
        operators: that read or write memory.
        activations: results of all leaf modules of a live model, of all operators of a file.
        bandwidth: what operators read and write, with no buffer on the chip.
        norms: batch normalisations among the operators.
        in_place: operators that write into their first input.
    """

    name: str
    params: int
    param_bytes: int
    macs: int
    operators: int
    activations: int
    bandwidth: int
    norms: int
    in_place: int
    is_live: bool


class Comparison:
    """Forms of a model side by side; ``print`` shows the table, and below it why the later ones differ from the first.

    Attributes:
        forms: the figures.
        reasons: one line each.
    """

    def __init__(self, forms: list[Form]) -> None:
        self.forms = forms
        self.reasons = [f"{other.name}: {reason}" for other in forms[1:] for reason in _reasons(forms[0], other)]

    def to_records(self) -> list[dict[str, Any]]:
        """One dict a form."""
        return [form._asdict() for form in self.forms]

    def __str__(self) -> str:
        headers = ["", "Params", "Params (B)", "MACs", "Operators", "Activations (B)", "Bandwidth (B)"]
        cells = [[form.name, *map(grouped, form[1:7])] for form in self.forms]
        return "\n".join([table(cells, headers, "lrrrrrr", "simple"), *self.reasons])

    __repr__ = __str__


def compare(models: Mapping[str, ModelStatistics]) -> Comparison:
    """Put forms of one model side by side.

    Args:
        models: name -> ``Statistics`` with an input, or what ``load`` gave.

    Raises:
        InputError: there are none, or one was made without an input.
    """
    if not models:
        raise InputError("there is nothing to compare")
    return Comparison([_form(name, stats) for name, stats in models.items()])


def _form(name: str, stats: ModelStatistics) -> Form:
    if stats.execution == "none":
        raise InputError(f"{name}: the size of its input is needed to compare what a forward does")
    if isinstance(stats, FileStatistics):
        ran = [each for each in stats.operations if each.executed and not each.is_free]
        counts = Counter(each.op_type for each in ran)
        in_place, bandwidth = sum(each.aliases for each in ran), stats.bandwidth().total
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


class _Counts:
    """Runs operators, and counts those that move something."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.counts: Counter[str] = Counter()
        self.in_place = 0

    def input(self, tensor: Any) -> Any:
        """An input tensor."""
        return self.execution.input(tensor)

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator."""
        out, cost = self.execution.run(func, rule, args, kwargs)
        if cost.bytes_read or cost.bytes_written:
            self.counts[rule.name] += 1
            self.in_place += 0 in rule.writes
        return out, cost


def _operators_of(stats: ModelStatistics) -> tuple[Counter[str], int]:
    """Operators of a live model that move something, and how many work in place."""
    live = as_live(stats, "comparing operators").live
    on_shapes = live.execution == "shape"
    with running(modules_of(live.model), live.call, on_shapes=on_shapes, grad=False) as (execution, args, kwargs):
        counts = _Counts(execution)
        with Operators(Uncounted(), counts):
            live.model(*args, **kwargs)
    return counts.counts, counts.in_place


def _reasons(first: Form, other: Form) -> list[str]:
    """Why figures differ; only what is known."""
    reasons = []
    folded = first.norms - other.norms
    if folded:
        how = "are in the weights and biases of the convolutions before them" if folded > 0 else "stand apart"
        reasons.append(f"{abs(folded)} batch norms {how}")
    elif first.params != other.params:
        reasons.append("parameters differ though the norms are the same: constants may be merged, or be buffers")
    if first.in_place != other.in_place:
        number = _fewer(first.in_place, other.in_place)
        reasons.append(f"{number} work in place, without storage of their own")
    if first.activations != other.activations and first.is_live != other.is_live:
        file, live = "results of all operators, views too", "results of leaf modules, without functions between them"
        reasons.append(
            f"activations are {live if other.is_live else file}; of {first.name}: {file if other.is_live else live}"
        )
    if first.macs != other.macs:
        what = f"multiply-adds differ by {grouped(other.macs - first.macs)}"
        reasons.append(f"{what}: what has no formula is below its table; for two different models use --diff")
    if first.operators != other.operators:
        reasons.append(f"{_fewer(first.operators, other.operators)} read and write memory")
    return reasons


def _fewer(before: int, after: int) -> str:
    return f"{abs(before - after)} {'fewer' if after < before else 'more'} operators"
