"""Multiply-adds that a block mask spares ``flex_attention``: whole blocks of the scores are never computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from modelsummary import _torch

__all__ = ["BLOCK_MASKED", "skipped_macs"]

# Position of the block mask among the arguments; number of products over the query's head size, and over the value's.
BLOCK_MASKED = {"flex_attention": (4, 1, 1), "flex_attention_backward": (9, 3, 2)}
_NO_BLOCKS = 2**30  # the block size without a mask: one block covers everything


def skipped_macs(name: str, args: Sequence[Any], values: Callable[[Tensor], Tensor | None]) -> int | None:
    """Return how many of the dense multiply-adds the mask skips; None if its values are not known.

    Args:
        name: name of the operator, one of ``BLOCK_MASKED``.
        args: query (B, H, L, E), key (B, G, S, E), value (B, G, S, V), ..., the block mask as a tuple.
        values: returns the values of a tensor of the mask, or None if they are not known.
    """
    position, as_query, as_value = BLOCK_MASKED[name]
    query, key, value = (tensor.shape for tensor in args[:3])
    mask = args[position]
    *parts, rows_of_block, columns_of_block, _ = mask
    if rows_of_block >= _NO_BLOCKS:
        return 0
    first = next(number for number, part in enumerate(parts) if isinstance(part, Tensor))
    computed = 0
    # First the blocks that the mask cuts through, then full blocks: their number per row of blocks, and their columns.
    for counts, columns in (parts[first : first + 2], parts[first + 2 : first + 4]):
        if counts is None:
            continue
        counted, chosen = values(counts), values(columns)
        if counted is None or chosen is None or counted.is_meta or chosen.is_meta:
            return None
        with _disable_current_modes(), _torch.DisableTorchFunction():  # these are not operators of the model
            elements = _elements(counted, chosen, query[-2], key[-2], rows_of_block, columns_of_block)
        computed += elements * (query[0] * query[1] // (counts.shape[0] * counts.shape[1]))
    dense: int = query[0] * query[1] * query[-2] * key[-2]
    per_score: int = as_query * query[-1] + as_value * value[-1]
    return (dense - computed) * per_score


def _elements(
    counts: Tensor, columns: Tensor, length: int, keys: int, rows_of_block: int, columns_of_block: int
) -> int:
    """Return the number of scores in these blocks, without what the last ones have beyond the sequence."""
    chosen = torch.arange(columns.shape[-1], device=columns.device) < counts[..., None]
    widths = (keys - columns.long() * columns_of_block).clamp(0, columns_of_block) * chosen
    begins = torch.arange(counts.shape[-1], device=counts.device) * rows_of_block
    heights = (length - begins).clamp(0, rows_of_block)
    return int((widths.sum(-1) * heights).sum())
