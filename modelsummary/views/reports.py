"""Latency as text: one line per call, and totals with the most expensive classes at each depth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from modelsummary.errors import check_integers, harmless
from modelsummary.layer_info import LayerInfo, Sizes, first_shape
from modelsummary.subject import subject_of
from modelsummary.tables import screen_of_output
from modelsummary.units import duration, percent, scaled
from modelsummary.views.folding import Folding, Shown, is_folded
from modelsummary.views.labels import check_depth, settings

__all__ = ["ClassTotals", "flops_with_elementwise", "latency_lines", "profile_report", "top_classes"]


# --------------------------------------------------------------------------------------- one line per call


def latency_lines(root: LayerInfo, depth: int | None = None) -> str:
    """Return one line per call: ``(conv1): Conv2d, num_params 9408, 16.923ms, 18.068% latency, input shape ...``."""
    return "\n".join("\t" * row.depth + _line(row) for row in root.walk(depth))


def _line(row: LayerInfo) -> str:
    time = "not timed"
    if row.latency_ms is not None and row.latency_share is not None:
        time = f"{round(row.latency_ms, 3)}ms, {round(100 * row.latency_share, 3)}% latency"
    shapes = f"input shape {_shape(row.input_size)}, output shape {_shape(row.output_size)}"
    return harmless(f"({row.name or 'model'}): {row.class_name}, num_params {row.num_params}, {time}, {shapes}")


def _shape(sizes: Sizes) -> str:
    return str(first_shape(sizes))


# ------------------------------------------------------------------------------------------------- totals


class ClassTotals(NamedTuple):
    """The totals of all modules of one class at one depth."""

    class_name: str
    params: int
    macs: int
    latency_ms: float


def top_classes(root: LayerInfo) -> list[list[ClassTotals]]:
    """Return the totals of each class, by depth; parameters of a module that is called several times count once.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), (1, 2)).root
    >>> top_classes(root)[1]
    [ClassTotals(class_name='Linear', params=13, macs=9, latency_ms=0.0)]
    """
    by_depth: list[dict[str, ClassTotals]] = []
    seen: set[int] = set()
    for row in root.walk():
        while len(by_depth) <= row.depth:
            by_depth.append({})
        so_far = by_depth[row.depth].get(row.class_name, ClassTotals(row.class_name, 0, 0, 0.0))
        by_depth[row.depth][row.class_name] = so_far._replace(
            params=so_far.params + (row.num_params if row.layer_id not in seen else 0),
            macs=so_far.macs + row.macs,
            latency_ms=so_far.latency_ms + (row.latency_ms or 0.0),
        )
        seen.add(row.layer_id)
    return [list(classes.values()) for classes in by_depth]


_WEIGHTS = {
    "BatchNorm": (2, 1),
    "SyncBatchNorm": (2, 1),
    "InstanceNorm": (2, 1),
    "LayerNorm": (5, 4),
    "GroupNorm": (5, 4),
}


def flops_with_elementwise(root: LayerInfo) -> int:
    """Return FLOPs as DeepSpeed's flops profiler counts them: 2 x MACs plus the element-wise work of leaf modules.

    A batch or instance norm counts 2 per element (1 without affine parameters), a layer or group norm 5 (4), an
    activation or pooling 1. Operators outside of leaf modules, such as a residual addition, are left out.
    """
    return root.flops + sum(
        _elementwise_flops(row) for row in root.walk() if row.executed and row.is_leaf and not row.macs
    )


def _elementwise_flops(row: LayerInfo) -> int:
    weights = next((attributes for name, attributes in _WEIGHTS.items() if row.class_name.startswith(name)), None)
    shape = first_shape(row.input_size)
    if weights is None or not isinstance(shape, list):
        return row.self_elementwise_ops
    return math.prod(shape) * weights[0 if row.inner_layers else 1]


def profile_report(
    root: LayerInfo, *, top_modules: int = 1, module_depth: int | None = None, detailed: bool = True, device: str = ""
) -> str:
    """Return totals, the most expensive classes at each depth, and the model's repr with figures.

    Raises:
        InputError: ``top_modules`` or ``module_depth`` is unusable.
    """
    check_integers(top_modules=top_modules)
    check_depth(module_depth, name="module_depth")
    lines = [f"Profile of {subject_of(root)}{f', on {device}' if device else ''}", "", *_header(root), ""]
    lines += [f"Top {top_modules} classes of modules in terms of params, MACs or forward latency, by depth:"]
    for depth, classes in enumerate(top_classes(root)):
        if module_depth is None or depth <= module_depth:
            lines += [f"depth {depth}:", *_top(classes, top_modules)]
    if detailed:
        is_timed = any(row.latency_ms is not None for row in root.walk())  # times of equal modules differ
        folding = Folding(root, fold=not is_timed and is_folded(root, None))
        lines += ["", _ORDER, "", *_annotated(folding.top, folding, "", module_depth)]
    return screen_of_output().printed(lines)


_ORDER = (
    "Each module with: params, share of params, MACs, share of MACs, forward latency, share of latency, forward "
    "FLOP/s. Work of a module outside of its submodules is in its own line only."
)


def _header(root: LayerInfo) -> Iterator[str]:
    facts = [
        ("params", scaled(root.num_params)),
        ("forward MACs", scaled(root.macs, "MACs")),
        ("forward FLOPs = 2 x MACs", scaled(root.flops)),
        ("forward FLOPs with element-wise work of modules", scaled(flops_with_elementwise(root))),
    ]
    if root.latency_ms:
        facts.append(("forward latency", duration(root.latency_ms)))
        facts.append(("forward FLOP/s = FLOPs / latency", scaled(root.flops / root.latency_ms * 1e3, "FLOP/s")))
    if root.backward_latency_ms and root.latency_ms:
        backward, total_latency = root.backward_latency_ms, root.latency_ms + root.backward_latency_ms
        facts.append(("backward FLOPs, estimated as 2 x forward", scaled(2 * root.flops)))
        facts.append(("backward latency", duration(backward)))
        facts.append(("backward FLOP/s", scaled(2 * root.flops / backward * 1e3, "FLOP/s")))
        facts.append(("forward and backward FLOP/s", scaled(3 * root.flops / total_latency * 1e3, "FLOP/s")))
    width = max(len(name) for name, _ in facts) + 2
    for name, value in facts:
        yield f"{name + ':':<{width}}{value}"


def _top(classes: list[ClassTotals], count: int) -> Iterator[str]:
    def largest(key: str, text: object) -> str:
        ranked = sorted(classes, key=lambda group: -getattr(group, key))[:count]
        return ", ".join(f"{group.class_name} {text(getattr(group, key))}" for group in ranked)  # type: ignore[operator]

    yield f"    params           {largest('params', scaled)}"
    yield f"    MACs             {largest('macs', lambda value: scaled(value, 'MACs'))}"
    if any(kind.latency_ms for kind in classes):
        yield f"    forward latency  {largest('latency_ms', duration)}"


def _annotated(shown: Shown, folding: Folding, indent: str, depth: int | None) -> Iterator[str]:
    row, root = shown.row, folding.top.row
    extra = settings(row)
    figures = ", ".join([*_figures(row, root), *([extra] if extra else [])])
    times = f"{shown.times} x " if shown.times > 1 else ""
    name = f"({shown.names(row.name)}): {times}" if row.name else ""
    below = list(folding.below(shown)) if depth is None or row.depth < depth else []
    if not below:
        yield f"{indent}{name}{row.class_name}({figures})"
        return
    yield f"{indent}{name}{row.class_name}("
    yield f"{indent}  {figures}"
    for inner in below:
        yield from _annotated(inner, folding, indent + "  ", depth)
    yield f"{indent})"


def _figures(row: LayerInfo, root: LayerInfo) -> Iterator[str]:
    yield scaled(row.num_params)
    yield f"{percent(row.num_params / (root.num_params or 1), 2)} Params"
    yield scaled(row.macs, "MACs")
    yield f"{percent(row.macs / (root.macs or 1), 2)} MACs"
    if row.latency_ms is None:
        yield "not timed"
        return
    yield duration(row.latency_ms)
    yield f"{percent(row.latency_share or 0, 2)} latency"
    yield scaled(row.achieved_flops_per_second or 0, "FLOP/s")
