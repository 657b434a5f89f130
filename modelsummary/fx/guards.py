"""What a graph checks of its inputs: that it was made for them. The generated code calls these by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from modelsummary.errors import TraceError

__all__ = ["check_decision", "check_input", "check_mode"]


@has_side_effect
def check_decision(told: Any, traced: Any) -> None:
    """Check a value by which the forward decides. Raises ``TraceError`` if it is not the traced one."""
    if told != traced:
        raise TraceError(
            f"the forward decides by values: it read {traced!r:.80} when it was traced, and reads {told!r:.80}; "
            "trace again with such an input"
        )


@has_side_effect
def check_input(
    tensor: Tensor, sizes: Sequence[int | None] | None, dtype: torch.dtype | None = None, smallest_batch: int = 1
) -> None:
    """Check an input of a traced graph.

    Args:
        sizes: that it must have, with None where any will do; None: any.
        dtype: that it must have; None: any.
        smallest_batch: the smallest size where ``sizes`` has None.

    Raises:
        TraceError: the graph was not made for this input.
    """
    shape = list(tensor.shape)
    if dtype is not None and tensor.dtype is not dtype:
        raise TraceError(
            f"an input is {tensor.dtype}, but the graph computes with {dtype}, which was read; trace again"
        )
    if sizes is None:
        return
    expected = ["any" if size is None else size for size in sizes]
    if len(shape) != len(sizes) or any(size not in (None, own) for size, own in zip(sizes, shape, strict=True)):
        raise TraceError(
            f"an input has the shape {shape}, but the graph was made for {expected}: the forward computes with sizes; "
            "trace again with an input of this shape"
        )
    if any(size is None and own < smallest_batch for size, own in zip(sizes, shape, strict=True)):
        raise TraceError(
            f"an input has the shape {shape}, but the forward does other things with a batch of at least "
            f"{smallest_batch}, for which the graph was made; trace again with such a batch"
        )


@has_side_effect
def check_mode(training: bool, traced: bool) -> None:
    """Check the mode of a traced graph. Raises ``TraceError`` if it was made for the other one."""
    if training is not traced:
        modes = ["train" if mode else "eval" for mode in (traced, training)]
        raise TraceError(
            f"the graph was traced in {modes[0]} mode, and the forward does other things in {modes[1]} mode; "
            "trace again"
        )
