"""Pipeline stages of ``torch.distributed.pipelining``: the order of actions, and the reduction of gradients.

All names hold from torch 2.6 to 2.14, except where a comment gives another version. ``torch.distributed`` is
imported when it is needed.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["merge_by", "planned_actions", "reduce_gradients", "same_for_all"]


def planned_actions(kind: Any, device: int, n_devices: int, n_microbatches: int) -> list[Any]:
    """Return the actions of a device under a schedule of two stages per device, as torch's engine orders them."""
    engine = kind.__new__(kind)  # with the attributes that the order depends on; __init__ wants process groups
    engine._n_microbatches = n_microbatches
    engine.pp_group_size, engine.num_stages, engine._num_stages = n_devices, 2 * n_devices, 2 * n_devices
    engine.n_local_stages, engine.rank = 2, device
    return [
        action
        for planned in engine._calculate_single_rank_operations(device)
        if planned is not None
        for action in getattr(planned, "sub_actions", None) or (planned,)  # since torch 2.9
    ]


def merge_by(schedule: Any, merge: Any) -> None:
    """Let a schedule join the results of micro-batches by a function."""
    schedule._merge_outputs = merge


def same_for_all() -> Any:
    """Return the mark of an argument that all micro-batches get whole."""
    from torch.distributed.pipelining.microbatch import _Replicate

    return _Replicate()


def reduce_gradients(stage_module: torch.nn.Module) -> None:
    """Reduce the gradients that FSDP2 accumulated in a stage, with the function of torch's engine."""
    from torch.distributed.pipelining import PipelineStage

    stage: Any = PipelineStage.__new__(PipelineStage)  # the method needs these attributes only
    stage.submod, stage.has_backward, stage._gradient_reduction_handle = stage_module, True, None
    stage.perform_reduce_grad(1)
