"""Clocks: the time of a mark in a run, on the CPU or on the stream of an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CpuClock", "EventClock", "SynchronizingClock", "clock_for"]


class Clock(Protocol):
    """Marks points in time.

    Attributes:
        waits: a mark waits for the device, which slows the run down.
    """

    waits: bool

    def now(self) -> Any:
        """Make a mark; cheap, called at every begin and end of a module."""

    def milliseconds(self, marks: Sequence[Any]) -> list[float]:
        """Each mark in milliseconds since the first; waits until the last has come."""

    def release(self, marks: Sequence[Any]) -> None:
        """These marks are not needed any longer."""


class CpuClock:
    """``time.perf_counter_ns``."""

    waits = False
    now = staticmethod(time.perf_counter_ns)

    @staticmethod
    def milliseconds(marks: Sequence[int]) -> list[float]:
        """Each mark in milliseconds since the first."""
        return [(mark - marks[0]) / 1e6 for mark in marks]

    @staticmethod
    def release(marks: Sequence[int]) -> None:
        """Numbers need no care."""


class EventClock:
    """Events on the current stream of an accelerator: they tell when the device came by, and nobody waits for them.

    Args:
        make_event: makes an event that takes the time, such as ``torch.cuda.Event(enable_timing=True)``.
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
        """Each mark in milliseconds since the first; the only place where the CPU waits for the device."""
        for mark in reversed(marks):  # the last first: the others have come by then, on one stream
            mark.synchronize()
        return [0.0, *(float(marks[0].elapsed_time(mark)) for mark in marks[1:])]

    def release(self, marks: Sequence[Any]) -> None:
        """Use these events again."""
        self._pool.extend(marks)


class SynchronizingClock:
    """For a device without events that take the time: each mark waits until the device is idle."""

    waits = True

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize

    def now(self) -> int:
        """The time once the device has done what it was given."""
        self._synchronize()
        return time.perf_counter_ns()

    milliseconds = staticmethod(CpuClock.milliseconds)
    release = staticmethod(CpuClock.release)


def clock_for(device: torch.device) -> Clock:
    """The clock for work on ``device``."""
    if device.type == "cpu":
        return CpuClock()
    if device.type == "cuda":
        return EventClock(lambda: torch.cuda.Event(enable_timing=True))
    try:
        torch.Event(device=device, enable_timing=True).record()
    except (RuntimeError, NotImplementedError):
        return SynchronizingClock(torch.accelerator.synchronize)
    return EventClock(lambda: torch.Event(device=device, enable_timing=True))
