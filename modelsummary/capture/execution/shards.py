"""FSDP2 on shapes: its shards are replaced by tensors without data.

FSDP2 keeps the shard of each parameter, and what it gathers, in objects beside the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary import _torch

__all__ = ["mesh_device", "replace_shards"]


def mesh_device(modules: Sequence[nn.Module]) -> torch.device | None:
    """Return the device on which FSDP2 gathers parameters; None if it shards none of the modules.

    >>> mesh_device([nn.Linear(2, 2)]) is None
    True
    """
    return next((group.device for module in modules for group in _torch.fsdp_groups(module)), None)


def replace_shards(group: Any, twin_of: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> None:
    """Replace the shards of a group of parameters, and forget what FSDP2 gathered.

    All of this is in attributes, which the run restores. So a group that was left gathered, as the root is after a
    forward, begins the run sharded, and the memory of what was gathered is not freed.

    Args:
        group: as returned by ``fsdp_groups``.
        twin_of: returns the twin of a tensor; twins share memory where the tensors do.
        dtype: dtype of the twins if it is not the tensors' own.
    """
    for fsdp_param in group.fsdp_params:
        shares = _storage(fsdp_param._sharded_param_data) == _storage(fsdp_param.sharded_param)
        data = twin_of(fsdp_param._sharded_param_data) if shares else None
        fsdp_param.sharded_param = twin_of(fsdp_param.sharded_param)
        fsdp_param._sharded_param_data = fsdp_param.sharded_param._local_tensor if data is None else data
        fsdp_param._setattr_on_modules(fsdp_param.sharded_param)
        fsdp_param.sharded_state = type(fsdp_param.sharded_state).SHARDED
        fsdp_param.all_gather_outputs = []
        if "unsharded_accumulated_grad" in vars(fsdp_param):  # torch < 2.15
            fsdp_param.unsharded_accumulated_grad = None
        vars(fsdp_param).pop("_unsharded_param", None)
        if not shares:
            fsdp_param.reset_sharded_param()
        fsdp_param._init_extensions()
    group._sharded_state = type(group._sharded_state).SHARDED
    group._all_gather_result = None
    group._reset_sharded_params = True
    if dtype is not None:
        group._init_mp_dtypes()


def _storage(tensor: Any) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
