"""Checks that a graph was made for its inputs. The generated code calls them by name."""

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
    """Raise ``TraceError`` if a value that the forward decides by differs from the traced one."""
    if told != traced:
        raise TraceError(
            f"the forward decides by values: it read {traced!r:.80} when it was traced, and reads {told!r:.80} now; "
            "trace again with this input"
        )


@has_side_effect
def check_input(
    tensor: Tensor, sizes: Sequence[int | None] | None, dtype: torch.dtype | None = None, smallest_batch: int = 1
) -> None:
    """Raise ``TraceError`` if the graph was not made for an input.

    Args:
        sizes: its required sizes, with None where any size will do; None: any shape.
        dtype: its required dtype; None: any.
        smallest_batch: the smallest size allowed where ``sizes`` has None.
    """
    shape = list(tensor.shape)
    if dtype is not None and tensor.dtype is not dtype:
        raise TraceError(
            f"an input is {tensor.dtype}, but the graph was made for {dtype}, because the forward reads the dtype; "
            "trace again"
        )
    if sizes is None:
        return
    expected = ["any" if size is None else size for size in sizes]
    if len(shape) != len(sizes) or any(size not in (None, actual) for size, actual in zip(sizes, shape, strict=True)):
        raise TraceError(
            f"an input has shape {shape}, but the graph was made for {expected}, because the forward computes with "
            "sizes; trace again with an input of this shape"
        )
    if any(size is None and actual < smallest_batch for size, actual in zip(sizes, shape, strict=True)):
        raise TraceError(
            f"an input has shape {shape}, but the graph was made for a batch of at least {smallest_batch}; a smaller "
            "batch runs other operators; trace again with this batch"
        )


@has_side_effect
def check_mode(training: bool, traced: bool) -> None:
    """Raise ``TraceError`` if the graph was traced in the other mode."""
    if training is not traced:
        modes = ["train" if mode else "eval" for mode in (traced, training)]
        raise TraceError(
            f"the graph was traced in {modes[0]} mode and is in {modes[1]} mode, in which the forward runs other "
            "operators; trace again"
        )
