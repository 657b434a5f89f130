"""``AllocatorReserve``: what torch's allocator takes from a CUDA device, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from modelsummary.errors import InputError
from modelsummary.memory.memory_snapshot import write_snapshot
from modelsummary.memory.replay import MemoryBlock, replayed
from modelsummary.tables import Printed, Report
from modelsummary.units import grouped, parse_bytes, scaled

__all__ = ["AllocatorReserve", "AllocatorSettings", "allocator_settings"]


class AllocatorSettings(NamedTuple):
    """Settings of torch's allocator.

    Attributes:
        limit: bytes that the device has for it; None: as many as it asks for.
        expandable_segments: the option of ``PYTORCH_ALLOC_CONF``.
    """

    limit: int | None = None
    expandable_segments: bool = False


def allocator_settings(reserve: bool | int | str, *, expandable_segments: bool) -> AllocatorSettings | None:
    """Return the settings for ``reserve=`` as a user passes it; None: nothing is replayed.

    Raises:
        InputError: an argument is unusable, or the allocator has a setting but is not replayed.

    >>> allocator_settings("24GB", expandable_segments=True)
    AllocatorSettings(limit=24000000000, expandable_segments=True)
    """
    if not isinstance(expandable_segments, bool):
        raise InputError(f"expandable_segments must be True or False, got {expandable_segments!r:.80}")
    if reserve is False:
        if expandable_segments:
            raise InputError("expandable_segments=True changes what the allocator reserves; pass reserve=True with it")
        return None
    limit = None if reserve is True else parse_bytes(reserve, "reserve")
    return AllocatorSettings(limit, expandable_segments)


@dataclass(frozen=True, repr=False)
class AllocatorReserve(Printed):
    """The bytes that torch's allocator takes from a CUDA device for the first three steps.

    Attributes:
        reserved: most bytes of its segments at one time: ``torch.cuda.max_memory_reserved()``.
        max_allocated: most bytes of blocks with a tensor at one time: ``torch.cuda.max_memory_allocated()``.
        settings: settings of the allocator.
        segments: bytes of each segment at the end.
        missing: what the limit leaves no memory for, though cached segments were released; None: the steps fit.
        blocks: what is allocated, in time; the seconds are numbers of operators.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> reserve = Statistics(nn.Linear(1024, 1024), (8, 1024)).memory(reserve=True, device="cuda").reserve
    >>> reserve.reserved % 2**21, reserve.fits
    (0, True)
    """

    reserved: int
    max_allocated: int
    settings: AllocatorSettings
    segments: tuple[int, ...] = ()
    missing: MemoryBlock | None = None
    blocks: tuple[MemoryBlock, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(cls, blocks: Iterable[MemoryBlock], settings: AllocatorSettings) -> AllocatorReserve:
        """Return the reserve for what is allocated and freed in time on one device."""
        blocks = tuple(blocks)
        limit, expandable_segments = settings
        (replay,) = replayed(blocks, limit, expandable_segments=expandable_segments)
        segments = tuple(sum(block.nbytes for block in segment) for segment in replay.allocator.segments())
        return cls(replay.reserved, replay.allocated, settings, segments, replay.missing, blocks)

    @property
    def fragmentation(self) -> int:
        """Bytes that are reserved beyond the most that tensors take at one time."""
        return self.reserved - self.max_allocated

    @property
    def fits(self) -> bool:
        """Whether the steps run within the limit."""
        return self.missing is None

    def write_memory_snapshot(self, path: str | PathLike[str]) -> Path:
        """Write the steps for pytorch.org/memory_viz, as torch's snapshots of memory, with segments.

        A second stands for an operator.

        Raises:
            InputError: the file cannot be written.
        """
        limit, expandable_segments = self.settings
        return write_snapshot(replayed(self.blocks, limit, expandable_segments=expandable_segments), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as a dict that can be written as JSON."""
        figures = {f"{name}_bytes": getattr(self, name) for name in ("reserved", "fragmentation", "max_allocated")}
        limit, expandable_segments = self.settings
        return {**figures, "fits": self.fits, "limit_bytes": limit, "expandable_segments": expandable_segments}

    def _report(self) -> Report:
        rows = [("Reserved", self.reserved), ("Allocated", self.max_allocated), ("Fragmentation", self.fragmentation)]
        below = []
        if self.missing is not None:
            limit = scaled(self.settings.limit or 0, "B")
            below = [
                f"Out of memory: {limit} leave no room for {self.missing.name}, {grouped(self.missing.nbytes)} bytes"
            ]
        cells = [(name, grouped(nbytes), scaled(nbytes, "B")) for name, nbytes in rows]
        return Report(cells, ["", "Bytes", ""], "lrr", above=["Segments of torch's allocator"], below=below)
