"""The memory of one rank: a step of the model to which the plan was applied is followed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.step_plan import StageShare, StepPlan
from modelsummary.errors import InputError, StepError
from modelsummary.keywords import choice_of
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.predict import simulate_step, stage_actions
from modelsummary.memory.rank_step import memory_of_schedule
from modelsummary.memory.step_options import StepOptions, step_plan
from modelsummary.parallel.applied_rank import call_of_rank, check_runs, device_of_rank, rank_of, sharded_copy

if TYPE_CHECKING:
    from modelsummary.parallel.plan import ParallelPlan

__all__ = ["memory_of_rank"]

_SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zb", "zbv", "dualpipev")
_TWO_PER_RANK = frozenset(_SCHEDULES) - {"gpipe", "1f1b", "zb"}  # schedules with two stages on each rank
# Schedules of torch's engine that wait for what they sent forward before the backwards. 1F1B also waits for the
# gradients that it sent. The others wait at the end of the step (torch/distributed/pipelining/schedules.py).
_WAIT_FOR_RESULTS = frozenset({"1f1b", "gpipe"})


def memory_of_rank(
    plan: ParallelPlan,
    rank: int,
    microbatches: int | None,
    schedule: str,
    options: StepOptions,
    *,
    return_outputs: bool = False,
) -> MemoryEstimate:
    """Predict a step as ``ParallelPlan.memory`` says."""
    check_runs(plan, "memory of a plan")
    _check(plan, rank, microbatches, options)
    schedule = choice_of(schedule, _SCHEDULES, "schedule")
    step = step_plan("train", options)
    ranks_per_stage = plan.world_size // plan.pipeline
    pipeline_rank, rank_in_stage = divmod(rank, ranks_per_stage)
    in_world = rank_of(plan, rank_in_stage, ranks_per_stage, "memory of a rank")
    if plan.pipeline == 1:
        with in_world:
            estimate = _of_model(plan, replace(step, device=device_of_rank(plan) or step.device))
    else:
        n_batches = microbatches or plan.pipeline
        order, stages = _stages_of_rank(plan, pipeline_rank, n_batches, schedule, return_outputs=return_outputs)
        actions = []
        with in_world:
            for stage, call, share in stages:
                with sharded_copy(plan, stage, step.dtype) as (twin, _):
                    actions.append(stage_actions(twin, call, replace(step, stage=share)))
        estimate = memory_of_schedule(actions, order, returns=return_outputs and share.is_last)
    return replace(estimate, subject=f"{plan.model_class}, rank {rank} of {plan.world_size}")


def _of_model(plan: ParallelPlan, step: StepPlan) -> MemoryEstimate:
    """Return the memory of a step of the whole model, sharded over the ranks of the world."""
    live, call = plan._live, call_of_rank(plan)
    try:
        with sharded_copy(plan, live.model, step.dtype) as (twin, _):
            return simulate_step(twin, call, step)
    except StepError:  # a step that needs choices begins again, which FSDP refuses in the same copy
        with sharded_copy(plan, live.model, step.dtype) as (twin, _):
            return simulate_step(twin, call, step, routes_evenly=True)


def _check(plan: ParallelPlan, rank: int, microbatches: int | None, options: StepOptions) -> None:
    if type(rank) is not int or not 0 <= rank < plan.world_size:
        raise InputError(f"rank={rank!r}; expected an integer from 0 to {plan.world_size - 1}")
    if "checkpoint" in options:
        raise InputError("the plan says what is checkpointed; pass checkpoint= to parallel_plan")
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        raise InputError(f"microbatches={microbatches!r}; expected an integer >= 1, or None for one per stage")
    if plan.pipeline == 1 and microbatches not in (None, 1):
        raise InputError(f"microbatches={microbatches} needs a plan with stages; pass accumulates=True instead")


def _stages_of_rank(
    plan: ParallelPlan, pipeline_rank: int, microbatches: int, schedule: str, *, return_outputs: bool
) -> tuple[list[tuple[str, int]], list[tuple[nn.Module, CallArguments, StageShare]]]:
    """Return the actions of a rank of the pipeline, and the stages that they number.

    Of each stage, these are its module, the arguments of its forward, and what it runs.
    """
    stages = plan._stages
    if schedule in _TWO_PER_RANK:
        stages = plan._split(2 * plan.pipeline)
    simulation = stages.predict(microbatches, schedule, seconds=[(1.0, 1.0)] * len(stages))
    actions = simulation.actions[pipeline_rank]
    indices = sorted({action.stage for action in actions})
    rank_stages = []
    for index in indices:
        kinds = "".join(action.kind for action in actions if action.stage == index)
        call = plan._live.call
        if index:
            call = CallArguments(tuple(tensor.at(None) for tensor in stages.crossing[index]), {}, None)
        is_first, is_last = index == 0, index == len(stages) - 1
        share = StageShare(
            kinds,
            is_first,
            is_last,
            keeps_results=return_outputs if is_last else index + 1 not in indices and schedule not in _WAIT_FOR_RESULTS,
            keeps_gradients=not is_first and index - 1 not in indices and schedule != "1f1b",
            shares_results=index + 1 in indices,
        )
        rank_stages.append((stages[index], call, share))
    return [(action.kind, indices.index(action.stage)) for action in actions], rank_stages
