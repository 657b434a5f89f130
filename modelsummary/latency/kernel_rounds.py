"""Seconds of operator calls, measured in rounds, with the caches as a model leaves them.

A round runs every call once, in the model's order, each alone. Before a call runs, its first argument is written, as
the operator before it does in a model: small arguments are then in the cores' own caches, large ones are not. The
other arguments were used some calls earlier. Parameters were, too, unless the model is too large for the last level of
the cache: a round then begins by reading other data, which pushes them into memory. Between two runs of a call all
other calls run, so its code is as cold as in a model.

A machine has slower seconds, such as those in which a neighbour shares its cores. They slow whole rounds, of which the
faster half counts. A model with many calls has several groups of them, whose rounds take turns: each group then sees
the same fast and slow seconds. Slower minutes cannot be seen by a measurement of seconds: for these, ``KernelTable``
takes the median of several visits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import cycle
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.latency.host_time import minor_faults, other_operators, preemptions
from modelsummary.latency.kept_memory import kept_memory
from modelsummary.latency.kernel_measure import arguments_of
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_facts import tensors_in
from modelsummary.progress import counted

__all__ = ["seconds_of"]

_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS_OF_ROUNDS = 5, 60, 0.7
_OTHERS_PER_CALL = 10
_AHEAD = 4  # calls between the use of an argument by another operator and the call
_HELD_BYTES, _HELD_SHARE = 2**31, 1 / 4  # arguments and results at the same time; of the free memory
_UNKNOWN_FREE = 2**31  # bytes of free memory where the system does not report it
_GROUP_CALLS = 64  # in a round; more would be colder than in a model
_LONGEST = 1.5  # times the median: longer runs were interrupted
_UNDISTURBED = 0.95  # least share of a core in a run that counts
_CLOCK_SECONDS = 2e-6  # between the readings of the two clocks

_Times = list[tuple[float, bool]]  # seconds of each call of a round, and whether no other process took a core
_Timed = Callable[[Callable[[], object]], tuple[float, bool]]  # the same for one function


def seconds_of(
    calls: Sequence[OperatorCall],
    device: torch.device,
    *,
    cold_bytes: int = 0,
    page: float = 0.0,
    crowded: bool = False,
) -> list[float | None]:
    """Return the seconds of each call; None for a call that fails with random arguments.

    Args:
        calls: calls in the order in which a model runs them.
        device: the CPU, or a CUDA device.
        cold_bytes: bytes that push the parameters out of the cache before a round; 0 leaves them there.
        page: seconds of a page fault. The CPU's pages of new memory are left out: a process that keeps its memory has
            none, and how much another one gives back depends on its history.
        crowded: the calls are a small part of a model: run other operators before each.
    """
    others = cycle(other_operators()) if crowded and device.type == "cpu" else None
    on_cuda = device.type == "cuda"
    guard: AbstractContextManager[object] = torch.cuda.device(device) if on_cuda else kept_memory()
    flush = torch.zeros(cold_bytes // 4, device=device)
    all_seconds: list[float | None] = []
    with torch.no_grad(), guard, counted("kernels", "round") as done:
        timed = _timer_by_events() if on_cuda else _timer_by_clock(page)  # events belong to the current device

        def one_round(group: Sequence[_Ready]) -> _Times:
            flush.sum()
            return _round(group, timed, others)

        for part in _parts(calls, min(_HELD_BYTES, int(_HELD_SHARE * _free_bytes(device)))):
            ready = [_ready(call, device, cold=cold_bytes > 0) for call in part]
            runnable = [call for call in ready if call is not None]
            seconds = iter(_in_turns(runnable, one_round, done))
            all_seconds += [None if call is None else next(seconds) for call in ready]
            del ready, runnable
    return all_seconds


class _Ready(NamedTuple):
    """A call with its arguments.

    Attributes:
        run: runs the call.
        produced: the argument that the operator before makes, with its least and largest value.
        used: the other arguments, which other operators used some time before.
    """

    run: Callable[[], object]
    produced: tuple[Tensor, float, float] | None
    used: tuple[Tensor, ...]

    def produce(self) -> None:
        """Write the first argument. Its values stay in their range: calls in place change them in every round."""
        if self.produced is not None:
            tensor, least, largest = self.produced
            tensor.clamp_(least, largest)

    def use(self) -> None:
        """Read the other arguments."""
        for tensor in self.used:
            with suppress(RuntimeError):
                tensor.sum()


def _ready(call: OperatorCall, device: torch.device, *, cold: bool) -> _Ready | None:
    """Return a call that ran once; None if it fails."""
    try:
        args, kwargs, params = arguments_of(call, device)
        call.func(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return None
    param_ids = set(map(id, params))
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in param_ids]
    produced = _range_of(tensors[0]) if tensors else None
    return _Ready(lambda: call.func(*args, **kwargs), produced, tuple(tensors[1:] + ([] if cold else params)))


def _range_of(tensor: Tensor) -> tuple[Tensor, float, float] | None:
    """Return the memory of a floating point tensor with its least and largest value; None if it cannot be clamped."""
    base = tensor if tensor._base is None else tensor._base
    if not base.is_floating_point() or not base.numel():
        return None
    try:
        least, largest = map(float, base.aminmax())
        base.clamp_(least, largest)
    except RuntimeError:  # a float of 8 bits
        return None
    return (base, least, largest) if least <= largest else None  # no range if an element is NaN


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    sizes = (int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))
    return next(sizes, _UNKNOWN_FREE)


def _parts(calls: Sequence[OperatorCall], most_bytes: int) -> Iterator[list[OperatorCall]]:
    """Yield successive calls whose arguments and results have at most ``most_bytes`` bytes, or one call."""
    part: list[OperatorCall] = []
    held = 0
    for call in calls:
        size = sum(spec.nbytes for spec in (*call.tensors, *call.outputs))
        if part and held + size > most_bytes:
            yield part
            part, held = [], 0
        part.append(call)
        held += size
    if part:
        yield part


def _in_turns(
    ready: Sequence[_Ready], one_round: Callable[[Sequence[_Ready]], _Times], done: Callable[[], object]
) -> list[float]:
    """Return the seconds of each call, from rounds of the groups that take turns."""
    groups = [ready[first : first + _GROUP_CALLS] for first in range(0, len(ready), _GROUP_CALLS)]
    rounds: list[list[_Times]] = [[] for _ in groups]
    begin, limit = time.perf_counter(), _SECONDS_OF_ROUNDS * len(groups)
    for n_rounds in range(_MOST_ROUNDS):
        if n_rounds >= _LEAST_ROUNDS and time.perf_counter() - begin >= limit:
            break
        for group, group_rounds in zip(groups, rounds, strict=True):
            group_rounds.append(one_round(group))
        done()
    return [seconds for group_rounds in rounds for seconds in _typical(group_rounds)]


def _round(ready: Sequence[_Ready], timed: _Timed, others: Iterator[Callable[[], object]] | None) -> _Times:
    """Run each call once; return the seconds of each, and whether it ran undisturbed."""
    times = []
    for call in ready[:_AHEAD]:
        call.use()
    for index, call in enumerate(ready):
        if others is not None:
            for _ in range(_OTHERS_PER_CALL):
                next(others)()
        if index + _AHEAD < len(ready):
            ready[index + _AHEAD].use()
        call.produce()
        times.append(timed(call.run))
    return times


def _typical(rounds: Sequence[_Times]) -> Iterator[float]:
    """Yield the seconds of each call: the mean of the undisturbed runs in the faster half of the rounds.

    Means add up to the mean of a model, unlike medians. No run counts for more than 1.5 times the median.
    """
    medians = [median(seconds for seconds, _ in runs) for runs in zip(*rounds, strict=True)]
    paces = [
        median(
            [run[0] / max(median_seconds, 1e-9) for run, median_seconds in zip(times, medians, strict=True)] or [1.0]
        )
        for times in rounds
    ]
    fastest = sorted(range(len(rounds)), key=paces.__getitem__)[: (len(rounds) + 1) // 2]
    for runs in zip(*(rounds[index] for index in fastest), strict=True):
        undisturbed = [seconds for seconds, is_undisturbed in runs if is_undisturbed]
        chosen = undisturbed or [seconds for seconds, _ in runs]
        limit = _LONGEST * median(chosen)
        yield mean(min(seconds, limit) for seconds in chosen)


# -------------------------------------------------------------------------------------------------------- timers


def _timer_by_clock(page: float) -> _Timed:
    """Return a timer of functions on the CPU that leaves out page faults of ``page`` seconds."""

    def timed(run: Callable[[], object]) -> tuple[float, bool]:
        n_preemptions, faults = preemptions(), minor_faults()
        cpu_begin, begin = time.thread_time(), time.perf_counter()
        output = run()  # freed after the end is read, as in a model
        end, cpu_seconds = time.perf_counter(), time.thread_time() - cpu_begin
        paging = (minor_faults() - faults) * page
        del output
        duration = end - begin
        share = (cpu_seconds + _CLOCK_SECONDS) / duration
        if torch.get_num_threads() > 1:  # the other threads wait for the one that n_preemptions its core
            return max(duration - paging, 0.0), share > _UNDISTURBED and preemptions() == n_preemptions
        if share < _UNDISTURBED:
            duration = cpu_seconds  # all work was done by this thread, and other processes ran in between
        return max(duration - paging, 0.0), True

    return timed


def _timer_by_events() -> _Timed:
    """Return a timer of functions on the current CUDA device, without the time of the events themselves."""

    def elapsed(run: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _torch.sleep_cycles(_SLEEP_CYCLES)  # the device is busy until both events and the kernels are queued
        start.record()
        output = run()
        end.record()
        end.synchronize()
        del output
        return float(start.elapsed_time(end)) * 1e-3

    events = min(elapsed(lambda: None) for _ in range(10))
    return lambda run: (max(elapsed(run) - events, 0.0), True)


_SLEEP_CYCLES = 1_000_000  # half a millisecond: longer than a call needs to queue its kernels
