"""``ParallelPlan``: how a model is spread over devices, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelsummary.parallel.local_check import Attribute

__all__ = ["LayerPlan", "ParallelPlan"]


@dataclass(frozen=True)
class LayerPlan:
    """How one module is sharded over the ranks of tensor parallelism.

    Attributes:
        fqn: of the module.
        style: class of ``torch.distributed.tensor.parallel``.
        options: its arguments; layouts as they are written: ``"Replicate()"``, ``"Shard(1)"``.
        role: ``"column"``, ``"row"``, ``"embedding"``, ``"head"`` or ``"norm"``.
        shards: parameter of the module -> its sharded dimension; None where it is replicated.
        params: elements of its parameters on one rank.
    """

    fqn: str
    style: str
    options: dict[str, Any]
    role: str
    shards: dict[str, int | None]
    params: int


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is spread over devices."""

    tensor: int
    layers: tuple[LayerPlan, ...]
    attributes: tuple[Attribute, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
