"""A replay as a snapshot of memory, which pytorch.org/memory_viz and ``torch.cuda._memory_viz`` show.

``torch.cuda.memory._snapshot`` has the same format: ``device_traces`` has the allocations of each device in time, and
``segments`` what the allocator holds at the end.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.file_contents import saved
from modelsummary.memory.caching_allocator import AllocatorBlock
from modelsummary.memory.replay import DeviceReplay, MemoryBlock, MemoryEvent

__all__ = ["snapshot_of", "write_snapshot"]


def snapshot_of(replays: Sequence[DeviceReplay]) -> dict[str, Any]:
    """Return the snapshot of the devices of a replay.

    >>> from modelsummary.memory.replay import replayed
    >>> blocks = [MemoryBlock(0, "parameters", "weight", 500), MemoryBlock(0, "temporary", "sum", 64, 1.0, 2.0)]
    >>> snapshot = snapshot_of(replayed(blocks))
    >>> [(event["action"], event["size"]) for event in snapshot["device_traces"][0]]
    [('segment_alloc', 2097152), ('alloc', 500), ('alloc', 64), ('free_requested', 64), ('free_completed', 64)]
    >>> (segment,) = snapshot["segments"]
    >>> segment["total_size"], segment["allocated_size"], segment["requested_size"]
    (2097152, 512, 500)
    """
    return {
        "device_traces": [list(_trace(replay.events)) for replay in replays],
        "segments": [
            _segment(device, blocks, replay.contents)
            for device, replay in enumerate(replays)
            for blocks in replay.allocator.segments()
        ],
    }


def write_snapshot(replays: Sequence[DeviceReplay], path: str | PathLike[str]) -> Path:
    """Write the snapshot of the devices of a replay and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    return saved(pickle.dumps(snapshot_of(replays)), path)


def _trace(events: Sequence[MemoryEvent]) -> Iterator[dict[str, Any]]:
    for at, action, address, nbytes, block in events:
        for name in ("free_requested", action) if action == "free_completed" else (action,):
            event = {"action": name, "addr": address, "size": nbytes, "stream": 0, "time_us": round(1e6 * at)}
            yield {**event, "frames": _frames(block), "category": "segment" if block is None else block.category}


def _segment(device: int, blocks: Sequence[AllocatorBlock], contents: Mapping[int, MemoryBlock]) -> dict[str, Any]:
    entries = [
        {
            "address": block.address,
            "size": block.nbytes,
            "requested_size": block.requested,
            "state": "inactive" if block.is_free else "active_allocated",
            "frames": _frames(contents.get(block.address)),
        }
        for block in blocks
    ]
    active = sum(block.nbytes for block in blocks if not block.is_free)
    return {
        "device": device,
        "address": blocks[0].address,
        "total_size": sum(block.nbytes for block in blocks),
        "allocated_size": active,
        "active_size": active,
        "requested_size": sum(block.requested for block in blocks),
        "stream": 0,
        "segment_type": "small" if blocks[0].is_small else "large",
        "blocks": entries,
    }


def _frames(block: MemoryBlock | None) -> list[dict[str, Any]]:
    """Return the name and category of a block where a reader shows the stack of its allocation."""
    return [] if block is None else [{"filename": block.category, "line": 0, "name": block.name}]
