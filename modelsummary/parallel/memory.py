"""The memory of one rank: the plan is applied to a copy in a fake process group, and a step of it is followed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelsummary._torch import FakeTensorMode
from modelsummary.capture.modules import modules_of
from modelsummary.capture.state.unchanged import unchanged
from modelsummary.errors import InputError
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.on_fakes import simulate_on_fakes
from modelsummary.memory.predict import simulate_step
from modelsummary.memory.step_plan import StepOptions, StepPlan, step_plan
from modelsummary.parallel.applying import meshes_of, shard_module
from modelsummary.parallel.fake_world import fake_world, real_meshes

if TYPE_CHECKING:
    from modelsummary.parallel.plan import ParallelPlan

__all__ = ["memory_of_rank", "model_of_rank"]


def memory_of_rank(plan: ParallelPlan, rank: int, options: StepOptions) -> MemoryEstimate:
    """Predict a step as ``ParallelPlan.memory`` says."""
    live = plan._live
    if live is None:
        raise InputError("memory of a plan needs the model that it was made of; make the plan in this process")
    if type(rank) is not int or not 0 <= rank < plan.world_size:
        raise InputError(f"rank={rank!r}; expected an integer from 0 to {plan.world_size - 1}")
    if plan.pipeline > 1:
        raise InputError(
            f"pipeline={plan.pipeline}: memory() predicts a plan without stages; pass pipeline=1 to parallel_plan, or "
            "cost the stages with stats.simulate"
        )
    if "checkpoint" in options:
        raise InputError("the plan says what is checkpointed; pass checkpoint= to parallel_plan")
    if "shard" in plan.mesh_shape and torch.__version__ < "2.10":
        raise InputError(
            f"the memory of a rank with sharded parameters needs torch >= 2.10, got {torch.__version__}: FSDP of older "
            "versions does not run without data; make a plan without shard="
        )
    step = step_plan("train", options)
    # Process groups draw from Python's random numbers.
    with (
        unchanged(modules_of(live.model), (), lazy_device=None),
        fake_world(rank, plan.world_size),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # about in-place functions on its result
        if "shard" in plan.mesh_shape:
            return _on_fakes(plan, step)
        twin = _copy(live.model, lambda each: torch.empty_like(each, device="meta"))
        shard_module(plan, twin, meshes_of(plan.device_mesh("cpu")))
        return simulate_step(twin, live.call, step)[0]


@contextmanager
def model_of_rank(plan: ParallelPlan, rank: int) -> Iterator[nn.Module]:
    """Return a context with the model that one rank of a tensor-parallel plan runs, on meta, in a fake process group.

    Raises:
        InputError: there is a process group already.
    """
    live = plan._live
    with unchanged(modules_of(live.model), (), lazy_device=None), fake_world(rank, plan.world_size):
        twin = _copy(live.model, lambda each: torch.empty_like(each, device="meta"))
        shard_module(plan, twin, meshes_of(plan.device_mesh("cpu")))
        yield twin


def _on_fakes(plan: ParallelPlan, step: StepPlan) -> MemoryEstimate:
    """Return the estimate of a copy whose parameters are fake tensors on the CPU: FSDP2 refuses parameters on meta."""
    live = plan._live
    meshes = meshes_of(plan.device_mesh("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), real_meshes():

        def fake(tensor: Tensor) -> Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

        twin = _copy(live.model, fake, with_buffers=True)
        shard_module(plan, twin, meshes)
        args, kwargs = live.call.on_meta(fake)
        return simulate_on_fakes(twin, args, kwargs, step, torch.device("cpu"))


def _copy(model: nn.Module, like: Any, *, with_buffers: bool = False) -> nn.Module:
    """Return a copy of a model with other tensors for its parameters."""
    memo: dict[int, Any] = {id(each): like(each) if with_buffers else each for each in model.buffers()}
    for each in model.parameters():
        memo[id(each)] = nn.Parameter(like(each), requires_grad=each.requires_grad)
    return copy.deepcopy(model, memo)
