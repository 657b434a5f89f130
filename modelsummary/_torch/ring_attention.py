"""Context parallelism: torch's ring attention. Names hold in torch 2.14, whose public part of it is a prototype."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "COLLECTIVES",
    "CONTEXT_PARALLEL",
    "FLATTENED",
    "JOINED",
    "RING_OPTIONS",
    "all_gather_single",
    "all_reduce",
    "flattened_group",
    "has_ring",
]


# Lines of code that is written.
CONTEXT_PARALLEL = "from torch.distributed.tensor.experimental import context_parallel"
COLLECTIVES = "from torch.distributed._functional_collectives import all_gather_single, all_reduce"
RING_OPTIONS = "from torch.distributed.tensor.experimental._attention import _cp_options as ring_options"
# One dimension of a mesh for several, with their name.
FLATTENED = "mesh[{names!r}]._flatten({name!r})"
# One mesh of several dimensions that were taken apart.
JOINED = "DeviceMesh._concatenate([{meshes}])"

_ATTENTION = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "cuda": "_scaled_dot_product_flash_attention",
}


def all_gather_single(tensor: Any, dim: int, group: Any) -> Any:
    """Return the tensors of the ranks of a group, joined along a dimension in the order of the ranks."""
    import torch.distributed._functional_collectives as collectives

    return collectives.all_gather_single(tensor, dim, group)


def all_reduce(tensor: Any, operation: str, group: Any) -> Any:
    """Return the tensors of the ranks of a group, reduced to one."""
    import torch.distributed._functional_collectives as collectives

    return collectives.all_reduce(tensor, operation, group)


def flattened_group(mesh: Any, names: tuple[str, ...]) -> str:
    """Return the name of the process group of several dimensions of a mesh that were made one."""
    name: str = mesh[names]._flatten("_".join(names)).get_group().group_name
    return name


def has_ring(device_type: str) -> bool:
    """Return True if torch runs the attention that it chooses on a kind of device as a ring.

    >>> has_ring("cuda"), has_ring("cpu")
    (True, False)
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as rings

    name = _ATTENTION.get(device_type, "_scaled_dot_product_fused_attention_overrideable")
    operators: Any = rings.custom_ops
    return getattr(torch.ops.aten, name).default in operators
