"""One figure along one dimension: the pieces on which it is a polynomial of the size, or of a rounded part of it.

Everything here works on integers k = 0, 1, 2 ...: the k-th size that the model accepts. A strided or padded layer makes
sizes such as ``(k + 3) // 4``, so a piece is a polynomial of ``(k + shift) // divisor``. A window or a special case
for small sizes makes several pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice

__all__ = ["Axis", "Piece", "candidates"]

_DEGREE = 3  # of a polynomial of the size itself
_ROUNDED_DEGREE = 2  # of a polynomial of a rounded size
_LARGEST_DIVISOR = 64
_MOST = 40  # candidates that are compared

Samples = tuple[tuple[int, int], ...]  # (k, figure), by k


@dataclass(frozen=True)
class Piece:
    """A range of sizes on which a figure is a polynomial of ``(k + shift) // divisor``.

    >>> Piece(divisor=4, shift=3, degree=1).atom(5)
    2
    """

    divisor: int = 1
    shift: int = 0
    degree: int = 0
    first: int = 0
    last: int | None = None

    def atom(self, k: int) -> int:
        """Return the number whose polynomial the figure is."""
        return (k + self.shift) // self.divisor

    def holds(self, k: int) -> bool:
        """Return True if k is in the range of this piece."""
        return self.first <= k and (self.last is None or k <= self.last)


@dataclass(frozen=True)
class Axis:
    """Pieces that cover all sizes, and the values of the figure along the line that was sampled.

    Attributes:
        pieces: one or two pieces, by their range.
        gap: the first and last k between which the border of two pieces is not known yet; None if it is.
    """

    pieces: tuple[Piece, ...]
    values: tuple[tuple[tuple[int, int], ...], ...]  # per piece: (atom, figure) that determine the polynomial
    gap: tuple[int, int] | None = None

    def piece(self, k: int) -> int:
        """Return the number of the piece that holds k."""
        return next(number for number, piece in enumerate(self.pieces) if piece.holds(k))

    def predict(self, k: int) -> Fraction:
        """Return the figure at k by interpolation."""
        number = self.piece(k)
        return _interpolated(self.values[number], self.pieces[number].atom(k))


def candidates(samples: Mapping[int, int]) -> list[Axis]:
    """Return the simplest ways to continue samples; empty if there is none.

    Each explains all samples, and more of them than it has coefficients.

    >>> [axis.pieces[0] for axis in candidates({k: 5 * ((k + 1) // 2) for k in (1, 2, 3, 4, 7, 8, 12)})]
    [Piece(divisor=2, shift=1, degree=1, first=0, last=None)]
    """
    return list(_candidates(tuple(sorted(samples.items()))))


@lru_cache(4096)
def _candidates(samples: Samples) -> tuple[Axis, ...]:
    whole = tuple(islice(_whole(samples), _MOST))
    return whole or tuple(islice(_in_two(samples), 1))


def _whole(samples: Samples) -> Iterator[Axis]:
    """Yield axes of one piece: a polynomial of the size if there is one, else polynomials of rounded sizes."""
    found = _polynomial(samples, Piece(), _DEGREE)
    if found is not None:
        yield found
        return
    for divisor in range(2, _LARGEST_DIVISOR + 1):
        for shift in range(divisor):
            found = _polynomial(samples, Piece(divisor, shift), _ROUNDED_DEGREE)
            if found is not None:
                yield found


def _in_two(samples: Samples) -> Iterator[Axis]:
    """Yield axes of two pieces, the left one as short as possible."""
    for place in range(1, len(samples) - 2):
        left, right = samples[:place], samples[place:]
        above = next(_whole(right), None)
        if above is None:
            continue
        below = _left(left)
        if below is not None:
            end, begin = left[-1][0], right[0][0]
            first, last = below.pieces[0], above.pieces[0]
            pieces = (
                Piece(first.divisor, first.shift, first.degree, 0, end),
                Piece(last.divisor, last.shift, last.degree, end + 1, None),
            )
            gap = (end, begin) if begin > end + 1 else None
            yield Axis(pieces, (below.values[0], above.values[0]), gap)


def _left(samples: Samples) -> Axis | None:
    """Return the axis of a left piece: overdetermined, or exact if every size of the piece was sampled."""
    found = next(_whole(samples), None)
    every = [k for k, _ in samples] == list(range(samples[0][0], samples[-1][0] + 1))
    if found is None and every and len(samples) <= _DEGREE:
        return Axis((Piece(degree=len(samples) - 1),), (samples,))
    return found


def _polynomial(samples: Samples, piece: Piece, most: int) -> Axis | None:
    """Return the polynomial of least degree of the piece's atom through all samples; None if there is none."""
    by_atom: dict[int, int] = {}
    for k, value in samples:
        if by_atom.setdefault(piece.atom(k), value) != value:
            return None
    points = tuple(sorted(by_atom.items()))
    for degree in range(min(most, len(points) - 2) + 1):
        chosen = _spread(points, degree + 1)
        if all(_interpolated(chosen, atom) == value for atom, value in points):
            return Axis((Piece(piece.divisor, piece.shift, degree),), (chosen,))
    return None


def _spread(points: Samples, number: int) -> Samples:
    """Return some of the points, the outermost included."""
    if number == 1:
        return points[:1]
    return tuple(points[round(place * (len(points) - 1) / (number - 1))] for place in range(number))


def _interpolated(points: Samples, at: int) -> Fraction:
    """Return the polynomial through the points, by Lagrange's formula."""
    total = Fraction(0)
    for one, value in points:
        term = Fraction(value)
        for other, _ in points:
            if other != one:
                term *= Fraction(at - other, one - other)
        total += term
    return total
