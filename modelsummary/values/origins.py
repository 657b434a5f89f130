"""Where NaN and Inf come from: the operators that made them, in the order in which they ran.

An operator makes a bad value if its result holds NaN and no argument does, or if its result holds Inf, and neither an
argument nor a number that it was called with is infinite. Everything that follows from a bad value belongs to it.

Some are absorbed, and not final: a NaN or a negative infinity that the forward of the model makes and replaces, as
``nan_to_num`` and softmax do, so that it reaches no result of the model, no gradient, and no NaN or positive infinity
outside of the model; and what the formula of a backward makes and replaces at once, so that it reaches no gradient.
"""

from __future__ import annotations

import linecache
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from modelsummary.capture.module_calls import ModuleCall
from modelsummary.layer_info import CallKey
from modelsummary.operators.operator_calls import Line
from modelsummary.tables import Printed, Report
from modelsummary.units import NOTHING, grouped, number_of
from modelsummary.values.contents import Content, LoggedOperator, TensorContent
from modelsummary.values.tensor_statistics import TensorStatistics

__all__ = ["BadValue", "NodeMakers", "OperandValues", "bad_values"]

_UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_"  # of GradScaler: its last argument is the inverse scale


@dataclass(frozen=True)
class OperandValues:
    """The elements of a floating point tensor that an operator read or wrote.

    Attributes:
        shape, dtype: of the tensor.
        low, high: smallest and largest element of its storage; NaN if one is NaN.
        statistics: None where they are not known: of an argument that was written over, and on an accelerator.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    low: float
    high: float
    statistics: TensorStatistics | None = None

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} in [{self.low:.3g}, {self.high:.3g}]"
        if self.statistics is not None:
            figures = self.statistics
            text += f", mean {figures.mean:.3g}, std {figures.std:.3g}, {figures.zeros:.0%} zeros"
        return text


@dataclass(repr=False)
class BadValue(Printed):
    """A NaN or Inf, and the operator that made it.

    Attributes:
        kind: ``"nan"`` or ``"inf"``.
        operator: the operator, such as ``"aten.log"``; ``"AdamW.step"`` for an optimizer's step; None for a tensor that
            no operator made, such as a parameter that held it before.
        source: what such a tensor is; empty for an operator.
        key: FQN and number of the module call in which it ran, or, of a backward, whose backward it was; None outside
            of the model.
        class_name: class of this module.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        node: the autograd node of a backward, such as ``"SqrtBackward0"``.
        line: the user's line that called the operator, or whose backward it is; None where there is none.
        inputs, outputs: the floating point arguments and results.
        step: number of the step, from 0.
        takes_inf: an argument that is a number is infinite, such as the one of ``(1 - mask) * -inf``.
        spread: number of later results with NaN or Inf because of it.
        is_final: False for one that later operators absorbed, such as a mask.
        loss_scale: scale above 1 that ``GradScaler`` had when it met the value in gradients; it skips such a step and
            lowers the scale, so ``is_final`` is False unless an optimizer steps nevertheless. Else None.
    """

    kind: str
    operator: str | None
    source: str
    key: CallKey | None
    class_name: str
    phase: str
    node: str
    line: Line | None
    inputs: list[OperandValues]
    outputs: list[OperandValues]
    step: int = 0
    takes_inf: bool = False
    spread: int = 0
    is_final: bool = False
    loss_scale: float | None = None

    @property
    def code(self) -> str:
        """The text of the line; empty if it is not known."""
        return "" if self.line is None else linecache.getline(*self.line).strip()

    def __bool__(self) -> bool:
        return True

    def _report(self) -> Report:
        what = self.operator or self.source
        where = ", outside of the model"
        if self.key is not None:
            where = f" of {self.key[0] or '(model)'} ({self.class_name})"
            where += f", call {self.key[1]}" if self.key[1] else ""
        verb = "made" if self.operator is not None else "held"
        node = f" of {self.node}" if self.node else ""
        above = [
            f"{what}{node} {verb} {'NaN' if self.kind == 'nan' else 'Inf'} in the {self.phase}{where}",
            *([f"{self.line.file}:{self.line.number}: {self.code}"] if self.line is not None else []),
        ]
        operands = [("input", operand) for operand in self.inputs] + [("output", operand) for operand in self.outputs]
        rows = [[name, *_cells(operand)] for name, operand in operands]
        headers = ["", "dtype", "shape", "low", "high", "mean", "std", "zeros"]
        below = [f"step {self.step}; not finite because of it: {number_of(self.spread, 'later result')}"]
        below += ["an infinite number is among its arguments; times 0 it is NaN"] if self.takes_inf else []
        if not self.is_final and self.loss_scale is None:
            below.append("later operators replaced it: it reached no result and no gradient")
        if self.loss_scale is not None:
            scale = grouped(round(self.loss_scale))
            below.append(f"the loss was scaled by {scale}: GradScaler skips such a step and lowers the scale")
        return Report(rows, headers, "lllrrrrr", above=above, below=below)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return {
            **{name: getattr(self, name) for name in ("kind", "operator", "source", "class_name", "phase", "node")},
            "fqn": None if self.key is None else self.key[0],
            "call_index": None if self.key is None else self.key[1],
            "file": None if self.line is None else self.line.file,
            "line": None if self.line is None else self.line.number,
            "code": self.code,
            "inputs": list(map(str, self.inputs)),
            "outputs": list(map(str, self.outputs)),
            **{name: getattr(self, name) for name in ("step", "takes_inf", "spread", "is_final", "loss_scale")},
        }


def _cells(operand: OperandValues) -> list[str]:
    figures = operand.statistics
    numbers = [operand.low, operand.high, *([] if figures is None else [figures.mean, figures.std])]
    cells = [f"{number:.4g}" for number in numbers] + ([NOTHING] * 2 if figures is None else [])
    zeros = NOTHING if figures is None else f"{figures.zeros:.0%}"
    return [str(operand.dtype).removeprefix("torch."), str(list(operand.shape)), *cells, zeros]


class NodeMakers:
    """The calls and the lines whose operators made the autograd nodes of a step."""

    def __init__(self) -> None:
        self._numbers: list[int] = []  # of the next node, at each operator that may make one
        self._makers: list[tuple[ModuleCall | None, Line | None]] = []

    def resolve(self, log: Iterable[LoggedOperator], call_of: Callable[[int], ModuleCall | None]) -> None:
        """Give each operator of a backward the call and the line of the operator that made its autograd node.

        Args:
            call_of: returns the module call that made the autograd node of a number; None for a node that a backward
                made, as a re-entrant checkpoint does.
        """
        for run in log:
            if run.node >= 0:
                index = bisect_right(self._numbers, run.node)
                call, line = self._makers[index] if index < len(self._makers) else (None, None)
                run.call = run.call or call_of(run.node) or call
                run.line = run.line or line
            if run.node_number >= 0 and (not self._numbers or run.node_number >= self._numbers[-1]):
                self._numbers.append(run.node_number)
                self._makers.append((run.call, run.line))


def bad_values(
    log: Iterable[LoggedOperator], key_of: Callable[[ModuleCall], tuple[CallKey, str] | None], step: int
) -> list[BadValue]:
    """Return the bad values that the operators of a step made, in their order.

    Args:
        key_of: returns the key of a call and the class of its module.
    """
    values: list[BadValue] = []
    for run in log:
        for operand in run.writes:
            if operand.content.rest is not None and operand.content.rest.is_finite:
                operand.content.rest = None
        if not any(_kind(operand.content) for operand in run.writes):
            continue
        if run.name == _UNSCALE:
            _note_scale(run, step)
        read = [content for operand in run.reads for content in operand.content.layers() if content.bad is not None]
        reads_nan = any(operand.content.has_nan for operand in run.reads)
        reads_inf = run.takes_inf or any(operand.content.has_inf for operand in run.reads)
        first_bad: BadValue | None = None
        for operand in run.results:
            content = operand.content
            kind = _kind(content)
            if not kind:
                continue
            earlier = first_bad or _cause(kind, read)
            if earlier is not None:
                content.bad = earlier
                earlier.spread += 1
                earlier.is_final |= _gets_out(content, run, earlier)
            elif not reads_nan if kind == "nan" else not reads_inf and not reads_nan and not _is_given(run):
                first_bad = content.bad = _bad_value(kind, run, key_of, step)
                values.append(first_bad)
    return values


def _kind(content: Content) -> str:
    """Return what an operator wrote: ``"nan"``, ``"inf"`` or an empty string for finite elements."""
    if content.low != content.low:
        return "nan"
    return "inf" if content.low == -torch.inf or content.high == torch.inf else ""


def _cause(kind: str, read: Sequence[Content]) -> BadValue | None:
    """Return the bad value that a result of this kind follows from: NaN rather from NaN than from a mask."""
    alike = (content.bad for content in read if _kind(content) == kind)
    cause: BadValue | None = next(alike, read[0].bad if read else None)
    return cause


def _is_given(run: LoggedOperator) -> bool:
    """Return True for a tensor that no operator made, unless it is a parameter: masks and limits are infinite."""
    return run.is_outside and not run.name.startswith("parameter")


def _gets_out(content: Content, run: LoggedOperator, earlier: BadValue) -> bool:
    """Return True if what an operator wrote shows that a bad value was not absorbed where it was made.

    In a backward, what comes of one of the forward counts if it reaches a gradient.
    """
    if earlier.loss_scale is not None:
        return run.phase == "optimizer"
    if earlier.phase != "forward":
        return content.low != content.low or run.phase != "forward"
    return run.phase == "optimizer" or (_is_outside_of_model(run) and not content.high < torch.inf)


def _note_scale(run: LoggedOperator, step: int) -> None:
    """Note the scale at which gradients overflowed. At 1 and below, they would without a scale, too."""
    inverse = run.reads[-1].content.low
    for content in (content for operand in run.reads for content in operand.content.layers()):
        bad = content.bad
        if bad is not None and bad.phase == "backward" and bad.step == step and 0 < inverse < 1:
            bad.is_final, bad.loss_scale = False, 1 / inverse


def _is_outside_of_model(run: LoggedOperator) -> bool:
    return run.phase == "forward" and run.call is None


def _may_be_absorbed(kind: str, run: LoggedOperator) -> bool:
    """Return True for a bad value that is final only if it gets out of the place where it was made."""
    if run.phase != "forward":
        return run.phase == "backward"
    if kind == "nan":
        return not _is_outside_of_model(run) and (not run.is_outside or _is_given(run))
    return all(operand.content.high < torch.inf for operand in run.writes)  # a mask


def _bad_value(
    kind: str, run: LoggedOperator, key_of: Callable[[ModuleCall], tuple[CallKey, str] | None], step: int
) -> BadValue:
    named = None if run.call is None else key_of(run.call)
    return BadValue(
        kind=kind,
        operator=None if run.is_outside else run.name,
        source=run.name if run.is_outside else "",
        key=None if named is None else named[0],
        class_name="" if named is None else named[1],
        phase=run.phase,
        node=run.node_name,
        line=run.line,
        inputs=list(map(_values_of, run.reads)),
        outputs=list(map(_values_of, run.writes)),
        step=step,
        takes_inf=run.takes_inf,
        is_final=not _may_be_absorbed(kind, run),
    )


def _values_of(operand: TensorContent) -> OperandValues:
    return OperandValues(operand.shape, operand.dtype, *operand.content.bounds, operand.statistics)
