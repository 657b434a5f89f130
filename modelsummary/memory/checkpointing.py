"""Activation checkpointing: the choice of modules to recompute."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from modelsummary.capture.checkpoints import segment_of
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.tables import Printed, Report
from modelsummary.units import grouped, number_of, scaled

__all__ = [
    "Block",
    "CheckpointPlan",
    "blocks_of",
    "bytes_by_block",
    "least_recomputation",
    "recomputed_macs",
    "square_root",
]


class Block(NamedTuple):
    """A module that can be recomputed in the backward.

    Attributes:
        saving: bytes that are then not kept for the backward.
        macs: multiply-adds that are then done twice.
    """

    saving: int
    macs: int


@dataclass(frozen=True, repr=False)
class CheckpointPlan(Printed):
    """Modules to run under activation checkpointing.

    Attributes:
        fqns: names of these modules, for ``apply_checkpoint``.
        peak: peak of a step with checkpointing, in bytes.
        peak_without: peak of a step without it, in bytes.
        recomputed_macs: multiply-adds that each step does again.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> blocks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2)]
    >>> plan = Statistics(nn.Sequential(*blocks), (256, 8)).suggest_checkpoint(300_000)
    >>> plan.fqns, plan.peak < 300_000 < plan.peak_without
    (('0',), True)
    """

    fqns: tuple[str, ...]
    peak: int
    peak_without: int
    recomputed_macs: int

    def _report(self) -> Report:
        figures = [("Peak", self.peak), ("Peak without checkpointing", self.peak_without)]
        rows = [(name, grouped(value), scaled(value, "B")) for name, value in figures]
        rows.append(("MACs recomputed in each step", grouped(self.recomputed_macs), scaled(self.recomputed_macs)))
        title = f"Checkpoint {number_of(len(self.fqns), 'module')}: {', '.join(self.fqns)}"
        title = title if self.fqns else "No checkpoint is needed"
        return Report(rows, ["Figure", "Value", ""], "lrr", above=[title])


def least_recomputation(blocks: Sequence[Block], needed: Sequence[int]) -> list[int] | None:
    """Return the indices of the blocks whose recomputation frees enough with the fewest MACs; None if none do.

    Blocks are in the order of the forward. While block j runs, forward or backward, the activations of the blocks
    before it are alive, and none of the blocks after it. So the savings of the blocks before j must reach
    ``needed[j]``, and the savings of all blocks ``needed[len(blocks)]``, for the operators after the last block. The
    choice is exact: all sets that no other set beats in both savings and MACs are extended block by block.

    >>> least_recomputation([Block(10, 5), Block(30, 9), Block(20, 6)], needed=[0, 0, 0, 25])
    [1]
    >>> least_recomputation([Block(10, 5)], needed=[0, 25]) is None
    True
    """
    limit = max(needed)
    front: list[_Choice] = [(0, 0, ())]
    for index, block in enumerate(blocks):
        front = [choice for choice in front if -choice[1] >= needed[index]]
        taken = [
            (macs + block.macs, max(saved - block.saving, -limit), (*indices, index)) for macs, saved, indices in front
        ]
        front = _undominated(sorted([*front, *taken]))
    enough = [choice for choice in front if -choice[1] >= needed[-1]]
    return list(enough[0][2]) if enough else None


_Choice = tuple[int, int, tuple[int, ...]]  # MACs, minus the saving (capped at the most needed), blocks


def _undominated(choices: Iterable[_Choice]) -> list[_Choice]:
    """Return the choices, given in the order of their MACs, that save more than all before them."""
    kept: list[_Choice] = []
    for choice in choices:
        if not kept or choice[1] < kept[-1][1]:
            kept.append(choice)
    return kept


def bytes_by_block(estimate: MemoryEstimate, fqns: Sequence[str]) -> list[int]:
    """Return the peak in bytes while each block runs, forward or backward, and (last) while later operators run.

    Operators before the forward or after the backward of the first block, and in the optimizer's step, count for the
    first block.
    """
    peaks = [0] * (len(fqns) + 1)
    position, phase = 0, "forward"
    for point in estimate.timeline:
        if point.phase != phase:
            phase, position = point.phase, len(fqns) if point.phase == "backward" else 0
        inside = [index for index, fqn in enumerate(fqns) if f"{point.fqn}.".startswith(f"{fqn}.")]
        if point.fqn is not None and inside:
            position = inside[0]
        elif phase == "forward" and position < len(fqns) and point.fqn is not None and position == len(fqns) - 1:
            position = len(fqns)  # after the last block
        peaks[position] = max(peaks[position], point.total)
    return peaks


def blocks_of(root: LayerInfo) -> list[LayerInfo]:
    """Return the repeated parts of a model: the outermost called modules in containers that call submodules.

    Return the called children of the model if there are none. Modules that are called more than once, and
    parametrizations, are left out.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), (1, 2)).root
    >>> [row.fqn for row in blocks_of(root)]
    ['0', '1']
    """
    blocks: list[LayerInfo] = []
    pending = list(reversed(root.children))
    while pending:
        row = pending.pop()
        parent = row.parent_info
        in_container = parent is not None and isinstance(parent.module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        is_whole = not isinstance(row.module, (nn.Sequential, ParametrizationList))
        if row.executed and in_container and not row.is_leaf and is_whole:
            blocks.append(row)
        else:
            pending.extend(reversed(row.children))
    blocks = blocks or [row for row in root.children if row.executed]
    return [row for row in blocks if row.call_index == 0]


def square_root(blocks: Sequence[LayerInfo]) -> list[str]:
    """Return names for ``apply_checkpoint`` that cut n blocks of an ``nn.Sequential`` into about sqrt(n) segments.

    The memory kept at a time is then about 2 sqrt(n) blocks' worth (Chen et al. 2016, https://arxiv.org/abs/1604.06174).
    Blocks in other containers cannot be joined; each is named alone.
    """
    names: list[str] = []
    for parent, group in groupby(blocks, key=lambda row: row.parent_info):
        rows = list(group)
        container = parent.module if parent is not None else None
        if parent is None or container is None or type(container).forward is not nn.Sequential.forward:
            names += [row.fqn for row in rows]
            continue
        indices_by_id = {id(child): index for index, child in enumerate(container.children())}
        indices = [indices_by_id[row.layer_id] for row in rows]
        for run in _runs(indices):
            count = max(round(math.sqrt(len(run))), 1)
            edges = [run.start + len(run) * part // count for part in range(count + 1)]
            names += [
                f"{parent.fqn}[{first}:{end}]" if end - first > 1 else rows[indices.index(first)].fqn
                for first, end in pairwise(edges)
            ]
    return names


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield ascending numbers as ranges without gaps."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield range(numbers[first], numbers[index - 1] + 1)
            first = index


def recomputed_macs(root: LayerInfo, fqns: Iterable[str]) -> int:
    """Return the multiply-adds that checkpointing these modules and segments does again in each step."""
    names: set[str] = set()
    for fqn in fqns:
        container, segment = segment_of(fqn)
        row = next(row for row in root.walk() if row.fqn == container)
        if segment is None:
            names.add(fqn)
        elif row.module is not None:
            children = list(row.module.named_children())[segment.start : segment.stop]
            names.update(f"{container}.{name}" if container else name for name, _ in children)
    return _macs_under(root, names)


def _macs_under(row: LayerInfo, names: Container[str]) -> int:
    if row.executed and row.fqn in names:
        return row.macs
    return sum(_macs_under(child, names) for child in row.children)
