"""The memory of a rank of a pipeline: the actions of its stages in the order of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.memory.stage_actions import ActionMemory, Held, StageActions, add

__all__ = ["memory_of_schedule"]

_ACTIVATIONS, _TEMPORARY = CATEGORIES.index("activations"), CATEGORIES.index("temporary")
_ENDS = frozenset("BW")  # actions that end a backward


def memory_of_schedule(
    stages: Sequence[StageActions], order: Sequence[tuple[str, int]], *, returns: bool = False
) -> MemoryEstimate:
    """Return the memory of the rank that runs the stages.

    Args:
        stages: of the rank; the last one of the model comes last.
        order: kind of each action, and the index of its stage in ``stages``.
        returns: the last stage joins the results of all micro-batches, to return them.
    """
    run = _Run(stages)
    left = [stage.share.microbatches for stage in stages]
    for kind, index in order:
        run.do(kind, index)
        stage, share = stages[index], stages[index].share
        if kind == "F" and share.shares_results:  # they lie in the buffers of the next stage
            run.keep(-stage.result)
        if kind in "BI" and share.keeps_gradients and left[index] < share.microbatches:
            run.keep(stage.sent)  # of the last micro-batch they live on anyway
        if kind in _ENDS:
            left[index] -= 1
            run.keep(stage.result * (share.keeps_results + share.shares_results))
            if not left[index]:
                run.do("R", index)
    if returns:
        run.keep(stages[-1].result * stages[-1].share.microbatches)
    for index in range(len(stages)):
        run.do("S", index)
    return run.estimate()


class _Run:
    """A step in progress.

    Args:
        stages: of the rank.
    """

    def __init__(self, stages: Sequence[StageActions]) -> None:
        self._stages = stages
        self._held: Held = (0,) * len(CATEGORIES)
        for stage in stages:
            self._held = add(self._held, stage.before)
        self._done: dict[tuple[str, int], int] = {}  # kind and index of the stage -> actions so far
        # id of an action -> its position in the order, and the bytes before it, where these were most
        self._fullest: dict[int, tuple[int, Held, ActionMemory]] = {}
        self._position = 0
        self._activations = 0
        self._after_forward: int | None = None  # bytes before the first backward

    def do(self, kind: str, index: int) -> None:
        """Run an action of the stage with this index."""
        action = self._action(kind, index)
        if kind in "BI" and self._after_forward is None:
            self._after_forward = sum(self._held)
        fullest = self._fullest.get(id(action))
        if fullest is None or sum(self._held) > sum(fullest[1]):
            self._fullest[id(action)] = self._position, self._held, action
        self._held = add(self._held, action.after)
        self._activations = max(self._activations, self._held[_ACTIVATIONS])
        self._position += 1

    def keep(self, nbytes: int) -> None:
        """Keep bytes until the end of the step."""
        self._held = add(self._held, tuple(nbytes * (index == _TEMPORARY) for index in range(len(CATEGORIES))))

    def _action(self, kind: str, index: int) -> ActionMemory:
        """Return the memory of the next action: a forward after a backward is the last one that was tried."""
        actions = self._stages[index].actions[kind]
        done = self._done.get((kind, index), 0)
        self._done[kind, index] = done + 1
        if kind == "F":
            has_gradients = any(self._done.get((end, index)) for end in "BW")
            return actions[2] if has_gradients else actions[min(done, 1)]
        return actions[min(done, 1, len(actions) - 1)]

    def estimate(self) -> MemoryEstimate:
        """Return the figures of the step."""
        timeline: list[TimelinePoint] = []
        for _, held, action in sorted(self._fullest.values(), key=lambda entry: entry[0]):
            timeline += [point._replace(held=add(held, point.held)) for point in action.points]
        first = self._stages[0].totals
        summed = {
            name: sum(getattr(stage.totals, name) for stage in self._stages)
            for name in ("params", "buffers", "grads", "optimizer_state", "inputs")
        }
        return replace(
            first,
            **summed,
            activations=self._activations,
            held_after_forward=self._after_forward or 0,
            peak=max(point.total for point in timeline),
            timeline=timeline,
        )
