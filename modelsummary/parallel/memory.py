"""The memory of one rank: the plan is applied to a copy in a fake process group, and a step of it is followed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from modelsummary._torch import FakeTensorMode
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of
from modelsummary.capture.state.unchanged import unchanged
from modelsummary.errors import InputError
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.on_fakes import simulate_on_fakes
from modelsummary.memory.predict import simulate_step
from modelsummary.memory.step_plan import StageShare, StepOptions, StepPlan, step_plan
from modelsummary.parallel.applying import meshes_of, shard_module
from modelsummary.parallel.fake_world import fake_world, real_meshes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.parallel.plan import ParallelPlan

__all__ = ["memory_of_rank", "model_of_rank"]


class CrossingTensor(Protocol):
    """A tensor that crosses into a stage, as ``split`` describes it."""

    def at(self, batch_size: int | None) -> Tensor:
        """Return a tensor like it for a batch size; None: the recorded one."""


class _RankPart(NamedTuple):
    """What one rank runs, before it is sharded over the other dimensions of the mesh.

    Attributes:
        module: the model, or its stage.
        call: arguments of its forward.
        stage: what the stage runs; None for a whole model.
    """

    module: nn.Module
    call: CallArguments
    stage: StageShare | None


def memory_of_rank(
    plan: ParallelPlan, rank: int, microbatches: int | None, schedule: str, options: StepOptions
) -> MemoryEstimate:
    """Predict a step as ``ParallelPlan.memory`` says."""
    live = plan._live
    if live is None:
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
    ranks_per_stage = plan.world_size // plan.pipeline
    number, own_rank = divmod(rank, ranks_per_stage)
    part = _part(plan, number, microbatches, schedule)
    step = replace(step_plan("train", options), stage=part.stage)
    # Process groups draw from Python's random numbers.
    with (
        unchanged(modules_of(live.model), (), lazy_device=None),
        fake_world(own_rank, ranks_per_stage),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # about in-place functions on its result
        if "shard" in plan.mesh_shape:
            return _on_fakes(plan, part, step)
        twin = _copy(part.module, lambda each: torch.empty_like(each, device="meta"))
        shard_module(plan, twin, _meshes(plan))
        return simulate_step(twin, part.call, step)[0]


def _part(plan: ParallelPlan, number: int, microbatches: int | None, schedule: str) -> _RankPart:
    """Return what the ranks of a stage run."""
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        raise InputError(f"microbatches={microbatches!r}; expected an integer >= 1, or None for one per stage")
    if schedule not in ("1f1b", "gpipe"):
        raise InputError(f"schedule={schedule!r}; expected '1f1b' or 'gpipe'")
    live, stages = plan._live, plan._stages
    if plan.pipeline == 1:
        if microbatches not in (None, 1):
            raise InputError(f"microbatches={microbatches} needs a plan with stages; pass accumulates=True instead")
        return _RankPart(live.model, live.call, None)
    count = microbatches or plan.pipeline
    in_flight = count if schedule == "gpipe" else min(count, plan.pipeline - number)
    call = live.call if number == 0 else _call_of(stages.crossing[number])
    return _RankPart(stages[number], call, StageShare(count, in_flight, number == plan.pipeline - 1))


def _call_of(crossing: Iterable[CrossingTensor]) -> CallArguments:
    """Return the arguments of a stage that takes the given tensors."""
    return CallArguments(tuple(each.at(None) for each in crossing), {}, None)


def _meshes(plan: ParallelPlan) -> dict[str, DeviceMesh]:
    """Return the meshes over the ranks of one stage."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in plan.mesh_shape.items() if name != "pipeline"}
    if not sizes:
        return {}
    return meshes_of(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


@contextmanager
def model_of_rank(plan: ParallelPlan, rank: int) -> Iterator[nn.Module]:
    """Return a context with the model that one rank of a tensor-parallel plan runs, on meta, in a fake process group.

    Raises:
        InputError: there is a process group already.
    """
    live = plan._live
    with unchanged(modules_of(live.model), (), lazy_device=None), fake_world(rank, plan.world_size):
        twin = _copy(live.model, lambda each: torch.empty_like(each, device="meta"))
        shard_module(plan, twin, _meshes(plan))
        yield twin


def _on_fakes(plan: ParallelPlan, part: _RankPart, step: StepPlan) -> MemoryEstimate:
    """Return the estimate of a copy whose parameters are fake tensors on the CPU: FSDP2 refuses parameters on meta."""
    meshes = _meshes(plan)
    with FakeTensorMode(allow_non_fake_inputs=True), real_meshes():

        def fake(tensor: Tensor) -> Tensor:
            dtype = step.dtype if step.dtype is not None and tensor.is_floating_point() else tensor.dtype
            return torch.empty(tensor.shape, dtype=dtype, device="cpu", requires_grad=tensor.requires_grad)

        twin = _copy(part.module, fake, with_buffers=True)
        shard_module(plan, twin, meshes)
        args, kwargs = part.call.on_meta(fake)
        return simulate_on_fakes(twin, args, kwargs, step, torch.device("cpu"))


def _copy(model: nn.Module, like: Any, *, with_buffers: bool = False) -> nn.Module:
    """Return a copy of a model with other tensors for its parameters."""
    memo: dict[int, Any] = {id(each): like(each) if with_buffers else each for each in model.buffers()}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(like(each).detach(), requires_grad=each.requires_grad)
    return copy.deepcopy(model, memo)
