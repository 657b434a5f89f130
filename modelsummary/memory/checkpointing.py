"""Activation checkpointing: which modules to recompute so that a step fits, and how to apply it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from torch import nn
from torch.utils.checkpoint import checkpoint

from modelsummary.errors import InputError, close_to
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.estimate import MemoryEstimate

__all__ = [
    "Block",
    "CheckpointPlan",
    "apply_checkpoint",
    "blocks_of",
    "bytes_by_block",
    "least_recomputation",
    "recomputed_macs",
    "segment_of",
    "square_root",
]


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

    Args:
        model: it is changed.
        fqns: of modules; ``"features[4:8]"`` are children 4 to 7 of the ``nn.Sequential`` ``features``, as one segment,
            of which only the input is kept.

    Raises:
        InputError: a name is no module of the model, or no such segment; nothing was changed then.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
    if isinstance(fqns, str):
        raise InputError(f"fqns={fqns!r} is one name; pass a list: [{fqns!r}]")
    chosen = list(dict.fromkeys(fqns)) if isinstance(fqns, Iterable) else [fqns]
    if not all(isinstance(fqn, str) for fqn in chosen):
        raise InputError(f"fqns={fqns!r}; expected a list of names of modules")
    modules = dict(model.named_modules())
    segments: defaultdict[str, list[range]] = defaultdict(list)
    for fqn in chosen:
        container, segment = segment_of(fqn)
        if container not in modules:
            raise InputError(f"checkpoint names {fqn!r}, which is no module of the model{close_to(fqn, modules)}")
        if segment is not None:
            _check_segment(fqn, modules[container], segment, segments[container])
            segments[container].append(segment)
    for fqn in {segment_of(fqn)[0]: fqn for fqn in chosen}.values():
        container, _ = segment_of(fqn)
        if container in segments and container in chosen:
            raise InputError(f"checkpoint names {fqn!r} and all of {container!r}; name one of them")
        forward = vars(modules[container]).get("forward")
        if isinstance(forward, partial) and forward.func in (checkpoint, _in_segments):
            raise InputError(f"{fqn!r} is checkpointed already")
    for fqn in chosen:
        if fqn in modules:
            modules[fqn].forward = partial(checkpoint, modules[fqn].forward, use_reentrant=False)
    for container, parts in segments.items():
        modules[container].forward = partial(_in_segments, modules[container], parts)


_SEGMENT = re.compile(r"(?P<container>.*)\[(?P<first>\d+):(?P<end>\d+)\]")


def segment_of(fqn: str) -> tuple[str, range | None]:
    """A name, or the container of a segment and the numbers of its children."""
    found = _SEGMENT.fullmatch(fqn)
    return (found["container"], range(int(found["first"]), int(found["end"]))) if found else (fqn, None)


def _check_segment(fqn: str, container: nn.Module, segment: range, others: Iterable[range]) -> None:
    if type(container).forward is not nn.Sequential.forward:
        raise InputError(f"checkpoint names {fqn!r}, but {type(container).__name__} is no nn.Sequential")
    number = len(container._modules)
    if not segment or segment.stop > number:
        raise InputError(f"checkpoint names {fqn!r}, but the container has children 0 to {number - 1}")
    if any(set(segment) & set(other) for other in others):
        raise InputError(f"checkpoint names {fqn!r}, which overlaps another segment")


def _in_segments(container: nn.Module, segments: Sequence[range], x: Any) -> Any:
    """The forward of an ``nn.Sequential`` with parts of it checkpointed."""
    children = list(container.children())
    segment_at = {segment.start: segment for segment in segments}
    place = 0
    while place < len(children):
        segment = segment_at.get(place)
        if segment is None:
            x = children[place](x)
            place += 1
        else:
            x = checkpoint(_run, children[segment.start : segment.stop], x, use_reentrant=False)
            place = segment.stop
    return x


def _run(children: Iterable[nn.Module], x: Any) -> Any:
    for child in children:
        x = child(x)
    return x


def square_root(blocks: Sequence[LayerInfo]) -> list[str]:
    """Names for ``apply_checkpoint``: of n blocks in an ``nn.Sequential`` about the square root of n segments.

    Then about 2 sqrt(n) blocks' worth is kept at a time (Chen et al. 2016, https://arxiv.org/abs/1604.06174). Blocks in
    other containers cannot be joined, and stand for themselves.
    """
    names: list[str] = []
    for parent, group in groupby(blocks, key=lambda row: row.parent_info):
        own = list(group)
        container = parent.module if parent is not None else None
        if parent is None or container is None or type(container).forward is not nn.Sequential.forward:
            names += [row.fqn for row in own]
            continue
        places = {id(child): number for number, child in enumerate(container.children())}
        numbers = [places[row.layer_id] for row in own]
        for run in _runs(numbers):
            count = max(round(math.sqrt(len(run))), 1)
            edges = [run.start + len(run) * part // count for part in range(count + 1)]
            names += [
                f"{parent.fqn}[{first}:{end}]" if end - first > 1 else own[numbers.index(first)].fqn
                for first, end in pairwise(edges)
            ]
    return names


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Numbers in ascending order as ranges without gaps."""
    first = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield range(numbers[first], numbers[place - 1] + 1)
            first = place


def recomputed_macs(root: LayerInfo, fqns: Iterable[str]) -> int:
    """Multiply-adds that checkpointing these modules and segments does again in each step."""
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
