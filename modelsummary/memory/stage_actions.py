"""The memory of each kind of action of a stage of a pipeline, beyond what lived before it.

``rank_step`` puts the actions of a whole step together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelsummary.capture.stage_step import StageTrace
from modelsummary.capture.step_plan import StageShare
from modelsummary.capture.trace import BEFORE_THE_STEP, Trace
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.memory.timeline import Workspaces, estimate_of, timeline_of

__all__ = ["ActionMemory", "Held", "StageActions", "actions_of", "add"]

Held = tuple[int, ...]  # bytes by category, in the order of ``CATEGORIES``
_INPUTS = CATEGORIES.index("inputs")


def add(one: Held, other: Held) -> Held:
    """Return the sum by category.

    >>> add((1, 2), (10, 20))
    (11, 22)
    """
    return tuple(map(sum, zip(one, other, strict=True)))


def _less(one: Held, other: Held) -> Held:
    return tuple(nbytes - before for nbytes, before in zip(one, other, strict=True))


@dataclass(frozen=True)
class ActionMemory:
    """The bytes that one action takes beyond what lived before it.

    Attributes:
        points: while each of its operators runs.
        after: once it has ended.
    """

    points: tuple[TimelinePoint, ...]
    after: Held


@dataclass(frozen=True)
class StageActions:
    """The memory of a stage, apart from the schedule.

    Attributes:
        totals: parameters, gradients, optimizer state, and inputs of the whole step with buffers of all micro-batches.
        before: bytes that live before the step.
        actions: kind -> the actions of that kind that were tried: the first, a further one, and the last one. ``"F"``
            forward, ``"B"`` backward, or its halves ``"I"`` for inputs and ``"W"`` for weights, ``"R"`` reduction of
            the gradients that FSDP accumulated, ``"S"`` step of the optimizer.
        result: bytes of the result of one micro-batch.
        sent: bytes of the gradients of one micro-batch's inputs.
        share: what the stage runs.
    """

    totals: MemoryEstimate
    before: Held
    actions: dict[str, tuple[ActionMemory, ...]]
    result: int
    sent: int
    share: StageShare


def actions_of(trace: Trace, share: StageShare, workspaces: Workspaces | None) -> StageActions:
    """Return the memory of each kind of action of a stage."""
    assert isinstance(trace, StageTrace)
    timeline = timeline_of(trace, workspaces)
    states = [_state_at(trace, operator_index) for _, operator_index in trace.marks]
    actions: dict[str, list[ActionMemory]] = {}
    for index, (kind, end) in enumerate(trace.marks[1:]):
        begin, before = trace.marks[index][1], states[index]
        points = (point._replace(held=_less(point.held, before)) for point in timeline[begin:end])
        actions.setdefault(kind, []).append(ActionMemory(tuple(points), _less(states[index + 1], before)))
    estimate = estimate_of(trace, workspaces)
    return StageActions(
        totals=replace(estimate, inputs=estimate.inputs + trace.unfollowed),
        before=add(states[0], tuple(trace.unfollowed * (index == _INPUTS) for index in range(len(CATEGORIES)))),
        actions={kind: tuple(memories) for kind, memories in actions.items()},
        result=trace.result,
        sent=trace.sent,
        share=share,
    )


def _state_at(trace: Trace, operator_index: int) -> Held:
    """Return the bytes that live between an operator and the one before it."""
    held = [0] * len(CATEGORIES)
    for storage in trace.storages:
        was_born = storage.born < operator_index or (not operator_index and storage.kind in BEFORE_THE_STEP)
        if was_born and (storage.died is None or storage.died > operator_index):
            held[CATEGORIES.index(storage.kind)] += storage.nbytes
    return tuple(held)
