"""The making of tensors, base classes of tensors and of norms, and containers.

All names hold from torch 2.6 to 2.14.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
)

__all__ = [
    "HOOKS_OF_ALL_MODULES",
    "SUPPORTED_NODES",
    "TREES",
    "BatchNorm",
    "InstanceNorm",
    "NormBase",
    "StorageBase",
    "TensorBase",
    "bound_functions",
    "make_subclass",
    "make_wrapper_subclass",
    "set_conj",
    "set_neg",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
]

TREES = "from torch.utils._pytree import tree_leaves, tree_map"  # for code that is written
# The base class whose ``resize_`` refuses storages without memory.
StorageBase: Any = torch._C.StorageBase
# The base class whose getters are the properties of tensors.
TensorBase: Any = torch._C.TensorBase
# The base classes of batch norms and instance norms of all dimensions, and of both.
BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm
InstanceNorm: Any = torch.nn.modules.instancenorm._InstanceNorm
NormBase: Any = torch.nn.modules.batchnorm._NormBase
# The tables of hooks that hold for all modules.
HOOKS_OF_ALL_MODULES: list[dict[Any, Any]] = [
    table
    for name, table in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(table, dict)
]
# The module whose functions torch binds to names of its own.
bound_functions: Any = torch._C
# Marks a tensor as conjugated.
set_conj: Any = torch._C._set_conj
# Marks a tensor as negated.
set_neg: Any = torch._C._set_neg
# A tensor of a subclass with the memory of another tensor.
make_subclass: Any = torch.Tensor._make_subclass
# A tensor of a subclass that holds no memory.
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
