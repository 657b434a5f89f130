"""One figure along one dimension: the pieces on which it is a polynomial of the size, or of a rounded part of it.

Everything here works on integers k = 0, 1, 2 ...: the k-th size that the model accepts. A strided or padded layer makes
sizes such as ``(k + 3) // 4``, so a piece is a polynomial of ``(k + shift) // divisor``. A window or a special case
for small sizes makes several pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import islice, pairwise
from math import gcd, lcm, prod

__all__ = ["Axis", "PolynomialPiece", "candidates"]

_DEGREE = 3  # of a polynomial of the size itself
_ROUNDED_DEGREE = 2  # of a polynomial of a rounded size
# Strides multiply, also with the size of attention windows: 32 x 7 pixels, 640 samples of sound per frame.
_DIVISORS = (*range(2, 65), 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640)
_ROOTS = range(-8, 9)
_FEWEST_RIGHT = 4  # samples of the right of two pieces

Samples = tuple[tuple[int, int], ...]  # (k, figure), by k


@dataclass(frozen=True)
class PolynomialPiece:
    """A range of sizes on which a figure is a polynomial of ``(k + shift) // divisor``.

    >>> PolynomialPiece(divisor=4, shift=3, degree=1).atom(5)
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

    pieces: tuple[PolynomialPiece, ...]
    values: tuple[tuple[tuple[int, int], ...], ...]  # per piece: (atom, figure) that determine the polynomial
    gap: tuple[int, int] | None = None

    def piece(self, k: int) -> int:
        """Return the number of the piece that holds k."""
        return next(number for number, piece in enumerate(self.pieces) if piece.holds(k))

    def predict(self, k: int) -> Fraction:
        """Return the figure at k by interpolation."""
        number = self.piece(k)
        return _interpolated(self.values[number], self.pieces[number].atom(k))


def candidates(samples: Mapping[int, int]) -> tuple[Axis, ...]:
    """Return the simplest ways to continue samples; empty if there is none.

    Each explains all samples, up to a common factor, and more of them than it has coefficients.

    >>> [axis.pieces[0] for axis in candidates({k: 5 * ((k + 1) // 2) for k in (1, 2, 3, 4, 7, 8, 12)})]
    [PolynomialPiece(divisor=2, shift=1, degree=1, first=0, last=None)]
    """
    scale = gcd(*samples.values()) or 1  # parts that differ by a factor share the search
    return _candidates(tuple(sorted((k, value // scale) for k, value in samples.items())))


@lru_cache(4096)
def _candidates(samples: Samples) -> tuple[Axis, ...]:
    return tuple(_whole(samples)) or tuple(islice(_in_two(samples), 1))


def _whole(samples: Samples) -> Iterator[Axis]:
    """Yield axes of one piece: a polynomial of the size if there is one, else polynomials of rounded sizes."""
    found = _polynomial(samples, PolynomialPiece(), _DEGREE)
    if found is not None:
        yield found
        return
    for piece in _roundings(samples):
        found = _polynomial(samples, piece, _ROUNDED_DEGREE)
        if found is not None:
            yield _from_root(found)


def _roundings(samples: Samples) -> Iterator[PolynomialPiece]:
    """Yield the rounded sizes that change exactly where the figure changes."""
    steps = [(k, following, one == other) for (k, one), (following, other) in pairwise(samples)]
    known = next((following for k, following, is_same in steps if following == k + 1 and not is_same), None)
    for divisor in _DIVISORS:
        for shift in range(divisor) if known is None else (-known % divisor,):
            if all(
                ((k + shift) // divisor == (following + shift) // divisor) == is_same for k, following, is_same in steps
            ):
                yield PolynomialPiece(divisor, shift)


def _in_two(samples: Samples) -> Iterator[Axis]:
    """Yield axes of two pieces, the left one as short as possible."""
    for place in range(1, len(samples) - _FEWEST_RIGHT + 1):
        below = _left(samples[:place])
        above = next(_whole(samples[place:]), None) if below is not None else None
        if below is None or above is None:
            continue
        end, begin = samples[place - 1][0], samples[place][0]
        pieces = replace(below.pieces[0], last=end), replace(above.pieces[0], first=end + 1)
        yield Axis(pieces, (*below.values, *above.values), (end, begin) if begin > end + 1 else None)


def _left(samples: Samples) -> Axis | None:
    """Return the axis of a left piece: overdetermined, or exact if every size of the piece was sampled."""
    found = _polynomial(samples, PolynomialPiece(), _DEGREE)
    is_whole = [k for k, _ in samples] == list(range(samples[0][0], samples[-1][0] + 1))
    if found is None and is_whole and len(samples) <= _DEGREE:
        return Axis((PolynomialPiece(degree=len(samples) - 1),), (samples,))
    return found


def _polynomial(samples: Samples, piece: PolynomialPiece, most: int) -> Axis | None:
    """Return the polynomial of least degree of the piece's atom through all samples; None if there is none."""
    by_atom: dict[int, int] = {}
    for k, value in samples:
        if by_atom.setdefault((k + piece.shift) // piece.divisor, value) != value:
            return None
    points = tuple(sorted(by_atom.items()))
    for degree in range(min(most, len(points) - 2) + 1):
        chosen = _spread(points, degree + 1)
        if _passes(chosen, points):
            return Axis((replace(piece, degree=degree),), (chosen,))
    return None


def _spread(points: Samples, number: int) -> Samples:
    """Return some of the points, the outermost included."""
    if number == 1:
        return points[:1]
    return tuple(points[round(place * (len(points) - 1) / (number - 1))] for place in range(number))


def _passes(chosen: Samples, points: Samples) -> bool:
    """Return True if the polynomial through the chosen points also passes through the others."""
    if len(chosen) == 1:
        return all(value == chosen[0][1] for _, value in points)
    if len(chosen) == 2:  # most searches end here, so this is short
        (first, low), (last, high) = chosen
        return all((value - low) * (last - first) == (high - low) * (at - first) for at, value in points)
    below = [prod(one - other for other, _ in chosen if other != one) for one, _ in chosen]
    scale = lcm(*below)
    weights = [value * (scale // each) for (_, value), each in zip(chosen, below, strict=True)]
    others_of = [[other for other, _ in chosen if other != node] for node, _ in chosen]
    terms = list(zip(weights, others_of, strict=True))
    return all(
        sum(weight * prod(at - other for other in others) for weight, others in terms) == scale * value
        for at, value in points
    )


def _from_root(axis: Axis) -> Axis:
    """Return the axis with its atom shifted so that the figure is 0 where the atom is, if it is 0 at some atom."""
    (piece,), (points,) = axis.pieces, axis.values
    root = next((at for at in sorted(_ROOTS, key=abs) if _interpolated(points, at) == 0), 0) if piece.degree else 0
    moved = tuple((atom - root, value) for atom, value in points)
    return Axis((replace(piece, shift=piece.shift - root * piece.divisor),), (moved,))


def _interpolated(points: Samples, at: int) -> Fraction:
    """Return the polynomial through the points, by Lagrange's formula."""
    total = Fraction(0)
    for one, value in points:
        others = [other for other, _ in points if other != one]
        total += Fraction(value * prod(at - other for other in others), prod(one - other for other in others))
    return total
