"""Bytes on each rank, by what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.simulated_stages import BackwardMoment, Moment, SimulatedStage, weights_of
from modelsummary.cluster.weights import RankWeights
from modelsummary.devices.factors import Factors
from modelsummary.memory.replay import MemoryBlock
from modelsummary.split.schedule import Action

__all__ = ["RankLoad", "RankMemory", "RankMoments", "blocks_of", "moments_of"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the fullest moment of a step.

    Attributes:
        parameters: weights, trained or frozen, in the dtype of the recipe; integers in their own; shards of FSDP in
            float32, if the optimizer keeps float32 weights.
        gradients: sums of gradients, of trained parameters, as far as they are there at that moment.
        optimizer: states of the optimizer, and its float32 weights where these are not the parameters.
        activations: kept from forwards to backwards, and inputs, of all micro-batches in flight.
        recomputed: activations of the block whose backward runs, where it is recomputed, and where they and
            ``temporary`` take most together.
        gathered: whole parameters of the units of FSDP that are used or gathered ahead, and whole gradients until they
            are reduced, when they and the activations take most together.
        temporary: results of operators that are used at once, at that moment, of the optimizer or of the model; where
            there is one micro-batch, also the gradients of the block whose backward runs.
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
        return sum(vars(self).values())

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by category, and the total."""
        return {**vars(self), "total": self.total}


class RankMoments(NamedTuple):
    """The moments of a step at which a rank may be fullest: in a forward or a backward, or in the optimizer's step."""

    backward: RankMemory
    optimizer: RankMemory

    @property
    def fullest(self) -> RankMemory:
        """The one with most bytes."""
        return max(self, key=lambda memory: memory.total)


@dataclass(frozen=True, eq=False)
class RankLoad:
    """What a rank holds, before parameters are sharded over copies.

    Attributes:
        weights: of all its stages.
        units: of each distinct stage, the unit that stays gathered, and the distinct moments of the others.
        recomputed, temporary: bytes, as in ``RankMemory``, where gradients are summed over micro-batches.
        backwards: of its only stage, the moments that may be its fullest; empty if there are several stages.
        held_bytes: bytes of activations that are there in the optimizer's step.
    """

    weights: RankWeights
    units: tuple[tuple[RankWeights, tuple[Moment, ...]], ...] = ()
    recomputed: int = 0
    temporary: int = 0
    backwards: tuple[BackwardMoment, ...] = ()
    held_bytes: int = 0
    _gathered: dict[tuple[int, bool, bool, Recipe], int] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, stages: Sequence[SimulatedStage]) -> RankLoad:
        """Return what the rank of the given stages holds, without the activations."""
        fullest = max((stage.fullest for stage in stages), key=lambda moment: moment.working + moment.temporary)
        return cls(
            weights_of(stages),
            tuple({id(stage): (stage.root, stage.moments) for stage in stages}.values()),
            fullest.working,
            fullest.temporary,
            stages[0].backwards if len(stages) == 1 else (),
            sum(stage.held_bytes for stage in stages),
        )

    def gathered_bytes(self, plan: Plan, recipe: Recipe) -> int:
        """Return the bytes of ``gathered`` in ``RankMemory``, which plans share that differ in numbers of ranks."""
        key = plan.zero_stage, plan.shards > 1, plan.expert_copies > 1, recipe
        if key not in self._gathered:
            self._gathered[key] = _gathered_bytes(self, *key)
        return self._gathered[key]


def _gathered_bytes(rank: RankLoad, zero_stage: int, has_shards: bool, has_copies: bool, recipe: Recipe) -> int:
    """Return the bytes of whole parameters and gradients of which a rank has shards, at the moment with most bytes.

    A forward holds the parameters of a unit, the buffer that they were gathered in until the next unit's parameters are
    copied out of theirs, and this buffer. A backward holds the parameters and gradients of a unit, what was gathered
    ahead for the unit before it, and until its own reduction the gradients of the unit after it, in the dtype in which
    they are reduced. The first gathers nothing again: what is behind the blocks stays gathered, as does the root
    (``wait_for_unshard`` and ``post_backward`` in torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).

    Args:
        rank, recipe: as for ``moments_of``.
        zero_stage: of the plan.
        has_shards, has_copies: several ranks have the same parameters, or the same experts.
    """
    if zero_stage < 2:
        return 0
    most = 0
    for root, moments in rank.units:
        always = root.of_several(has_shards, has_copies)
        if zero_stage == 2:  # parameters are whole anyway
            most = max(
                most, always.trained, *(moment.unit.of_several(has_shards, has_copies).trained for moment in moments)
            )
            continue
        most = max(most, always.nbytes + always.trained)
        for moment in moments:
            before, unit, after = (weights.of_several(has_shards, has_copies) for weights in moment[:3])
            waiting = after.gradient_bytes(recipe)
            forward = 2 * unit.nbytes + after.nbytes
            copying = 2 * unit.nbytes + waiting
            backward = unit.nbytes + unit.trained + before.nbytes + waiting
            reducing = unit.trained + unit.gradient_bytes(recipe) + before.nbytes - moment.kept
            held = max(forward, max(copying, backward, reducing) + always.trained)
            most = max(most, always.nbytes + held - moment.later)
    return most


def moments_of(
    rank: RankLoad, activations: int, plan: Plan, recipe: Recipe, factors: Factors, microbatches: int
) -> RankMoments:
    """Return the memory of a rank at the moments at which it may be fullest.

    Under FSDP the shards are the float32 weights of the optimizer, and what is gathered is cast: a rank has no other
    shards. The gradients of one micro-batch come one after the other, while its activations go, unless their sums are
    buffers of their own, which are there in the forward.

    Args:
        rank: what it holds.
        activations: bytes kept from forwards to backwards, at its fullest moment.
        plan: the plan.
        recipe: what is trained with.
        factors: of them, the one on activations.
        microbatches: of one copy in a step.
    """
    whole, share = rank.weights.total, rank.weights.sharded(plan)
    in_states = share if plan.zero_stage >= 1 else whole
    gradients = (share if plan.zero_stage >= 2 else whole).gradient_bytes(recipe)
    sums, recomputed, temporary = gradients, rank.recomputed, rank.temporary
    are_gradients = plan.zero_stage >= 2 or recipe.gradient_dtype is None
    if microbatches == 1 and are_gradients and not recipe.adds_in_products:
        sums, recomputed, temporary = max(
            (_of_first(moment, plan, recipe) for moment in rank.backwards),
            key=sum,
            default=(sums, recomputed, temporary),
        )
    factor = factors.activations
    backward = RankMemory(
        parameters=share.stored if plan.is_fsdp else whole.nbytes,
        buffers=whole.buffers,
        gradients=sums,
        optimizer=in_states.state_bytes(recipe) + (0 if plan.is_fsdp else 4 * in_states.masters),
        activations=int(factor * activations),
        recomputed=int(factor * recomputed),
        gathered=rank.gathered_bytes(plan, recipe),
        temporary=int(factor * temporary),
    )
    optimizer = replace(
        backward,
        gradients=gradients,
        activations=int(factor * rank.held_bytes),
        recomputed=0,
        gathered=0,
        temporary=in_states.temporary_bytes(recipe),
    )
    return RankMoments(backward, optimizer)


def _of_first(moment: BackwardMoment, plan: Plan, recipe: Recipe) -> tuple[int, int, int]:
    """Return gradients, recomputed and temporary bytes of a moment of the only micro-batch.

    What FSDP gathers has the whole gradients of the unit.
    """
    if plan.zero_stage >= 2:
        return moment.later.sharded(plan).gradient_bytes(recipe), moment.working, moment.temporary
    return moment.later.total.gradient_bytes(recipe), moment.working, moment.first_temporary


def blocks_of(
    rank: int, moments: RankMoments, actions: Sequence[Action], kept_bytes: Sequence[int], end: float
) -> Iterator[MemoryBlock]:
    """Yield what a rank of the pipeline holds during a step.

    Weights, optimizer states and buffers stay; gradients are alive from the first backward to the end of the step, the
    activations of a micro-batch from its forward to the end of its backward. What exists only while an action runs is
    there in each of them as in the fullest one. The optimizer's step begins behind the last action.

    Args:
        rank: number of the rank.
        moments: its memory at the moments at which it may be fullest.
        actions: its forwards and backwards in time.
        kept_bytes: bytes of activations that each stage keeps for a micro-batch.
        end: seconds at which the step ends.
    """
    memory = moments.backward
    for category in ("parameters", "optimizer", "buffers"):
        yield MemoryBlock(rank, category, category, getattr(memory, category))
    begins: dict[tuple[int, int], float] = {}
    first = min((action.begin for action in actions if action.kind in "BI"), default=end)
    last = max((action.end for action in actions), default=end)
    yield MemoryBlock(rank, "gradients", "gradients", memory.gradients, first, last)
    for category in ("gradients", "activations", "temporary"):
        yield MemoryBlock(rank, category, "optimizer", getattr(moments.optimizer, category), last, end)
    for action in actions:
        micro_batch = f"micro-batch {action.microbatch} of stage {action.stage}"
        key = action.stage, action.microbatch
        if action.kind == "F":
            begins[key] = action.begin
        elif action.kind in "BW":
            yield MemoryBlock(rank, "activations", micro_batch, kept_bytes[action.stage], begins[key], action.end)
        for category in ("gathered", "temporary", *(("recomputed",) if action.kind in "BI" else ())):
            yield MemoryBlock(rank, category, micro_batch, getattr(memory, category), action.begin, action.end)
