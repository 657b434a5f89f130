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
    from sympy import QQ
    from sympy.polys.matrices import DomainMatrix

    unknowns = len(rows[0])
    equations = [[QQ(entry) for entry in (*row, value)] for row, value in zip(rows, values, strict=True)]
    reduced, pivots = DomainMatrix(equations, (len(rows), unknowns + 1), QQ).rref()
    if pivots != tuple(range(unknowns)):  # the last column is a pivot if the equations contradict each other
        return None
    solution = (reduced[row, unknowns].element for row in range(unknowns))
    return [Fraction(int(entry.numerator), int(entry.denominator)) for entry in solution]
