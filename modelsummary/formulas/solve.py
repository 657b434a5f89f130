"""Exact linear equations: the coefficients of a polynomial from its values."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

__all__ = ["solve"]


def solve(rows: Sequence[Sequence[int]], values: Sequence[int]) -> list[Fraction] | None:
    """Return x with ``rows @ x == values``; None if no x or more than one fits.

    >>> solve([[1, 0], [1, 2], [1, 4]], [3, 7, 11])
    [Fraction(3, 1), Fraction(2, 1)]
    """
    unknowns = len(rows[0])
    reduced: list[tuple[int, list[Fraction]]] = []  # pivot column, row with its value at the end
    for row, value in zip(rows, values, strict=True):
        remainder = [Fraction(entry) for entry in (*row, value)]
        for pivot, equation in reduced:
            factor = remainder[pivot]
            if factor:
                remainder = [entry - factor * other for entry, other in zip(remainder, equation, strict=True)]
        pivot = next((index for index, entry in enumerate(remainder[:-1]) if entry), -1)
        if pivot < 0:
            if remainder[-1]:
                return None  # the equations contradict each other
            continue
        scale = remainder[pivot]
        remainder = [entry / scale for entry in remainder]
        reduced = [(column, _without(solved, remainder, pivot)) for column, solved in reduced]
        reduced.append((pivot, remainder))
    if len(reduced) < unknowns:
        return None
    return [solved[-1] for _, solved in sorted(reduced, key=lambda pair: pair[0])]


def _without(row: list[Fraction], other: list[Fraction], pivot: int) -> list[Fraction]:
    factor = row[pivot]
    return [entry - factor * subtracted for entry, subtracted in zip(row, other, strict=True)] if factor else row
