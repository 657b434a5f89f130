"""FSDP units: what is gathered together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import blocks_of

__all__ = ["fsdp_units", "unit_bytes"]


def fsdp_units(model: nn.Module, root: LayerInfo) -> list[list[str]]:
    """Return the FQNs of the modules of each unit, in the order of their calls; what is in none belongs to the root.

    A unit is a repeated block with parameters. Blocks that share a parameter are one unit; a block that shares one with
    a module outside of all blocks is not a unit: the parameter belongs to the root.
    """
    blocks = [row.fqn for row in blocks_of(root) if not row.fqn.endswith(")") and _has_parameters(model, row.fqn)]
    blocks = [fqn for fqn in dict.fromkeys(blocks) if fqn]
    inside = {name: next((fqn for fqn in blocks if name.startswith(f"{fqn}.")), None) for name in _names(model)}
    together: dict[int, set[str | None]] = {}
    for name, number in _names(model).items():
        together.setdefault(number, set()).add(inside[name])
    groups = {fqn: {fqn} for fqn in blocks}
    in_root: set[str] = set()
    for holders in together.values():
        shared = {fqn for fqn in holders if fqn is not None}
        if len(holders) > 1 and None in holders:
            in_root |= shared
        elif len(shared) > 1:
            merged = set().union(*(groups[fqn] for fqn in shared))
            for fqn in merged:
                groups[fqn] = merged
    units: list[list[str]] = []
    for fqn in blocks:
        group = [each for each in blocks if each in groups[fqn]]
        if group[0] == fqn and not in_root & set(group):
            units.append(group)
    return units


def unit_bytes(
    model: nn.Module,
    units: Sequence[Sequence[str]],
    shapes: Mapping[int, Sequence[int]],
    shard: int,
    dtype: torch.dtype | None,
) -> list[tuple[int, int]]:
    """Return the bytes that each unit gathers, and the bytes of gradients that it reduces; the root is the last unit.

    FSDP pads the rows of each parameter to a multiple of the ranks.

    Args:
        shapes: id of a parameter -> its shape after tensor and expert parallelism.
        dtype: of gathered parameters; gradients are then reduced in float32. None: their own.
    """
    seen: set[int] = set()
    found = []
    for fqns in (*units, [""]):
        gathered = reduced = 0
        for parameter in (each for fqn in fqns for each in model.get_submodule(fqn).parameters()):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            rows, *others = shapes[id(parameter)] or (1,)
            padded = -(-rows // shard) * shard * math.prod(others)
            gathered += padded * (dtype or parameter.dtype).itemsize
            reduced += padded * (parameter.itemsize if dtype is None else 4) * parameter.requires_grad
        found.append((gathered, reduced))
    return found


def _names(model: nn.Module) -> dict[str, int]:
    return {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}


def _has_parameters(model: nn.Module, fqn: str) -> bool:
    return next(model.get_submodule(fqn).parameters(), None) is not None
