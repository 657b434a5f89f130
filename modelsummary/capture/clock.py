"""Clocks that mark points in time, on the CPU or on the stream of an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CpuClock", "EventClock", "SynchronizingClock", "clock_for"]


class Clock(Protocol):
    """Source of marks, which are points in time.

    Attributes:
        waits: whether a mark waits for the device, which slows the run down.
    """

    waits: bool

    def now(self) -> Any:
        """Make a mark. It must be cheap, as it is called at every begin and end of a module."""

    def milliseconds(self, marks: Sequence[Any]) -> list[float]:
        """Return each mark in milliseconds since the first; wait until the last has been reached."""

    def release(self, marks: Sequence[Any]) -> None:
        """Release marks that are not needed any longer."""


class CpuClock:
    """Clock of the CPU: ``time.perf_counter_ns``.

    >>> CpuClock.milliseconds([1_000_000, 3_500_000])
    [0.0, 2.5]
    """

    waits = False
    now = staticmethod(time.perf_counter_ns)

    @staticmethod
    def milliseconds(marks: Sequence[int]) -> list[float]:
        """Return each mark in milliseconds since the first."""
        return [(mark - marks[0]) / 1e6 for mark in marks]

    @staticmethod
    def release(marks: Sequence[int]) -> None:
        """Do nothing: the marks are plain numbers."""


class EventClock:
    """Clock of an accelerator: events on its current stream record when the device reaches them, without waiting.

    Args:
        make_event: returns an event that records the time, such as ``torch.cuda.Event(enable_timing=True)``.
    """

    waits = False

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._pool: list[Any] = []

    def now(self) -> Any:
        """Record an event on the current stream."""
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._make_event()
        event.record()
        return event

    def milliseconds(self, marks: Sequence[Any]) -> list[float]:
        """Return each mark in milliseconds since the first; the only place where the CPU waits for the device."""
        for mark in reversed(marks):  # the last first: on one stream the others have been reached by then
            mark.synchronize()
        return [0.0, *(float(marks[0].elapsed_time(mark)) for mark in marks[1:])]

    def release(self, marks: Sequence[Any]) -> None:
        """Return events to the pool, to be used again."""
        self._pool.extend(marks)


class SynchronizingClock:
    """Clock of a device without events that record the time: each mark waits until the device is idle."""

    waits = True

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize

    def now(self) -> int:
        """Wait until the device is idle and return the time."""
        self._synchronize()
        return time.perf_counter_ns()

    milliseconds = staticmethod(CpuClock.milliseconds)
    release = staticmethod(CpuClock.release)


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on ``device``.

    >>> clock_for(torch.device("cpu")).waits
    False
    """
    if device.type == "cpu":
        return CpuClock()
    if device.type == "cuda":
        return EventClock(lambda: torch.cuda.Event(enable_timing=True))
    try:
        torch.Event(device=device, enable_timing=True).record()
    except (RuntimeError, NotImplementedError):
        return SynchronizingClock(torch.accelerator.synchronize)
    return EventClock(lambda: torch.Event(device=device, enable_timing=True))
