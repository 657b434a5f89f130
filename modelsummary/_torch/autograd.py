"""Autograd: its nodes, its engine, the hooks of saved tensors, and activation checkpointing.

All names hold from torch 2.6 to 2.14, except where a comment gives another version.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "CHECKPOINT_GENERATORS",
    "CHECKPOINT_HOOK",
    "CHECKPOINT_INPUTS",
    "RUNNING_BACKWARD",
    "TOP_HOOKS",
    "current_node",
    "next_node_number",
    "queue_callback",
    "running_backward",
    "set_grad_enabled",
    "top_saved_tensors_hooks",
]

# The function that ``torch.no_grad`` calls, and that fx graphs contain.
set_grad_enabled: Any = torch._C._set_grad_enabled
# Number of the next autograd node.
next_node_number: Any = torch._C._autograd._get_sequence_nr
# Id of the running backward, -1 without one.
running_backward: Any = torch._C._current_graph_task_id
RUNNING_BACKWARD = "from torch._C import _current_graph_task_id as running_backward"  # for code that is written
# The running autograd node, or None.
current_node: Any = torch._C._current_autograd_node
# Innermost default hooks of saved tensors; None on torch 2.6, which has no such function.
top_saved_tensors_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
TOP_HOOKS = "from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks"

# Non-reentrant checkpointing, by the names in ``torch.utils.checkpoint``: the generators that yield once, around the
# function (torch 2.13 has the first, others the second); the hook that saves nothing; and before torch 2.13, the
# autograd function that saves the inputs.
CHECKPOINT_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)
CHECKPOINT_HOOK = "_checkpoint_hook"
CHECKPOINT_INPUTS = "_NoopSaveInputs"


def queue_callback(callback: Any) -> None:
    """Call ``callback`` at the end of the running backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)
