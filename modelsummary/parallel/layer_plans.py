"""The style that shards a layer, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.linear_layers import LinearLayer
from modelsummary.parallel.placements import Partial, Section, Shard, in_pieces
from modelsummary.parallel.plan_entries import LayerPlan
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.regions import Region
from modelsummary.record.events import Event, Value

__all__ = [
    "INPUTS",
    "attention_inputs",
    "attentions",
    "in_call_order",
    "layout",
    "nested_encoders",
    "parameter_shards",
    "region_plans",
    "split_plan",
    "with_layouts",
]

INPUTS = ("query", "key", "value")


def attentions(calls: Calls) -> dict[str, str]:
    """Return why each ``nn.MultiheadAttention`` that runs cannot be split, by FQN; an empty reason if it can."""
    called = {*calls.places, *(event.fqn for event in calls.entered)}
    return {
        fqn: _obstacle(calls, fqn, module)
        for fqn, module in calls.modules.items()
        if isinstance(module, nn.MultiheadAttention) and fqn in called
    }


def _obstacle(calls: Calls, fqn: str, module: nn.MultiheadAttention) -> str:
    if fqn not in calls.places or type(module).forward is not nn.MultiheadAttention.forward:
        return (
            f"{type(module).__name__} overrides the forward of nn.MultiheadAttention; the forward of torch can be split"
        )
    if module.bias_k is not None or module.add_zero_attn:
        return f"{fqn} adds keys and values of all heads (add_bias_kv, add_zero_attn); without them it can be split"
    expected = {"in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"}
    projection = f"{fqn}.out_proj"
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    if not names <= expected or type(module.out_proj).forward is not nn.Linear.forward:
        return f"the parameters of {fqn} are parametrised or quantised; plain parameters can be split"
    if any(calls.holders[name] != {name} or calls.users.get(name) for name in (fqn, projection)):
        return f"another module or function takes parameters of {fqn}, too; parameters of its own work"
    return (
        f"{projection} is also called as a module; the attention alone may take it"
        if projection in calls.places
        else ""
    )


def _attention_shards(module: nn.Module) -> dict[str, Shard | None]:
    """Return each parameter of an attention -> its placement; None if it is replicated."""
    shards: dict[str, Shard | None] = {}
    for name, _ in module.named_parameters():
        if name == "out_proj.bias":
            shards[name] = None
        elif name == "out_proj.weight":
            shards[name] = Shard(1)
        else:
            shards[name] = Shard(0, outer=3 if name.startswith("in_proj") else 1)  # queries, keys and values
    return shards


def attention_inputs(event: Event) -> list[Value | Attribute]:
    """Return the tensors that are query, key and value of a call."""
    return [*event.args[:3], *(event.kwargs[name] for name in INPUTS[len(event.args) :])]


def nested_encoders(calls: Calls, sharded: set[str]) -> list[str]:
    """Return the FQNs of each ``nn.TransformerEncoder`` that would give nested tensors to layers that are sharded."""
    return [
        fqn
        for fqn, module in calls.modules.items()
        if isinstance(module, nn.TransformerEncoder)
        and getattr(module, "use_nested_tensor", None) is True
        and any(name.startswith(f"{fqn}." if fqn else "") for name in sharded)
    ]


# ------------------------------------------------------------------------------------------------------------ attention


_STYLES = {
    "column": "ColwiseParallel",
    "row": "RowwiseParallel",
    "embedding": "RowwiseParallel",
    "head": "ColwiseParallel",
    "norm": "SequenceParallel",
    "local": "LocalParallel",
    "heads": "AttentionParallel",
}
_WHOLE, _CHUNK, _STRIDED = "Replicate()", "Shard({})", "_StridedShard({}, split_factor={})"
_TORCH_LINEAR = LinearLayer("weight", "bias", 0, True)


def region_plans(region: Region, *, exchanges: bool) -> dict[str, LayerPlan]:
    """Return FQN of each module of a region -> how it is sharded. ``exchanges`` is as for ``split_plan``."""
    calls = region.calls
    plans = {
        fqn: split_plan(calls, fqn, "column", pieces=region.pieces.get(fqn, ()), exchanges=exchanges)
        for fqn in region.columns
    }
    plans |= {fqn: split_plan(calls, fqn, "row") for fqn in region.rows}
    plans |= {fqn: split_plan(calls, fqn, "norm", sequence_dim=dim) for fqn, dim in region.norms.items()}
    once = tuple(name.rpartition(".")[2] for name, placement in region.parameters.items() if placement == Partial())
    summed: dict[str, Any] = {"once": once, "summed": region.summed, "sums_result": True} if region.module else {}
    return plans | {
        fqn: split_plan(calls, fqn, "local", shards=shards, exchanges=exchanges, **summed)
        for fqn, shards in region.owners.items()
    }


def split_plan(
    calls: Calls,
    fqn: str,
    role: str,
    *,
    shards: Mapping[str, Shard] | None = None,
    pieces: Sequence[Section] = (),
    exchanges: bool = False,
    reason: str = "",
    **options: Any,
) -> LayerPlan:
    """Return the plan of a module that is split; its number of ``params`` is filled in later.

    Args:
        fqn: of the module.
        role: as ``LayerPlan`` has it.
        shards: name of a parameter -> its placement. Default: as the role says.
        pieces: that its columns are; empty for one.
        exchanges: ranks exchange rows of parameters of which they need equal pieces, too: FSDP could not gather these.
        reason: why its activations are whole on each rank; empty if they are sharded.
        options: further arguments of its style.
    """
    module, linear = calls.modules[fqn], calls.linears.get(fqn, _TORCH_LINEAR)
    placements = parameter_shards(calls, fqn, role, pieces) | dict(shards or {})
    style = _STYLES[role]
    if role == "norm":
        options |= {"use_local_output": True}
    elif role == "head" or (role == "column" and reason):
        options |= {"output_layouts": _WHOLE}
    elif role == "embedding" or (role == "row" and reason):
        options |= {"input_layouts": _WHOLE}
    if not linear.is_torch or pieces:
        style = "LinearParallel"
        by_rows = {"by_rows": True, **({"bias": linear.bias} if linear.bias else {})} if role == "row" else {}
        options = {**by_rows, **({"weight": linear.weight} if linear.reshapes else {}), **options}
    if style not in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"):
        split = {name: placement for name, placement in placements.items() if placement is not None}
        held = _held(module, placements if role == "heads" else shards or split, exchanges=exchanges)
        options = {**held, **options}
    dims = {name: None if placement is None else placement.dim for name, placement in placements.items()}
    return LayerPlan(fqn, style, options, role, dims, 0, reason)


def parameter_shards(calls: Calls, fqn: str, role: str, pieces: Sequence[Section] = ()) -> dict[str, Shard | None]:
    """Return each parameter of a module that is split -> what a rank computes with; None: all of it."""
    module, linear = calls.modules[fqn], calls.linears.get(fqn, _TORCH_LINEAR)
    if role == "heads":
        return _attention_shards(module)
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    dims: dict[str, int] = {}
    if role in ("column", "head"):
        is_table = isinstance(module, nn.Embedding)
        dims = {name: 1 if is_table else linear.dim if name == linear.weight else 0 for name in names}
    elif role in ("row", "embedding"):
        dims = {linear.weight: 1 - linear.dim if role == "row" else 0}
    return {name: (in_pieces(dims[name], pieces) or Shard(dims[name])) if name in dims else None for name in names}


def _held(module: nn.Module, placements: Mapping[str, Shard | None], *, exchanges: bool) -> dict[str, Any]:
    """Return the options that say what a rank holds of parameters.

    Args:
        placements: name of a parameter -> what the rank computes with; None: all of it.
    """
    shards: dict[str, str] = {}
    pieces: dict[str, Any] = {}
    for name, placement in placements.items():
        if placement is None:
            shards[name] = _WHOLE
            continue
        if placement.pieces or (placement.outer > 1 and exchanges):
            size = module.get_parameter(name).shape[placement.dim] // placement.outer
            pieces[name] = tuple(map(tuple, placement.pieces or [Section(size)] * placement.outer))
        is_chunk = placement.is_plain or name in pieces
        shards[name] = (_CHUNK if is_chunk else _STRIDED).format(placement.dim, placement.outer)
    return {"shards": shards, **({"pieces": pieces} if pieces else {})}


def with_layouts(plan: LayerPlan, **layouts: Any) -> LayerPlan:
    """Return the plan of a layer that takes, or returns, chunks of the sequence.

    Args:
        layouts: arguments of its style -> the placement, or one for each input; None: whole.
    """
    written = {
        name: tuple(map(layout, placement)) if isinstance(placement, list) else layout(placement)
        for name, placement in layouts.items()
    }
    options = {**plan.options, **written}
    last = [name for name in ("input_layouts", "output_layouts", "use_local_output") if name in options]
    names = [*(name for name in options if name not in last), *last]
    return replace(plan, options={name: options[name] for name in names})


def layout(placement: Shard | None) -> str:
    """Return a placement as it is written in the options of a plan."""
    return _WHOLE if placement is None else _CHUNK.format(placement.dim)


def in_call_order(calls: Calls, plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Return plans in the order of the first call of their module, outer modules before inner ones.

    A list of modules, which is never called, comes before the first of them, with modules of it that were not called.
    """
    first: dict[str, int] = {}
    for position, event in enumerate(calls.record.root.walk()):
        fqn = event.fqn
        while event.is_module and fqn not in first:
            first[fqn] = position
            fqn = fqn.rpartition(".")[0]

    def position_of(fqn: str) -> int:
        while fqn not in first:
            fqn = fqn.rpartition(".")[0]
        return first[fqn]

    return sorted(plans, key=lambda plan: position_of(plan.fqn))
