"""What operators read and write: the bounds of the elements in each storage, and a log of the operators that ran."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite, isinf, isnan, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.capture.model_lines import model_line
from modelsummary.capture.module_calls import ModuleCall
from modelsummary.capture.operator_mode import Execution
from modelsummary.operators.operator_calls import Line
from modelsummary.operators.operator_rules import NO_COST, OpCost, OpRule, tensors_in
from modelsummary.values.tensor_statistics import (
    BoundsAndSums,
    Readout,
    TensorStatistics,
    as_plain,
    bounds_and_sums_of,
    bounds_of,
    elements_of,
    is_read_in_parts,
)

__all__ = ["Content", "Contents", "LoggedOperator", "TensorContent"]

_MOST_DETAILED = 16  # operators of a step whose arguments get statistics


class Content:
    """What is known of the elements in a storage since an operator wrote it.

    Attributes:
        low, high: smallest and largest element that was written; NaN if one is NaN, or while they are not fetched.
        sums: sum of the elements and of their squares, where they were read together with the bounds.
        elements: number of elements that were written.
        rest: what the other elements of the storage held before; None if all were written.
        bad: the first value that the elements follow from and that should be finite, set by ``origins.bad_values``.
    """

    __slots__ = ("bad", "elements", "high", "low", "rest", "sums")

    def __init__(self, elements: int, rest: Content | None = None) -> None:
        self.low = self.high = nan
        self.sums: tuple[float, float] | None = None
        self.elements = elements
        self.rest = rest
        self.bad: Any = None

    def receive(self, bounds: Sequence[float]) -> None:
        """Note the bounds."""
        self.low, self.high = bounds

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest element that was written."""
        return self.low, self.high

    def layers(self) -> Iterator[Content]:
        """Yield this content and what it left of earlier ones."""
        content: Content | None = self
        while content is not None:
            yield content
            content = content.rest

    @property
    def has_nan(self) -> bool:
        """Return True if an element is NaN."""
        return any(isnan(content.low) for content in self.layers())

    @property
    def has_inf(self) -> bool:
        """Return True if an element is Inf; False if this is not known, as another one is NaN."""
        return any(isinf(content.low) or isinf(content.high) for content in self.layers())

    @property
    def is_finite(self) -> bool:
        """Return True if no element is NaN or Inf."""
        return not (self.has_nan or self.has_inf)


class TensorContent(NamedTuple):
    """A floating point tensor that an operator read or wrote."""

    content: Content
    shape: tuple[int, ...]
    dtype: torch.dtype
    statistics: TensorStatistics | None = None

    @classmethod
    def of(cls, content: Content, tensor: Tensor) -> TensorContent:
        """Return what a tensor holds."""
        return cls(content, tuple(tensor.shape), tensor.dtype)


class LoggedOperator:
    """One operator that ran, or a tensor that no operator made.

    Attributes:
        name: of the operator; of a tensor, what it is.
        call: the module call in which it ran; None outside of the model, and in a backward until it is resolved.
        node_number: number of the next autograd node when it ran; -1 where no operator makes one.
        node: number of the autograd node that ran it; -1 in a forward.
        node_name: class of this node.
        phase: ``"forward"``, ``"backward"`` or ``"optimizer"``.
        line: the user's line that called it; None where there is none.
        reads, writes: floating point arguments and results.
        takes_inf: an argument that is a number is infinite.
        is_outside: a tensor that no operator made.
        rule: the properties of the operator; None for an optimizer and a tensor.
    """

    __slots__ = (
        "call",
        "is_outside",
        "line",
        "name",
        "node",
        "node_name",
        "node_number",
        "phase",
        "reads",
        "rule",
        "takes_inf",
        "writes",
    )

    def __init__(self, name: str, call: ModuleCall | None, phase: str, line: Line | None = None) -> None:
        self.name, self.call, self.phase, self.line = name, call, phase, line
        self.node_number, self.node, self.node_name = -1, -1, ""
        self.reads: list[TensorContent] = []
        self.writes: list[TensorContent] = []
        self.takes_inf = self.is_outside = False
        self.rule: OpRule | None = None

    @property
    def results(self) -> list[TensorContent]:
        """The results that the model sees: further ones of attention are for its backward, and padded with Inf."""
        is_attention = len(self.writes) > 1 and self.rule is not None and self.rule.op_class == "attention"
        return self.writes[:1] if is_attention and self.phase == "forward" else self.writes


class Contents:
    """An execution that notes the bounds of what operators read and write.

    Args:
        running: returns the module call that runs, or None.
        name_of: returns what a tensor is that no operator made.
        is_ignored: returns True while operators are not noted; what they write is then unknown.

    Attributes:
        log: the operators that ran.
    """

    def __init__(
        self,
        readout: Readout,
        running: Callable[[], ModuleCall | None],
        name_of: Callable[[Tensor], str],
        is_ignored: Callable[[], bool] = lambda: False,
    ) -> None:
        self._readout, self._running, self._name_of, self._is_ignored = readout, running, name_of, is_ignored
        self._of: dict[int, tuple[Any, Content]] = {}  # by storage
        self._execution: Execution | None = None
        self._detailed = 0
        self.log: list[LoggedOperator] = []

    def around(self, execution: Execution) -> Contents:
        """Return the execution that runs operators by ``execution`` and notes them."""
        self._execution = execution
        return self

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator, note it, and return its result and cost."""
        if not rule.launches_kernel or self._is_ignored():
            result = self._run(func, rule, args, kwargs)
            if rule.may_write:
                for tensor in tensors_in(rule.written(args, kwargs)):
                    self._forget(tensor)
            return result
        written = list(tensors_in(rule.written(args, kwargs))) if rule.may_write else []
        reads = [self._read(tensor) for tensor in self._arguments(rule, args, kwargs) if _is_inexact(tensor)]
        out, cost = self._run(func, rule, args, kwargs)
        results = [tensor for tensor in _unique(written, tensors_in(out)) if _is_inexact(tensor)]
        operands = [operand for tensor in results if (operand := self.write(tensor)) is not None]
        if operands:
            run = self.note(rule.name, reads=[operand for operand in reads if operand is not None], writes=operands)
            run.rule = rule
            run.takes_inf = any(isinf(number) for number in _numbers_in((args, kwargs)))
            if self._detailed < _MOST_DETAILED and any(not isfinite(operand.content.high) for operand in operands):
                self._add_details(run, args, kwargs, {id(tensor) for tensor in written})
        return out, cost

    def _run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        if self._execution is None:
            return func(*args, **kwargs), NO_COST
        result: tuple[Any, OpCost] = self._execution.run(func, rule, args, kwargs)
        return result

    def note(
        self,
        name: str,
        reads: list[TensorContent],
        writes: list[TensorContent],
        phase: str = "",
    ) -> LoggedOperator:
        """Note an operator that ran, and return it."""
        node = _torch.current_node() if _torch.running_backward() != -1 else None
        phase = phase or ("backward" if node is not None else "forward")
        run = LoggedOperator(name, self._running(), phase, model_line())
        run.reads, run.writes = reads, writes
        if node is None or torch.is_grad_enabled():
            run.node_number = _torch.next_node_number()
        if node is not None:
            run.node, run.node_name = node._sequence_nr(), node.name()
        self.log.append(run)
        return run

    def _arguments(self, rule: OpRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that an operator reads, without the ones that it only writes."""
        read = {name: value for name, value in kwargs.items() if name not in rule.writes}
        return _unique(tensors_in((args[1:] if rule.overwrites else args, read)))

    def _read(self, tensor: Tensor) -> TensorContent | None:
        """Return what an operator reads; a tensor that no operator made is noted now."""
        plain = as_plain(tensor)
        if plain is None or not plain.numel():
            return None
        content = self._content(plain)
        if content is None:
            operand = self.write(tensor)
            if operand is None:
                return None
            run = self.note(self._name_of(tensor), [], [operand])
            run.is_outside = True
            return operand
        return TensorContent.of(content, tensor)

    def write(self, tensor: Tensor) -> TensorContent | None:
        """Note the elements of a tensor as they are now; return None if it has none that can be read."""
        plain = as_plain(tensor)
        if plain is None or not plain.numel():
            return None
        try:
            storage = plain.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        before = self._content(plain)
        covers_all = before is None or plain.numel() * plain.element_size() >= storage.nbytes()
        rest = None if covers_all or (before is not None and before.is_finite) else before
        content = Content(plain.numel(), rest)
        elements = elements_of(plain)
        if is_read_in_parts(elements):
            content.low, content.high, content.sums = bounds_and_sums_of(elements)
        else:
            self._readout.receive(list(bounds_of(elements)), content.receive)
        self._keep(storage, content)
        return TensorContent.of(content, tensor)

    def bounds_and_sums_of(self, plain: Tensor) -> BoundsAndSums | None:
        """Return what is known of a tensor's elements; None if it is not known of just them."""
        content = self._content(plain)
        if content is None or content.rest is not None or content.elements != plain.numel():
            return None
        return None if isnan(content.low) else BoundsAndSums(*content.bounds, content.sums)

    def content_of(self, tensor: Tensor) -> Content | None:
        """Return what is known of the elements of a tensor; None if no operator wrote or read them."""
        plain = as_plain(tensor)
        return None if plain is None else self._content(plain)

    def causes(self) -> list[Any]:
        """Return the bad values that elements follow from which an operator may still read."""
        return [layer.bad for _, content in self._of.values() for layer in content.layers() if layer.bad is not None]

    def settle(self) -> list[LoggedOperator]:
        """Return the log, and begin a new one."""
        log, self.log, self._detailed = self.log, [], 0
        return log

    def _content(self, plain: Tensor) -> Content | None:
        try:
            entry = self._of.get(plain.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # no memory of its own
            return None
        return None if entry is None else entry[1]

    def _keep(self, storage: torch.UntypedStorage, content: Content) -> None:
        key = storage._cdata
        entry = self._of.get(key)
        watched = entry[0] if entry is not None else weakref.ref(storage, lambda _: self._of.pop(key, None))
        self._of[key] = (watched, content)

    def _forget(self, tensor: Tensor) -> None:
        plain = as_plain(tensor)
        if plain is not None and self._content(plain) is not None:
            del self._of[plain.untyped_storage()._cdata]

    def _add_details(self, run: LoggedOperator, args: Any, kwargs: Any, written: set[int]) -> None:
        """Take the statistics of what an operator read, where its result is already known not to be finite.

        What it wrote over is gone.
        """
        self._detailed += 1
        statistics: dict[Content, TensorStatistics | None] = {}
        for tensor in _unique(tensors_in((args, kwargs))):
            plain = as_plain(tensor) if id(tensor) not in written and _is_inexact(tensor) else None
            content = None if plain is None else self._content(plain)
            if plain is not None and content is not None:
                statistics[content] = TensorStatistics.at_once(plain)
        run.reads = [operand._replace(statistics=statistics.get(operand.content)) for operand in run.reads]


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _unique(*iterables: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensors in iterables for tensor in tensors}.values())


def _numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers in the arguments of an operator."""
    for inner in value.values() if isinstance(value, dict) else value:
        if type(inner) is float:
            yield inner
        elif isinstance(inner, (list, tuple, dict)):
            yield from _numbers_in(inner)
