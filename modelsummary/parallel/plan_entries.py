"""What a plan says of one module, or of one call, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["WHOLE_CALL_KINDS", "LayerPlan", "LocalAttribute", "WholeCall"]

WHOLE_CALL_KINDS = frozenset({"part", "whole", "own", "causal"})


@dataclass(frozen=True)
class LayerPlan:
    """How one module is sharded over the ranks of tensor or expert parallelism.

    Attributes:
        fqn: of the module.
        style: class of ``torch.distributed.tensor.parallel``, or of this package where torch has none.
        options: its arguments; layouts as they are written: ``"Replicate()"``, ``"Shard(1)"``.
        role: ``"column"``, ``"row"``, ``"embedding"``, ``"head"``, ``"norm"``, ``"local"`` for a module whose
            functions take sharded parameters, ``"heads"`` for an ``nn.MultiheadAttention``, ``"gradient"`` for a
            layer that sums the gradient of its result, or of a part of it, over the ranks, ``"copy"`` for a layer
            whose result is copied because the model writes into it, ``"sizes"`` for a module whose forward takes sizes
            of the whole model, ``"input"`` and ``"output"`` for a module whose input or result is gathered or cut,
            ``"expert"`` for stacked experts and lists of experts. A module has one entry for each of its styles.
        shards: parameter of the module -> its sharded dimension; None where it is replicated.
        params: elements of its parameters on one rank.
        reason: why its activations are whole on each rank, where that costs more than a shard; else empty.
        mesh: dimension of the mesh over which it is sharded: ``"tensor"`` or ``"expert"``.
    """

    fqn: str
    style: str
    options: dict[str, Any]
    role: str
    shards: dict[str, int | None]
    params: int
    reason: str = ""
    mesh: str = "tensor"

    @property
    def is_list(self) -> bool:
        """Whether it is a list of experts, of which each rank has its own."""
        return self.role == "expert" and not self.shards


@dataclass(frozen=True)
class LocalAttribute:
    """An attribute of a module that has another value on a rank: a number that is divided, or a switch.

    Attributes:
        fqn: of the module.
        name: of the attribute.
        whole, local: its value before and after.
    """

    fqn: str
    name: str
    whole: int | bool
    local: int | bool


@dataclass(frozen=True)
class WholeCall:
    """A call of a function that sees the tokens of all ranks, or that looks like one.

    Attributes:
        fqn: of the module whose forward calls it.
        function: its name.
        kind: ``"part"``, ``"whole"``, ``"own"`` or ``"causal"``, as ``TokensOfRank`` takes them.
        sizes: positions of the numbers among its arguments that count tokens.
        dim: of the tokens in its result; None if it has none.
    """

    fqn: str
    function: str
    kind: str
    sizes: tuple[int, ...] = ()
    dim: int | None = None
