"""The memory of one rank: the plan is applied to a copy in a fake process group, and a step of it is followed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of
from modelsummary.capture.state.unchanged import unchanged
from modelsummary.capture.step_error import NeedsValuesError
from modelsummary.capture.step_plan import StageShare
from modelsummary.errors import InputError
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.predict import simulate_step, stage_actions
from modelsummary.memory.rank_step import memory_of_schedule
from modelsummary.memory.step_options import StepOptions, step_plan
from modelsummary.parallel.applying import shard_module
from modelsummary.parallel.fake_world import fake_world
from modelsummary.parallel.rank_model import copied

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.parallel.plan import ParallelPlan

__all__ = ["memory_of_rank", "sharded_model"]

_SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zb", "zbv", "dualpipev")
_TWO_PER_RANK = frozenset(_SCHEDULES) - {"gpipe", "1f1b", "zb"}  # schedules with two stages on each rank
# Schedules of torch's engine that wait for what they sent forward before the backwards. 1F1B also waits for the
# gradients that it sent. The others wait at the end of the step (torch/distributed/pipelining/schedules.py).
_WAIT_FOR_RESULTS = frozenset({"1f1b", "gpipe"})


class CrossingTensor(Protocol):
    """A tensor that crosses into a stage, as ``split`` describes it."""

    def at(self, batch_size: int | None) -> Tensor:
        """Return a tensor like it for a batch size; None: the recorded one."""


class _OwnStage(NamedTuple):
    """A stage of one rank, before it is sharded over the other dimensions of the mesh.

    Attributes:
        module: of the stage.
        call: arguments of its forward.
        share: what it runs.
    """

    module: nn.Module
    call: CallArguments
    share: StageShare


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
    _check(plan, rank, microbatches, options)
    if not isinstance(schedule, str) or schedule not in _SCHEDULES:
        schedules = ", ".join(map(repr, _SCHEDULES))
        raise InputError(f"schedule must be one of {schedules}, got {schedule!r:.80}")
    ranks_per_stage = plan.world_size // plan.pipeline
    pipeline_rank, rank_in_stage = divmod(rank, ranks_per_stage)
    step = step_plan("train", options)
    if plan.pipeline == 1:
        live = plan._live
        with _rank(plan, rank_in_stage, ranks_per_stage), _about_values(plan):
            return simulate_step(_sharded(plan, live.model, step.dtype), live.call, step)[0]
    order, stages = _stages_of_rank(
        plan, pipeline_rank, microbatches or plan.pipeline, schedule, return_outputs=return_outputs
    )
    with _rank(plan, rank_in_stage, ranks_per_stage), _about_values(plan):
        actions = [
            stage_actions(_sharded(plan, stage.module, step.dtype), stage.call, replace(step, stage=stage.share))
            for stage in stages
        ]
    return memory_of_schedule(actions, order, returns=return_outputs and stages[-1].share.is_last)


def _check(plan: ParallelPlan, rank: int, microbatches: int | None, options: StepOptions) -> None:
    if plan._live is None:
        raise InputError("memory of a plan needs the model that it was made of; make the plan in this process")
    if type(rank) is not int or not 0 <= rank < plan.world_size:
        raise InputError(f"rank={rank!r}; expected an integer from 0 to {plan.world_size - 1}")
    if "checkpoint" in options:
        raise InputError("the plan says what is checkpointed; pass checkpoint= to parallel_plan")
    if "shard" in plan.mesh_shape and torch.__version__ < "2.10":
        raise InputError(
            f"the memory of a rank with sharded parameters needs torch >= 2.10, got {torch.__version__}: FSDP of older "
            "versions does not run without data; make a plan without shard="
        )
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        raise InputError(f"microbatches={microbatches!r}; expected an integer >= 1, or None for one per stage")
    if plan.pipeline == 1 and microbatches not in (None, 1):
        raise InputError(f"microbatches={microbatches} needs a plan with stages; pass accumulates=True instead")


@contextmanager
def _rank(plan: ParallelPlan, rank: int, ranks: int) -> Iterator[None]:
    """Return a context in which this process is one rank of a fake process group, and which leaves no trace."""
    # Process groups draw from Python's random numbers.
    with (
        unchanged(modules_of(plan._live.model), (), lazy_device=None),
        fake_world(rank, ranks),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # about in-place functions on its result
        yield


@contextmanager
def _about_values(plan: ParallelPlan) -> Iterator[None]:
    """Run the body. Raise ``InputError`` if the step needs values, which the copy of a rank lacks."""
    try:
        yield
    except NeedsValuesError as error:
        where = {"step": "the optimizer", "loss": "the loss"}.get(error.phase, f"the forward of {plan.model_class}")
        remedy = "; pass another one, or measure a step of the sharded model instead"
        if error.phase not in ("step", "loss"):
            remedy = (
                ", as where each expert of a list takes the tokens that its router chose; measure a step of the "
                "sharded model instead, or let experts take all tokens"
            )
        message = f"memory of a rank is predicted on shapes, but {error.reason} in {where}{remedy}"
        raise InputError(message) from error


def _stages_of_rank(
    plan: ParallelPlan, pipeline_rank: int, microbatches: int, schedule: str, *, return_outputs: bool
) -> tuple[list[tuple[str, int]], list[_OwnStage]]:
    """Return the actions of a rank of the pipeline, and the stages that they number."""
    stages = plan._stages
    if schedule in _TWO_PER_RANK:
        stages = plan._split(2 * plan.pipeline)
    simulation = stages.predict(microbatches, schedule, seconds=[(1.0, 1.0)] * len(stages))
    actions = simulation.actions[pipeline_rank]
    indices = sorted({action.stage for action in actions})
    rank_stages = []
    for index in indices:
        kinds = "".join(action.kind for action in actions if action.stage == index)
        call = _call_of(stages.crossing[index]) if index else plan._live.call
        is_first, is_last = index == 0, index == len(stages) - 1
        share = StageShare(
            kinds,
            is_first,
            is_last,
            keeps_results=return_outputs if is_last else index + 1 not in indices and schedule not in _WAIT_FOR_RESULTS,
            keeps_gradients=not is_first and index - 1 not in indices and schedule != "1f1b",
            shares_results=index + 1 in indices,
        )
        rank_stages.append(_OwnStage(stages[index], call, share))
    return [(action.kind, indices.index(action.stage)) for action in actions], rank_stages


def _sharded(plan: ParallelPlan, module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy on meta of what a rank runs, to which the plan was applied."""

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)

    twin = copied(module, on_meta)
    shard_module(plan, twin, _mesh(plan))
    return twin


def _call_of(crossing: Iterable[CrossingTensor]) -> CallArguments:
    """Return the arguments of a stage that takes the given tensors."""
    return CallArguments(tuple(tensor.at(None) for tensor in crossing), {}, None)


def _mesh(plan: ParallelPlan) -> DeviceMesh | None:
    """Return the mesh over the ranks of one stage; None if there is one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in plan.mesh_shape.items() if name != "pipeline"}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None


@contextmanager
def sharded_model(plan: ParallelPlan, rank: int) -> Iterator[nn.Module]:
    """Return a context with the model that one rank of a tensor-parallel plan runs, on meta, in a fake process group.

    Raises:
        InputError: there is a process group already.
    """
    with _rank(plan, rank, plan.world_size):
        yield _sharded(plan, plan._live.model, None)
