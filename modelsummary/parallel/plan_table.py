"""A plan as a table: one row per sharded module, equal blocks folded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelsummary.tables import Report
from modelsummary.units import PREFIXES, auto_prefix, symbol

if TYPE_CHECKING:
    from modelsummary.parallel.plan import Collective, LayerPlan, ParallelPlan

__all__ = ["report"]

_HEADERS = ["Module", "Style", "Sharded", "Params per rank", "Forward", "Backward"]
_ALIGN = "lllrll"


def report(plan: ParallelPlan) -> Report:
    """Return the table that ``print(plan)`` shows."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh_shape.items())
    title = f"Parallel plan of {plan.model_class} for {plan.world_size} ranks: {mesh}"
    lines = [f"* whole activations: {reason}" for reason in _whole_reasons(plan.layers)]
    for name, whole, local, times, fqn in _attributes(plan):
        lines.append(f"{fqn}.{name} = {local} (was {whole}){times}")
    for names in plan.ties:
        lines.append(f"Tied: {', '.join(names)}")
    if plan.unit_bytes:
        called = set(plan.called_units)
        units = [" + ".join(unit) for unit in plan.units if unit in called]
        uncalled = [" + ".join(unit) for unit in plan.units if unit not in called]
        root = ["and the root"] if plan.unit_bytes[-1][0] else []
        named = [*_folded(units), *root] if plan.units else ["the root alone"]
        lines.append(f"FSDP units: {', '.join(named)}{_policies(plan)}")
        if uncalled:
            lines.append(f"FSDP units that the recorded forward does not call: {', '.join(_folded(uncalled))}")
        lines += [f"Gathered with the root: {names}: {why}" for names, why in _with_root(plan)]
    names_by_text = {
        "Whole on each rank, having no dimensions to shard": plan.averaged,
        "Ranks may use different parameters, which needs torch 2.13": plan.conditional,
    }
    lines += [f"{text}: {', '.join(_folded(names))}" for text, names in names_by_text.items() if names]
    if plan.loss_parallel:
        lines.append(
            "Logits stay sharded: run loss and backward under torch.distributed.tensor.parallel.loss_parallel()"
        )
    if plan.checkpoint:
        lines.append(f"Activation checkpointing: {', '.join(_folded(plan.checkpoint))}")
    if plan.boundaries:
        lines.append(f"Stages begin with: {', '.join(plan.boundaries)}")
    for fqn, why in _reasons(plan):
        lines.append(f"Replicated: {fqn}: {why}")
    total = "" if not plan.params else f"{plan.params:,} -> {plan.params_per_rank:,} per rank"
    lines.append(f"Parameters: {total}")
    phases = ("forward", "loss", "backward")
    for name in ("tensor", "expert"):
        totals = sorted(plan.collectives_over(name).items(), key=lambda item: phases.index(item[0][0]))
        for (phase, operation), (count, nbytes) in totals:
            lines.append(f"{name.capitalize()} parallel, {phase}: {count} x {operation}, {_bytes(nbytes)}")
    for (phase, operation), (count, nbytes) in sorted(plan.unit_collectives.items(), reverse=True):
        lines.append(f"FSDP, {phase}: {count} x {operation}, {_bytes(nbytes)}")
    return Report(_rows(plan.layers), _HEADERS, _ALIGN, above=[title], below=lines)


def _starred(fqn: str) -> str:
    """Return an FQN whose first number, which counts the blocks, is replaced with a star."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn, count=1)


def _folded(fqns: Sequence[str]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for fqn in fqns:
        groups.setdefault(_starred(fqn), []).append(fqn)
    return [f"{name} x {len(group)}" if len(group) > 1 else group[0] for name, group in groups.items()]


def _rows(layers: Sequence[LayerPlan]) -> list[list[str]]:
    groups: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        key = (
            _starred(layer.fqn),
            layer.style,
            str(layer.options),
            layer.params,
            layer.collectives,
            _alike(layer.reason),
        )
        groups.setdefault(key, []).append(layer)
    rows = []
    for group in groups.values():
        first = group[0]
        name = first.fqn if len(group) == 1 else f"{_starred(first.fqn)} x {len(group)}"
        style = first.style + ("*" if first.reason else "")
        cut = ", ".join(f"{name}[{dim}]" for name, dim in first.shards.items() if dim is not None) or "-"
        phases = [_moved(first.collectives, phase) for phase in ("forward", "backward")]
        rows.append([name, style, cut, f"{first.params:,}", *phases])
    return rows


def _whole_reasons(layers: Sequence[LayerPlan]) -> list[str]:
    """Return why the layers with a star keep whole activations, each reason once."""
    return list({_alike(layer.reason): layer.reason for layer in reversed(layers) if layer.reason}.values())[::-1]


def _alike(reason: str) -> str:
    """Return a reason without the numbers in FQNs, so that equal blocks have equal reasons."""
    return re.sub(r"(?<=\.)\d+", "*", reason)


def _moved(collectives: Sequence[Collective], phase: str) -> str:
    in_phase = [collective for collective in collectives if collective.phase == phase]
    return ", ".join(
        f"{collective.operation}{f' x {collective.count}' if collective.count > 1 else ''} {_bytes(collective.nbytes)}"
        for collective in in_phase
    )


def _bytes(value: int) -> str:
    prefix = auto_prefix(value)
    return f"{value / PREFIXES[prefix]:.3g} {symbol(prefix, 'B')}"


def _attributes(plan: ParallelPlan) -> list[tuple[str, int, int, str, str]]:
    groups: dict[tuple[str, str, int, int], int] = {}
    for attribute in plan.attributes:
        key = (_starred(attribute.fqn), attribute.name, attribute.whole, attribute.local)
        groups[key] = groups.get(key, 0) + 1
    return [
        (name, whole, local, f" x {times}" if times > 1 else "", fqn)
        for (fqn, name, whole, local), times in groups.items()
    ]


def _with_root(plan: ParallelPlan) -> list[tuple[str, str]]:
    """Return the modules that are not units, and each reason once."""
    groups: dict[str, list[str]] = {}
    for fqn, why in plan.gathered_with_root.items():
        groups.setdefault(_alike(why), []).append(fqn)
    return [(", ".join(_folded(fqns)), plan.gathered_with_root[fqns[0]]) for fqns in groups.values()]


def _reasons(plan: ParallelPlan) -> list[tuple[str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for fqn, why in plan.replicated.items():
        groups.setdefault((_starred(fqn), re.sub(r"\d+", "*", why)), []).append(fqn)
    return [
        (fqns[0] if len(fqns) == 1 else f"{name} x {len(fqns)}", plan.replicated[fqns[0]])
        for (name, _), fqns in groups.items()
    ]


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
