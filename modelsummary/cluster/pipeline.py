"""The time of a pipeline: the schedule of its stages, simulated until it repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from modelsummary.cluster.plan import Plan
from modelsummary.errors import InputError
from modelsummary.split.schedule import IN_V, Simulation, StageLoad, order_of, simulate

__all__ = ["PipelineTime", "StageTime", "in_flight", "least_seconds", "pipeline_time", "rank_of"]


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


@dataclass(frozen=True)
class PipelineTime:
    """The time of a pipeline.

    Attributes:
        seconds: from the first forward to the end of the last backward.
        busy: seconds that each rank computes, and waits for collectives of its own.
        held: the most bytes of activations that each rank holds.
        simulation: the simulated schedule; of fewer micro-batches if it repeats itself.
    """

    seconds: float
    busy: list[float]
    held: list[float]
    simulation: Simulation


def rank_of(stage: int, plan: Plan) -> int:
    """Return the rank of the pipeline that has a stage."""
    if plan.schedule in IN_V:
        return min(stage, plan.stages - 1 - stage)
    return stage % plan.pipeline


def pipeline_time(stages: Sequence[StageTime], plan: Plan, microbatches: int) -> PipelineTime:
    """Return the time of a step's forwards and backwards.

    After a few rounds, each further round of ``plan.pipeline`` micro-batches takes the same time. So schedules of many
    micro-batches are simulated for a few rounds, and the rest is added.

    Raises:
        InputError: the schedule does not work with that many micro-batches.
    """
    p = plan.pipeline
    _check(plan, microbatches)
    loads = [
        StageLoad(each.forward, each.backward_input, each.backward_weight, each.transfer, each.held) for each in stages
    ]
    shortest = 4 * p + microbatches % p
    if plan.schedule == "gpipe" or microbatches <= shortest + p:
        found = _simulated(loads, plan, microbatches)
        return PipelineTime(found.makespan, found.busy, found.peak_activation_bytes, found)
    short, long = _simulated(loads, plan, shortest), _simulated(loads, plan, shortest + p)
    rounds = (microbatches - shortest) / p
    seconds = short.makespan + rounds * (long.makespan - short.makespan)
    busy = [each * microbatches / shortest for each in short.busy]
    return PipelineTime(seconds, busy, short.peak_activation_bytes, short)


def _check(plan: Plan, microbatches: int) -> None:
    if plan.schedule == "interleaved1f1b" and plan.pipeline > 1 and microbatches % plan.pipeline:
        raise InputError(
            f"schedule='interleaved1f1b' needs a multiple of pipeline={plan.pipeline} micro-batches, got {microbatches}"
        )


def _simulated(loads: list[StageLoad], plan: Plan, microbatches: int) -> Simulation:
    per_device = plan.virtual_stages if plan.schedule == "interleaved1f1b" else None
    return simulate(loads, microbatches, plan.schedule, stages_per_device=per_device, bandwidth=1.0)


@lru_cache(maxsize=4096)
def in_flight(schedule: str, pipeline: int, virtual_stages: int, microbatches: int, rank: int) -> Tensor:
    """Return how many micro-batches of each of its stages a rank holds, at each moment that may be its fullest.

    The result has a row per moment and a column per stage of the rank.

    >>> [in_flight("1f1b", 4, 1, 8, rank).tolist() for rank in range(4)]
    [[[4.0]], [[3.0]], [[2.0]], [[1.0]]]
    >>> in_flight("interleaved1f1b", 2, 2, 4, 0).max(0).values.tolist()
    [4.0, 2.0]
    """
    rounds = microbatches if schedule == "gpipe" else min(microbatches, 4 * pipeline + microbatches % pipeline)
    order = order_of(schedule, rank, pipeline, virtual_stages, rounds)
    stages = sorted({action.stage for action in order})
    held, found = dict.fromkeys(stages, 0), set()
    for action, after in zip(order, [*order[1:], None], strict=True):
        if action.kind in "FBW":
            held[action.stage] += 1 if action.kind == "F" else -1
        if action.kind == "F" and (after is None or after.kind != "F"):
            found.add(tuple(held.values()))
    return torch.tensor(sorted(found), dtype=torch.float64)


def least_seconds(stages: Sequence[StageTime], plan: Plan, microbatches: int) -> float:
    """Return a bound that no simulated schedule of the plan is below.

    A rank is busy with all micro-batches of its stages. Before its first forward, the stages before its first one run
    theirs; after its last backward, they run theirs.
    """
    p = plan.pipeline
    busy = [0.0] * p
    for number, each in enumerate(stages):
        busy[rank_of(number, plan)] += microbatches * (each.forward + each.backward)
    least, ahead = 0.0, 0.0
    halves = plan.schedule == "zb" or plan.schedule in IN_V
    for rank in range(p):
        least = max(least, busy[rank] + ahead)
        each = stages[rank]
        ahead += each.forward + (0.0 if halves else each.backward) + (1 if halves else 2) * each.transfer
    return least
