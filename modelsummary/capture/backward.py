"""Time the backward of modules by the autograd nodes that their calls made.

A mark is made before each node runs; the time until the next mark in the same thread is the node's, with the sums of
gradients that follow from it. Nothing is added to the graph, so in-place operations, which full backward hooks refuse,
and residual additions, which they read as zero, are timed like all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from modelsummary.capture.clock import Clock
from modelsummary.capture.structure import tensors_of
from modelsummary.capture.timer import Step, TimedCall

__all__ = ["BackwardTimer"]

_LEAF = 2**63  # numbers from here on are those of nodes that add up gradients of leaves
_REENTRANT = "CheckpointFunctionBackward"


class BackwardTimer:
    """Times the backward of one step, whose output must have been kept.

    Attributes:
        unknown: calls whose backward runs out of sight, inside of re-entrant activation checkpointing.
    """

    def __init__(self, step: Step, clock: Clock) -> None:
        self._clock = clock
        self._logs: defaultdict[int, list[Any]] = defaultdict(list)  # by thread: call (None: an end), mark
        self._handles: list[Any] = []
        self.unknown: set[TimedCall] = set()
        numbers, calls = _ranges(step.root())
        reentrant: set[TimedCall] = set()

        def maker(number: int) -> TimedCall | None:
            place = bisect_right(numbers, number) - 1
            return calls[place] if place >= 0 else None

        pending: list[tuple[Any, TimedCall | None]] = [
            (tensor.grad_fn, None) for tensor in tensors_of(step.output) if tensor.grad_fn is not None
        ]
        seen: set[Any] = set()
        while pending:
            node, user = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            call = user if number >= _LEAF else maker(number)
            if node.name() == _REENTRANT and call is not None:
                reentrant.add(call)
            self._handles.append(node.register_prehook(self._mark(call)))
            inner = [each for each, _ in node.next_functions if each is not None] if call is not None else []
            if not inner:  # it may be the last to run
                self._handles.append(node.register_hook(self._mark(None)))
            pending.extend((each, call) for each in inner)
        step.output = None
        for call in reentrant:
            self.unknown.update(each for child in call.children for each in child.walk())

    def _mark(self, call: TimedCall | None) -> Callable[..., None]:
        logs, now = self._logs, self._clock.now

        def mark(*_: Any) -> None:
            log = logs[get_ident()]
            log += (call, now())

        return mark

    @property
    def ran(self) -> bool:
        """A backward ran."""
        return bool(self._logs)

    def milliseconds(self) -> dict[TimedCall, float]:
        """Time of the nodes that each call made itself; waits for the device."""
        found: defaultdict[TimedCall, float] = defaultdict(float)
        for log in self._logs.values():
            calls, marks = log[::2], log[1::2]
            times = self._clock.milliseconds(marks)
            self._clock.release(marks)
            for call, (begin, end) in zip(calls, pairwise(times), strict=False):  # the last mark ends the last node
                if call is not None:
                    found[call] += end - begin
        self._logs.clear()
        return dict(found)

    def detach(self) -> None:
        """Take the marks off the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _ranges(root: TimedCall) -> tuple[list[int], list[TimedCall | None]]:
    """From which node number on which call is the innermost; a node from before or after the root has none."""
    numbers: list[int] = []
    calls: list[TimedCall | None] = []
    pending: list[tuple[TimedCall, bool]] = [(root, True)]
    while pending:
        call, begins = pending.pop()
        numbers.append(call.nodes[0] if begins else call.nodes[1])
        if begins:
            calls.append(call)
            pending.append((call, False))
            pending.extend((child, True) for child in reversed(call.children))
        else:
            calls.append(call.parent)
    return numbers, calls


def gradients_of(output: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of an output that have a gradient, and ones to begin their backward with."""
    tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    return tensors, [torch.ones_like(tensor) for tensor in tensors]
