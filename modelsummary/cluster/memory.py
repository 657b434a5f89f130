"""Bytes on each rank, by what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.simulated_stages import SimulatedStage

__all__ = ["RankLoad", "RankMemory", "gathered_params", "memory_of", "sharded_params"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step.

    Attributes:
        parameters: weights, in the dtype of the recipe.
        gradients: sums of gradients.
        optimizer: states of the optimizer, and master weights.
        activations: kept from forwards to backwards, of all micro-batches in flight.
        recomputed: activations of the block whose backward runs, where it is recomputed.
        gathered: whole parameters of the units of FSDP that are used, and whole gradients until they are reduced.
        temporary: results of operators that are used at once.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    recomputed: int = 0
    gathered: int = 0
    temporary: int = 0

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
        params: parameters on the rank.
        expert_params: parameters among them of divided experts.
        unit_params: parameters of its largest block or end.
        unit_expert_params: parameters among these of divided experts.
        activations, recomputed, temporary: bytes, as in ``RankMemory``.
    """

    params: int
    expert_params: int
    unit_params: int
    unit_expert_params: int
    activations: int
    recomputed: int
    temporary: int

    @classmethod
    def of(cls, stages: Sequence[SimulatedStage], activations: int) -> RankLoad:
        """Return what the rank of the given stages holds, with the activations of its fullest moment."""
        unit = max(stages, key=lambda each: each.unit_params)
        return cls(
            sum(each.params for each in stages),
            sum(each.expert_params for each in stages),
            unit.unit_params,
            unit.unit_expert_params,
            activations,
            max(each.working_bytes for each in stages),
            max(each.temporary_bytes for each in stages),
        )


def sharded_params(params: int, expert_params: int, plan: Plan) -> int:
    """Return the parameters that a rank holds if each is held by one of the ranks that have the same ones.

    Args:
        params: parameters of a rank without sharding.
        expert_params: parameters among them of divided experts.
        plan: the plan.
    """
    return -(-(params - expert_params) // plan.shards) + -(-expert_params // plan.expert_copies)


def gathered_params(params: int, expert_params: int, plan: Plan) -> int:
    """Return the parameters that a rank has to gather if they are sharded: what only one rank has is whole there.

    Args:
        params, expert_params, plan: as for ``sharded_params``.
    """
    others = params - expert_params if plan.shards > 1 else 0
    return others + (expert_params if plan.expert_copies > 1 else 0)


def memory_of(rank: RankLoad, plan: Plan, recipe: Recipe, weight_bytes: int) -> RankMemory:
    """Return the memory of a rank.

    Args:
        rank: what it holds.
        plan: the plan.
        recipe: what is trained with.
        weight_bytes: bytes of an element of the parameters.
    """
    params = rank.params
    sharded = sharded_params(params, rank.expert_params, plan)
    unit = gathered_params(rank.unit_params, rank.unit_expert_params, plan)
    gradient_bytes = recipe.gradient_dtype.itemsize if recipe.gradient_dtype is not None else weight_bytes
    master = 4 if recipe.master_weights and weight_bytes < 4 else 0
    gathered = unit * weight_bytes if plan.zero >= 2 else 0  # the gradients of the unit at hand
    if plan.zero == 3:  # its parameters, and the next unit's, gathered ahead
        gathered += 2 * unit * weight_bytes
    return RankMemory(
        parameters=(sharded if plan.zero == 3 else params) * weight_bytes,
        gradients=(sharded if plan.zero >= 2 else params) * gradient_bytes,
        optimizer=(sharded if plan.zero >= 1 else params) * (recipe.state_bytes + master),
        activations=rank.activations,
        recomputed=rank.recomputed,
        gathered=gathered,
        temporary=rank.temporary,
    )
