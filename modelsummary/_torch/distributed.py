"""Process groups, collectives and DTensor. All names hold from torch 2.6 to 2.14.

``torch.distributed`` is imported when it is needed.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = [
    "ALL_TO_ALL",
    "STRIDED_SHARD",
    "all_to_all_single_autograd",
    "clear_sharding_caches",
    "fake_store",
    "functional_collectives",
    "local_part",
]


# Lines of code that is written.
ALL_TO_ALL = "from torch.distributed._functional_collectives import all_to_all_single_autograd"
STRIDED_SHARD = "from torch.distributed.tensor.placement_types import _StridedShard"


def fake_store() -> Any:
    """Return the store of a fake process group, which moves nothing; importing it registers the backend ``fake``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def clear_sharding_caches() -> None:
    """Forget the layouts that DTensor inferred: an equal mesh of a later process group has groups of other names."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # absent from old versions of torch


def functional_collectives() -> Any:
    """Return the namespace of collectives that return their results; importing them gives them shapes in torch 2.6."""
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional


def all_to_all_single_autograd(sent: Any, arrives: list[int], leaves: list[int], group: Any) -> Any:
    """Return the parts of the first dimension that the ranks of a group exchange, with a backward."""
    import torch.distributed._functional_collectives as collectives

    return collectives.all_to_all_single_autograd(sent, arrives, leaves, group)


def local_part(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, not connected to its gradient; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)
