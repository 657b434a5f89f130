"""Time the backward of modules by the autograd nodes that their calls made.

A mark is made before each node runs, and one after the backward. The time from a mark to the next belongs to the node,
including the sums of gradients that follow. Nothing is added to the graph: in-place operations, which full backward
hooks refuse, and residual additions, which they time as zero, are timed like all other operations.
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

from modelsummary import _torch
from modelsummary.capture.clock import Clock
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.module_calls import ModuleCall
from modelsummary.capture.timer import TimedCall, TimedStep

__all__ = ["BackwardNodes", "BackwardTimer", "node_ranges"]

_LEAF = 2**63  # numbers from here on belong to nodes that add up gradients of leaves
_REENTRANT = "CheckpointFunctionBackward"


class BackwardNodes:
    """The autograd nodes of a forward, each with the call that made it; a mark is made as each one begins.

    Only nodes that the step made are marked, as they are freed with its graph. Nodes that add up gradients of leaves
    may live longer, with ``DistributedDataParallel`` forever; their time is counted for the node before them.

    Args:
        output: result of the model, or what was made of it.

    Attributes:
        unknown: calls whose backward runs out of sight, inside re-entrant activation checkpointing.
        unreached: calls with nodes that the output does not lead to; they run as part of other calls.
    """

    def __init__(
        self, root: ModuleCall, output: Any, now: Callable[[], Any], on_node: Callable[[Any], object] | None = None
    ) -> None:
        self._now = now
        # by backward and thread: call and mark of each node that begins; the call is None for nodes outside the step
        self._logs: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
        self._ends: dict[int, Any] = {}  # by backward
        self._handles: list[Any] = []
        self.ran = False
        self.unknown: set[Any] = set()
        starts, calls = node_ranges(root)
        seen_numbers: set[int] = set()
        reached: set[Any] = set()
        reentrant: list[tuple[Any, int]] = []
        pending = [tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None]
        seen: set[Any] = set()
        while pending:
            node = pending.pop()
            node_number = node._sequence_nr()
            call = calls[index] if (index := bisect_right(starts, node_number) - 1) >= 0 else None
            if node in seen or node_number >= _LEAF or call is None:
                continue
            seen.add(node)
            seen_numbers.add(node_number)
            reached.add(call)
            if on_node is not None:
                on_node(node)
            if node.name() == _REENTRANT:
                reentrant.append((call, node_number))
            next_nodes = [next_node for next_node, _ in node.next_functions if next_node is not None]
            self._handles.append(node.register_prehook(self._mark(call)))
            # next come nodes that made the model's input
            if any(next_node._sequence_nr() < starts[0] for next_node in next_nodes):
                self._handles.append(node.register_hook(self._mark(None)))
            pending.extend(next_nodes)
        for call, node_number in reentrant:  # the nodes that it made are freed by now
            inside = [child for child in call.children if child.nodes[0] == node_number + 1]
            inside = [child for child in inside if seen_numbers.isdisjoint(range(*child.nodes))]
            self.unknown.update(inner_call for child in inside for inner_call in child.walk())
        ranges = zip(calls, pairwise(starts), strict=False)
        with_nodes = {call for call, (begin, end) in ranges if call is not None and begin < end}
        self.unreached = with_nodes - reached - self.unknown

    def _mark(self, call: ModuleCall | None) -> Callable[..., None]:
        logs, ends, now = self._logs, self._ends, self._now

        def mark(*_: Any) -> None:
            backward = _torch.running_backward()
            if backward not in ends:
                ends[backward] = None
                _torch.queue_callback(lambda: ends.__setitem__(backward, now()))
                self.ran = True
            logs[backward, get_ident()] += (call, now())

        return mark

    def intervals(self) -> list[tuple[Any, Any, Any]]:
        """Return each call with the marks before and after one of its nodes, in backwards that have ended."""
        intervals = []
        for (backward, _), log in self._logs.items():
            if self._ends[backward] is not None:
                marks = [*log[1::2], self._ends[backward]]
                intervals += [
                    (call, *marks[index : index + 2]) for index, call in enumerate(log[::2]) if call is not None
                ]
        return intervals

    def detach(self) -> None:
        """Remove the marks from the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class BackwardTimer(BackwardNodes):
    """Timer of the backward of one step, whose output must have been kept and is released."""

    def __init__(self, step: TimedStep, clock: Clock) -> None:
        super().__init__(step.root(), step.output, clock.now)
        step.output = None
        self._clock = clock
        self._times: defaultdict[TimedCall, float] = defaultdict(float)

    def milliseconds(self) -> dict[TimedCall, float]:
        """Return the time of the nodes that each call made itself, in all ended backwards; wait for the device."""
        for key in [key for key in self._logs if self._ends[key[0]] is not None]:
            log = self._logs.pop(key)
            marks = [*log[1::2], self._ends[key[0]]]
            times = self._clock.milliseconds(marks)
            self._clock.release(log[1::2])
            for call, (begin, end) in zip(log[::2], pairwise(times), strict=True):
                if call is not None:
                    self._times[call] += end - begin
        return dict(self._times)


def node_ranges(root: ModuleCall) -> tuple[list[int], list[Any]]:
    """Return node numbers in order, and the innermost call from each on; None before and after the root."""
    numbers: list[int] = []
    calls: list[Any] = []
    pending: list[tuple[Any, bool]] = [(root, True)]
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
    """Return the tensors of an output that require a gradient, and tensors of ones to begin their backward with."""
    tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    return tensors, [torch.ones_like(tensor) for tensor in tensors]
