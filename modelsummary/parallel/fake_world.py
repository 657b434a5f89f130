"""A process group of any size on one process, that moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from modelsummary import _torch

__all__ = ["fake_world"]


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Context in which this process is one rank of a fake process group; a group that exists already is put back.

    Collectives return at once, and give tensors of the right shape.
    """
    make_store, get_world, set_world = _torch.process_groups()
    before = get_world()
    set_world(type(before)())
    try:
        dist.init_process_group("fake", store=make_store(), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        set_world(before)
