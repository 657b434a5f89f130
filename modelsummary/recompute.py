"""Activation checkpointing: which modules to recompute so that a step fits, and how to apply it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory_estimate import MemoryEstimate

__all__ = ["Block", "CheckpointPlan", "apply_checkpoint", "blocks_of", "bytes_by_block", "least_recomputation"]


class Block(NamedTuple):
    """A module that can be recomputed: bytes that are then not kept for the backward, multiply-adds done again."""

    saving: int
    macs: int


@dataclass(frozen=True)
class CheckpointPlan:
    """Modules to run under activation checkpointing.

    Attributes:
        fqns: of these modules.
        peak: bytes of a step then.
        peak_without: bytes of a step without.
        recomputed_macs: multiply-adds that are done again in each step.
    """

    fqns: tuple[str, ...]
    peak: int
    peak_without: int
    recomputed_macs: int


def least_recomputation(blocks: Sequence[Block], needed: Sequence[int]) -> list[int] | None:
    """The blocks, in the order of the forward, whose recomputation frees enough with the fewest MACs; None if none do.

    While block j runs, forward or backward, what the blocks before it keep is alive, and nothing of those behind it. So
    the savings of the blocks before j must reach ``needed[j]``; ``needed[len(blocks)]`` is for what runs behind all
    blocks. Exact: the sets that no other beats in saving and MACs are extended block by block.
    """
    limit = max(needed)
    front: list[_Choice] = [(0, 0, ())]
    for number, block in enumerate(blocks):
        front = [choice for choice in front if -choice[1] >= needed[number]]
        taken = [(macs + block.macs, max(saved - block.saving, -limit), (*own, number)) for macs, saved, own in front]
        front = _undominated(sorted([*front, *taken]))
    enough = [choice for choice in front if -choice[1] >= needed[-1]]
    return list(enough[0][2]) if enough else None


_Choice = tuple[int, int, tuple[int, ...]]  # MACs, minus the saving (no more than is ever needed), blocks


def _undominated(choices: Iterable[_Choice]) -> list[_Choice]:
    """Of choices in the order of their MACs those that save more than all before."""
    kept: list[_Choice] = []
    for choice in choices:
        if not kept or choice[1] < kept[-1][1]:
            kept.append(choice)
    return kept


def bytes_by_block(estimate: MemoryEstimate, fqns: Sequence[str]) -> list[int]:
    """The most that lives while each block runs, forward or backward, and (last) while what is behind all of them does.

    What runs before the first block's forward, after its backward, or in the optimizer's step counts for the first.
    """
    most = [0] * (len(fqns) + 1)
    place, phase = 0, "forward"
    for point in estimate.timeline:
        if point.phase != phase:
            phase, place = point.phase, len(fqns) if point.phase == "backward" else 0
        inside = [number for number, fqn in enumerate(fqns) if f"{point.fqn}.".startswith(f"{fqn}.")]
        if point.fqn is not None and inside:
            place = inside[0]
        elif phase == "forward" and place < len(fqns) and point.fqn is not None and place == len(fqns) - 1:
            place = len(fqns)  # behind the last block
        most[place] = max(most[place], point.total)
    return most


def blocks_of(root: LayerInfo) -> list[LayerInfo]:
    """The repeated parts of a model: outermost called modules in a container that call others themselves.

    Where there is none, the called modules right below the model. Modules that are called again are left out.
    """
    blocks: list[LayerInfo] = []
    pending = list(reversed(root.children))
    while pending:
        row = pending.pop()
        parent = row.parent_info
        in_container = parent is not None and isinstance(parent.module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        if row.executed and in_container and not row.is_leaf and not isinstance(row.module, nn.Sequential):
            blocks.append(row)
        else:
            pending.extend(reversed(row.children))
    blocks = blocks or [row for row in root.children if row.executed]
    return [row for row in blocks if not row.is_recursive and row.call_index == 0]


def apply_checkpoint(model: nn.Module, fqns: Iterable[str]) -> None:
    """Run modules of ``model`` under non-reentrant activation checkpointing from now on.

    Gradients are the same; names, parameters and state dicts do not change.

    Raises:
        InputError: a name is no module of the model; nothing was changed then.
    """
    if isinstance(fqns, str):
        raise InputError(f"fqns={fqns!r} is one name; pass a list: [{fqns!r}]")
    modules = dict(model.named_modules())
    chosen = list(dict.fromkeys(fqns))
    for fqn in chosen:
        if fqn not in modules:
            raise InputError(f"checkpoint names {fqn!r}, which is no module of the model")
    for fqn in chosen:
        modules[fqn].forward = partial(checkpoint, modules[fqn].forward, use_reentrant=False)
