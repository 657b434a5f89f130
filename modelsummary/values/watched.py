"""The values of watched steps as plain data: statistics by call and by parameter, and the bad values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isnan, nan, sqrt
from typing import Any

from modelsummary.errors import InputError
from modelsummary.extras import Records
from modelsummary.layer_info import CallKey
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, number_of
from modelsummary.values.origins import BadValue
from modelsummary.values.tensor_statistics import TensorStatistics

__all__ = ["CallValues", "ParameterValues", "StepValues", "Values"]

_KEPT = 16  # steps
_FIGURES = ("mean", "std", "abs_max", "zeros")
_EARLIEST = 100  # bad values that are kept of earlier steps


@dataclass
class CallValues:
    """The values of one module call.

    Attributes:
        fqn, call_index: of the call, numbered within the step.
        class_name: class of the module.
        outputs: statistics of the tensors in its result.
        gradients: of the gradients of these tensors, in the same order; None where there is none.
    """

    fqn: str
    call_index: int
    class_name: str
    outputs: list[TensorStatistics] = field(default_factory=list)
    gradients: list[TensorStatistics | None] = field(default_factory=list)

    @property
    def key(self) -> CallKey:
        """The key of the call: ``(fqn, call_index)``."""
        return self.fqn, self.call_index

    @property
    def output(self) -> TensorStatistics | None:
        """The statistics of the first tensor in the result; None without one."""
        return self.outputs[0] if self.outputs else None

    @property
    def gradient(self) -> TensorStatistics | None:
        """The statistics of the gradient of the first tensor; None without one."""
        return self.gradients[0] if self.gradients else None


@dataclass
class ParameterValues:
    """The values of one parameter at the step of the optimizer, or at the end without one.

    Attributes:
        name: of the parameter; the first of a tied one.
        weight: after the step of the optimizer; None if it has no elements that can be read.
        gradient: as the optimizer got it, after clipping; None without one.
        update_ratio: norm of the change that the optimizer made, over the norm of the weight before it: of a regular
            sample of at most 65,536 elements; NaN without an optimizer.
    """

    name: str
    weight: TensorStatistics | None = None
    gradient: TensorStatistics | None = None
    update_ratio: float = nan


@dataclass
class StepValues:
    """The values of one step: what ran up to the steps of optimizers, or one forward without gradients.

    Attributes:
        number: of the step, from 0.
        calls: in the order in which they began.
        parameters: those with a gradient, in the order of the model.
    """

    number: int
    calls: list[CallValues] = field(default_factory=list)
    parameters: list[ParameterValues] = field(default_factory=list)

    @property
    def gradient_norm(self) -> float:
        """The 2-norm of all gradients of parameters together; NaN without any, or if one is not finite."""
        gradients = [row.gradient for row in self.parameters if row.gradient is not None]
        if not gradients or not all(gradient.is_finite for gradient in gradients):
            return nan
        return sqrt(sum(gradient.norm**2 for gradient in gradients))

    def __str__(self) -> str:
        """Return one line for a log: the norm of the gradients, and the least and the largest update."""
        text = f"step {self.number}"
        if self.parameters:
            text += f"; gradient norm {_number(self.gradient_norm)} over {len(self.parameters)} parameters"
        if ratios := [row for row in self.parameters if not isnan(row.update_ratio)]:
            least, most = (kind(ratios, key=lambda row: row.update_ratio) for kind in (min, max))
            rows = (f"{_number(row.update_ratio)} ({row.name})" for row in (least, most))
            text += f"; update / weight from {' to '.join(rows)}"
        return text

    def log(self) -> dict[str, float]:
        """Return the figures of the step as a flat dict, for a logger."""
        figures: dict[str, float] = {}
        for call in self.calls:
            name = f"{call.fqn or '(model)'}{f'#{call.call_index}' if call.call_index else ''}"
            for kind, statistics in (("activations", call.output), ("gradients", call.gradient)):
                if statistics is not None:
                    figures |= {f"{kind}/{name}/{figure}": value for figure, value in _logged(statistics).items()}
        for row in self.parameters:
            for figure, statistics in (("weight_norm", row.weight), ("gradient_norm", row.gradient)):
                if statistics is not None:
                    figures[f"parameters/{row.name}/{figure}"] = statistics.norm
            if not isnan(row.update_ratio):
                figures[f"parameters/{row.name}/update_ratio"] = row.update_ratio
        if any(row.gradient is not None for row in self.parameters):
            figures["gradient_norm"] = self.gradient_norm
        return figures


def _logged(statistics: TensorStatistics) -> dict[str, float]:
    figures = {name: float(getattr(statistics, name)) for name in _FIGURES}
    return {**figures, "not_finite": float(statistics.nans + statistics.infs)}


class Values(Printed, Records):
    """The values of the steps that ran under ``Statistics.watch``, printed as a table of the latest step.

    They can be read while the steps run; an accelerator then waits for its numbers.

    Attributes:
        steps: the latest 16 steps, the oldest first.
        bad: the bad values of these steps, and the first 100 final ones of earlier steps, in the order in which they
            were made; replaced ones have ``is_final`` False.

    >>> import torch
    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with Statistics(model, (4, 2)).watch() as values:
    ...     model(torch.ones(4, 2)).sum().backward()
    >>> [call.key for call in values.calls], [row.name for row in values.parameters], values.first_bad()
    ([('', 0), ('0', 0), ('1', 0)], ['0.weight', '0.bias'], None)
    """

    def __init__(self) -> None:
        self._steps: deque[StepValues] = deque(maxlen=_KEPT)
        self._bad: list[BadValue] = []
        self._refresh: Callable[[], object] = lambda: None  # brings the current step up to date

    def __getstate__(self) -> dict[str, Any]:
        self._refresh()
        return {"_steps": self._steps, "_bad": self._bad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.__dict__.update(state)

    @property
    def steps(self) -> list[StepValues]:
        """The latest steps, the oldest first."""
        self._refresh()
        return list(self._steps)

    @property
    def bad(self) -> list[BadValue]:
        """The bad values of the latest steps, and the first 100 final ones, in the order in which they were made."""
        self._refresh()
        return list(self._bad)

    def _add_step(self, step: StepValues) -> None:
        """Add a step, or replace the latest one if it has the same number."""
        if self._steps and self._steps[-1].number == step.number:
            self._steps.pop()
        self._steps.append(step)

    def _forget(self, causes: Sequence[BadValue]) -> None:
        """Forget bad values of earlier steps, except the first final ones and all that may still become final."""
        first = self._steps[0].number if self._steps else 0
        causing = set(map(id, causes))
        final = [value for value in self._bad if value.is_final][:_EARLIEST]
        kept = causing.union(map(id, final))
        self._bad = [value for value in self._bad if value.step >= first or id(value) in kept]

    @property
    def calls(self) -> list[CallValues]:
        """The calls of the latest step that had any."""
        return next((step.calls for step in reversed(self.steps) if step.calls), [])

    @property
    def parameters(self) -> list[ParameterValues]:
        """The parameters with a gradient in the latest step that had any."""
        return next((step.parameters for step in reversed(self.steps) if step.parameters), [])

    def first_bad(self) -> BadValue | None:
        """Return the first NaN or Inf that was made from finite values; None if there is none.

        One that the forward replaced does not count, such as an infinite mask.

        Raises:
            InputError: nothing ran while values were watched.

        >>> import torch
        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> class Logs(nn.Module):
        ...     def forward(self, x):
        ...         return torch.log(x).mean()
        >>> bad = Statistics(Logs(), (3,)).values(torch.zeros(3)).first_bad()
        >>> bad.operator, bad.kind
        ('aten.log', 'inf')
        """
        if not self.steps:
            raise InputError("nothing ran while values were watched: call the model inside of `with stats.watch()`")
        return next((value for value in self.bad if value.is_final), None)

    def log(self, step: int | None = None) -> dict[str, float]:
        """Return the figures of a step as a flat dict, for the logger of TensorBoard, W&B and others.

        Args:
            step: number of a step, from 0, among the latest 16. Default: the latest.

        Raises:
            InputError: the step is not kept.

        >>> import torch
        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> model = nn.Linear(2, 3)
        >>> with Statistics(model, (4, 2)).watch() as values:
        ...     _ = model(torch.ones(4, 2))
        >>> sorted(values.log())
        ['activations/(model)/abs_max', ..., 'activations/(model)/zeros']
        """
        steps = {kept.number: kept for kept in self.steps}
        number = max(steps, default=None) if step is None else step
        if number is None:
            return {}
        if number not in steps:
            numbers = f"steps {min(steps)} to {max(steps)} are" if steps else "no step is"
            raise InputError(f"step must be the number of a step that is kept, got {step!r}; {numbers} kept")
        return steps[number].log()

    def show(self, stats: Any) -> None:
        """Write the figures of the latest calls into the rows of statistics, as columns of their table.

        >>> import torch
        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.ReLU(), (4, 2))
        >>> with stats.watch() as values:
        ...     _ = stats.live.model(torch.ones(4, 2))
        >>> values.show(stats)
        >>> stats.to_records(columns=["fqn", "output_mean", "output_zeros"])
        [{'fqn': '', 'output_mean': 1.0, 'output_zeros': 0.0}]
        """
        calls = {call.key: call for call in self.calls}
        for row in stats.root.walk():
            call = calls.get(row.key)
            figures: dict[str, float] = {}
            for tensor, statistics in () if call is None else (("output", call.output), ("gradient", call.gradient)):
                for name in (*_FIGURES, "norm", "nans", "infs") if statistics is not None else ():
                    value = float(getattr(statistics, name))
                    figures |= {} if isnan(value) else {f"{tensor}_{name}": value}
            row.values = figures

    def to_records(self) -> list[dict[str, Any]]:
        """Return one flat dict per call and per parameter of each kept step."""
        return [record for step in self.steps for record in _records(step)]

    def to_dict(self) -> dict[str, Any]:
        """Return all facts as plain data that can be written as JSON."""
        return {"bad": [value.to_dict() for value in self.bad], "rows": self.to_records()}

    def _report(self) -> Report:
        headers = ["Call", "Class", "mean", "std", "abs max", "zeros", "not finite", "grad norm", "grad abs max"]
        rows = [
            [
                f"{call.fqn or '(model)'}{f' #{call.call_index}' if call.call_index else ''}",
                call.class_name,
                *_cells(call.output),
                *([NOTHING] * 2 if call.gradient is None else [_number(call.gradient.norm), _top(call.gradient)]),
            ]
            for call in self.calls
        ]
        if not self.steps:
            return Report(rows, headers, "llrrrrrrr", below=["nothing ran"])
        bad = self.first_bad()
        below = [str(self.steps[-1])]
        below.append("all values are finite" if bad is None else f"{str(bad).splitlines()[0]}; see first_bad()")
        scaled = sum(value.loss_scale is not None for value in self.bad)
        if scaled:
            below.append(f"{number_of(scaled, 'overflow')} at the scale of GradScaler, which skips such steps; see bad")
        optional = ("zeros", "grad abs max", "std", "Class", "mean", "not finite")
        return Report(rows, headers, "llrrrrrrr", below=below, optional=optional)


def _records(step: StepValues) -> Iterator[dict[str, Any]]:
    for call in step.calls:
        for number, output in enumerate(call.outputs):
            location = {"step": step.number, "fqn": call.fqn, "call_index": call.call_index, "output": number}
            yield {**location, "kind": "activation", **output.to_dict()}
            gradient = call.gradients[number] if number < len(call.gradients) else None
            if gradient is not None:
                yield {**location, "kind": "gradient", **gradient.to_dict()}
    for row in step.parameters:
        location = {"step": step.number, "fqn": row.name, "call_index": None, "output": None}
        for kind, statistics in (("weight", row.weight), ("parameter gradient", row.gradient)):
            if statistics is not None:
                yield {**location, "kind": kind, **statistics.to_dict(), "update_ratio": row.update_ratio}


def _number(value: float) -> str:
    return NOTHING if isnan(value) else f"{value:.3g}"


def _top(statistics: TensorStatistics) -> str:
    return _number(statistics.abs_max)


def _cells(statistics: TensorStatistics | None) -> list[str]:
    if statistics is None:
        return [NOTHING] * 5
    figures = [_number(value) for value in (statistics.mean, statistics.std, statistics.abs_max)]
    zeros = f"{statistics.zeros:.0%}" if statistics.elements else NOTHING
    return [*figures, zeros, str(statistics.nans + statistics.infs or "")]
