"""FSDP: what it keeps beside the modules. All names hold from torch 2.6 to 2.14, except where a comment says more.

FSDP2 keeps the shard of each parameter, and what it gathers, in objects beside the modules. For a run on shapes, its
shards are replaced by tensors without data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary._torch.distributed import local_part

__all__ = ["flat_shards", "fsdp_groups", "gathered_parameters", "mesh_device", "replace_shards"]


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module; [] if it does not shard the module.

    Each has ``fsdp_params``, whose objects hold a shard and the gathered parameter.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent: FSDP is not in use
    if fsdp is None or not isinstance(module, getattr(fsdp, "FSDPModule", ())):
        return []
    sharded: Any = module
    state = sharded._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def flat_shards(module: nn.Module) -> tuple[int, int]:
    """Return the elements of the parameters that FSDP1 keeps flat for a module, and of this rank's part."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # absent: FSDP is not in use
    if fsdp is None or not isinstance(module, fsdp.FullyShardedDataParallel):
        return 0, 0
    handle: Any = getattr(module, "_handle", None)
    if handle is None:
        return 0, 0
    whole = handle.flat_param._unpadded_unsharded_size.numel()
    return whole, -(-whole // (handle.world_size if handle.uses_sharded_strategy else 1))


def gathered_parameters(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return the shards of the parameters that FSDP2 has gathered in a module, by the ``id`` of what it gathered."""
    return {
        id(getattr(fsdp_param, "_unsharded_param", None)): fsdp_param.sharded_param
        for part in module.modules()
        for group in fsdp_groups(part)
        for fsdp_param in group.fsdp_params
    }


def mesh_device(modules: Sequence[nn.Module]) -> torch.device | None:
    """Return the device on which FSDP2 gathers parameters; None if it shards none of the modules.

    >>> mesh_device([nn.Linear(2, 2)]) is None
    True
    """
    return next((group.device for module in modules for group in fsdp_groups(module)), None)


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
        fsdp_param._sharded_param_data = local_part(fsdp_param.sharded_param) if data is None else data
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
    return int(local_part(tensor).untyped_storage()._cdata)
