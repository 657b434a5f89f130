"""Process groups, collectives and DTensor. All names hold from torch 2.6 to 2.14.

``torch.distributed`` is imported when it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "ALL_TO_ALL",
    "STRIDED_SHARD",
    "all_to_all_single_autograd",
    "clear_sharding_caches",
    "fake_store",
    "group_name",
    "groups_set_aside",
    "local_part",
    "place_in_group",
]


# Lines of code that is written.
ALL_TO_ALL = "from torch.distributed._functional_collectives import all_to_all_single_autograd"
STRIDED_SHARD = "from torch.distributed.tensor.placement_types import _StridedShard"


def fake_store() -> Any:
    """Return the store of a fake process group, which moves nothing; importing it registers the backend ``fake``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def groups_set_aside() -> Iterator[None]:
    """Return a context in which this process has no process group, so that it can make one; afterwards it has its own.

    The body destroys what it makes.
    """
    from torch.distributed import distributed_c10d

    registry: Any = torch._C._distributed_c10d
    world: Any = distributed_c10d._world
    tables = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
    )
    kept = [dict(table) for table in tables]
    default, count, method = world.default_pg, world.group_count, distributed_c10d._default_pg_init_method
    for table in tables:
        table.clear()
    registry._unregister_all_process_groups()
    distributed_c10d._update_default_pg(None)
    world.group_count = 0
    try:
        yield
    finally:
        for table, entries in zip(tables, kept, strict=True):
            table.clear()
            table.update(entries)
        distributed_c10d._update_default_pg(default)
        world.group_count, distributed_c10d._default_pg_init_method = count, method
        for group, name in world.pg_names.items():
            registry._register_process_group(name, group)


def group_name(value: Any) -> str | None:
    """Return the name of a process group, as an operator takes it; None for anything else.

    >>> group_name(3) is None
    True
    """
    if not isinstance(value, torch.ScriptObject) or "torch.distributed" not in sys.modules:
        return None
    groups: Any = torch.distributed.ProcessGroup
    try:
        name: str = groups.unbox(value).group_name
    except (RuntimeError, TypeError):  # another object, such as the reduction of an all-reduce
        return None
    return name


def place_in_group(name: str) -> tuple[int, int]:
    """Return the rank of this process in a group with a name, and the number of its ranks."""
    from torch.distributed import distributed_c10d

    groups: Any = distributed_c10d
    group = groups._resolve_process_group(name)
    return group.rank(), group.size()


def clear_sharding_caches() -> None:
    """Forget the layouts that DTensor inferred: an equal mesh of a later process group has groups of other names."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()
        else:  # torch 2.6, whose layouts of embeddings hold a mask: both caches have to forget the same ones
            from torch.distributed.tensor import _redistribute

            propagator: Any = DTensor._op_dispatcher.sharding_propagator
            propagator.propagate_op_sharding.cache.cache_clear()
            _redistribute._gen_transform_infos.cache_clear()


def all_to_all_single_autograd(sent: Any, arrives: list[int], leaves: list[int], group: Any) -> Any:
    """Return the parts of the first dimension that the ranks of a group exchange, with a backward."""
    import torch.distributed._functional_collectives as collectives

    return collectives.all_to_all_single_autograd(sent, arrives, leaves, group)


def local_part(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, not connected to its gradient; any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)
