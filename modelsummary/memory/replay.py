"""Allocations over time, replayed through torch's allocator: what it reserves, and where each block lies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from modelsummary.memory.caching_allocator import AllocatorBlock, CachingAllocator, OutOfMemory

__all__ = ["DeviceReplay", "MemoryBlock", "MemoryEvent", "changes_of", "replayed"]

_ADDRESSES = 2**40  # of each device


class MemoryBlock(NamedTuple):
    """Bytes of a device that are alive for a time.

    Attributes:
        device: number of the device.
        category: kind of memory, such as ``"activations"``.
        name: what the bytes are.
        nbytes: number of bytes.
        begin: seconds at which they are allocated.
        end: seconds at which they are freed; None: they stay.
    """

    device: int
    category: str
    name: str
    nbytes: int
    begin: float = 0.0
    end: float | None = None


def changes_of(blocks: Iterable[MemoryBlock]) -> list[tuple[float, bool, MemoryBlock]]:
    """Return each allocation (True) and each release (False) with its seconds, in time.

    At one moment, releases precede allocations. Blocks that no time passes in are left out.

    >>> blocks = [MemoryBlock(0, "inputs", "next", 8, 1.0), MemoryBlock(0, "inputs", "first", 8, 0.0, 1.0)]
    >>> [(at, is_new) for at, is_new, _ in changes_of(blocks)]
    [(0.0, True), (1.0, False), (1.0, True)]
    """
    changes: list[tuple[float, bool, MemoryBlock]] = []
    for block in blocks:
        if block.nbytes and block.end != block.begin:
            changes.append((block.begin, True, block))
            changes += [] if block.end is None else [(block.end, False, block)]
    return sorted(changes, key=lambda change: change[:2])


class MemoryEvent(NamedTuple):
    """One change of the memory of a device.

    Attributes:
        at: seconds.
        action: as in torch's snapshots: ``"alloc"``, ``"free_completed"``, or the action of a ``SegmentChange``.
        address, nbytes: what changed.
        block: what is allocated or freed; None for segments.
    """

    at: float
    action: str
    address: int
    nbytes: int
    block: MemoryBlock | None = None


@dataclass
class DeviceReplay:
    """The memory of a device after a replay.

    Attributes:
        allocator: the allocator at the end.
        events: all changes, in time.
        contents: address -> what lies there at the end.
        reserved: most bytes of segments at one time.
        allocated: most bytes of blocks in use at one time.
        missing: what the device had no memory for; None: everything had a place.
    """

    allocator: CachingAllocator
    events: list[MemoryEvent] = field(default_factory=list)
    contents: dict[int, MemoryBlock] = field(default_factory=dict)
    reserved: int = 0
    allocated: int = 0
    missing: MemoryBlock | None = None

    def allocate(self, at: float, block: MemoryBlock) -> AllocatorBlock:
        """Allocate a block.

        Raises:
            OutOfMemory: the device has no memory for it.
        """
        n_changes = len(self.allocator.changes)
        try:
            allocation = self.allocator.allocate(block.nbytes)
        finally:
            self.events += [MemoryEvent(at, *change) for change in self.allocator.changes[n_changes:]]
        self.contents[allocation.address] = block
        self.events.append(MemoryEvent(at, "alloc", allocation.address, block.nbytes, block))
        self.allocated = max(self.allocated, self.allocator.allocated)
        self.reserved = max(self.reserved, self.allocator.reserved)
        return allocation

    def free(self, at: float, allocation: AllocatorBlock) -> None:
        """Free the block of an allocation."""
        block = self.contents.pop(allocation.address)
        self.events.append(MemoryEvent(at, "free_completed", allocation.address, block.nbytes, block))
        self.allocator.free(allocation)


def replayed(
    blocks: Iterable[MemoryBlock], limit: int | None = None, *, expandable_segments: bool = False
) -> Sequence[DeviceReplay]:
    """Return the memory of each device, at least of one, after its blocks were allocated and freed in time.

    A device that has no memory for a block stops there.

    Args:
        blocks: what the devices hold.
        limit, expandable_segments: as for ``CachingAllocator``.

    >>> blocks = [MemoryBlock(0, "parameters", "weight", 2**21), MemoryBlock(0, "temporary", "sum", 64, 1.0, 2.0)]
    >>> (device,) = replayed(blocks)
    >>> device.reserved == 20 * 2**20 + 2 * 2**20, device.allocated == 2**21 + 512
    (True, True)
    """
    changes = changes_of(blocks)
    n_devices = max((block.device for _, _, block in changes), default=0) + 1
    replays = [
        DeviceReplay(
            CachingAllocator(limit, expandable_segments=expandable_segments, first_address=_ADDRESSES * (device + 1))
        )
        for device in range(n_devices)
    ]
    allocations: dict[int, AllocatorBlock] = {}  # by the id of what lies there
    for at, is_new, block in changes:
        replay = replays[block.device]
        if replay.missing is not None:
            continue
        if not is_new:
            replay.free(at, allocations.pop(id(block)))
            continue
        try:
            allocations[id(block)] = replay.allocate(at, block)
        except OutOfMemory:
            replay.missing = block
    return replays
