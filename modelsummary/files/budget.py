"""What reading one file may cost.

Files are untrusted, and a few bytes can stand for endless work. Every reader spends from one ``Budget``, at the place
where it works: a format needs no limits of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from modelsummary.errors import ModelFileError

__all__ = ["Budget"]

_BETWEEN_LOOKS = 512  # steps between two looks at the clock


class Budget:
    """Steps, bytes, depth and seconds that are left for reading a file.

    Args:
        seconds: processor time of the thread that makes the budget, from now on.
        steps: units of work, such as nodes, tokens or values, each of about a microsecond.
        bytes: bytes of what is unpacked or built from the file.
        depth: levels of nesting.

    >>> budget = Budget(steps=10)
    >>> budget.spend(8)
    >>> budget.spend(8)
    Traceback (most recent call last):
    modelsummary.errors.ModelFileError: reading it takes more than 10 steps, more than a model of its size needs
    """

    def __init__(
        self, *, seconds: float = 1.5, steps: int = 1_000_000, bytes: int = 256 * 2**20, depth: int = 100
    ) -> None:
        self.seconds, self.steps, self.bytes, self.depth = seconds, steps, bytes, depth
        self._end = time.thread_time() + seconds
        self._steps_left, self._bytes_left, self._depth = steps, bytes, 0
        self._next_look = steps

    def spend(self, steps: int = 1) -> None:
        """Count steps; raise ``ModelFileError`` if they, or the seconds, are used up."""
        self._steps_left -= steps
        if self._steps_left < 0:
            self._refuse(f"more than {self.steps:,} steps")
        if self._steps_left <= self._next_look:
            self._next_look = self._steps_left - _BETWEEN_LOOKS
            self.look()

    def look(self) -> None:
        """Raise ``ModelFileError`` if the seconds are used up."""
        if time.thread_time() > self._end:
            self._refuse(f"more than {self.seconds:.1f} s")

    def take(self, nbytes: int) -> None:
        """Count bytes; raise ``ModelFileError`` if they are used up."""
        self._bytes_left -= nbytes
        if self._bytes_left < 0:
            self._refuse(f"more than {self.bytes:,} bytes of memory")

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Return a context one level deeper; raise ``ModelFileError`` if it is too deep."""
        if self._depth >= self.depth:
            raise ModelFileError(f"it is nested more than {self.depth} deep")
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _refuse(self, what: str) -> None:
        raise ModelFileError(f"reading it takes {what}, more than a model of its size needs")
