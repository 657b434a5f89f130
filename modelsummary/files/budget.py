"""What reading one file may cost.

Files are untrusted, and a few bytes can stand for endless work. Every reader spends from one ``Budget``, at the place
where it works: a format needs no limits of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from modelsummary.errors import ModelFileError

__all__ = ["Budget"]

_BETWEEN_LOOKS = 4096  # steps between two looks at the clock
_LARGEST = 8_000_000  # bytes that are read: the graph of the largest models


class Budget:
    """Steps, bytes, depth and seconds that are left for reading a file.

    Args:
        seconds: processor time of this thread, from now on.
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
        self, *, seconds: float = 1.5, steps: int = 1_500_000, bytes: int = 300 * 2**20, depth: int = 64
    ) -> None:
        self.seconds, self.steps, self.bytes, self.depth = seconds, steps, bytes, depth
        self._steps_left, self._bytes_left, self._depth = steps, bytes, 0
        self._next_look = steps
        self.seconds_left = seconds
        self.restart()

    @classmethod
    def of_size(cls, nbytes: int) -> Budget:
        """Return the budget for a file with so many bytes that are read, such as a graph without its weights.

        Reading is linear: a large file may take longer, and a small one may not.

        >>> Budget.of_size(100).seconds < 2 < Budget.of_size(10_000_000).seconds
        True
        """
        size = min(nbytes, _LARGEST)
        return cls(seconds=1.5 + size / 500_000, steps=1_500_000 + 4 * size, bytes=300 * 2**20 + 20 * size)

    def restart(self) -> None:
        """Count the seconds that are left from now on: a copied process has a clock of its own."""
        self._began = time.thread_time()

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
        now = time.thread_time()
        self.elapse(now - self._began)
        self._began = now

    def elapse(self, seconds: float) -> None:
        """Count seconds of processor time; raise ``ModelFileError`` if they are used up."""
        self.seconds_left -= seconds
        if self.seconds_left <= 0:
            self.refuse_time()

    def refuse_time(self, seconds: float | None = None) -> NoReturn:
        """Raise ``ModelFileError`` because the seconds, or so many of them, are used up."""
        self._refuse(f"more than {self.seconds if seconds is None else seconds:.1f} s")

    def take(self, nbytes: int) -> None:
        """Count bytes; raise ``ModelFileError`` if they are used up."""
        self.check_bytes(nbytes)
        self._bytes_left -= nbytes

    def check_bytes(self, nbytes: int) -> None:
        """Raise ``ModelFileError`` if fewer bytes are left: they will be counted when they are used."""
        if nbytes > self._bytes_left:
            self._refuse(f"more than {self.bytes:,} bytes of memory")

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Return a context one level deeper; raise ``ModelFileError`` if it is too deep."""
        self.check_depth(self._depth + 1)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def check_depth(self, depth: int) -> None:
        """Raise ``ModelFileError`` for something at this depth if it is too deep."""
        if depth > self.depth:
            raise ModelFileError(f"it is nested more than {self.depth} deep")

    def _refuse(self, what: str) -> NoReturn:
        raise ModelFileError(f"reading it takes {what}, more than a model of its size needs")
