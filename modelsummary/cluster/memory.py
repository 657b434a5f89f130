"""Bytes on each rank, by what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.simulated_stages import SimulatedStage
from modelsummary.cluster.weights import Weights

__all__ = ["RankLoad", "RankMemory", "gathered", "memory_of", "sharded"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step.

    Attributes:
        parameters: weights, trained or frozen, in the dtype of the recipe; integers in their own; shards of FSDP in
            float32, if the optimizer keeps float32 weights.
        gradients: sums of gradients, of trained parameters.
        optimizer: states of the optimizer, and its float32 weights where these are not the parameters.
        activations: kept from forwards to backwards, of all micro-batches in flight.
        recomputed: activations of the block whose backward runs, where it is recomputed.
        gathered: whole parameters of the units of FSDP that are used, and whole gradients until they are reduced.
        temporary: results of operators that are used at once.
        buffers: whole on each rank.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    recomputed: int = 0
    gathered: int = 0
    temporary: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(getattr(self, each.name) for each in fields(self))

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by category, and the total."""
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "total": self.total}


class RankLoad(NamedTuple):
    """What a rank holds, before parameters are sharded over copies.

    Attributes:
        weights: without divided experts.
        experts: weights of divided experts.
        unit, unit_experts: the same of its largest block or end.
        activations, recomputed, temporary: bytes, as in ``RankMemory``.
    """

    weights: Weights
    experts: Weights
    unit: Weights
    unit_experts: Weights
    activations: int
    recomputed: int
    temporary: int

    @classmethod
    def of(cls, stages: Sequence[SimulatedStage], activations: int) -> RankLoad:
        """Return what the rank of the given stages holds, with the activations of its fullest moment."""
        largest = max(stages, key=lambda each: each.unit.nbytes + each.unit_experts.nbytes)
        return cls(
            sum((each.weights for each in stages), Weights()),
            sum((each.experts for each in stages), Weights()),
            largest.unit,
            largest.unit_experts,
            activations,
            max(each.working_bytes for each in stages),
            max(each.temporary_bytes for each in stages),
        )


def sharded(weights: Weights, experts: Weights, plan: Plan) -> Weights:
    """Return what a rank holds if each parameter is held by one of the ranks that have the same ones.

    Args:
        weights: of a rank without sharding, without divided experts.
        experts: weights of divided experts.
        plan: the plan.
    """
    return weights.over(plan.shards) + experts.over(plan.expert_copies)


def gathered(weights: Weights, experts: Weights, plan: Plan) -> Weights:
    """Return what a rank has to gather if parameters are sharded: what only one rank has is whole there.

    Args:
        weights, experts, plan: as for ``sharded``.
    """
    return (weights if plan.shards > 1 else Weights()) + (experts if plan.expert_copies > 1 else Weights())


def memory_of(rank: RankLoad, plan: Plan, recipe: Recipe) -> RankMemory:
    """Return the memory of a rank.

    Under FSDP the shards are the float32 weights of the optimizer, and what is gathered is cast: a rank has no other
    shards.

    Args:
        rank: what it holds.
        plan: the plan.
        recipe: what is trained with.
    """
    whole, share = rank.weights + rank.experts, sharded(rank.weights, rank.experts, plan)
    unit = gathered(rank.unit, rank.unit_experts, plan)
    in_states = share if plan.zero >= 1 else whole
    held = unit.trained if plan.zero >= 2 else 0  # the gradients of the unit at hand
    if plan.zero == 3:  # its parameters, and the next unit's, gathered ahead
        held += 2 * unit.nbytes
    return RankMemory(
        parameters=share.stored if plan.is_fsdp else whole.nbytes,
        buffers=whole.buffers,
        gradients=(share if plan.zero >= 2 else whole).gradient_bytes(recipe),
        optimizer=in_states.state_bytes(recipe) + (0 if plan.is_fsdp else 4 * in_states.masters),
        activations=rank.activations,
        recomputed=rank.recomputed,
        gathered=held,
        temporary=rank.temporary,
    )
