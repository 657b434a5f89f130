"""One rank of a plan that was applied: its model in a fake process group, and what a step of it communicates."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.modules import modules_of
from modelsummary.capture.observe import observe
from modelsummary.capture.state.unchanged import unchanged
from modelsummary.capture.step_error import NeedsValuesError
from modelsummary.capture.step_plan import StepPlan
from modelsummary.errors import InputError
from modelsummary.operators.collective_calls import Collective, collectives_of
from modelsummary.operators.tensor_bytes import is_distributed
from modelsummary.parallel.applying import shard_module
from modelsummary.parallel.fake_world import fake_world
from modelsummary.parallel.rank_model import copied, on_meta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.parallel.plan import ParallelPlan

__all__ = ["check_runs", "communication_of", "rank_of", "sharded_copy", "sharded_model"]


def check_runs(plan: ParallelPlan, figure: str) -> None:
    """Refuse a plan of which no rank can run.

    Args:
        plan: the plan.
        figure: what is asked for, for the message.
    """
    if plan._live is None:
        raise InputError(f"{figure} needs the model that it was made of; make the plan in this process")
    if "shard" in plan.mesh_shape and torch.__version__ < "2.10":
        raise InputError(
            f"{figure} with sharded parameters needs torch >= 2.10, got {torch.__version__}: FSDP of older versions "
            "does not run without data; make a plan without shard="
        )


@contextmanager
def rank_of(plan: ParallelPlan, rank: int, ranks: int, figure: str) -> Iterator[None]:
    """Return a context in which this process is one rank of a fake process group, and which leaves no trace.

    Args:
        plan: the plan.
        rank: among the ``ranks`` of its stage.
        figure: what is asked for, for messages.

    Raises:
        InputError: the step of the body needs values, which the copy of a rank lacks.
    """
    with (
        unchanged(modules_of(plan._live.model), (), lazy_device=None),  # process groups draw Python's random numbers
        fake_world(rank, ranks),
        _loss_parallel() if plan.loss_parallel else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # about in-place functions on its result
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
            raise InputError(f"{figure} is predicted on shapes, but {error.reason} in {where}{remedy}") from error


def _loss_parallel() -> Any:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def sharded_copy(plan: ParallelPlan, module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Return a copy on meta of the model, or of a stage of it, to which the plan was applied."""
    return _applied(plan, module, dtype, _mesh(plan))


def _applied(plan: ParallelPlan, module: nn.Module, dtype: torch.dtype | None, mesh: DeviceMesh | None) -> nn.Module:
    twin = copied(module, partial(on_meta, dtype=dtype))
    shard_module(plan, twin, mesh)
    return twin


def _mesh(plan: ParallelPlan) -> DeviceMesh | None:
    """Return the mesh over the ranks of one stage; None if there is one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in plan.mesh_shape.items() if name != "pipeline"}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None


@contextmanager
def sharded_model(plan: ParallelPlan, rank: int) -> Iterator[nn.Module]:
    """Return a context with the model that one rank of a plan runs, on meta, in a fake process group."""
    with rank_of(plan, rank, plan.world_size, "the model of a rank"):
        yield sharded_copy(plan, plan._live.model, None)


# ---------------------------------------------------------------------------------------------- collectives


def communication_of(plan: ParallelPlan) -> tuple[Collective, ...]:
    """Return what the first rank communicates in a step of ``plan``, read off the trace of the step.

    Of a plan with stages, it is the step of all stages for one micro-batch.

    Raises:
        InputError, StepError: the step does not run on shapes.
    """
    check_runs(plan, "communication of a plan")
    whole = replace(plan, pipeline=1)
    live = plan._live
    step = StepPlan(
        train=any(parameter.requires_grad for parameter in live.model.parameters()),
        loss=_loss if plan.loss_parallel else None,
    )
    with rank_of(whole, 0, whole.world_size, "communication of a rank"):
        mesh = _mesh(whole)
        twin = _applied(whole, live.model, None, mesh)
        trace = observe(twin, live.call, step, storages=False, routes_evenly=True)
        names = () if mesh is None else mesh.mesh_dim_names or ()
        groups = {str(mesh.get_group(name).group_name): name for name in names} if mesh is not None else {}
    return collectives_of(trace.operators, groups)


def _loss(output: Any) -> Tensor:
    """Return the loss that a model computed, or the cross-entropy of the logits that stay sharded."""
    tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    losses = [tensor for tensor in tensors if not tensor.dim()]
    logits = [tensor for tensor in tensors if is_distributed(type(tensor)) and tensor.dim()]
    for tensor in () if losses else logits:
        labels = torch.zeros(tensor.shape[:-1].numel(), dtype=torch.long, device=tensor.device)
        losses.append(F.cross_entropy(tensor.flatten(0, -2), labels))
    first, *others = losses or [tensor.sum() for tensor in tensors] or [torch.zeros(())]
    return sum(others, first)
