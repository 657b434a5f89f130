"""A plan as a table: one row per sharded module, equal blocks folded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from modelsummary.errors import ModelSummaryError
from modelsummary.tables import Report, starred
from modelsummary.units import PREFIXES, auto_prefix, number_of, symbol

if TYPE_CHECKING:
    from modelsummary.operators.collective_calls import Collective
    from modelsummary.parallel.plan import LayerPlan, ParallelPlan

__all__ = ["report"]

_HEADERS = ["Module", "Style", "Sharded", "Params per rank", "Forward", "Backward"]
_ALIGN = "lllrll"
_OPTIONAL = ("Params per rank", "Sharded")  # columns for wide pages
_PARALLELISM = {
    "Tensor parallel": ("tensor",),
    "Expert parallel": ("expert",),
    "Context parallel": ("context",),
    "FSDP": ("data", "shard"),
}
_PHASES = ("forward", "loss", "backward")
_Item = TypeVar("_Item")


def report(plan: ParallelPlan) -> Report:
    """Return the table that ``print(plan)`` shows."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh_shape.items())
    title = f"Parallel plan of {plan.model_class} for {number_of(plan.world_size, 'rank')}: {mesh}"
    lines = [f"* whole activations: {reason}" for reason in _whole_reasons(plan.layers)]
    lines += _attributes(plan)
    for names in plan.ties:
        lines.append(f"Tied: {', '.join(names)}")
    if plan.units or plan.root_gathers:
        called = set(plan.called_units)
        units = [" + ".join(unit) for unit in plan.units if unit in called]
        uncalled = [" + ".join(unit) for unit in plan.units if unit not in called]
        root = ["and the root"] if plan.root_gathers else []
        named = [*_folded(units), *root] if plan.units else ["the root alone"]
        lines.append(f"FSDP units: {', '.join(named)}{_policies(plan)}")
        if uncalled:
            lines.append(f"FSDP units that the recorded forward does not call: {', '.join(_folded(uncalled))}")
        lines += _with_root(plan)
    names_by_text = {
        "Whole on each rank, having no dimensions to shard": plan.averaged,
        "Ranks may use different parameters, which needs torch 2.13": plan.conditional,
    }
    lines += [f"{text}: {', '.join(_folded(names))}" for text, names in names_by_text.items() if names]
    if plan.parameter_dtypes:
        lines.append(
            f"Parameters are cast to: {', '.join(f'{dtype} ({kind})' for kind, dtype in plan.parameter_dtypes.items())}"
        )
    if plan.loss_parallel:
        lines.append(
            "Logits stay sharded: run loss and backward under torch.distributed.tensor.parallel.loss_parallel()"
        )
    if plan.context > 1:
        order = "one piece from the beginning and one from the end" if plan.is_causal else "one piece"
        tables = f", and its rows of {', '.join(_folded(name for name, _ in plan.tables))}" if plan.tables else ""
        lines.append(
            f"Each rank has {order} of the sequence{tables}: run forward, loss and backward under "
            "plan.context_parallel(model, mesh, inputs, labels)"
        )
    lines += _recomputed(plan)
    if plan.boundaries:
        lines.append(f"Stages begin with: {', '.join(plan.boundaries)}")
    lines += _reasons(plan)
    communication, unknown = _communication(plan)
    total = "" if not plan.params else f"{plan.params:,} -> {plan.params_per_rank:,} per rank"
    lines.append(f"Parameters: {total}")
    if unknown:
        lines.append(f"Collectives are not known: {unknown}")
    for name, groups in _PARALLELISM.items():
        totals = sorted(plan.collectives_over(*groups).items() if communication else (), key=_order)
        for (phase, operation), (count, nbytes) in totals:
            lines.append(f"{name}, {phase}: {count} x {operation}, {_bytes(nbytes)}")
    if plan.estimate is not None:
        lines.append(f"Predicted: {plan.estimate.in_short()}")
    return Report(_rows(plan.layers, communication), _HEADERS, _ALIGN, above=[title], below=lines, optional=_OPTIONAL)


def _order(total: tuple[tuple[str, str], tuple[int, int]]) -> tuple[int, str]:
    (phase, operation), _ = total
    return _PHASES.index(phase), operation


def _starred(fqn: str) -> str:
    """Return an FQN whose first number, which counts the blocks, is replaced with a star."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn, count=1)


def _grouped(items: Iterable[_Item], key: Callable[[_Item], object]) -> list[list[_Item]]:
    """Return the items with equal keys together, in the order of the first ones."""
    groups: dict[object, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _folded(fqns: Iterable[str]) -> list[str]:
    """Return the names of equal blocks as one, with their number."""
    groups = _grouped(fqns, _starred)
    return [f"{_starred(group[0])} x {len(group)}" if len(group) > 1 else group[0] for group in groups]


def _communication(plan: ParallelPlan) -> tuple[Sequence[Collective], str]:
    """Return what a rank communicates; or nothing, and why it is not known."""
    try:
        return plan.communication, ""
    except ModelSummaryError as error:
        return (), str(error)


def _by_layer(layers: Sequence[LayerPlan], communication: Sequence[Collective]) -> dict[str, list[Collective]]:
    """Return FQN of a sharded module -> the collectives of its calls, with modules inside that are not sharded."""
    by_layer: dict[str, list[Collective]] = {layer.fqn: [] for layer in layers}
    for collective in communication:
        fqn = collective.fqn
        while fqn and fqn not in by_layer:
            fqn = fqn.rpartition(".")[0]
        if fqn in by_layer and collective.group in ("tensor", "expert"):
            by_layer[fqn].append(collective)
    return by_layer


def _rows(layers: Sequence[LayerPlan], communication: Sequence[Collective]) -> list[list[str]]:
    by_layer = _by_layer(layers, communication)
    first_of = {layer.fqn: layer for layer in reversed(layers)}  # a module with several styles has its collectives once
    moved_in = {
        id(layer): tuple(_moved(by_layer[layer.fqn], phase) for phase in ("forward", "backward"))
        if first_of[layer.fqn] is layer
        else ("", "")
        for layer in layers
    }

    def key(layer: LayerPlan) -> object:
        kind = _starred(layer.fqn), layer.style, str(layer.options)
        return *kind, layer.params, moved_in[id(layer)], starred(layer.reason)

    rows = []
    for group in _grouped(layers, key):
        first = group[0]
        style = first.style + ("*" if first.reason else "")
        cut = ", ".join(f"{name}[{dim}]" for name, dim in first.shards.items() if dim is not None) or "-"
        rows.append([*_folded(layer.fqn for layer in group), style, cut, f"{first.params:,}", *moved_in[id(first)]])
    return rows


def _whole_reasons(layers: Sequence[LayerPlan]) -> list[str]:
    """Return why the layers with a star keep whole activations, each reason once."""
    return list({starred(layer.reason): layer.reason for layer in reversed(layers) if layer.reason}.values())[::-1]


def _moved(collectives: Sequence[Collective], phase: str) -> str:
    totals: dict[str, tuple[int, int]] = {}
    for collective in (collective for collective in collectives if collective.phase == phase):
        count, nbytes = totals.get(collective.operation, (0, 0))
        totals[collective.operation] = count + collective.count, nbytes + collective.nbytes
    return ", ".join(
        f"{operation}{f' x {count}' if count > 1 else ''} {_bytes(nbytes)}"
        for operation, (count, nbytes) in totals.items()
    )


def _bytes(value: int) -> str:
    prefix = auto_prefix(value)
    return f"{value / PREFIXES[prefix]:.3g} {symbol(prefix, 'B')}"


def _attributes(plan: ParallelPlan) -> Iterator[str]:
    """Yield the attributes that change, equal blocks folded."""
    for group in _grouped(plan.attributes, lambda attribute: replace(attribute, fqn=_starred(attribute.fqn))):
        first, times = group[0], f" x {len(group)}" if len(group) > 1 else ""
        yield f"{_starred(first.fqn)}.{first.name} = {first.local} (was {first.whole}){times}"


def _with_root(plan: ParallelPlan) -> Iterator[str]:
    """Yield the modules that are not units, and each reason once."""
    reasons = plan.gathered_with_root
    for group in _grouped(reasons, lambda fqn: starred(reasons[fqn])):
        yield f"Gathered with the root: {', '.join(_folded(group))}: {reasons[group[0]]}"


def _recomputed(plan: ParallelPlan) -> Iterator[str]:
    """Yield what runs under activation checkpointing, and the results that this keeps."""
    if plan.checkpoint:
        yield f"Activation checkpointing: {', '.join(_folded(plan.checkpoint))}"
    modules: dict[tuple[str, ...], list[str]] = {}
    for fqn, names in plan.kept.items():
        modules.setdefault(names, []).append(fqn)
    for names, fqns in modules.items():
        yield f"Kept in {', '.join(_folded(fqns))}: {', '.join(names)}"


def _reasons(plan: ParallelPlan) -> Iterator[str]:
    """Yield what is whole on each rank, and why, equal blocks folded."""
    for group in _grouped(plan.replicated, lambda fqn: (_starred(fqn), re.sub(r"\d+", "*", plan.replicated[fqn]))):
        yield f"Replicated: {_folded(group)[0]}: {plan.replicated[group[0]]}"


def _policies(plan: ParallelPlan) -> str:
    is_freed = plan.reshard_after_forward and plan.units  # the root is not
    said = ["resharded after the forward" if is_freed else "kept after the forward"]
    if is_freed and plan.last_unit:
        said.append(f"{' + '.join(plan.last_unit)} after the backward")
    if plan.precision:
        said.append(f"in {plan.precision}")
    if plan.offload:
        said.append("offloaded to the CPU")
    return f" ({', '.join(said)})"
