"""The time of a pipeline: the schedule of its stages, simulated until it repeats itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from modelsummary.cluster.plan import Plan
from modelsummary.errors import InputError
from modelsummary.split.schedule import IN_V, Simulation, StageLoad, checked_per_device, order_of, simulate

__all__ = ["StageTime", "in_flight", "least_seconds", "pipeline_seconds", "rank_of", "simulation_of"]

_KINDS = "FIWB"  # forward, backward for inputs, for weights, for both


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for one micro-batch.

    Attributes:
        forward: of a forward.
        backward_input, backward_weight: of a backward, for the gradients of its input and of its weights.
        transfer: of sending its result to the next stage, or a gradient back.
        held: bytes held from the forward to the end of the backward.
    """

    forward: float
    backward_input: float
    backward_weight: float
    transfer: float = 0.0
    held: float = 0.0

    @property
    def backward(self) -> float:
        """Seconds of a whole backward."""
        return self.backward_input + self.backward_weight


class _Order(NamedTuple):
    """The actions of a schedule in an order in which each follows the actions that it waits for, whatever the times.

    Attributes:
        previous: the number of the action before it on its rank, counted from 1; 0: none.
        awaited: the number of the action of the neighbouring stage that it waits for, counted from 1; 0: none.
        work: which work it is: ``4 * stage`` plus the index of its kind in ``_KINDS``.
    """

    previous: array[int]
    awaited: array[int]
    work: array[int]


def rank_of(stage: int, plan: Plan) -> int:
    """Return the rank of the pipeline that has a stage."""
    if plan.schedule in IN_V:
        return min(stage, plan.stages - 1 - stage)
    return stage % plan.pipeline


def pipeline_seconds(stages: Sequence[StageTime], plan: Plan, microbatches: int) -> float:
    """Return the seconds of a step's forwards and backwards.

    After a few rounds, each further round of ``plan.pipeline`` micro-batches takes the same time. So schedules of many
    micro-batches are timed for a few rounds, and the rest is added.

    Raises:
        InputError: the schedule does not work with that many micro-batches.
    """
    p = plan.pipeline
    _check(plan, microbatches)
    shortest = _rounds(plan.schedule, p, microbatches)
    if microbatches <= shortest + p:
        return _makespan(stages, plan, microbatches)
    short, long = (_makespan(stages, plan, count) for count in (shortest, shortest + p))
    return short + (microbatches - shortest) / p * (long - short)


def simulation_of(stages: Sequence[StageTime], plan: Plan, microbatches: int) -> Simulation:
    """Return the simulated schedule, of fewer micro-batches if it repeats itself.

    Raises:
        InputError: the schedule does not work with that many micro-batches.
    """
    _check(plan, microbatches)
    shortest = _rounds(plan.schedule, plan.pipeline, microbatches)
    loads = [
        StageLoad(stage.forward, stage.backward_input, stage.backward_weight, stage.transfer, stage.held)
        for stage in stages
    ]
    rounds = microbatches if microbatches <= shortest + plan.pipeline else shortest
    return simulate(loads, rounds, plan.schedule, stages_per_device=_per_rank(plan), bandwidth=1.0)


def _rounds(schedule: str, pipeline: int, microbatches: int) -> int:
    """Return a number of micro-batches after which the schedule repeats itself; all of them for GPipe."""
    return microbatches if schedule == "gpipe" else min(microbatches, 4 * pipeline + microbatches % pipeline)


def _check(plan: Plan, microbatches: int) -> None:
    if plan.schedule == "interleaved1f1b" and plan.pipeline > 1 and microbatches % plan.pipeline:
        raise InputError(
            f"schedule='interleaved1f1b' needs a multiple of pipeline={plan.pipeline} micro-batches, got {microbatches}"
        )


def _per_rank(plan: Plan) -> int | None:
    return plan.virtual_stages if plan.schedule == "interleaved1f1b" else None


def _makespan(stages: Sequence[StageTime], plan: Plan, microbatches: int) -> float:
    """Return the makespan that ``simulate`` has. It keeps the ends of actions only, which is faster."""
    seconds = [
        value
        for stage in stages
        for value in (stage.forward, stage.backward_input, stage.backward_weight, stage.backward)
    ]
    delays = [0.0] * len(seconds)  # until the result of the neighbouring stage has arrived
    for index, stage in enumerate(stages[:-1]):
        delays[4 * index + 4] = delays[4 * index + 1] = delays[4 * index + 3] = stage.transfer
    ends = [0.0]
    for previous, awaited, work in zip(*_order(plan.schedule, len(stages), _per_rank(plan), microbatches), strict=True):
        free, ready = ends[previous], ends[awaited] + delays[work]
        ends.append((free if free > ready else ready) + seconds[work])
    return max(ends)


@lru_cache(maxsize=256)
def _order(schedule: str, n_stages: int, per_rank: int | None, microbatches: int) -> _Order:
    """Return an order in which the actions of a schedule can run one after the other.

    Raises:
        InputError: the schedule does not work with that many micro-batches.
    """
    n_ranks = n_stages // checked_per_device(n_stages, microbatches, schedule, per_rank)
    orders = [order_of(schedule, rank, n_ranks, n_stages // n_ranks, microbatches) for rank in range(n_ranks)]
    actions = _Order(array("i"), array("i"), array("i"))
    forwards = [0] * (n_stages * microbatches)  # number of the action by stage and micro-batch; 0: not there yet
    backwards = list(forwards)
    done, last, total = [0] * n_ranks, [0] * n_ranks, sum(map(len, orders))
    count = 0
    while count < total:
        before = count
        for rank, order in enumerate(orders):
            for position in range(done[rank], len(order)):
                kind, stage, microbatch, _, _ = order[position]
                index, awaited = stage * microbatches + microbatch, 0
                if kind == "F" and stage:
                    awaited = forwards[index - microbatches]
                    if not awaited:
                        break
                elif kind in "BI" and stage < n_stages - 1:
                    awaited = backwards[index + microbatches]
                    if not awaited:
                        break
                count += 1
                if kind != "W":
                    (forwards if kind == "F" else backwards)[index] = count
                actions.previous.append(last[rank])
                actions.awaited.append(awaited)
                actions.work.append(4 * stage + _KINDS.index(kind))
                last[rank], done[rank] = count, position + 1
        assert count > before, "the schedule deadlocks"
    return actions


def in_flight(
    schedule: str, pipeline: int, virtual_stages: int, microbatches: int, rank: int
) -> Sequence[tuple[int, ...]]:
    """Return how many micro-batches of each of its stages a rank holds, at each moment that may be its fullest.

    The result has a tuple per moment, with a number per stage of the rank.

    >>> [in_flight("1f1b", 4, 1, 8, rank) for rank in range(4)]
    [[(4,)], [(3,)], [(2,)], [(1,)]]
    >>> [max(stage) for stage in zip(*in_flight("interleaved1f1b", 2, 2, 4, 0))]
    [4, 2]
    """
    if schedule == "gpipe":
        return [(microbatches,)]
    if schedule == "zb":  # backwards of the weights are as late as the first stage's backwards in 1F1B
        return [(min(microbatches, pipeline),)]
    if virtual_stages == 1:
        return [(min(microbatches, pipeline - rank),)]
    return _fullest_moments(schedule, pipeline, virtual_stages, _rounds(schedule, pipeline, microbatches), rank)


@lru_cache(maxsize=2**14)
def _fullest_moments(
    schedule: str, pipeline: int, virtual_stages: int, microbatches: int, rank: int
) -> Sequence[tuple[int, ...]]:
    order = order_of(schedule, rank, pipeline, virtual_stages, microbatches)
    stages = sorted({action.stage for action in order})
    held, moments = dict.fromkeys(stages, 0), set()
    for action, after in zip(order, [*order[1:], None], strict=True):
        if action.kind in "FBW":
            held[action.stage] += 1 if action.kind == "F" else -1
        if action.kind == "F" and (after is None or after.kind != "F"):
            moments.add(tuple(held.values()))
    return sorted(moments)


def least_seconds(stages: Sequence[StageTime], plan: Plan, microbatches: int) -> float:
    """Return a bound that no simulated schedule of the plan is below.

    A rank is busy with all micro-batches of its stages. Before its first forward, the stages before its first one run
    theirs; after its last backward, they run theirs.
    """
    p = plan.pipeline
    busy = [0.0] * p
    for index, stage in enumerate(stages):
        busy[rank_of(index, plan)] += microbatches * (stage.forward + stage.backward)
    least, ahead = 0.0, 0.0
    halves = plan.schedule == "zb" or plan.schedule in IN_V
    for rank in range(p):
        least = max(least, busy[rank] + ahead)
        stage = stages[rank]
        ahead += stage.forward + (0.0 if halves else stage.backward) + (1 if halves else 2) * stage.transfer
    return least
