"""What a rank holds of a tensor, by the placement that propagation gives it."""

from __future__ import annotations

import torch
from torch import Tensor

from modelsummary.parallel.placements import Partial, Placement, Section


def part(tensor: Tensor, placement: Placement | None, rank: int, n: int) -> Tensor:
    """Return what a rank of ``n`` holds of a tensor; of a sum or a mean, one of its terms."""
    if placement is None:
        return tensor
    if isinstance(placement, Partial):
        term = tensor / 4 if rank else tensor - (n - 1) * (tensor / 4)
        return n * term if placement.reduce_op == "avg" else term
    size = tensor.shape[placement.dim]
    pieces = placement.pieces or [Section(size // placement.outer)] * placement.outer
    sections = tensor.split([piece.size for piece in pieces], placement.dim)
    chunks = (
        section if piece.is_whole else section.chunk(n, placement.dim)[rank]
        for section, piece in zip(sections, pieces, strict=True)
    )
    return torch.cat(list(chunks), placement.dim)


def held(shape: tuple[int, ...], placement: Placement | None, rank: int, n: int) -> Tensor:
    """Return True for each element that a rank holds."""
    mask = torch.ones(shape, dtype=torch.bool)
    if placement is None or isinstance(placement, Partial):
        return mask
    positions = part(torch.arange(shape[placement.dim]), placement._replace(dim=0), rank, n)
    others = torch.ones(shape[placement.dim], dtype=torch.bool).index_fill(0, positions, False)
    return mask.movedim(placement.dim, -1).logical_and(~others).movedim(-1, placement.dim)
