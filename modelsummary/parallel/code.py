"""A plan as Python code that uses torch alone, which is also what ``ParallelPlan.apply`` runs."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelsummary import _torch
from modelsummary.capture.checkpoints import checkpoint_options, keeping
from modelsummary.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.parallel.plan import LayerPlan, ParallelPlan

__all__ = ["casts", "parallelize", "share_tokens", "to_code"]


# Styles of this package, and the functions that they share; each comes after the ones that its source names.
_OWN_STYLES = """
replace_forward changed_leaves CopyOutput LocalParallel AttentionParallel SizesOfRank LocalSizes Families ExpertShards
ExpertParallel ExpertDispatch LinearParallel ExpertListParallel ExpertListDispatch ReduceGradient ReplicateParallel
AverageParallel WholeCalls TokensOfRank
""".split()
_IMPORTS = {  # line -> the names that it gives to the source of these styles
    "from collections import Counter": ("Counter",),
    "from collections.abc import Iterable": ("Iterable",),
    "import inspect": ("inspect",),
    "import math": ("math",),
    "from contextlib import contextmanager": ("contextmanager",),
    "from functools import partial": ("partial",),
    "from functools import wraps": ("wraps",),
    "from types import MethodType": ("MethodType",),
    "from typing import Any": ("Any",),
    "import torch": ("torch",),
    _torch.COLLECTIVES: ("all_gather_single", "all_reduce"),
    "import torch.nn.functional as F": ("F",),
    "from torch import nn": ("nn",),
    _torch.ALL_TO_ALL: ("all_to_all_single_autograd",),
    "from torch.overrides import TorchFunctionMode": ("TorchFunctionMode",),
    "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts": ("CheckpointPolicy",),
    "from torch.utils.weak import WeakTensorKeyDictionary": ("WeakTensorKeyDictionary",),
    _torch.RUNNING_BACKWARD: ("running_backward",),
    _torch.TREES: ("tree_leaves", "tree_map"),
}
_NUMBER = "-?(0|[1-9][0-9]{0,8})"
_PLACEMENT = re.compile(rf"Replicate\(\)|Shard\({_NUMBER}\)|_StridedShard\({_NUMBER}, split_factor={_NUMBER}\)")
_OF_TENSOR = frozenset({"DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"})


def to_code(plan: ParallelPlan) -> str:
    """Return a module with ``make_mesh(device_type)`` and ``parallelize(model, mesh)``, and ``share_tokens`` if needed.

    Raises:
        InputError: the plan has stages, which torch alone cannot build.
    """
    if plan.pipeline > 1:
        raise InputError("a plan with stages cannot be written as code; use plan.apply, or Stages.pipeline_stage")
    return _module(plan, _own_sources(plan))


def parallelize(plan: ParallelPlan, model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Shard a model in place: run the code of a plan.

    Args:
        plan: the plan, which names only what the model has.
        model: the model, or a stage of it.
        mesh: of the plan; None if no dimension of it is sharded.
    """
    _functions(plan)["parallelize"](model, mesh)


def share_tokens(
    plan: ParallelPlan, model: nn.Module, mesh: DeviceMesh | None, tensors: Sequence[Tensor]
) -> AbstractContextManager[Sequence[Tensor]]:
    """Return the context of ``ParallelPlan.context_parallel``, which the code of a plan makes."""
    if plan.context == 1:
        return nullcontext(tensors)
    context: AbstractContextManager[Sequence[Tensor]] = _functions(plan)["share_tokens"](model, mesh, *tensors)
    return context


def _functions(plan: ParallelPlan) -> dict[str, Any]:
    """Run the code of a plan, and return its functions by name."""
    from torch.distributed.fsdp import FSDPModule

    from modelsummary.parallel import styles

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # of torch 2.13
        plan = replace(plan, conditional=())
    namespace: dict[str, Any] = {"keeping": keeping, **{style: getattr(styles, style) for style in _OWN_STYLES}}
    source, name = _module(plan, {}), f"<plan of {plan.model_class}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # tracebacks show its lines
    exec(compile(source, name, "exec"), namespace)
    return namespace


def _module(plan: ParallelPlan, sources: Mapping[str, str]) -> str:
    """Return the module that a plan is.

    Args:
        sources: of styles that torch lacks, by their names.
    """
    lines = [
        repr(f"Parallelize {plan.model_class} over {plan.world_size} ranks."),
        "",
        *_imports(plan, sources),
        "",
        "",
        *(line for source in sources.values() for line in (source, "")),
        "def make_mesh(device_type):",
        f"    return init_device_mesh(device_type, {tuple(plan.mesh_shape.values())!r}, "
        f"mesh_dim_names={tuple(plan.mesh_shape)!r})",
        "",
        "",
        "def parallelize(model, mesh):",
        *(f"    {line}" for line in casts(plan)),
        *(
            ["    # Run loss and backward under torch.distributed.tensor.parallel.loss_parallel()."]
            * plan.loss_parallel
        ),
        *(f"    {line}" if line else "" for line in _body(plan)),
        "    return model",
        "",
        *(_sharing(plan) if plan.context > 1 else ()),
    ]
    return "\n".join(lines)


def _imports(plan: ParallelPlan, sources: Mapping[str, str]) -> Iterator[str]:
    used = set().union(*map(_names_in, sources.values()))
    used |= {"torch"} if plan.precision or plan.parameter_dtypes or plan.context > 1 else set()
    used |= {"partial"} if plan.checkpoint else set()
    used |= {"contextmanager"} if plan.context > 1 else set()
    yield from (line for line, names in _IMPORTS.items() if used.intersection(names))
    if plan.checkpoint:
        yield "from torch.utils.checkpoint import checkpoint"
    if plan.context > 1:
        yield _torch.CONTEXT_PARALLEL
        yield from [] if plan.is_causal else [_torch.RING_OPTIONS]
    joins = _joins_ranks(plan) and len(plan.unit_dims) > 1
    yield f"from torch.distributed.device_mesh import {'DeviceMesh, ' if joins else ''}init_device_mesh"
    if "shard" in plan.mesh_shape:
        names = ["fully_shard"]
        names += ["MixedPrecisionPolicy"] if plan.precision else []
        names += ["CPUOffloadPolicy"] if plan.offload else []
        yield f"from torch.distributed.fsdp import {', '.join(sorted(names))}"
    if plan.tensor > 1 or plan.expert > 1 or plan.averaged:
        placements = {name for layer in plan.layers for name in _placements(layer.options)}
        names = sorted((placements | used & _OF_TENSOR) - {"_StridedShard"})
        if names:
            yield f"from torch.distributed.tensor import {', '.join(names)}"
        if "_StridedShard" in placements:  # torch exports it under this private name alone
            yield _torch.STRIDED_SHARD
        if sources:
            yield "from torch.distributed.tensor.parallel import ParallelStyle"
        named = sorted({layer.style for layer in plan.layers}.difference(_OWN_STYLES))
        yield f"from torch.distributed.tensor.parallel import {', '.join([*named, 'parallelize_module'])}"


def _own_sources(plan: ParallelPlan) -> dict[str, str]:
    """Return the styles of a plan that torch lacks and their source, with the styles that it names before it."""
    from modelsummary.parallel import styles

    used = {layer.style for layer in plan.layers}
    used |= {"ReplicateParallel"} if _replicating_mesh(plan) else set()
    used |= {"AverageParallel"} if plan.averaged else set()
    used |= {"TokensOfRank"} if plan.context > 1 else set()
    sources = {}
    if plan.kept:
        sources["keeping"] = inspect.getsource(keeping)
    for style in reversed(_OWN_STYLES):
        if style in used:
            sources[style] = inspect.getsource(getattr(styles, style))
            used |= _names_in(sources[style])
    return dict(reversed(sources.items()))


def _names_in(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def casts(plan: ParallelPlan) -> Iterator[str]:
    """Yield the statements that give the parameters of ``model`` the dtypes in which they are stored."""
    for kind, dtype in plan.parameter_dtypes.items():
        yield "for parameter in model.parameters():"
        yield f"    if {'' if kind == 'trained' else 'not '}parameter.requires_grad and parameter.is_floating_point():"
        yield "        if type(parameter.data) is torch.Tensor:  # a quantised weight stays as it is"
        yield f"            parameter.data = parameter.data.to(torch.{dtype})"


def _body(plan: ParallelPlan) -> Iterator[str]:
    if plan.frozen:
        yield f"frozen = {plan.frozen!r}"
        yield "if any(model.get_parameter(name).requires_grad for name in frozen):"
        yield '    raise ValueError("a parameter takes a gradient that the plan does not sum; make another plan")'
    for attribute in plan.attributes:
        yield f"model.get_submodule({attribute.fqn!r}).{attribute.name} = {attribute.local!r}"
    if plan.tensor > 1:
        yield "parameters = dict(model.named_parameters(remove_duplicate=False))"
        yield "frozen = [name for name, each in parameters.items() if not each.requires_grad]"
        yield from _parallelized(plan, "tensor")
        sharded = {layer.fqn for layer in plan.layers}
        for names in plan.ties:
            first, *others = sorted(names, key=lambda name: name.rpartition(".")[0] not in sharded)
            for other in others:
                owner, _, attribute_name = other.rpartition(".")
                yield (
                    f"model.get_submodule({owner!r}).register_parameter({attribute_name!r}, "
                    f"model.get_parameter({first!r}))"
                )
        yield "for name in frozen:"
        yield "    model.get_parameter(name).requires_grad_(False)"
    if plan.expert > 1:
        yield from _parallelized(plan, "expert")
    name = _replicating_mesh(plan)
    if name:
        yield f"parallelize_module(model, mesh[{name!r}], ReplicateParallel())"
    if plan.averaged:
        every = tuple(name for name in plan.mesh_shape if name != "pipeline")
        averaged = {name for names in plan.unit_dims for name in names}
        n_dims = len(averaged.intersection(plan.mesh_shape))
        yield f"parallelize_module(model, mesh[{every!r}], AverageParallel(n_dims={n_dims}))"
    for fqn in plan.checkpoint:
        yield f"module = model.get_submodule({fqn!r})"
        yield f"module.forward = partial(checkpoint, module.forward, {_checkpoint_options(plan.kept.get(fqn, ()))})"
    if "shard" in plan.mesh_shape:
        yield from _fsdp(plan)


def _checkpoint_options(kept: tuple[str, ...]) -> str:
    """Return the keyword arguments of a checkpoint that keeps results of these names."""
    if not kept:
        return "use_reentrant=False"
    options = {name: value for name, value in checkpoint_options(kept).items() if name != "context_fn"}
    return ", ".join(
        [*(f"{name}={value}" for name, value in options.items()), f"context_fn=partial(keeping, {kept!r})"]
    )


def _parallelized(plan: ParallelPlan, mesh: str) -> Iterator[str]:
    """Yield the lines that shard modules over one dimension of the mesh."""
    yield "plan = ["
    for layer in plan.layers:
        if layer.mesh == mesh:
            yield f"    ({layer.fqn!r}, {_call(layer)}),"
    yield "]"
    yield "for name, style in plan:"
    names = "'expert', 'tensor'" if mesh == "expert" and plan.tensor > 1 else repr(mesh)
    yield f"    parallelize_module(model.get_submodule(name), mesh[{names}], style)"


def _fsdp(plan: ParallelPlan) -> Iterator[str]:
    names = tuple(name for name in ("data", "shard") if name in plan.mesh_shape)
    mesh = f"mesh[{', '.join(map(repr, names))}]"
    inner_mesh = mesh
    if _joins_ranks(plan):
        meshes = [_joined_mesh(dims) for dims in plan.unit_dims]
        yield f"units_mesh = {_torch.JOINED.format(meshes=', '.join(meshes)) if len(meshes) > 1 else meshes[0]}"
        mesh = "units_mesh"
    policies = ""
    if plan.precision:
        policies += f", mp_policy=MixedPrecisionPolicy(param_dtype=torch.{plan.precision}, reduce_dtype=torch.float32)"
    if plan.offload:
        policies += ", offload_policy=CPUOffloadPolicy()"
    if plan.averaged:
        policies += ", ignored_params=scalars"
        yield "scalars = {parameter for parameter in model.parameters() if not parameter.dim()}"
    last = plan.units.index(plan.last_unit) if plan.last_unit else -1
    frees = f"number != {last}" if plan.reshard_after_forward and last >= 0 else plan.reshard_after_forward
    if plan.sends_tokens:  # experts are of one rank of "expert", and of fewer copies
        stacked = [layer.fqn for layer in plan.layers if not layer.is_list]
        listed = [layer.fqn for layer in plan.layers if layer.is_list]
        inside = policies.replace("reduce_dtype", "cast_forward_inputs=False, reduce_dtype")
        yield f"experts = [model.get_submodule(name) for name in {stacked!r}]"
        yield f"experts += [expert for name in {listed!r} for expert in model.get_submodule(name).children()]"
        yield "for expert in experts:"
        yield f"    fully_shard(expert, mesh={inner_mesh}, reshard_after_forward={plan.reshard_after_forward}{inside})"
    yield f"units = {[list(unit) for unit in plan.units]!r}"
    yield "units = [[model.get_submodule(name) for name in unit] for unit in units]"
    yield "for number, unit in enumerate(units):"
    yield f"    fully_shard(unit, mesh={mesh}, reshard_after_forward={frees}{policies})"
    yield f"fully_shard(model, mesh={mesh}, reshard_after_forward=False{policies})"
    if plan.conditional:  # needs torch 2.13
        yield f"for name in {list(plan.conditional)!r}:"
        yield "    model.get_submodule(name).set_reduce_scatter_unused_params(True, recurse=False)"
    n_called = len(plan.called_units)  # the others come last
    yield f"for (unit, *_), (following, *_) in zip(units, units[1:{n_called if n_called < len(plan.units) else ''}]):"
    yield "    unit.set_modules_to_forward_prefetch([following])"
    yield "    following.set_modules_to_backward_prefetch([unit])"


def _joins_ranks(plan: ParallelPlan) -> bool:
    """Return True if a dimension of FSDP's mesh has the ranks of several dimensions of the plan's."""
    return any(len(names) > 1 for names in plan.unit_dims)


def _joined_mesh(names: tuple[str, ...]) -> str:
    """Return the expression of a dimension of FSDP's mesh, which has the ranks of some dimensions of the plan's."""
    return f"mesh[{names[0]!r}]" if len(names) == 1 else _torch.FLATTENED.format(names=names, name="_".join(names))


def _sharing(plan: ParallelPlan) -> Iterator[str]:
    """Yield the function that gives a rank its tokens."""
    yield from ["", "@contextmanager", "def share_tokens(model, mesh, *tensors):"]
    multiple = plan.context * (2 if plan.is_causal else 1)
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for call in plan.whole_calls:
        calls.setdefault(call.fqn, []).append((call.function, call.kind, call.sizes, call.dim))
    body = [
        f"tables = [model.get_buffer(name) for name in {tuple(name for name, _ in plan.tables)!r}]",
        "chunks = [tensor.detach().clone() for tensor in tensors]",
        f"dims = [*(min(1, chunk.dim() - 1) for chunk in chunks), *{tuple(dim for _, dim in plan.tables)!r}]",
        "lengths = [tensor.shape[dim] for tensor, dim in zip([*chunks, *tables], dims)]",
        f"if len(set(lengths)) != 1 or lengths[0] % {multiple} or lengths[0] > {plan.tokens}:",
        f'    raise ValueError(f"expected tensors with the same number of tokens, a multiple of {multiple} up to the '
        f'{plan.tokens} of the plan, got {{lengths}}")',
        "positions = torch.arange(lengths[0], device=[*chunks, *tables][0].device)",
        "inside = context_parallel(",
        '    mesh["context"], buffers=[positions, *chunks, *tables], buffer_seq_dims=[0, *dims],',
        "    no_restore_buffers={positions, *chunks},",
        ")",
        f"arguments = {dict(plan.token_arguments)!r}",
        f"calls = {calls!r}",
    ]
    entered = [
        "with inside:",
        '    with TokensOfRank(mesh["context"].get_group(), positions, arguments, calls).of(model):',
        "        yield chunks",
    ]
    if plan.is_causal:
        body += entered
    else:  # torch refuses to balance other attention
        body += [
            "balances, ring_options.enable_load_balance = ring_options.enable_load_balance, False",
            "try:",
            *(f"    {line}" for line in entered),
            "finally:",
            "    ring_options.enable_load_balance = balances",
        ]
    yield from (f"    {line}" for line in body)
    yield ""


def _call(layer: LayerPlan) -> str:
    return f"{layer.style}({', '.join(f'{name}={_written(value)}' for name, value in layer.options.items())})"


def _written(value: Any) -> str:
    """Return an option as code: layouts as calls of their classes."""
    if isinstance(value, str) and _is_placement(value):
        return value
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {_written(item)}' for name, item in value.items())}}}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_written, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return repr(value)


def _placements(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if _is_placement(value):
            yield value.partition("(")[0]
    elif isinstance(value, (dict, tuple, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _placements(item)


def _is_placement(text: str) -> bool:
    """Return True if an option names a placement, as ``"Shard(1)"`` does; only these are written without quotes."""
    return _PLACEMENT.fullmatch(text) is not None


def _replicating_mesh(plan: ParallelPlan) -> str:
    """Return the dimension of the mesh whose ranks hold the same other parameters; empty if there is none.

    Of experts in a list, each rank of ``"expert"`` has its own.
    """
    if plan.tensor > 1:
        return "tensor"
    has_list = any(layer.is_list for layer in plan.layers)
    return "expert" if plan.expert > 1 and not (has_list or plan.sends_tokens) else ""
