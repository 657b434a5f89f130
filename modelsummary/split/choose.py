"""Choose the cuts that meet the user's wishes, or raise an error that says what is possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from modelsummary.errors import InputError, SplitError, check_flags, check_integers
from modelsummary.operators.tensor_bytes import nbytes_of
from modelsummary.split.call_costs import CallCosts, held_by_calls
from modelsummary.split.legal_cuts import CallSequence, Cut
from modelsummary.split.partition import Chain, fewest_parts, partitions
from modelsummary.split.schedule import StageLoad, simulate

__all__ = ["AS_GOOD", "Choice", "Limit", "Wishes", "choose_cuts"]

AS_GOOD = 1.05  # splits whose largest stages differ by less than this factor count as equally balanced


@dataclass(frozen=True)
class Wishes:
    """The arguments of ``Statistics.split``, and ``whole``: FQNs of modules that are not cut."""

    n_stages: int
    max_memory: int | Sequence[int] | None = None
    boundaries: Sequence[str] | None = None
    max_crossing_bytes: int | None = None
    single_tensor_cuts: bool = False
    whole: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_integers(n_stages=self.n_stages)
        self._check_bytes()
        if isinstance(self.boundaries, str):
            raise InputError(f"boundaries must be a list of layer names, got one name; pass [{self.boundaries!r}]")
        names = self.boundaries if self.boundaries is not None else []
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise InputError(f"boundaries must be a list of layer names, got {self.boundaries!r}")
        check_flags(single_tensor_cuts=self.single_tensor_cuts)
        if self.boundaries is not None and len(set(self.boundaries)) > self.n_stages - 1:
            raise InputError(
                f"{len(set(self.boundaries))} boundaries make {len(set(self.boundaries)) + 1} stages, "
                f"but n_stages={self.n_stages}; pass n_stages={len(set(self.boundaries)) + 1}"
            )

    def _check_bytes(self) -> None:
        caps = self.caps or []
        if any(type(cap) is not int or cap < 0 for cap in caps):
            raise InputError(
                f"max_memory must be an integer >= 0 in bytes, or one such integer per stage, got {self.max_memory!r}"
            )
        if self.max_memory is not None and len(caps) != self.n_stages:
            raise InputError(
                f"max_memory has {len(caps)} entries for {self.n_stages} stages; pass one integer, or one per stage"
            )
        crossing = self.max_crossing_bytes
        if crossing is not None and not (isinstance(crossing, (int, float)) and crossing >= 0):
            raise InputError(f"max_crossing_bytes must be a number >= 0, got {crossing!r}")

    @property
    def caps(self) -> list[int] | None:
        """Bytes that each stage may hold; None if unlimited."""
        if self.max_memory is None:
            return None
        if isinstance(self.max_memory, Sequence):
            return list(self.max_memory)
        return [self.max_memory] * self.n_stages


class Limit(NamedTuple):
    """A call that keeps the largest stage larger than the mean.

    Attributes:
        name: name of the call.
        share: its cost divided by the cost of all stages, 0 to 1.
        reason: why it is not cut.
    """

    name: str
    share: float
    reason: str


@dataclass(frozen=True)
class Choice:
    """The cuts of a sequence of calls, and how even the stages are.

    Attributes:
        cuts: positions in ``sequence.calls`` at which a stage begins; the first stage's 0 is left out.
    """

    sequence: CallSequence
    costs: CallCosts
    cuts: Sequence[int]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Half-open range of the calls of each stage."""
        return list(pairwise([0, *self.cuts, len(self.costs.costs)]))

    @property
    def largest(self) -> float:
        """Cost of the largest stage divided by the cost of all stages."""
        return max(sum(self.costs.costs[begin:end]) for begin, end in self.ranges) / sum(self.costs.costs)

    @property
    def could_be(self) -> float:
        """A lower bound of ``largest`` over all records: modules kept whole count as if they could be cut anywhere."""
        if not self.sequence.why_whole and not any(cut.obstacle for cut in self.sequence.cuts):
            return self.largest  # every call can be cut from the next one, so no record has more places to cut
        calls = zip(self.sequence.calls, self.costs.costs, strict=True)
        largest = max((cost for call, cost in calls if call not in self.sequence.why_whole), default=0)
        return max(1 / len(self.ranges), largest / sum(self.costs.costs))

    def limits(self) -> list[Limit]:
        """Return why the largest stage exceeds the mean by more than ``AS_GOOD``; empty if it does not."""
        total, mean = sum(self.costs.costs), sum(self.costs.costs) / len(self.ranges)
        begin, end = max(self.ranges, key=lambda bounds: sum(self.costs.costs[slice(*bounds)]))
        excess = sum(self.costs.costs[begin:end]) - mean
        if excess <= (AS_GOOD - 1) * mean:
            return []
        calls = zip(self.sequence.calls[begin:end], self.costs.costs[begin:end], strict=True)
        why_whole = self.sequence.why_whole
        limits = [
            Limit(call.name, cost / total, why_whole.get(call, "it is a single layer or operator"))
            for call, cost in calls
            if cost > mean or (call in why_whole and cost >= excess)
        ]
        obstacles = Counter(cut.obstacle for cut in self.sequence.cuts[begin : end - 1] if cut.obstacle)
        if not limits and obstacles:
            reason, count = obstacles.most_common(1)[0]
            first = self.sequence.calls[begin]
            limits.append(Limit(first.name, self.largest, f"{count} places after it cannot be cut: {reason}"))
        return limits


def choose_cuts(sequence: CallSequence, costs: CallCosts, wishes: Wishes, model: nn.Module) -> list[int]:
    """Return the best cuts that meet the wishes.

    Raises:
        InputError: a boundary is not a layer that can begin a stage.
        SplitError: no cuts meet the wishes; the message says how many stages are possible.
    """
    sequence = _keeping_whole(sequence, wishes.whole)
    legal = [cut for cut in sequence.cuts if not _obstacle(cut, wishes)]
    required = [_boundary(sequence, fqn, wishes) for fqn in wishes.boundaries or ()]
    chain = _chain(sequence, costs, legal, required, wishes.caps, model)
    candidates = list(partitions(chain, wishes.n_stages, wishes.caps))
    if candidates:
        return _quickest(chain, candidates)
    possible = len(legal) + 1
    if possible < wishes.n_stages:
        raise SplitError(_too_few(sequence, wishes, possible), possible)
    assert wishes.caps is not None
    fewest = fewest_parts(chain, max(wishes.caps))
    if fewest is None:
        raise SplitError(
            f"max_memory={wishes.max_memory!r}: a single call, with its parameters, buffers and results, needs more "
            f"than {max(wishes.caps):,} bytes; raise max_memory",
        )
    raise SplitError(
        f"max_memory={wishes.max_memory!r} is too small for {wishes.n_stages} stages; with {max(wishes.caps):,} bytes "
        f"per stage, at least {fewest} are needed",
        fewest,
    )


def _keeping_whole(sequence: CallSequence, fqns: Collection[str]) -> CallSequence:
    """Return the sequence with an obstacle at each cut inside a call of the named modules."""
    spans = [span for event, span in sequence.span.items() if event.is_module and event.fqn in fqns]
    inside = {position for begin, end in spans for position in range(begin + 1, end)}
    cuts = [
        replace(cut, obstacle=cut.obstacle or "it is inside a block") if cut.position in inside else cut
        for cut in sequence.cuts
    ]
    return replace(sequence, cuts=cuts)


def _quickest(chain: Chain, candidates: Sequence[Sequence[int]]) -> list[int]:
    """Return the partition with the shortest simulated step; among those within 1 %, the one with the fewest bytes.

    All have equal bottlenecks. A pipeline drains sooner if the expensive stages come first, up to 12 % for a few
    stages. Within 1 % the bytes, which the simulation leaves out, matter more. Where one large call bounds all parts,
    the quickest may leave devices empty: if its least part is less than half of the evenest partition's least part, the
    evenest is returned.
    """
    parts = [
        [sum(chain.costs[begin:end]) for begin, end in pairwise([0, *cuts, len(chain.costs)])] for cuts in candidates
    ]
    times = [simulate([StageLoad(cost, cost, cost) for cost in costs], 2 * len(costs)).makespan for costs in parts]
    quick = [index for index, time in enumerate(times) if time <= 1.01 * min(times)]
    chosen = min(quick, key=lambda index: sum(chain.crossing[cut] for cut in candidates[index]))
    evenest = min(range(len(candidates)), key=lambda index: sum(cost**2 for cost in parts[index]))
    return list(candidates[evenest if 2 * min(parts[chosen]) < min(parts[evenest]) else chosen])


def _obstacle(cut: Cut, wishes: Wishes) -> str:
    if cut.obstacle:
        return cut.obstacle
    if wishes.single_tensor_cuts and len(cut.values) > 1:
        return "more than one tensor crosses"
    if wishes.max_crossing_bytes is not None and cut.nbytes > wishes.max_crossing_bytes:
        return f"more than {wishes.max_crossing_bytes:,} bytes cross"
    return ""


def _boundary(sequence: CallSequence, fqn: str, wishes: Wishes) -> int:
    """Return the position of the cut before the first call of a module."""
    spans = [span for event, span in sequence.span.items() if event.is_module and event.fqn == fqn]
    if not spans:
        inside = next((event for event in sequence.calls if event.is_module and fqn.startswith(f"{event.fqn}.")), None)
        why = f"it is inside {inside.fqn!r}, which is called as a whole" if inside else "this layer was not called"
        raise InputError(f"boundaries names {fqn!r}, but {why}")
    position = min(first for first, _ in spans)
    if position == 0:
        raise InputError(f"boundaries names {fqn!r}, where the first stage begins anyway; leave it out")
    obstacle = _obstacle(sequence.cuts[position - 1], wishes)
    if obstacle:
        raise SplitError(f"no stage can begin at {fqn!r}: {obstacle}; choose a layer nearby")
    return position


def _chain(
    sequence: CallSequence,
    costs: CallCosts,
    legal: Sequence[Cut],
    required: Sequence[int],
    caps: Sequence[int] | None,
    model: nn.Module,
) -> Chain:
    crossing = {cut.position: cut.nbytes for cut in legal}
    if caps is None:
        return Chain(costs.costs, crossing, frozenset(required))
    holds: list[list[int]] = []
    sizes: dict[Hashable, int] = {}
    for index, tensors in enumerate(held_by_calls(sequence, model)):
        sizes.update((id(tensor), nbytes_of(tensor)) for tensor in tensors)
        sizes[-1 - index] = sequence.activation_bytes(index)
        holds.append([-1 - index, *(id(tensor) for tensor in tensors)])
    return Chain(costs.costs, crossing, frozenset(required), holds, sizes)


def _too_few(sequence: CallSequence, wishes: Wishes, possible: int) -> str:
    reasons = Counter(reason for cut in sequence.cuts if (reason := _obstacle(cut, wishes)))
    message = (
        f"cannot split into {wishes.n_stages} stages: {possible} {'is' if possible == 1 else 'are'} possible, with "
        f"{len(sequence.calls)} calls and {possible - 1} place{'' if possible == 2 else 's'} to cut them"
    )
    if reasons:
        reason, count = reasons.most_common(1)[0]
        message += f"; {sum(reasons.values())} places are ruled out, {count} because {reason}"
    if sequence.why_whole:
        call, why = next(iter(sequence.why_whole.items()))
        message += f"; layer {call.fqn!r} is called as a whole: {why}"
    return f"{message}; ask for {possible} or fewer"
