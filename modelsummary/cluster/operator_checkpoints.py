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
from modelsummary.memory.least_cost import Option, UndominatedChoices, corners_of, least_cost, undominated_options

__all__ = ["OperatorCheckpoints", "StageBlocks", "Way"]

_MANY = 8  # blocks of a rank; of more, ways that a mixture of others beats hardly matter
_MOST_TRIED = 16  # choices of what stages save at least


class StageBlocks(NamedTuple):
    """The blocks of a stage on a rank.

    Attributes:
        fqns, kinds: their names, and the equal blocks that run for them.
        copies: micro-batches of which the rank keeps activations at its fullest moment.
        peaks: bytes while each of them runs, beyond what all micro-batches keep, without checkpoints.
        after: the same while what follows the blocks runs.
    """

    fqns: tuple[str, ...]
    kinds: tuple[str, ...]
    copies: int
    peaks: tuple[int, ...]
    after: int


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
        left, of_stages = list(blocks), []
        for stage in stages:
            count = sum(unit.is_block for unit in stage.units)
            of_stages.append((stage, left[:count]))
            del left[:count]
        ranks = []
        for rank, on_rank in enumerate(by_rank(of_stages, plan)):
            moments = in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, microbatches, rank)
            kept_bytes = [stage.kept_bytes for stage, _ in on_rank]
            fullest = max(moments, key=lambda moment: sum(map(mul, moment, kept_bytes)))
            ranks.append(
                [_blocks_of(stage, of_stage, n) for (stage, of_stage), n in zip(on_rank, fullest, strict=True)]
            )
        lacking: list[int | None] = [0] * len(ranks)  # None: of a rank that saves as much as it can
        while True:
            kept: dict[str, Kept] = {}
            for rank, of_rank in enumerate(ranks):
                nbytes = lacking[rank]
                chosen = None if nbytes is None else self._kept(of_rank, nbytes)
                lacking[rank] = nbytes if chosen is not None else None
                kept |= chosen or {
                    fqn: self.ways(kind)[-1].kept
                    for stage in of_rank
                    for fqn, kind in zip(stage.fqns, stage.kinds, strict=True)
                }
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

    def _kept(self, stages: Sequence[StageBlocks], lacking: int) -> dict[str, Kept] | None:
        """Return what each block of a rank keeps, so that its peak is so many bytes lower; None if no choice does that.

        While a block of a stage runs, the blocks behind it hold nothing of its micro-batch. Other micro-batches, and
        other stages, hold all that they keep: what each stage saves at least is taken from choices of blocks that need
        nothing while they run again, of which few are tried.

        Args:
            stages: the blocks of the stages of the rank.
            lacking: bytes.
        """
        ways = [[self._ways_among(kind, stages) for kind in stage.kinds] for stage in stages]
        if sum(stage.copies for stage in stages) == 1:
            cheapest = self._cheapest(stages, ways, [0], lacking)
            return None if cheapest is None else cheapest[1]
        choices = UndominatedChoices()
        for stage, of_stage in zip(stages, ways, strict=True):
            for of_block in of_stage:
                choices.extend([Option(way.cost, stage.copies * way.saving) for way in of_block])
        first, count = int((choices.savings < lacking).sum()), len(choices.costs)
        best: tuple[int, dict[str, Kept]] | None = None
        for index in range(first, count, -(-(count - first) // _MOST_TRIED) or 1):
            if best is not None and int(choices.costs[index]) >= best[0]:
                break
            numbers = iter(choices.choice(index))
            least = [sum(of_block[next(numbers)].saving for of_block in of_stage) for of_stage in ways]
            cheapest = self._cheapest(stages, ways, least, lacking)
            if cheapest is not None and (best is None or cheapest[0] < best[0]):
                best = cheapest
        return None if best is None else best[1]

    def _cheapest(
        self, stages: Sequence[StageBlocks], ways: Sequence[Sequence[list[Way]]], least: Sequence[int], lacking: int
    ) -> tuple[int, dict[str, Kept]] | None:
        """Return the cost of the cheapest ways of the blocks of a rank, and what they keep; None if none suffice.

        Args:
            stages, lacking: as for ``_kept``.
            ways: of each block of each stage.
            least: bytes that a micro-batch of each stage saves at least.
        """
        budget = max(max((*stage.peaks, stage.after)) for stage in stages) - lacking
        saved = sum(stage.copies * saving for stage, saving in zip(stages, least, strict=True))
        cost, kept = 0, {}
        for stage, of_stage, saving in zip(stages, ways, least, strict=True):
            others = saved - saving  # saved by other micro-batches and stages
            options = [
                [Option(way.cost, way.saving, peak + way.again_bytes - way.saving - others) for way in of_block]
                for peak, of_block in zip(stage.peaks, of_stage, strict=True)
            ]
            after = max(stage.after - others, budget + saving)
            chosen = least_cost(options, [budget] * len(options) + [after], budget)
            if chosen is None:
                return None
            for fqn, of_block, number in zip(stage.fqns, of_stage, chosen, strict=True):
                cost, kept[fqn] = cost + of_block[number].cost, of_block[number].kept
        return cost, kept

    def _ways_among(self, kind: str, stages: Sequence[StageBlocks]) -> list[Way]:
        """Return the ways of a block that are chosen among on a rank with these blocks."""
        ways = self.ways(kind)
        if sum(len(stage.kinds) for stage in stages) <= _MANY:
            return ways
        corners = set(corners_of([Option(way.cost, way.saving) for way in ways]))
        return [way for way in ways if Option(way.cost, way.saving) in corners]


def _blocks_of(stage: SimulatedStage, blocks: Sequence[tuple[str, str]], copies: int) -> StageBlocks:
    """Return the blocks of a stage without checkpoints; ``blocks`` are their names and kinds."""
    freed = after = 0
    peaks: list[int] = []
    for unit in reversed(stage.units):
        if unit.is_block:
            peaks.insert(0, unit.temporary_bytes - freed)
        elif not peaks:
            after = unit.temporary_bytes
        freed += unit.freed_bytes
    fqns, kinds = zip(*blocks, strict=True) if blocks else ((), ())
    return StageBlocks(fqns, kinds, copies, tuple(peaks), after)
