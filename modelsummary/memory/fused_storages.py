"""When storages of a compiled step exist: a fused kernel runs its operators at once, and writes what others read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from modelsummary.capture.trace import Storage, Trace
from modelsummary.operators.kernels import Launches, launches_of, readers_of

__all__ = ["storages_in_time"]


def storages_in_time(trace: Trace) -> tuple[Sequence[Storage], Sequence[int]]:
    """Return the storages that a step writes, and the time at which each operator runs, in which they count.

    Of an eager step these are all storages, and the numbers of the operators. In a compiled graph, operators that
    Inductor fuses run at one time. What is made and read inside of one kernel does not exist. If a kernel is the last
    to read an intermediate result of the graph, a result of as many bytes takes its place.

    Args:
        trace: a step; storages were followed.
    """
    times = list(range(len(trace.operators)))
    if not trace.fused:
        return trace.storages, times
    readers = readers_of(trace.operators)
    storages = dict(trace.storages_by_identity)
    for begin, end in trace.fused:
        launches = launches_of(trace.operators[begin:end], readers)
        _run_fused(trace, begin, end, launches, storages, times)
    return list(storages.values()), times


def _run_fused(
    trace: Trace, begin: int, end: int, launches: Launches, storages: dict[int, Storage], times: list[int]
) -> None:
    """Move the storages of one graph to the times of its kernels, and drop what no kernel writes.

    Args:
        trace: the step.
        begin, end: number of the first operator of the graph, and of the first one behind it.
        launches: its kernels.
        storages: storages of the step by identity; changed.
        times: time of each operator; changed.
    """
    last = begin
    for number, position in enumerate(launches.positions, begin):
        last = times[number] = last if position is None else begin + position
    used = {key: list(uses) for key, uses in _uses(trace, begin, end, times).items()}
    made: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # time and bytes -> storages
    freed: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # the same of what is read for the last time
    for key, uses in used.items():
        storage = storages.get(key)
        if storage is None:
            continue
        is_made, is_freed = begin <= storage.born < end, storage.died is not None and begin < storage.died <= end
        if is_made and is_freed and key in launches.unwritten:
            del storages[key]
            continue
        if is_made:
            storage = storage._replace(born=min(uses))
        if is_freed:
            storage = storage._replace(died=max(uses) + 1)
        storages[key] = storage
        if is_made and storage.born - begin in launches.fused:
            made[storage.born, storage.nbytes].append(key)
        if is_made and is_freed and max(uses) - begin in launches.fused:  # what a graph takes is never written
            freed[max(uses), storage.nbytes].append(key)
    for time_and_bytes, keys in made.items():
        replaced = (key for key in freed[time_and_bytes] if key not in keys)
        for _, key in zip(keys, replaced, strict=False):
            storages[key] = storages[key]._replace(died=time_and_bytes[0])


def _uses(trace: Trace, begin: int, end: int, times: Sequence[int]) -> Mapping[int, set[int]]:
    """Return the times at which kernels of a graph read or make each storage; of allocations and views if none does."""
    by_kernels: defaultdict[int, set[int]] = defaultdict(set)
    others: defaultdict[int, set[int]] = defaultdict(set)
    for number in range(begin, end):
        run = trace.operators[number].run
        uses = by_kernels if run.call.rule.launches_kernel else others
        for key in (*run.reads, *run.makes):
            uses[key].add(times[number])
    return {**others, **by_kernels}
