"""The stages of a pipeline: which blocks each has, and what it takes for one micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelsummary.cluster.parts import AFTER, BEFORE, Part
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.timing import PartSeconds
from modelsummary.cluster.weights import FsdpUnit, Weights
from modelsummary.errors import InputError
from modelsummary.split.partition import Chain, partition

__all__ = ["SimulatedStage", "deal", "stages_of"]


@dataclass(frozen=True)
class SimulatedStage:
    """One stage of the pipeline on one rank, for one micro-batch.

    Attributes:
        counts: kind of block -> how many the stage has.
        is_first, is_last: it has what precedes, or follows, the blocks.
        forward, backward: seconds of its kernels, without recomputation.
        recomputation: seconds of what the backward computes again.
        waits_forward, waits_backward: seconds for which it waits for collectives, by group; the backward with what
            recomputation communicates again.
        crossing_bytes: bytes that it takes from the stage before it.
        kept_bytes: bytes of activations kept from the forward to the backward.
        working_bytes: bytes of activations that exist only while a block is recomputed.
        temporary_bytes: the most bytes alive for a moment.
        weights: on the rank, without divided experts.
        experts: weights of experts that are divided over ranks.
        units: what FSDP can gather at once, in the order of the calls, also what has no parameters of its own.
        root: the unit that stays gathered: what precedes and what follows the blocks, if they share a parameter.
        share_again: share of its parameters that FSDP gathers again for the backward: of the parts that the backward
            passes through, without what follows the blocks and without the root.
        tied: parameters that the first and the last stage both have; none for other stages, and for one stage.
    """

    counts: Mapping[str, int]
    is_first: bool
    is_last: bool
    forward: float
    backward: float
    recomputation: float
    waits_forward: Mapping[str, float]
    waits_backward: Mapping[str, float]
    crossing_bytes: int
    kept_bytes: int
    working_bytes: int
    temporary_bytes: int
    weights: Weights
    experts: Weights
    units: tuple[FsdpUnit, ...]
    root: FsdpUnit
    share_again: float
    tied: Weights

    @property
    def n_units(self) -> int:
        """Number of FSDP units, with the root."""
        return max(sum(unit.nbytes > 0 for unit in (*self.units, self.root)), 1)

    @property
    def largest_unit(self) -> FsdpUnit:
        """The FSDP unit with the most bytes."""
        return max((*self.units, self.root), key=lambda unit: unit.nbytes)

    @property
    def forward_seconds(self) -> float:
        """Seconds of a forward."""
        return self.forward + sum(self.waits_forward.values())

    @property
    def backward_seconds(self) -> float:
        """Seconds of a backward, with recomputation."""
        return self.backward + self.recomputation + sum(self.waits_backward.values())


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
        cuts = partition(Chain(list(costs), dict.fromkeys(range(1, count), 1)), stages)
        assert cuts is not None
        return [end - begin for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
    per_stage = -(-count // stages)
    missing = per_stage * stages - count
    dealt = [per_stage] * stages
    for stage in [stages - 1, 0, *range(stages - 2, 0, -1)][:missing]:
        dealt[stage] -= 1
    return dealt


def stages_of(
    model: StepModel, parts: Mapping[str, Part], seconds: Mapping[str, PartSeconds], plan: Plan
) -> list[SimulatedStage]:
    """Return the stages of a plan, in order.

    Raises:
        InputError: the model has too few blocks.
    """
    kinds = [model.kind_of[fqn] for fqn in model.blocks]
    n_stages = plan.stages
    if not kinds and n_stages > 1:
        raise InputError(f"pipeline={plan.pipeline}: the model has no repeated blocks to cut between")
    dealt = deal([max(parts[kind].flops, 1) for kind in kinds], n_stages) if kinds else [0]
    stages, begin = [], 0
    stage_of: dict[tuple[tuple[str, ...], bool, bool, int], SimulatedStage] = {}
    for index, count in enumerate(dealt):
        stage_kinds = tuple(kinds[begin : begin + count])
        # a stage without blocks takes what the last block returns, which is as large as what it takes
        crossing_bytes = parts[kinds[min(begin, len(kinds) - 1)]].crossing_bytes if index else 0
        begin += count
        key = stage_kinds, index == 0, index == n_stages - 1, crossing_bytes
        if key not in stage_of:
            stage_of[key] = _stage(stage_kinds, parts, seconds, plan, crossing_bytes, is_first=key[1], is_last=key[2])
        stages.append(stage_of[key])
    return stages


def _stage(
    kinds: Sequence[str],
    parts: Mapping[str, Part],
    seconds: Mapping[str, PartSeconds],
    plan: Plan,
    crossing_bytes: int,
    *,
    is_first: bool,
    is_last: bool,
) -> SimulatedStage:
    counts = Counter(kinds)
    ends = [name for name, is_present in ((BEFORE, is_first), (AFTER, is_last)) if is_present]
    n_recomputed = (
        len(kinds) if plan.recompute == "full" else (plan.recompute if isinstance(plan.recompute, int) else 0)
    )
    passed = [kind for kind in kinds if parts[kind].has_backward]  # others are neither kept nor computed again
    recomputed = Counter(passed[:n_recomputed])
    selective = plan.recompute == "selective"
    part_counts = [*counts.items(), *((name, 1) for name in ends)]
    waits_forward, waits_backward = Counter[str](), Counter[str]()
    for name, count in part_counts:
        for group, value in seconds[name].forward_communication.items():
            waits_forward[group] += count * value  # type: ignore[assignment]
            waits_backward[group] += recomputed[name] * value  # type: ignore[assignment]
        for group, value in seconds[name].backward_communication.items():
            waits_backward[group] += count * value  # type: ignore[assignment]
    recomputation = sum(count * seconds[name].forward for name, count in recomputed.items())
    if selective:
        recomputation = sum(count * seconds[name].core for name, count in counts.items())
    working = [parts[name].kept_bytes - parts[name].entered_bytes for name in recomputed]
    working += [parts[name].core_bytes for name in counts] if selective else []
    tied = parts[BEFORE].weights.keys() & parts[AFTER].weights.keys()
    root = FsdpUnit.of(
        {key: weight for name in ends for key, weight in parts[name].weights.items()}.values() if tied else ()
    )
    unit_of = {name: FsdpUnit.of(parts[name].weights.values()) for name in counts}
    unit_of |= {name: FsdpUnit() if tied else FsdpUnit.of(parts[name].weights.values()) for name in ends}
    units = []
    left = Counter(recomputed)  # the first ones of a stage
    for name in (name for name in (BEFORE, *kinds, AFTER) if name in unit_of):
        kept = parts[name].kept_bytes - (parts[name].core_bytes if selective and name in counts else 0)
        if left[name]:
            kept, left[name] = parts[name].entered_bytes, left[name] - 1
        elif name in counts and not parts[name].has_backward:
            kept = 0
        units.append(unit_of[name]._replace(kept_bytes=kept))
    shared = sum((unit.shared for unit in (root, *units)), Weights())
    experts = sum((unit.experts for unit in (root, *units)), Weights())
    freed = [*counts.items()] if tied or not is_first else [*counts.items(), (BEFORE, 1)]
    again_bytes = sum(count * _nbytes(parts[name]) for name, count in freed if parts[name].has_backward)
    return SimulatedStage(
        counts=counts,
        is_first=is_first,
        is_last=is_last,
        forward=sum(count * seconds[name].forward for name, count in part_counts),
        backward=sum(count * seconds[name].backward for name, count in part_counts),
        recomputation=recomputation,
        waits_forward=waits_forward,
        waits_backward=waits_backward,
        crossing_bytes=crossing_bytes,
        kept_bytes=sum(unit.kept_bytes for unit in units),
        working_bytes=max(working, default=0),
        temporary_bytes=max(parts[name].temporary_bytes for name, _ in part_counts),
        weights=shared,
        experts=experts,
        units=tuple(units),
        root=root,
        share_again=again_bytes / max(shared.nbytes + experts.nbytes, 1),
        tied=Weights.of(parts[AFTER].weights[key] for key in (tied if len(ends) == 1 else ())),
    )


def _nbytes(part: Part) -> int:
    return sum(weight.nbytes for weight in part.weights.values() if weight.kind != "buffer")
