"""The bytes that torch allocates on the CPU, from the events of its profiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import profile

__all__ = ["CpuAllocations", "cpu_allocations"]

_LOG_LEVEL = "KINETO_LOG_LEVEL"


class CpuAllocations:
    """The bytes that were allocated and freed on the CPU, and the spans that ``record_function`` named."""

    def __init__(self) -> None:
        self._changes: list[tuple[int, int]] = []
        self._spans: dict[str, tuple[int, int]] = {}

    def read(self, traced: Any) -> None:
        """Read the events of a profiler that has ended."""
        events = traced.kineto_results.events()
        self._changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        self._spans = {event.name(): (event.start_ns(), event.end_ns()) for event in events}

    def held_and_peak(self, name: str | None = None) -> tuple[int, int]:
        """Return the bytes that were allocated and not freed, at the end and at most, in a span. Default: in all.

        Raises:
            KeyError: no span has this name.
        """
        begin, end = (0, float("inf")) if name is None else self._spans[name]
        held = peak = 0
        for moment, change in self._changes:
            if begin <= moment <= end:
                held += change
                peak = max(peak, held)
        return held, peak


@contextmanager
def cpu_allocations() -> Iterator[CpuAllocations]:
    """Follow the bytes that torch allocates on the CPU; they are there afterwards."""
    allocations = CpuAllocations()
    logs = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "99")  # read as a process profiles for the first time; 5 still prints each start
    try:
        with profile(use_kineto=True, profile_memory=True) as traced:
            yield allocations
    finally:
        if not logs:
            del os.environ[_LOG_LEVEL]
    allocations.read(traced)
