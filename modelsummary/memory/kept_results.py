"""What a checkpoint around a block runs again, and which of its results may be kept instead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from modelsummary.capture.checkpoints import result_name
from modelsummary.capture.trace import Storage
from modelsummary.memory.block_reruns import DETACH, BlockRerun
from modelsummary.memory.saved import PERSISTENT, Remaking, contents_read, draws_random_numbers
from modelsummary.memory.timeline import is_held
from modelsummary.operators.operator_calls import OperatorCall, OperatorRun

__all__ = ["KeptGroup", "RecomputedBlock", "result_names"]


@dataclass
class KeptGroup:
    """Results that are kept together: what an operator made, and what later ones wrote into it in place.

    If the first is kept, it has the values of the last, so none of them may run again.

    Attributes:
        names: their names, as ``apply_checkpoint`` takes them.
        calls: the operator calls that do not run again.
        nbytes: bytes that keeping them takes, beyond what is kept anyway.
        is_forced: they have to be kept, as making them again would change the model, or communicate.
        is_random: some draw random numbers.
        may_be_kept: nothing else that runs again reads the values before the last write.
        last: number of its last operator.
        again: numbers of the operators of the backward that run again unless the results are kept.
        changes: number of an operator -> bytes that are alive in addition from there on if the results are kept.
    """

    names: list[str] = field(default_factory=list)
    calls: list[OperatorCall] = field(default_factory=list)
    nbytes: int = 0
    is_forced: bool = False
    is_random: bool = False
    may_be_kept: bool = True
    last: int = -1
    again: list[int] = field(default_factory=list)
    changes: Counter[int] = field(default_factory=Counter)


class RecomputedBlock:
    """The operators of a block that a checkpoint runs again.

    Args:
        held: number of each operator of the block, forward and backward -> bytes alive while it runs.
        end: number of the first operator after the forward.
        groups: their results.
        repeats_effects: it runs operators again that must not, as their results are not known one by one.

    Attributes:
        has_backward: it runs operators in the backward.
        groups: their results, by the order of the last operator of each.
    """

    def __init__(
        self, held: Mapping[int, int], end: int, groups: Sequence[KeptGroup] = (), *, repeats_effects: bool = False
    ) -> None:
        self._held = held
        self.has_backward = any(index >= end for index in held)
        self.groups = sorted(groups, key=lambda group: group.last)
        self._repeats_effects = repeats_effects

    @property
    def can_keep(self) -> bool:
        """True if all that must not run again can be kept."""
        return not self._repeats_effects and all(group.may_be_kept for group in self.groups if group.is_forced)

    @property
    def free(self) -> list[KeptGroup]:
        """The results that may be kept or made again."""
        return [group for group in self.groups if group.may_be_kept and not (group.is_forced or group.is_random)]

    def kept_at_least(self) -> list[list[KeptGroup]]:
        """Return sets of results of which one is kept: the forced ones, and none or some of the random ones.

        A generator does not advance when an operator is skipped. So if one random result is kept, all later ones are.
        """
        forced = [group for group in self.groups if group.is_forced]
        sets = [forced]
        for group in reversed([group for group in self.groups if group.is_random and not group.is_forced]):
            if not group.may_be_kept:
                break
            sets.append([*sets[-1], group])
        return sets

    def peak_keeping(self, kept: Iterable[KeptGroup]) -> int:
        """Return the most bytes alive while the block runs, forward or backward, if it keeps these results."""
        left_out: set[int] = set()
        changes: Counter[int] = Counter()
        for group in kept:
            left_out.update(group.again)
            changes.update(group.changes)
        pending = sorted(changes, reverse=True)
        more, peak = 0, 0
        for index, nbytes in self._held.items():
            while pending and pending[-1] <= index:
                more += changes[pending.pop()]
            if index not in left_out:
                peak = max(peak, nbytes + more)
        return peak

    @classmethod
    def of(cls, rerun: BlockRerun, fqn: str, *, communicates_again: bool = False) -> RecomputedBlock | None:
        """Return the region of a block in a step in which a checkpoint runs it again.

        Return None if a checkpoint would compute something else: what the block reads is written later in the forward,
        or by the block itself after it has read it.

        Args:
            rerun: how it runs again.
            fqn: name of the block.
            communicates_again: the step is of a rank: collectives may run again. Functions of autograd that contain
                them run with gradients disabled, so their operators lack among ``rerun.again``.
        """
        trace, again, held = rerun.trace, rerun.again, rerun.held
        call = trace.first_call(fqn)
        runs = [operator.run for operator in trace.operators]
        inside = [index for index in range(call.begin, call.end) if runs[index].call.func is not DETACH]
        remaking = Remaking(trace)
        obstacle = remaking.persistent_written if communicates_again else remaking.obstacle
        recomputed = _recomputed(again, inside, runs, with_gaps=communicates_again)
        if recomputed is None:  # it is called several times, or what runs again depends on what ran before
            return cls(held, trace.end_of_forward, repeats_effects=any(map(obstacle, inside)))
        region, again_of = recomputed
        region_storages = {
            storage
            for index in region
            if not runs[index].is_view
            for storage in set(runs[index].makes).difference(runs[index].reads)
        }
        readers: defaultdict[int, list[int]] = defaultdict(list)
        group_of: dict[int, list[int]] = {}  # operator -> the operators of its group, shared by all of them
        touching: dict[int, int] = {}  # storage -> an operator that makes it or writes into it
        for index in region:
            if runs[index].is_view:
                continue
            for storage in contents_read(runs[index]):
                readers[storage].append(index)
            group_of[index] = [index]
            for storage in _touched(runs[index]):
                other = touching.setdefault(storage, index)
                if group_of[other] is not group_of[index]:
                    merged = group_of[other] + group_of[index]
                    group_of.update(dict.fromkeys(merged, merged))
        written_by_region = {storage for index in group_of for storage in _touched(runs[index])}
        for storage, indices in readers.items():
            is_written_later = remaking.written_last.get(storage, -1) > indices[0]
            if storage not in region_storages and storage not in written_by_region and is_written_later:
                return None
        names = result_names([runs[index].call for index in region])
        name_of = dict(zip(region, names, strict=True))
        storages_by_id = trace.storages_by_identity
        groups = []
        for indices in {id(indices): sorted(indices) for indices in group_of.values()}.values():
            storages = {storage for index in indices for storage in _touched(runs[index])}
            group = KeptGroup([name_of[index] for index in indices], [runs[index].call for index in indices])
            group.last = indices[-1]
            group.again = [again_of[index] for index in indices if index in again_of]
            pairs = ((runs[index], runs[again_of[index]]) for index in indices if index in again_of)
            group.changes = _changes(pairs, storages & region_storages, storages_by_id)
            group.nbytes = sum(
                storages_by_id[storage].nbytes
                for storage in storages
                if storage in region_storages
                and storage in storages_by_id
                and (storage in rerun.kept_by_others or not is_held(storages_by_id[storage], trace))
            )
            is_from_outside = any(storage not in region_storages and storage in storages_by_id for storage in storages)
            group.is_forced = is_from_outside or any(map(obstacle, indices))
            group.is_random = any(map(draws_random_numbers, group.calls))
            group.may_be_kept = not any(call.rule.facts.casts for call in group.calls)  # autocast keeps some itself
            for storage in storages:
                last_write = remaking.written_last.get(storage, -1)
                others = [reader for reader in readers[storage] if reader not in indices and reader < last_write]
                is_outside = storage in region_storages and last_write > region[-1]
                group.may_be_kept &= not others and not is_outside
                if others and storage not in region_storages and storages_by_id[storage].kind not in PERSISTENT:
                    return None  # the block would read what it wrote
            groups.append(group)
        return cls(held, trace.end_of_forward, groups)


def _changes(
    pairs: Iterable[tuple[OperatorRun, OperatorRun]], kept: set[int], storages_by_id: Mapping[int, Storage]
) -> Counter[int]:
    """Return what changes if storages live on instead of being made again: operator -> bytes from there on.

    Args:
        pairs: the operators that make the storages, in the forward and again.
        kept: the storages.
        storages_by_id: all storages of the step.
    """
    again_of: dict[int, int] = {}
    for run, again in pairs:
        for storage, other in zip(run.makes, again.makes, strict=False):
            again_of.setdefault(storage, other)
    changes: Counter[int] = Counter()
    for storage in kept.intersection(again_of):
        first, second = storages_by_id.get(storage), storages_by_id.get(again_of[storage])
        if first is None or second is None or first.died is None:
            continue
        if first.died < second.born:
            changes[first.died] += first.nbytes
            changes[second.born] -= first.nbytes
        else:  # both are alive at once
            changes[second.born] -= second.nbytes
            changes[first.died if second.died is None else min(first.died, second.died)] += second.nbytes
    return changes


def _recomputed(
    again: Sequence[int], inside: Sequence[int], runs: Sequence[OperatorRun], *, with_gaps: bool
) -> tuple[Sequence[int], dict[int, int]] | None:
    """Return the operators of a block that run again, and the number of each in the backward; None if some lack.

    Args:
        again: numbers of the operators that run again in the backward.
        inside: numbers of the operators of the block in the forward; hooks of the block may run others before.
        runs: operators of the step.
        with_gaps: operators that lack among ``again`` may run between them.
    """
    calls, others = [runs[index].call for index in again], [runs[index].call for index in inside]
    for first in range(len(others) - len(calls) + 1):
        if all(call is other for call, other in zip(calls, others[first:], strict=False)):
            region = inside[first : first + len(calls)]
            return region, dict(zip(region, again, strict=True))
    again_of: dict[int, int] = {}
    end = 0
    for call, number in zip(calls, again, strict=True):
        position = next((index for index in range(end, len(others)) if others[index] is call), None)
        if position is None or not with_gaps:
            return None
        again_of[inside[position]] = number
        end = position + 1
    return inside[:end], again_of


def _touched(run: OperatorRun) -> set[int]:
    """Return the storages that an operator makes, or writes in place."""
    return {*set(run.makes).difference(run.reads), *run.writes}


def result_names(calls: Sequence[OperatorCall]) -> list[str]:
    """Return the names of the results of a region, from its begin, without ``DETACH``."""
    counts: Counter[object] = Counter()
    names = []
    for call in calls:
        names.append(result_name(call.func, counts[call.func]))
        counts[call.func] += 1
    return names
