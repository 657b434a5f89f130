"""One figure along one dimension: the pieces on which it is a polynomial of the size, or of a rounded part of it.

Everything here works on integers k = 0, 1, 2 ...: the k-th size that the model accepts. A strided or padded layer makes
sizes such as ``(k + 3) // 4``, so a piece is a polynomial of ``(k + shift) // divisor``. A window or a special case
for small sizes makes several pieces. A layer that pads its tokens to whole chunks adds a multiple of k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod

__all__ = ["Axis", "PolynomialPiece", "candidates"]

_DEGREE = 3  # of a polynomial of the size itself
_ROUNDED_DEGREE = 2  # of a polynomial of a rounded size
# Strides multiply, also with the size of attention windows: 32 x 7 pixels, 640 samples of sound per frame.
_DIVISORS = (*range(2, 65), 72, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640)
_ROOTS = range(-8, 9)
_FEWEST_RIGHT = 4  # samples of the right of two pieces
_MOST_IN_TWO = 256  # axes of two pieces; further runs rule most of them out, and others are found then
_FEWEST_STEPS = 3  # neighbours that differ by the multiple of k

Samples = tuple[tuple[int, int], ...]  # (k, figure), by k


@dataclass(frozen=True)
class PolynomialPiece:
    """A range of sizes on which a figure is a polynomial of ``(k + shift) // divisor``, perhaps plus a multiple of k.

    >>> piece = PolynomialPiece(divisor=4, shift=3, degree=1, plus_size=True)
    >>> piece.atom(5), piece.basis(5)
    (2, [1, 2, 5])
    """

    divisor: int = 1
    shift: int = 0
    degree: int = 0
    first: int = 0
    last: int | None = None
    plus_size: bool = False

    def atom(self, k: int) -> int:
        """Return the number whose polynomial the figure is."""
        return (k + self.shift) // self.divisor

    def basis(self, k: int) -> list[int]:
        """Return the numbers at k whose multiples add up to the figure: powers of the atom, then k itself."""
        atom = self.atom(k)
        powers = [atom**power for power in range(self.degree + 1)]
        return [*powers, k] if self.plus_size else powers

    def holds(self, k: int) -> bool:
        """Return True if k is in the range of this piece."""
        return self.first <= k and (self.last is None or k <= self.last)


@dataclass(frozen=True)
class Axis:
    """Pieces that cover all sizes, and the values of the figure along the line that was sampled.

    Attributes:
        pieces: one or two pieces, by their range.
        gap: the first and last k between which the border of two pieces is not known yet; None if it is.
        slope: the multiple of k in the figure, beside the polynomial.
    """

    pieces: tuple[PolynomialPiece, ...]
    values: tuple[tuple[tuple[int, int], ...], ...]  # per piece: (atom, figure) that determine the polynomial
    gap: tuple[int, int] | None = None
    slope: int = 0

    def piece(self, k: int) -> int:
        """Return the number of the piece that holds k."""
        return next(index for index, piece in enumerate(self.pieces) if piece.holds(k))

    def predict(self, k: int) -> Fraction:
        """Return the figure at k by interpolation."""
        index = self.piece(k)
        return self.slope * k + _interpolated(self.values[index], self.pieces[index].atom(k))


def candidates(samples: Mapping[int, int]) -> tuple[Axis, ...]:
    """Return the simplest ways to continue samples; empty if there is none.

    Each explains all samples, up to a common factor, and more of them than it has coefficients.

    >>> [axis.pieces[0] for axis in candidates({k: 5 * ((k + 1) // 2) for k in (1, 2, 3, 4, 7, 8, 12)})]
    [PolynomialPiece(divisor=2, shift=1, degree=1, first=0, last=None, plus_size=False)]
    """
    scale = gcd(*samples.values()) or 1  # parts that differ by a factor share the search
    return _candidates(tuple(sorted((k, value // scale) for k, value in samples.items())))


@lru_cache(4096)
def _candidates(samples: Samples) -> tuple[Axis, ...]:
    return tuple(_whole(samples)) or _in_two(samples) or tuple(_plus_size(samples))


def _whole(samples: Samples) -> Iterator[Axis]:
    """Yield axes of one piece: a polynomial of the size if there is one, else polynomials of rounded sizes."""
    polynomial = _polynomial(samples, PolynomialPiece(), _DEGREE)
    if polynomial is not None:
        yield polynomial
    else:
        yield from _rounded(samples)


def _rounded(samples: Samples) -> Iterator[Axis]:
    """Yield axes of one piece: polynomials of rounded sizes."""
    for piece in _roundings(samples):
        polynomial = _polynomial(samples, piece, _ROUNDED_DEGREE)
        if polynomial is not None:
            yield _from_root(polynomial)


def _roundings(samples: Samples) -> Iterator[PolynomialPiece]:
    """Yield the rounded sizes that change exactly where the figure changes."""
    steps = [(k, following, one == other) for (k, one), (following, other) in pairwise(samples)]
    border = next((following for k, following, is_same in steps if following == k + 1 and not is_same), None)
    # The steps first that fewest shifts explain: near sizes that differ, distant ones that do not.
    steps.sort(key=lambda step: (step[2], (step[0] - step[1]) * (1 if step[2] else -1)))
    for divisor in _DIVISORS:
        shifts: Sequence[int] = range(divisor) if border is None else [-border % divisor]
        for k, following, is_same in steps:
            shifts = [
                shift for shift in shifts if ((k + shift) // divisor == (following + shift) // divisor) == is_same
            ]
            if not shifts:
                break
        yield from (PolynomialPiece(divisor, shift) for shift in shifts)


def _in_two(samples: Samples) -> tuple[Axis, ...]:
    """Return axes of two pieces: one per rounding on the right that explains samples, with the shortest left piece.

    A right piece that is not rounded ends the search: few samples explain a rounding by chance, not a polynomial.
    """
    axes: dict[PolynomialPiece, Axis] = {}  # by the right piece
    lefts = [(end, _left(samples[:end])) for end in range(1, len(samples) - _FEWEST_RIGHT + 1)]
    borders = [(end, left) for end, left in lefts if left is not None]
    for border, below in borders:
        above = _polynomial(samples[border:], PolynomialPiece(), _DEGREE)
        if above is not None:
            return (_joined(samples, border, below, above),)
    for border, below in borders:
        for above in _rounded(samples[border:]):
            axes.setdefault(above.pieces[0], _joined(samples, border, below, above))
            if len(axes) == _MOST_IN_TWO:
                return tuple(axes.values())
    return tuple(axes.values())


def _joined(samples: Samples, border: int, below: Axis, above: Axis) -> Axis:
    """Return an axis of two pieces, the first for the samples before ``border``."""
    end, begin = samples[border - 1][0], samples[border][0]
    pieces = replace(below.pieces[0], last=end), replace(above.pieces[0], first=end + 1)
    return Axis(pieces, (*below.values, *above.values), (end, begin) if begin > end + 1 else None)


def _plus_size(samples: Samples) -> Iterator[Axis]:
    """Yield axes of one piece: a polynomial of a rounded size plus a multiple of k, as most neighbours differ by it."""
    steps = Counter(other - one for (k, one), (following, other) in pairwise(samples) if following == k + 1)
    slope, times = max(steps.items(), key=lambda step: step[1], default=(0, 0))
    if slope and times >= _FEWEST_STEPS:
        for polynomial in _whole(tuple((k, value - slope * k) for k, value in samples)):
            axis = _from_root(polynomial, slope)  # the figure is often 0 at k = -1: no tokens
            yield replace(axis, pieces=(replace(axis.pieces[0], plus_size=True),), slope=slope)


def _left(samples: Samples) -> Axis | None:
    """Return the axis of a left piece: overdetermined, or exact if every size of the piece was sampled."""
    polynomial = _polynomial(samples, PolynomialPiece(), _DEGREE)
    is_whole = [k for k, _ in samples] == list(range(samples[0][0], samples[-1][0] + 1))
    if polynomial is None and is_whole and len(samples) <= _DEGREE:
        return Axis((PolynomialPiece(degree=len(samples) - 1),), (samples,))
    return polynomial


def _polynomial(samples: Samples, piece: PolynomialPiece, max_degree: int) -> Axis | None:
    """Return the polynomial of least degree of the piece's atom through all samples; None if there is none."""
    by_atom: dict[int, int] = {}
    for k, value in samples:
        if by_atom.setdefault((k + piece.shift) // piece.divisor, value) != value:
            return None
    points = tuple(sorted(by_atom.items()))
    for degree in range(min(max_degree, len(points) - 2) + 1):
        nodes = _spread(points, degree + 1)
        if _passes(nodes, points):
            return Axis((replace(piece, degree=degree),), (nodes,))
    return None


def _spread(points: Samples, count: int) -> Samples:
    """Return some of the points, the outermost included."""
    if count == 1:
        return points[:1]
    return tuple(points[round(index * (len(points) - 1) / (count - 1))] for index in range(count))


def _passes(nodes: Samples, points: Samples) -> bool:
    """Return True if the polynomial through the nodes also passes through the points."""
    if len(nodes) == 1:
        return all(value == nodes[0][1] for _, value in points)
    if len(nodes) == 2:  # most searches end here, so this is short
        (first, low), (last, high) = nodes
        return all((value - low) * (last - first) == (high - low) * (at - first) for at, value in points)
    scale, coefficients = _newton(nodes)
    return all(_horner(nodes, coefficients, at) == scale * value for at, value in points)


def _from_root(axis: Axis, value: int = 0) -> Axis:
    """Return the axis with its atom shifted so that the polynomial has this value where the atom is 0, if it has it."""
    (piece,), (points,) = axis.pieces, axis.values
    roots = (at for at in sorted(_ROOTS, key=abs) if _passes(points, ((at, value),)))
    root = next(roots, 0) if piece.degree else 0
    shifted = tuple((atom - root, figure) for atom, figure in points)
    return Axis((replace(piece, shift=piece.shift - root * piece.divisor),), (shifted,))


def _interpolated(points: Samples, at: int) -> Fraction:
    """Return the polynomial through the points.

    >>> _interpolated(((0, 0), (1, 1), (3, 9)), 5)
    Fraction(25, 1)
    """
    scale, coefficients = _newton(points)
    return Fraction(_horner(points, coefficients, at), scale)


@lru_cache(4096)
def _newton(points: Samples) -> tuple[int, tuple[int, ...]]:
    """Return a scale and the coefficients of Newton's form of the polynomial times the scale: integers are quick."""
    scale = prod(last - first for index, (last, _) in enumerate(points) for first, _ in points[:index])
    column = [scale * value for _, value in points]
    coefficients = [column[0]]
    for order in range(1, len(points)):
        column = [
            (high - low) // (points[index + order][0] - points[index][0])
            for index, (low, high) in enumerate(pairwise(column))
        ]
        coefficients.append(column[0])
    return scale, tuple(coefficients)


def _horner(points: Samples, coefficients: Sequence[int], at: int) -> int:
    """Return the value of a polynomial in Newton's form."""
    total = 0
    for (node, _), coefficient in zip(reversed(points), reversed(coefficients), strict=True):
        total = total * (at - node) + coefficient
    return total
