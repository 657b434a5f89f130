"""Bytes over time as a snapshot of memory, which pytorch.org/memory_viz and ``torch.cuda._memory_viz`` show.

``torch.cuda.memory._snapshot`` has the same format: ``device_traces`` has the allocations of each device in time, and
``segments`` what is allocated at the end.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from modelsummary.file_contents import saved

__all__ = ["MemoryBlock", "changes_of", "snapshot_of", "write_snapshot"]

_FIRST_ADDRESS = 2**40  # of the first device; the next one's are as far away


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


def snapshot_of(blocks: Iterable[MemoryBlock]) -> dict[str, Any]:
    """Return the snapshot of devices with these blocks. A block takes the address of an equally large one that is free.

    >>> blocks = [MemoryBlock(0, "parameters", "weight", 512), MemoryBlock(0, "temporary", "sum", 64, 1.0, 2.0)]
    >>> snapshot = snapshot_of(blocks)
    >>> [(event["action"], event["size"]) for event in snapshot["device_traces"][0]]
    [('alloc', 512), ('alloc', 64), ('free_requested', 64), ('free_completed', 64)]
    >>> snapshot["segments"][0]["total_size"], snapshot["segments"][0]["allocated_size"]
    (576, 512)
    """
    changes = changes_of(blocks)
    n_devices = max((block.device for _, _, block in changes), default=-1) + 1
    traces: list[list[dict[str, Any]]] = [[] for _ in range(n_devices)]
    ends = [_FIRST_ADDRESS * (device + 1) for device in range(n_devices)]
    free: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # device, bytes -> addresses
    addresses: dict[int, int] = {}  # id of a block -> its address, while it is alive
    sizes: list[dict[int, MemoryBlock | int]] = [{} for _ in range(n_devices)]  # address -> block, or free bytes
    for at, is_new, block in changes:
        device, key = block.device, (block.device, block.nbytes)
        if is_new and not free[key]:
            free[key].append(ends[device])
            ends[device] += block.nbytes
        if is_new:
            addresses[id(block)] = free[key].pop()
        address = addresses[id(block)] if is_new else addresses.pop(id(block))
        sizes[device][address] = block if is_new else block.nbytes
        if not is_new:
            free[key].append(address)
        for action in ("alloc",) if is_new else ("free_requested", "free_completed"):
            event = {"action": action, "addr": address, "size": block.nbytes, "stream": 0, "time_us": round(1e6 * at)}
            traces[device].append({**event, "frames": _frames(block), "category": block.category})
    return {
        "device_traces": traces,
        "segments": [_segment(device, of_device) for device, of_device in enumerate(sizes)],
    }


def write_snapshot(blocks: Iterable[MemoryBlock], path: str | PathLike[str]) -> Path:
    """Write the snapshot of devices with these blocks and return its path.

    Raises:
        InputError: the file cannot be written.
    """
    return saved(pickle.dumps(snapshot_of(blocks)), path)


def _segment(device: int, sizes: dict[int, MemoryBlock | int]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for address, block in sorted(sizes.items(), key=lambda entry: entry[0]):
        is_free = isinstance(block, int)
        nbytes, frames = (block, []) if isinstance(block, int) else (block.nbytes, _frames(block))
        state = "inactive" if is_free else "active_allocated"
        blocks.append({"address": address, "size": nbytes, "requested_size": nbytes, "state": state, "frames": frames})
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    return {
        "device": device,
        "address": min(sizes, default=_FIRST_ADDRESS * (device + 1)),
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": active,
        "active_size": active,
        "requested_size": active,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
    }


def _frames(block: MemoryBlock) -> list[dict[str, Any]]:
    """Return the name and category of a block where a reader shows the stack of its allocation."""
    return [{"filename": block.category, "line": 0, "name": block.name}]
