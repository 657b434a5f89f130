"""One rank of a plan that was applied: its model in a fake process group, and what a step of it communicates."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of
from modelsummary.capture.observe import observe
from modelsummary.capture.state.unchanged import unchanged
from modelsummary.capture.step_error import NeedsValuesError
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.errors import InputError, ModelSummaryError
from modelsummary.operators.collective_calls import Collective, collectives_of
from modelsummary.operators.tensor_bytes import is_distributed
from modelsummary.parallel.applying import part_of, shard_module
from modelsummary.parallel.code import share_tokens
from modelsummary.parallel.context import chunk_of, length_of
from modelsummary.parallel.equal_blocks import pass_through, repeats
from modelsummary.parallel.rank_model import copied, on_meta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.parallel.plan import ParallelPlan

__all__ = [
    "call_of_rank",
    "check_runs",
    "communication_of",
    "device_of_rank",
    "fake_world",
    "rank_of",
    "sharded_copy",
    "step_of_rank",
]


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Return a context in which this process is one rank of a fake process group.

    Collectives return at once, and give tensors of the right shape. Process groups of this process are set aside, and
    what a process group does to the traceback of an error is undone.
    """
    report_error = sys.excepthook
    with _torch.groups_set_aside():
        _torch.clear_sharding_caches()
        dist.init_process_group("fake", store=_torch.fake_store(), rank=rank, world_size=size)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="DTensor random operators")  # of torch 2.6, on the CPU
                yield
        finally:
            dist.destroy_process_group()
            sys.excepthook = report_error
            _torch.clear_sharding_caches()


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


@contextmanager
def sharded_copy(
    plan: ParallelPlan, module: nn.Module, dtype: torch.dtype | None, same: Mapping[str, str] | None = None
) -> Iterator[tuple[nn.Module, tuple[dict[str, str], dict[str, str]]]]:
    """Return a context with a copy on meta of the model, or of a stage of it, to which the plan was applied.

    Args:
        plan: the plan.
        module: the model or the stage.
        dtype: of the copy; None: as the module has it.
        same: FQN of a block that returns what it takes -> FQN of the equal one that runs.

    Yields:
        The copy, and the name of each process group -> the dimension of the mesh whose ranks it has: for what layers
        communicate, and for FSDP.
    """
    mesh, same = _mesh(plan), same or {}
    with _applying(plan):
        twin = copied(module, partial(on_meta, dtype=dtype))
        pass_through(twin, same)
        shard_module(part_of(plan, twin, list(same)) if same else plan, twin, mesh)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    groups = {str(mesh.get_group(name).group_name): name for name in names} if mesh is not None else {}
    unit_groups = dict(groups)
    for name, *others in plan.unit_dims:
        if others:
            unit_groups[_torch.flattened_group(mesh, (name, *others))] = name
    tokens = [] if plan._live is None else [torch.empty(length_of(plan._live.call), device="meta")]
    with share_tokens(plan, twin, mesh, tokens):
        yield twin, (groups, unit_groups)


def call_of_rank(plan: ParallelPlan) -> CallArguments:
    """Return the recorded call with the tokens of one rank."""
    call: CallArguments = plan._live.call
    gathered = {name for name, dim in plan.token_arguments if dim is not None}
    names = enumerate(inspect.signature(plan._live.model.forward).parameters)
    whole = gathered | {position for position, name in names if name in gathered}  # a decision may need their values
    return call if plan.context == 1 else chunk_of(call, plan.context, whole)


def device_of_rank(plan: ParallelPlan) -> torch.device | None:
    """Return the device whose kernels a rank runs; None: the model's. Torch has rings of CUDA's kernels alone."""
    return torch.device("cuda") if plan.context > 1 else None


@contextmanager
def _applying(plan: ParallelPlan) -> Iterator[None]:
    """Return a context in which what torch raises becomes an ``InputError``, such as for parameters it cannot shard."""
    try:
        yield
    except ModelSummaryError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{plan.model_class} cannot be sharded by this plan; torch says {reason:.300}") from error


def _mesh(plan: ParallelPlan) -> DeviceMesh | None:
    """Return the mesh over the ranks of one stage; None if there is one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in plan.mesh_shape.items() if name != "pipeline"}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None


# ---------------------------------------------------------------------------------------------- collectives


def communication_of(plan: ParallelPlan) -> tuple[Collective, ...]:
    """Return what the first rank communicates in a step of ``plan``, read off the trace of the step.

    Of a plan with stages, it is the step of all stages for one micro-batch.

    Raises:
        InputError, StepError: the step does not run on shapes.
    """
    check_runs(plan, "communication of a plan")
    same = _repeated_blocks(plan)
    if same:
        with suppress(ModelSummaryError):  # such as a block that does not return a tensor of the size that it takes
            trace, groups = step_of_rank(plan, device_of_rank(plan), same)
            return tuple(_repeated(collectives_of(trace.operators, *groups), same))
    trace, groups = step_of_rank(plan, device_of_rank(plan))
    return collectives_of(trace.operators, *groups)


def step_of_rank(
    plan: ParallelPlan, device: torch.device | None, same: Mapping[str, str] | None = None
) -> tuple[Trace, tuple[dict[str, str], dict[str, str]]]:
    """Return the trace of a step of the first rank, without stages, and the process groups as ``sharded_copy`` does.

    Args:
        plan: the plan; ``check_runs`` accepts it.
        device: whose kernels run; None: the model's.
        same: FQN of a block that returns what it takes -> FQN of the equal one that runs.
    """
    live = plan._live
    step = StepPlan(
        train=any(parameter.requires_grad for parameter in live.model.parameters()),
        loss=_loss if plan.loss_parallel else None,
        device=device,
    )
    whole = replace(plan, pipeline=1)
    with (
        rank_of(whole, 0, whole.world_size, "communication of a rank"),
        sharded_copy(whole, live.model, None, same) as (twin, groups),
    ):
        return observe(twin, call_of_rank(whole), step, storages=False, routes_evenly=True), groups


def _repeated_blocks(plan: ParallelPlan) -> dict[str, str]:
    """Return FQN of a block that need not run -> FQN of an equal one that the plan treats alike.

    Blocks that share a parameter are equal to no other.
    """
    blocks = list(plan._blocks or ())
    tied = [name for names in plan.ties for name in names]
    facts = []
    for position, block in enumerate(blocks):
        inside = partial(_inside, block)
        units = [
            (number - position, [*map(inside, unit)], plan.unit_calls[number], unit == plan.last_unit)
            for number, unit in enumerate(plan.units)
            if any(inside(fqn) is not None for fqn in unit)
        ]
        entries = [
            [replace(entry, fqn=path) for entry in entries if (path := inside(entry.fqn)) is not None]
            for entries in (plan.layers, plan.attributes)
        ]
        names = [
            [path for fqn in fqns if (path := inside(fqn)) is not None]
            for fqns in (plan.checkpoint, plan.conditional, plan.averaged, plan.frozen, plan.gathered_with_root)
        ]
        kept = [(path, results) for fqn, results in plan.kept.items() if (path := inside(fqn)) is not None]
        is_tied = any(inside(name) is not None for name in tied)
        facts.append((plan._blocks[block], block if is_tied else "", repr((units, entries, names, kept))))
    return {blocks[position]: blocks[other] for position, other in repeats(facts).items()}


def _inside(block: str, fqn: str) -> str | None:
    """Return the path of a module or parameter from a block that holds it; None if it does not."""
    return fqn[len(block) :] if f"{fqn}.".startswith(f"{block}.") else None


def _repeated(collectives: Iterable[Collective], same: Mapping[str, str]) -> Iterator[Collective]:
    """Yield the collectives, and the same ones for the blocks that did not run."""
    for collective in collectives:
        yield collective
        for block, other in same.items():
            path = _inside(other, collective.fqn)
            if path is not None:
                yield replace(collective, fqn=f"{block}{path}")


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
