"""``Plan(checkpoint="operator")``: what each block keeps, so that every rank fits into its device at the least cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from operator import mul
from typing import NamedTuple

from modelsummary.cluster.memory import RankMemory
from modelsummary.cluster.pipeline import by_rank, in_flight
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.simulated_stages import Kept, RankParts, SimulatedStage
from modelsummary.memory.least_cost import Option, UndominatedChoices, corners_of, undominated_options

__all__ = ["BlockCopies", "OperatorCheckpoints", "Way"]

_MOST_SOLVED = 128  # blocks of all choices that are made for a rank
_MANY = 8  # blocks of a rank; of more, ways that a mixture of others beats hardly matter

BlockCopies = tuple[str, int]
"""The kind of a block, and the micro-batches of which its rank keeps activations."""


class Way(NamedTuple):
    """One of the ways in which a block may run.

    Attributes:
        cost: nanoseconds of a micro-batch in addition.
        saving: bytes that are then not kept for the backward.
        again_bytes: bytes of activations that exist only while the block runs again.
        kept: what its checkpoint keeps.
    """

    cost: int
    saving: int
    again_bytes: int
    kept: Kept


class OperatorCheckpoints:
    """Chooses what the blocks of each rank keep, for plans whose ranks run the same parts.

    The sets of results among which it chooses are the ones that a memory plan considers. What each set costs and saves
    is what the simulation of a step takes for it.

    Args:
        rank_parts: the parts of the model on a rank.
        results: kind of a block -> sets of results that a checkpoint around it may keep.
    """

    def __init__(self, rank_parts: RankParts, results: Mapping[str, Sequence[tuple[str, ...]]]) -> None:
        self._rank_parts, self._results = rank_parts, results
        self._ways: dict[str, list[Way]] = {}
        self._choices: dict[tuple[tuple[BlockCopies, ...], int], tuple[list[list[Way]], UndominatedChoices]] = {}

    def choose(
        self,
        plan: Plan,
        stages: Sequence[SimulatedStage],
        blocks: Sequence[tuple[str, str]],
        microbatches: int,
        memory_of: Callable[[Plan], Sequence[RankMemory]],
        capacity: int,
        factor: float,
    ) -> Plan:
        """Return a plan with the cheapest checkpoints with which each rank fits into its device.

        A rank has to save the bytes that it lacks without checkpoints. What it needs in addition, while a block runs
        again, is lacking then, until all ranks fit. A rank that cannot fit saves as much as it can.

        Args:
            plan: the plan, with ``checkpoint="operator"``.
            stages: its stages without checkpoints.
            blocks: FQN and kind of the blocks, in order.
            microbatches: micro-batches of a rank in a step.
            memory_of: function from a plan with its checkpoints to the memory of each rank of the pipeline.
            capacity: bytes of a device.
            factor: bytes of activations for each predicted one.
        """
        ranks, left = [], list(blocks)
        dealt = [[left.pop(0) for _ in range(sum(unit.is_block for unit in stage.units))] for stage in stages]
        for rank, (of_rank, of_stages) in enumerate(zip(by_rank(dealt, plan), by_rank(stages, plan), strict=True)):
            moments = in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, microbatches, rank)
            kept_bytes = [stage.kept_bytes for stage in of_stages]
            fullest = max(moments, key=lambda moment: sum(map(mul, moment, kept_bytes)))
            copies = tuple((kind, count) for stage, count in zip(of_rank, fullest, strict=True) for _, kind in stage)
            working = max(stage.working_bytes + stage.temporary_bytes for stage in of_stages)
            freed = min(stage.freed_bytes for stage in of_stages)
            ranks.append(([fqn for stage in of_rank for fqn, _ in stage], copies, working + freed))
        lacking: list[int | None] = [0] * len(ranks)  # None: of a rank that saves as much as it can
        while True:
            kept: dict[str, Kept] = {}
            for rank, (fqns, copies, working) in enumerate(ranks):
                nbytes = lacking[rank]
                chosen = None if nbytes is None else self._kept(copies, nbytes, working)
                lacking[rank] = nbytes if chosen else None
                kept |= zip(fqns, chosen or [self.ways(kind)[-1].kept for kind, _ in copies], strict=True)
            named = {fqn: names for fqn, names in kept.items() if names is not None}
            chosen_plan = replace(plan, checkpoint={fqn: named[fqn] for fqn, _ in blocks if fqn in named})
            over = [memory.total - capacity for memory in memory_of(chosen_plan)]
            if all(nbytes is None or more <= 0 for nbytes, more in zip(lacking, over, strict=True)):
                return chosen_plan
            lacking = [
                None if nbytes is None else nbytes + ceil(max(more, 0) / factor)
                for nbytes, more in zip(lacking, over, strict=True)
            ]

    def ways(self, kind: str) -> list[Way]:
        """Return the ways in which a block may run that no other one beats in both cost and saving, by cost.

        The first way is to run without a checkpoint, unless another one is faster.
        """
        if kind not in self._ways:
            sets = [None, *self._results.get(kind, ())]
            units = [self._rank_parts.unit(kind, kept) for kept in sets]
            seconds = [sum(unit.forward.values()) + sum(unit.backward.values()) for unit in units]
            options = [
                Option(max(round(1e9 * (spent - seconds[0])), 0), units[0].kept_bytes - unit.kept_bytes)
                for unit, spent in zip(units, seconds, strict=True)
            ]
            self._ways[kind] = [
                Way(option.cost, option.saving, units[index].working_bytes, sets[index])
                for option, (index,) in undominated_options([options])
            ]
        return self._ways[kind]

    def _kept(self, copies: tuple[BlockCopies, ...], lacking: int, working: int) -> list[Kept] | None:
        """Return what each block of a rank keeps, so that the rank saves the bytes that it lacks; None if it cannot.

        Each choice is of ways that have no more than some number of bytes while they run again: of many blocks, few
        such numbers are tried.

        Args:
            copies: the blocks.
            lacking: bytes that the rank lacks without checkpoints.
            working: bytes that it may have there while a block runs, beside what it keeps in the forward.
        """
        temporary = max((self._rank_parts.parts[kind].temporary_bytes for kind, _ in copies), default=0)
        again = [[way.again_bytes for way in self.ways(kind)] for kind in {kind for kind, _ in copies}]
        least = max(map(min, again), default=0)  # without it, some block has no way
        sizes = sorted({size for of_kind in again for size in of_kind if size >= least})
        step = -(-len(sizes) * len(copies) // _MOST_SOLVED) or 1
        best: tuple[int, list[Kept]] | None = None
        for most in sizes[::-step]:
            ways, choices = self._choices_of(copies, most)
            cheapest = choices.cheapest(lacking + max(most + temporary - working, 0) if most else lacking)
            if cheapest is not None and (best is None or cheapest[0] < best[0]):
                kept = [of_block[number].kept for of_block, number in zip(ways, cheapest[1], strict=True)]
                best = cheapest[0], kept
        return None if best is None else best[1]

    def _choices_of(self, copies: tuple[BlockCopies, ...], most: int) -> tuple[list[list[Way]], UndominatedChoices]:
        """Return ways of each block that have at most so many bytes while they run again, and the choices of them."""
        key = copies, most
        if key not in self._choices:
            ways_of = {kind: [way for way in self.ways(kind) if way.again_bytes <= most] for kind, _ in copies}
            if len(copies) > _MANY:
                for kind, ways in ways_of.items():
                    corners = set(corners_of([Option(way.cost, way.saving) for way in ways]))
                    ways_of[kind] = [way for way in ways if Option(way.cost, way.saving) in corners]
            choices = UndominatedChoices()
            for kind, count in copies:
                choices.extend([Option(way.cost, count * way.saving) for way in ways_of[kind]])
            self._choices[key] = [ways_of[kind] for kind, _ in copies], choices
        return self._choices[key]
