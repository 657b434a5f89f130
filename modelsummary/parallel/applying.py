"""Apply a plan: check the model, run the code of the plan on it, and give values to what was on meta."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from modelsummary import _torch
from modelsummary.capture.checkpoints import is_checkpointed
from modelsummary.capture.containers import map_tensors
from modelsummary.capture.materialize import checkpoint_values, is_empty, materialize
from modelsummary.errors import InputError
from modelsummary.operators.tensor_bytes import is_distributed
from modelsummary.parallel.code import parallelize
from modelsummary.parallel.rank_model import copied, on_meta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.parallel.plan import ParallelPlan

__all__ = [
    "apply_plan",
    "check_unsharded",
    "clip_gradients",
    "part_of",
    "shard_module",
    "ties_of",
]


def apply_plan(
    plan: ParallelPlan,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    checkpoint: Any = None,
    init: Callable[[nn.Module], object] | None = None,
) -> Any:
    """Shard a model as ``ParallelPlan.apply`` says."""
    _check_mesh(plan, mesh)
    if plan.context > 1 and not _torch.has_ring(mesh.device_type):
        raise InputError(
            f"context={plan.context}: torch's ring attention (context_parallel) has no ring of the attention kernel "
            f"that torch runs on {mesh.device_type!r}; it has rings of CUDA's kernels: pass a mesh of 'cuda'"
        )
    _check_model(plan, model)
    check_unsharded(model)
    has_meta = any(map(is_empty, model.modules()))
    values = checkpoint_values([model], checkpoint, init) if has_meta else None
    _check_ties(plan, model)
    _keep_whole(plan, model)
    if plan.pipeline > 1:
        stages = plan._stages
        if stages is None or stages.model is not model:
            raise InputError("a plan with stages applies only to the model it was made from; make a plan of this one")
        _check_shared(plan, stages)
        rank, group = mesh["pipeline"].get_local_rank(), mesh["pipeline"].get_group()
        device = torch.device(mesh.device_type)
        if plan.dtype is not None:
            stages = _sending(stages, plan.dtype, rank)
        stage = stages.pipeline_stage(rank, device, group, checkpoint=values, init=init)
        shard_module(plan, stage.submod, mesh)
        return stage
    shard_module(plan, model, mesh)
    if has_meta:
        materialize([model], torch.device(mesh.device_type), values, init)
    return model


def _keep_whole(plan: ParallelPlan, model: nn.Module) -> None:
    """Let a plan hold a copy of its model without data, of which figures are asked when the model is sharded."""
    if plan._live is not None and plan._live.model is model:
        with suppress(InputError):  # it cannot be copied: nor could a rank
            object.__setattr__(plan, "_live", replace(plan._live, model=copied(model, on_meta), traces={}))


@torch.no_grad()
def clip_gradients(
    plan: ParallelPlan, model: nn.Module, mesh: DeviceMesh, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip gradients as ``ParallelPlan.clip_grad_norm_`` says: torch takes the norm of one mesh's tensors alone."""
    if all(parameter.grad is None for parameter in model.parameters()):
        raise InputError(f"no parameter of {type(model).__name__} has a gradient; call clip_grad_norm_ after backward")
    lists = tuple(f"{layer.fqn}." for layer in plan.layers if layer.is_list)
    groups: dict[Any, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        key = (name.startswith(lists), getattr(parameter, "device_mesh", None))
        groups.setdefault(key, []).append(parameter)
    norms: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for (is_of_rank, _), parameters in groups.items():
        norm: Any = get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None], norm_type
        )
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norms[is_of_rank].append(norm.to(parameters[0].device))
    if norms[True]:  # every rank of "expert" holds experts of its own, or other parts of them
        group = mesh["expert"].get_group()
        experts = torch.linalg.vector_norm(torch.stack(norms[True]), norm_type)
        parts = [torch.zeros_like(experts) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, experts, group=group)
        norms[False] += parts
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms[False]), norm_type)
    for parameters in groups.values():
        clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _sending(stages: Any, dtype: torch.dtype, index: int) -> Any:
    """Return the same stages, of which stage ``index`` takes and sends floating-point tensors in a dtype."""
    sending = copy.copy(stages)
    cast = partial(_cast, dtype)
    inner = [
        [replace(value, dtype=dtype) if value.dtype.is_floating_point else value for value in crossing]
        for crossing in stages.crossing[1:-1]
    ]
    sending.crossing = [stages.crossing[0], *inner, stages.crossing[-1]]
    if index < len(stages) - 1:
        stages[index].register_forward_hook(lambda _module, _args, out: map_tensors(cast, out))
    return sending


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def shard_module(plan: ParallelPlan, module: nn.Module, mesh: DeviceMesh | None) -> None:
    """Shard a model, or a stage of it, in place.

    Raises:
        InputError: a module that the plan checkpoints is checkpointed already.
    """
    for fqn in plan.checkpoint:
        if is_checkpointed(_find(module, fqn)):
            raise InputError(f"{fqn!r} is checkpointed already")
    parallelize(part_of(plan, module) if plan.pipeline > 1 else plan, module, mesh)


def part_of(plan: ParallelPlan, stage: nn.Module, without: Sequence[str] = ()) -> ParallelPlan:
    """Return the part of a plan that a stage holds.

    Args:
        without: FQNs of modules of the stage that do not run.
    """
    left_out = tuple(f"{fqn}." for fqn in without)

    def holds(fqn: str) -> bool:
        return not f"{fqn}.".startswith(left_out) and _find(stage, fqn) is not None

    parameters = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
    units = {unit: tuple(path for fqn in unit if holds(fqn) for path in _gathering(stage, fqn)) for unit in plan.units}
    kept = [(unit, n_calls) for unit, n_calls in zip(plan.units, plan.unit_calls, strict=True) if units[unit]]
    return replace(
        plan,
        layers=tuple(layer for layer in plan.layers if holds(layer.fqn)),
        attributes=tuple(attribute for attribute in plan.attributes if holds(attribute.fqn)),
        ties=tuple(map(tuple, ties_of(stage))),
        checkpoint=tuple(fqn for fqn in plan.checkpoint if holds(fqn)),
        kept={fqn: names for fqn, names in plan.kept.items() if holds(fqn)},
        units=tuple(units[unit] for unit, _ in kept),
        unit_calls=tuple(n_calls for _, n_calls in kept),
        last_unit=units.get(plan.last_unit, ()),
        conditional=tuple(units[unit][0] for unit, _ in kept if unit[0] in plan.conditional),
        frozen=tuple(name for name in plan.frozen if name in parameters),
    )


def check_unsharded(model: nn.Module) -> None:
    """Raise ``InputError`` for a model with a parameter that is a ``DTensor``."""
    for fqn, parameter in model.named_parameters():
        if is_distributed(type(parameter)):
            raise InputError(
                f"{fqn} is sharded already (DTensor), but a plan shares out a whole model; pass the model before "
                "parallelize_module or fully_shard"
            )


def _check_mesh(plan: ParallelPlan, mesh: DeviceMesh) -> None:
    if not hasattr(mesh, "mesh_dim_names"):
        raise InputError(f"mesh must be a DeviceMesh, such as plan.device_mesh('cuda'), got {mesh!r:.80}")
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if sizes != plan.mesh_shape:
        raise InputError(
            f"the plan needs a mesh of {plan.mesh_shape}, got {sizes or tuple(mesh.shape)}; "
            f"use plan.device_mesh({mesh.device_type!r})"
        )


def _check_model(plan: ParallelPlan, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be an nn.Module, got {model!r:.80}")
    modules = dict(model.named_modules(remove_duplicate=False))
    named = [layer.fqn for layer in plan.layers] + [attribute.fqn for attribute in plan.attributes]
    named += [call.fqn for call in plan.whole_calls]
    named += [*plan.checkpoint, *plan.conditional, *chain(*plan.units)]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    missing = [name for name, _ in plan.tables if name not in buffers]
    missing += [fqn for fqn in named if fqn not in modules]
    missing += [name for name in (*plan.frozen, *chain(*plan.ties)) if name not in parameters]
    if missing:
        raise InputError(f"the plan of a {plan.model_class} names {missing[0]!r}, which this model does not have")
    for name in plan.frozen:
        if parameters[name].requires_grad:
            raise InputError(
                f"{name} takes a gradient, and took none when the plan was made, which sums no gradients for it; make "
                "the plan of the model as it is trained"
            )
    for attribute in plan.attributes:
        value = getattr(modules[attribute.fqn], attribute.name, None)
        if value != attribute.whole:
            raise InputError(
                f"{attribute.fqn}.{attribute.name} is {value!r}, the plan expects {attribute.whole}: was it applied "
                "before?"
            )


def _check_ties(plan: ParallelPlan, model: nn.Module) -> None:
    for first, *others in plan.ties:
        apart = next((name for name in others if model.get_parameter(name) is not model.get_parameter(first)), None)
        if apart is not None:
            raise InputError(
                f"{first!r} and {apart!r} are one parameter in the plan and two in this model; tie them first: "
                "module.to('meta') unties parameters"
            )


def _check_shared(plan: ParallelPlan, stages: Any) -> None:
    """Refuse a parameter of several stages that is not sharded alike in all: their gradients are summed."""
    dims = {f"{layer.fqn}.{name}": dim for layer in plan.layers for name, dim in layer.shards.items()}
    for shared in stages.shared_parameters:
        if len({dims.get(name) for name in shared.names}) > 1:
            first, other = shared.names[:2]
            raise InputError(
                f"{first!r} and {other!r} are one parameter in several stages, and are sharded along different "
                f"dimensions: {dims.get(first)} and {dims.get(other)}; use pipeline=1, or tensor=1"
            )


def _find(module: nn.Module, fqn: str) -> nn.Module | None:
    """Return a submodule; None if a stage does not hold it."""
    try:
        return module.get_submodule(fqn)
    except AttributeError:
        return None


def ties_of(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def _gathering(stage: Any, fqn: str) -> Sequence[str]:
    """Return the modules whose calls gather a unit: those inside of a module that the stage has opened.

    Empty if the stage does not hold the unit, or if calls of these modules do not use all its parameters: then the root
    gathers them.
    """
    module = _find(stage, fqn)
    if module is None:
        return ()
    paths: Sequence[str] | None = stage.calls_inside(fqn) if hasattr(stage, "calls_inside") else None
    if paths is None:
        return (fqn,)
    used = {parameter for path in paths for parameter in stage.get_submodule(path).parameters()}
    return paths if len(set(paths)) == len(paths) and used == set(module.parameters()) else ()
