"""The style that shards each layer, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from modelsummary.parallel.attention_heads import attention_shards
from modelsummary.parallel.derive import Derivation, Layer
from modelsummary.parallel.linear_layers import LinearLayer
from modelsummary.parallel.placements import Section, Shard, in_pieces
from modelsummary.parallel.plan import LayerPlan
from modelsummary.parallel.prepared_inputs import prepared_inputs, prepared_outputs
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.stream import Redistribution, Stream, results_of

__all__ = ["in_call_order", "layer_plans", "redistribution_plan"]

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


def layer_plans(derivation: Derivation, blocks: Sequence[str]) -> list[LayerPlan]:
    """Return the style of each layer of a derivation, in the order of their calls.

    ``params`` is filled in where the shapes of all ranks are known.

    Args:
        blocks: FQNs of the repeated blocks of the model.
    """
    stream = derivation.stream or Stream({})
    prepared = prepared_inputs(derivation.calls, derivation.layers, stream)
    if derivation.stream is None:
        prepared += prepared_outputs(derivation.calls, derivation.layers, prepared, blocks)
    columns = {fqn for tensor in prepared for fqn in tensor.columns}
    changes = [tensor.redistribution for tensor in prepared]
    plans = [redistribution_plan(derivation.calls, change, is_local=False) for change in changes]
    for layer in derivation.layers.values():
        if layer.role in ("local", "heads"):
            plan_of = _local_plan if layer.role == "local" else _attention_plan
            plans.append(plan_of(derivation, layer.fqn))
            continue
        plans.append(_layer_plan(derivation, layer, stream, is_prepared=layer.fqn in columns))
    for region in derivation.regions:
        for fqn, parts in region.parts.items():
            shards = _whole_parameters(derivation.calls.modules[fqn])
            plans.append(LayerPlan(fqn, "ReduceGradient", {"parts": tuple(parts)}, "gradient", shards, 0))
    copied = [fqn for fqn in derivation.copied if fqn in derivation.layers]
    plans += [LayerPlan(fqn, "CopyOutput", {}, "copy", {}, 0) for fqn in copied]
    plans += [
        LayerPlan(fqn, "LocalSizes", {"calls": module_calls}, "sizes", {}, 0)
        for fqn, module_calls in derivation.sizes.items()
    ]
    # A hook of a norm runs before the one that gathers its result.
    norms = (Layer(fqn, "norm", dim=dim) for fqn, dim in stream.norms.items())
    plans += [_layer_plan(derivation, norm, stream, is_prepared=False) for norm in norms]
    redistributions = sorted(stream.redistributions, key=lambda redistribution: not redistribution.is_input)
    plans += [redistribution_plan(derivation.calls, redistribution) for redistribution in redistributions]
    return in_call_order(derivation.calls, plans)


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


def _layer_plan(derivation: Derivation, layer: Layer, stream: Stream, *, is_prepared: bool) -> LayerPlan:
    calls = derivation.calls
    module = calls.modules[layer.fqn]
    shards = _whole_parameters(module)
    options: dict[str, Any] = {}
    linear = calls.linears.get(layer.fqn, LinearLayer("weight", "bias", 0, True))
    style = _STYLES[layer.role]
    if layer.role == "norm":
        options = {"sequence_dim": layer.dim, "use_local_output": True}
    elif layer.role in ("column", "head"):
        is_table = isinstance(module, nn.Embedding)
        shards = dict.fromkeys(shards, 1 if is_table else 0)
        if not is_table:
            shards[linear.weight] = linear.dim
        if layer.fqn in stream.gathered and not is_prepared:
            options = {"input_layouts": _CHUNK.format(stream.gathered[layer.fqn])}
        if layer.gathers:
            options |= {"output_layouts": _WHOLE}
        elif layer.role == "head":
            options |= {"use_local_output": False}
    else:
        shards[linear.weight] = 1 - linear.dim if layer.role == "row" else 0
        if layer.role == "embedding" or layer.gathers:
            options = {"input_layouts": _WHOLE}
        if layer.fqn in stream.scattered:
            options |= {"output_layouts": _CHUNK.format(stream.scattered[layer.fqn])}
    if not linear.is_torch or layer.pieces:
        placements = {
            name: in_pieces(dim, layer.pieces) or Shard(dim) for name, dim in shards.items() if dim is not None
        }
        by_rows = {"by_rows": True, **({"bias": linear.bias} if linear.bias else {})} if layer.role == "row" else {}
        style, options = "LinearParallel", {**_held(derivation, module, placements), **by_rows, **options}
    reason = derivation.reasons.get(layer.fqn, "") if layer.gathers and layer.role != "head" else ""
    return LayerPlan(layer.fqn, style, options, layer.role, shards, 0, reason)


def _held(derivation: Derivation, module: nn.Module, placements: Mapping[str, Shard | None]) -> dict[str, Any]:
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
        if placement.pieces or (placement.outer > 1 and derivation.exchanges):
            size = module.get_parameter(name).shape[placement.dim] // placement.outer
            pieces[name] = tuple(map(tuple, placement.pieces or [Section(size)] * placement.outer))
        is_chunk = placement.is_plain or name in pieces
        shards[name] = (_CHUNK if is_chunk else _STRIDED).format(placement.dim, placement.outer)
    return {"shards": shards, **({"pieces": pieces} if pieces else {})}


def _local_plan(derivation: Derivation, fqn: str) -> LayerPlan:
    """Return the plan of a module that runs on local shards of its own parameters."""
    calls = derivation.calls
    region = next(region for region in derivation.regions if fqn in region.owners)
    chunks = region.owners[fqn]
    once = tuple(name.rpartition(".")[2] for name in region.once)
    options = _held(derivation, calls.modules[fqn], chunks)
    if region.module:
        options |= {"once": once, "summed": region.summed, "sums_result": True}
    shards = _whole_parameters(calls.modules[fqn]) | {name: chunk.dim for name, chunk in chunks.items()}
    return LayerPlan(fqn, _STYLES["local"], options, "local", shards, 0)


def _attention_plan(derivation: Derivation, fqn: str) -> LayerPlan:
    """Return the plan of an ``nn.MultiheadAttention`` of which each rank computes a part of the heads."""
    calls, stream = derivation.calls, derivation.stream or Stream({})
    module = calls.modules[fqn]
    parameter_shards = attention_shards(module)
    placements = stream.attended.get(fqn, (None, None, None))
    shards = {name: None if placement is None else placement.dim for name, placement in parameter_shards.items()}
    options = _held(derivation, module, parameter_shards)
    if any(placements):
        options["input_layouts"] = tuple(
            _WHOLE if placement is None else _CHUNK.format(placement.dim) for placement in placements
        )
    if fqn in stream.scattered:
        options["output_layouts"] = _CHUNK.format(1)
    return LayerPlan(fqn, _STYLES["heads"], options, "heads", shards, 0)


def _whole_parameters(module: nn.Module) -> dict[str, int | None]:
    """Return the parameters of a module as a plan has them if each rank holds all of them."""
    return {name: None for name, parameter in module._parameters.items() if parameter is not None}


def redistribution_plan(calls: Calls, redistribution: Redistribution, *, is_local: bool = True) -> LayerPlan:
    """Return the plan of a module at whose boundary a tensor is gathered, cut, or made a ``DTensor``.

    Args:
        is_local: the module gets, or returns, a plain tensor.
    """
    fqn, is_input, position, *placements = redistribution
    event = next(event for event in calls.record.root.walk() if event.is_module and event.fqn == fqn)
    kind, style = ("input", "PrepareModuleInput") if is_input else ("output", "PrepareModuleOutput")
    options: dict[str, Any] = {}
    for name, placement in zip(("", "desired_"), placements, strict=True):
        layout = _WHOLE if placement is None else _CHUNK.format(placement.dim)
        if isinstance(position, str):
            options[f"{name}{kind}_kwarg_layouts"] = {position: layout}
        else:
            count = len(event.args if is_input else results_of(event))
            options[f"{name}{kind}_layouts"] = tuple(layout if index == position else None for index in range(count))
    return LayerPlan(fqn, style, {**options, "use_local_output": is_local}, kind, {}, 0)
