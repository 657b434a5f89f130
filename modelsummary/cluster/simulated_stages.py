"""The stages of a pipeline: which blocks each has, and what it takes for one micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from modelsummary.cluster.parts import AFTER, BEFORE, Part
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.timing import PartSeconds, SecondsByCause
from modelsummary.cluster.weights import RankWeights, Weights
from modelsummary.errors import InputError, close_to
from modelsummary.split.partition import Chain, partitions
from modelsummary.split.schedule import StageLoad
from modelsummary.tables import folded_names

__all__ = [
    "BackwardMoment",
    "Kept",
    "Moment",
    "RankParts",
    "SimulatedStage",
    "StageUnit",
    "added",
    "deal",
    "deal_by_cost",
    "stages_of",
    "weights_of",
]


Kept = tuple[str, ...] | None
"""Names of the results that the checkpoint around a block keeps; None: it runs without one."""


class StageUnit(NamedTuple):
    """A block of a stage, or what precedes or follows the blocks, for one micro-batch.

    Attributes:
        is_block: it is a block.
        weights: what FSDP can gather at once.
        forward, backward: seconds by cause; the backward with recomputation, also of what it communicates again.
        of_weights: the seconds of the backward that compute gradients of weights alone.
        kept_bytes: bytes of its activations that are kept for the backward.
        freed_bytes: bytes among them that its backward frees: the result of the model holds the others.
        held_bytes: bytes that are there in the optimizer's step, as in ``Part``.
        working_bytes: bytes of activations that exist only while it is recomputed.
        temporary_bytes: bytes that are alive for a moment.
        first_temporary_bytes: the same in the first micro-batch, with the gradients of its weights.
        is_gathered_again: FSDP gathers it for the backward: the backward passes through it, and it is neither behind
            the blocks nor in the root.
    """

    is_block: bool
    weights: RankWeights
    forward: SecondsByCause
    backward: SecondsByCause
    of_weights: float = 0.0
    kept_bytes: int = 0
    freed_bytes: int = 0
    held_bytes: int = 0
    working_bytes: int = 0
    temporary_bytes: int = 0
    first_temporary_bytes: int = 0
    is_gathered_again: bool = False


class Moment(NamedTuple):
    """The pass through an FSDP unit.

    Attributes:
        before, unit, after: weights of the unit, and of the ones that are called before and after it.
        kept: bytes of activations that the unit keeps.
        later: bytes of activations that the units after it keep. They are not there yet, or not any more.
    """

    before: RankWeights
    unit: RankWeights
    after: RankWeights
    kept: int
    later: int


class BackwardMoment(NamedTuple):
    """The fullest operator of a unit, mostly of its backward.

    Attributes:
        working: bytes of activations that exist only while the unit is recomputed.
        temporary: bytes that are alive for a moment, less what the units behind it do not hold then.
        first_temporary: the same in the first micro-batch, with the gradients of the unit.
        later: weights of the units behind it, whose gradients are there by then.
    """

    working: int
    temporary: int
    first_temporary: int
    later: RankWeights


@dataclass(frozen=True)
class SimulatedStage:
    """One stage of the pipeline on one rank, for one micro-batch.

    Attributes:
        units: its blocks, and what precedes and follows them, in the order of the calls; equal ones are one object.
        crossing_bytes: bytes that it takes from the stage before it.
        backwards: the moments of its units that may be its fullest.
        root: what stays gathered under FSDP: what precedes and what follows the blocks, if they share a parameter.
        tied: parameters that the first and the last stage both have; none for other stages, and for one stage.
    """

    units: tuple[StageUnit, ...]
    crossing_bytes: int
    backwards: tuple[BackwardMoment, ...]
    root: RankWeights
    tied: Weights

    @cached_property
    def counts(self) -> list[tuple[StageUnit, int]]:
        """The distinct units, and how many of each there are."""
        unit_of = {id(unit): unit for unit in self.units}
        return [(unit_of[key], count) for key, count in Counter(map(id, self.units)).items()]

    @cached_property
    def fullest(self) -> BackwardMoment:
        """The moment with most bytes, where gradients are summed over micro-batches."""
        return max(self.backwards, key=lambda moment: moment.working + moment.temporary)

    @property
    def held_bytes(self) -> int:
        """Bytes of activations that are there in the optimizer's step."""
        return sum(count * unit.held_bytes for unit, count in self.counts)

    @property
    def freed_bytes(self) -> int:
        """Bytes of activations that are freed before the backward of its last block."""
        last = self.units[-1]
        return 0 if last.is_block else last.freed_bytes

    @cached_property
    def forward(self) -> SecondsByCause:
        """Seconds of the forward by cause."""
        return added((unit.forward, count) for unit, count in self.counts)

    @cached_property
    def backward(self) -> SecondsByCause:
        """Seconds of the backward by cause, with recomputation."""
        return added((unit.backward, count) for unit, count in self.counts)

    @cached_property
    def of_weights(self) -> float:
        """Seconds of the backward that compute gradients of weights alone."""
        return sum(count * unit.of_weights for unit, count in self.counts)

    @cached_property
    def load(self) -> StageLoad:
        """Seconds and bytes of the stage where nothing is sharded, sent to a neighbour or added to earlier sums."""
        forward, backward = sum(self.forward.values()), sum(self.backward.values())
        return StageLoad(forward, backward - self.of_weights, self.of_weights, 0, self.kept_bytes)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of activations kept from the forward to the backward."""
        return sum(count * unit.kept_bytes for unit, count in self.counts)

    @cached_property
    def weights(self) -> RankWeights:
        """Weights on the rank."""
        return weights_of([self])

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The distinct passes through its units; of equal ones, the one with the most activations."""
        kept = accumulate(unit.kept_bytes for unit in reversed(self.units))
        with_weights = [
            (unit, later - unit.kept_bytes)
            for unit, later in zip(reversed(self.units), kept, strict=True)
            if unit.weights.total.nbytes
        ]
        called = [RankWeights(), *(unit.weights for unit, _ in with_weights), RankWeights()]
        moments: dict[tuple[int, ...], Moment] = {}  # by the identity of weights: equal units are one object
        for after, (unit, later), before in zip(called, with_weights, called[2:], strict=False):
            key = (*map(id, (before, unit.weights, after)), unit.kept_bytes)
            moments.setdefault(key, Moment(before, unit.weights, after, unit.kept_bytes, later))
        return tuple(moments.values())


def weights_of(stages: Sequence[SimulatedStage]) -> RankWeights:
    """Return the weights of a rank that has some stages, which share their units."""
    unit_of = {id(unit): unit for stage in stages for unit, _ in stage.counts}
    counts: Counter[int] = Counter()
    for stage in stages:
        for unit, count in stage.counts:
            counts[id(unit)] += count
    roots = sum((stage.root for stage in stages), RankWeights())
    return sum((unit_of[key].weights.times(count) for key, count in counts.items()), roots)


def added(spent: Iterable[tuple[SecondsByCause, float]]) -> dict[str, float]:
    """Return the sum of seconds by cause, each taken so many times.

    >>> added([({"compute": 2.0, "tensor": 1.0}, 3), ({"compute": 1.0}, 1)])
    {'compute': 7.0, 'tensor': 3.0}
    """
    total: dict[str, float] = {}
    for seconds, times in spent:
        for cause, value in seconds.items():
            total[cause] = total.get(cause, 0.0) + times * value
    return total


def deal(costs: Sequence[int], stages: int) -> list[int]:
    """Return how many consecutive blocks each stage gets.

    Equal blocks are dealt evenly. If they do not divide, the last stage has one less, then the first, then the others
    from the end: the ends hold the head and the embedding, and may have no block at all. Blocks of different costs are
    cut so that the largest stage is the smallest possible.

    Raises:
        InputError: there are fewer blocks than stages.

    >>> deal([1] * 126, 16)
    [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]
    >>> deal([1] * 4, 6), deal([5, 1, 1, 5], 2)
    ([0, 1, 1, 1, 1, 0], [2, 2])
    """
    count = len(costs)
    if count < max(stages - 2, 1):
        raise InputError(
            f"{stages} stages need {stages - 2} blocks or more, but the model has {count}; use fewer stages"
        )
    if len(set(costs)) > 1 and count >= stages:
        return deal_by_cost(costs, 0, 0, stages)
    per_stage = -(-count // stages)
    missing = per_stage * stages - count
    dealt = [per_stage] * stages
    for stage in [stages - 1, 0, *range(stages - 2, 0, -1)][:missing]:
        dealt[stage] -= 1
    return dealt


def deal_by_cost(costs: Sequence[int], first: int, last: int, stages: int) -> list[int]:
    """Return how many consecutive blocks each stage gets, if the largest stage is to be the smallest possible.

    Args:
        costs: of the blocks.
        first, last: of what precedes and follows them.
        stages: their number.

    Raises:
        InputError: there are fewer blocks than stages.

    >>> deal_by_cost([1] * 16, 0, 4, 2)  # a head that takes as long as four blocks
    [10, 6]
    """
    ends = [*costs]
    ends[0], ends[-1] = ends[0] + first, ends[-1] + last
    cuts = next(partitions(Chain(ends, dict.fromkeys(range(1, len(ends)), 1)), stages), None)
    if cuts is None:
        raise InputError(f"{stages} stages need {stages} blocks or more, but the model has {len(costs)}; use fewer")
    return [end - begin for begin, end in zip([0, *cuts], [*cuts, len(costs)], strict=True)]


def _dealt(kinds: Sequence[str], parts: Mapping[str, Part], plan: Plan) -> list[int]:
    """Return how many consecutive blocks each stage of a plan gets."""
    if isinstance(plan.blocks, tuple):
        if sum(plan.blocks) != len(kinds):
            raise InputError(
                f"blocks={plan.blocks} are {sum(plan.blocks)} blocks, but the model has {len(kinds)}; pass numbers "
                f"that add up to {len(kinds)}"
            )
        return list(plan.blocks)
    costs = [max(parts[kind].flops, 1) for kind in kinds]
    if plan.blocks == "cost" and plan.stages > 1:
        return deal_by_cost(costs, parts[BEFORE].flops, parts[AFTER].flops, plan.stages)
    return deal(costs, plan.stages)


@dataclass(frozen=True)
class RankParts:
    """The parts of a model on one rank, of which stages are made.

    Attributes:
        parts: what each does and holds for a micro-batch.
        seconds: function from a part to the time that it takes.
    """

    parts: Mapping[str, Part]
    seconds: Callable[[Part], PartSeconds]
    _timed: dict[tuple[str, tuple[str, ...]], tuple[Part, PartSeconds]] = field(
        default_factory=dict, init=False, repr=False
    )
    _units: dict[tuple[object, ...], StageUnit] = field(default_factory=dict, init=False, repr=False)

    def unit(
        self,
        name: str,
        kept: Kept = None,
        *,
        has_core_recomputed: bool = False,
        is_in_root: bool = False,
        sends_result: bool = False,
    ) -> StageUnit:
        """Return a part as a unit of a stage, the same object for all stages.

        Args:
            name: name of the part.
            kept: what the checkpoint around it keeps.
            has_core_recomputed: attention between scores and context runs again.
            is_in_root: FSDP gathers it with the root.
            sends_result: the next part is on another rank, so what leaves this part is there only if it is kept.

        Raises:
            InputError: it has no result of such a name.
        """
        part = self._keeping(name, kept or ())[0]
        key = name, kept, has_core_recomputed, is_in_root, part.sent_bytes if sends_result else 0
        if key not in self._units:
            self._units[key] = self._unit(*key)
        return self._units[key]

    def _unit(self, name: str, names: Kept, has_core_recomputed: bool, is_in_root: bool, sent_bytes: int) -> StageUnit:
        part, seconds = self._keeping(name, names or ())
        kept, working, backward, is_block = part.kept_bytes, 0, dict(seconds.backward), name not in (BEFORE, AFTER)
        if names is not None:
            kept = part.entered_bytes + part.result_bytes + part.cached_bytes + sent_bytes
            working = part.again_bytes
            for cause, value in seconds.again.items():
                again = cause if cause in ("tensor", "context", "expert") else "recomputation"
                backward[again] = backward.get(again, 0.0) + value
        elif has_core_recomputed:
            kept, working, backward["recomputation"] = part.kept_bytes - part.core_bytes, part.core_bytes, seconds.core
        elif is_block and not part.has_backward:
            kept = 0
        return StageUnit(
            is_block=is_block,
            weights=RankWeights() if is_in_root else part.held,
            kept_bytes=kept,
            held_bytes=part.held_bytes,
            freed_bytes=max(kept - part.outliving_bytes, 0),
            working_bytes=working,
            temporary_bytes=part.temporary_bytes,
            first_temporary_bytes=part.first_temporary_bytes,
            is_gathered_again=part.has_backward and name != AFTER and not is_in_root,
            forward=seconds.forward,
            backward=backward,
            of_weights=seconds.of_weights,
        )

    def _keeping(self, name: str, names: tuple[str, ...]) -> tuple[Part, PartSeconds]:
        """Return a part as it is under a checkpoint that keeps some results, and the time that it takes."""
        if (name, names) not in self._timed:
            part = self.parts[name].keeping(names)
            self._timed[name, names] = part, self.seconds(part)
        return self._timed[name, names]


def stages_of(model: StepModel, rank_parts: RankParts, plan: Plan) -> list[SimulatedStage]:
    """Return the stages of a plan, in order.

    Args:
        model: the model.
        rank_parts: its parts on the ranks of the plan.
        plan: the plan.

    Raises:
        InputError: the model has too few blocks.
    """
    kinds, parts = [model.kind_of[fqn] for fqn in model.blocks], rank_parts.parts
    n_stages = plan.stages
    if not kinds and n_stages > 1:
        raise InputError(f"pipeline={plan.pipeline}: the model has no repeated blocks to cut between")
    dealt = _dealt(kinds, parts, plan) if kinds else [0]
    if isinstance(plan.checkpoint, tuple):
        _check_blocks(dict(plan.checkpoint), model.blocks)
    stages, begin = [], 0
    stage_of: dict[tuple[tuple[tuple[str, Kept], ...], bool, bool, int], SimulatedStage] = {}
    for index, count in enumerate(dealt):
        fqns = model.blocks[begin : begin + count]
        blocks = tuple(zip(kinds[begin : begin + count], _kept(fqns, model.kind_of, parts, plan), strict=True))
        # a stage without blocks takes what the last block returns, which is as large as what it takes
        crossing_bytes = parts[kinds[min(begin, len(kinds) - 1)]].crossing_bytes if index else 0
        begin += count
        key = blocks, index == 0, index == n_stages - 1, crossing_bytes
        if key not in stage_of:
            stage_of[key] = _stage(blocks, rank_parts, plan, crossing_bytes, is_first=key[1], is_last=key[2])
        stages.append(stage_of[key])
    return stages


def _check_blocks(kept: Mapping[str, Sequence[str]], blocks: Sequence[str]) -> None:
    """Raise ``InputError`` for a checkpoint around a module that is not a block."""
    for fqn in kept:
        if fqn not in blocks:
            raise InputError(
                f"checkpoint names {fqn!r}, but a Plan costs checkpoints around the model's blocks, which are "
                f"{folded_names(blocks):.80}; pass names of these{close_to(fqn, blocks)}"
            )


def _kept(fqns: Sequence[str], kind_of: Mapping[str, str], parts: Mapping[str, Part], plan: Plan) -> list[Kept]:
    """Return what the checkpoint around each block of a stage keeps.

    Blocks without a backward are neither kept nor computed again.
    """
    by_name = dict(plan.checkpoint) if isinstance(plan.checkpoint, tuple) else {}
    count = len(fqns) if plan.checkpoint == "every" else plan.checkpoint
    left = count if isinstance(count, int) else 0
    kept: list[Kept] = []
    for fqn in fqns:
        has_backward = parts[kind_of[fqn]].has_backward
        kept.append(() if has_backward and left else by_name.get(fqn) if has_backward else None)
        left -= bool(has_backward and left)
    return kept


def _stage(
    blocks: Sequence[tuple[str, Kept]],
    rank_parts: RankParts,
    plan: Plan,
    crossing_bytes: int,
    *,
    is_first: bool,
    is_last: bool,
) -> SimulatedStage:
    selective, parts = plan.checkpoint == "selective", rank_parts.parts
    tied = parts[BEFORE].weights.keys() & parts[AFTER].weights.keys()
    calls: list[tuple[str, Kept]] = [(BEFORE, None)] if is_first else []
    calls += [*blocks, *([(AFTER, None)] if is_last else [])]
    ends = [name for name in (BEFORE, AFTER) if (name, None) in calls]
    last = len(calls) - 1
    keys = [(*call, index == last and not is_last) for index, call in enumerate(calls)]
    unit_of = {
        (name, kept, sends_result): rank_parts.unit(
            name,
            kept,
            has_core_recomputed=selective and name not in ends and parts[name].has_backward,
            is_in_root=bool(tied) and name in ends,
            sends_result=sends_result,
        )
        for name, kept, sends_result in dict.fromkeys(keys)
    }
    units = tuple(unit_of[key] for key in keys)
    root = RankWeights.of(
        {key: weight for name in ends for key, weight in parts[name].weights.items()}.values() if tied else ()
    )
    freed = kept_later = 0
    later = RankWeights()
    moments: list[BackwardMoment] = []
    backward_order = units[::-1]
    for (name, _), unit in zip(reversed(calls), backward_order, strict=True):
        absent = freed if parts[name].has_backward else kept_later  # a forward runs before later ones keep anything
        moments.append(
            BackwardMoment(
                unit.working_bytes, unit.temporary_bytes - absent, unit.first_temporary_bytes - absent, later
            )
        )
        freed += unit.freed_bytes
        kept_later += unit.kept_bytes
        later += root if name == AFTER and tied else unit.weights
    # In a run of equal units what is held changes evenly: one of its two ends is the fullest.
    backwards = tuple(
        moment
        for index, moment in enumerate(moments)
        if index in (0, last) or not backward_order[index - 1] is backward_order[index] is backward_order[index + 1]
    )
    return SimulatedStage(
        units=units,
        crossing_bytes=crossing_bytes,
        backwards=backwards,
        root=root,
        tied=Weights.of(parts[AFTER].weights[key] for key in (tied if len(ends) == 1 else ())),
    )
