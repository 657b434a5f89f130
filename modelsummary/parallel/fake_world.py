"""A process group of any size on one process, that moves nothing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from modelsummary import _torch

__all__ = ["fake_world"]


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Return a context in which this process is one rank of a fake process group.

    Collectives return at once, and give tensors of the right shape. Process groups of this process are set aside, and
    what a process group does to the traceback of an error is undone.
    """
    report_error = sys.excepthook
    with _torch.groups_set_aside():
        _torch.clear_sharding_caches()
        dist.init_process_group("fake", store=_torch.fake_store(), rank=rank, world_size=size)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="DTensor random operators")  # of torch 2.6, on the CPU
                yield
        finally:
            dist.destroy_process_group()
            sys.excepthook = report_error
            _torch.clear_sharding_caches()
