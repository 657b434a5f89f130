"""Find the formula of a figure from runs at several sizes, and check it with runs at sizes that were not used.

First each dimension varies alone, which shows on which pieces the figure is a polynomial of the size or of a rounded
size (``axis``). Where several roundings explain the runs, the model runs at a size where they differ. Then a grid of
sizes gives the coefficients of the products (``solve``).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

from modelsummary.errors import FormulaError
from modelsummary.formulas.axis import Axis, PolynomialPiece, candidates
from modelsummary.formulas.dimensions import Dimension

__all__ = ["FARTHEST", "Fitted", "Terms", "Values", "fitted", "solve"]

_FEWEST = 3  # accepted sizes of a dimension
_FURTHER = (19, 27, 41, 63, 97, 150, 211, 307, 511, 801)  # numbers of sizes that show pieces
# Times the recorded size, and more, so that strides round them differently: windows and thresholds beyond the record.
_FAR = ((8, 2), (16, 9), (32, 20), (64, 36), (128, 59), (320, 100))
FARTHEST = _FAR[-1][0]
_FAR_SECONDS = 1.0  # a run that takes longer, as of a loop over positions, is the last of these
_BETWEEN = (5, 6, 7, 9, 10, 12)  # eighths of the largest size that was run
_MOST_QUERIES = 40  # runs that tell candidates apart, per dimension
_COMPARED = 4  # candidates that a further run should tell apart
_NEAR = 1024  # sizes among which it is chosen
_ASKED = 100  # of these, looked at first
_MOST_GRID = 200  # runs of a grid
_CHECKS = 6  # runs at sizes that were not used
_TRIES = 40
_FEW = 4  # sizes; a dimension with more below the recorded size is cut first

Numbers = tuple[int, ...]  # one number of a size per dimension
Unit = Any
Values = Callable[[Mapping[Dimension, int]], "Mapping[Unit, int] | str"]
"""Return the parts of a figure in a run with these sizes, or why the model does not accept them."""
Monomial = tuple[int, ...]  # per dimension, the number of an entry of the piece's basis: its exponent, or k itself
Terms = dict[tuple[tuple[PolynomialPiece, ...], ...], dict[Numbers, dict[Monomial, Fraction]]]
"""Pieces per dimension -> number of the piece per dimension -> monomial -> coefficient."""


class Fitted(NamedTuple):
    """The sum of polynomials that was found.

    Attributes:
        terms: the coefficients.
        checks: sizes of the runs that confirmed it.
        smallest: size per dimension from which it holds.
        largest: largest size per dimension that was run; beyond it, nothing was checked.
    """

    terms: Terms
    checks: tuple[Numbers, ...]
    smallest: Numbers
    largest: Numbers


def fitted(values: Values, dimensions: Sequence[Dimension], *, quick: bool = False) -> Fitted:
    """Return the formula of the sum of all parts.

    Args:
        quick: refuse a part that no polynomial explains at once, instead of looking for pieces with further runs.

    Raises:
        FormulaError: no polynomial explains the runs, or a further run contradicts it.
    """
    return _Fit(values, dimensions, () if quick else _FURTHER).result()


class _Fit:
    """The search for one formula."""

    def __init__(self, values: Values, dimensions: Sequence[Dimension], further: Sequence[int]) -> None:
        self._values = values
        self._further = further
        self._dimensions = dimensions
        self._runs: dict[Numbers, Mapping[Unit, int]] = {}
        self._rejected: dict[Numbers, str] = {}
        recorded = (dimension.number(dimension.size) for dimension in dimensions)
        # A batch of one often runs other code; lines through it would show only that.
        self._anchor = tuple(
            max(size, 1) if dimension.step == 1 else size for size, dimension in zip(recorded, dimensions, strict=True)
        )

    def result(self) -> Fitted:
        for index in range(len(self._dimensions)):
            self._sweep(index)
        for index in range(len(self._dimensions)):
            self._decide(index)
        self._run_grid()
        terms = self._coefficients()
        checks, smallest = self._check(terms)
        largest = tuple(self._line(index)[-1] for index in range(len(self._dimensions)))
        return Fitted(_from(terms, smallest), checks, *(tuple(self._sizes(k).values()) for k in (smallest, largest)))

    # ------------------------------------------------------------------------------------------ runs

    def _run(self, numbers: Numbers) -> bool:
        """Run the model; return True if it accepts the sizes."""
        if numbers not in self._runs and numbers not in self._rejected:
            values = self._values(self._sizes(numbers))
            if isinstance(values, str):
                self._rejected[numbers] = values
            else:
                self._runs[numbers] = values
        return numbers in self._runs

    def _sizes(self, numbers: Numbers) -> dict[Dimension, int]:
        return {
            dimension: dimension.at(multiple) for dimension, multiple in zip(self._dimensions, numbers, strict=True)
        }

    def _on_line(self, index: int, point: int) -> Numbers:
        return (*self._anchor[:index], point, *self._anchor[index + 1 :])

    def _sweep(self, index: int) -> None:
        """Run with many sizes of one dimension. Raise ``FormulaError`` if the model accepts too few."""
        base = self._anchor[index]
        near = [base, base + 1, base + 2, base + 3, base + 9, 2 * base + 5, 4 * base + 61]
        small = [0, 1, 2, 3, 4, 7, base // 3, base // 2]
        accepted = sum(self._run(self._on_line(index, step)) for step in dict.fromkeys([*near, *small]))
        if accepted < _FEWEST:
            dimension = self._dimensions[index]
            reason = next(iter(self._rejected.values()), "")
            raise FormulaError(
                f"the model accepts only {accepted} of the sizes of {dimension.name!r} that were run: {reason}"
            )
        for factor, offset in _FAR:
            begin = perf_counter()
            if not self._run(self._on_line(index, factor * base + offset)) or perf_counter() - begin > _FAR_SECONDS:
                break

    def _line(self, index: int) -> list[int]:
        """Return the numbers of the accepted sizes of one dimension, the others at the anchor."""
        return sorted(numbers[index] for numbers in self._runs if numbers == self._on_line(index, numbers[index]))

    # --------------------------------------------------------------------------------------- vectors

    def _name(self, vector: Sequence[int]) -> str:
        """Return the name of the first part with these values."""
        unit = next(unit for unit, values in self._parts().items() if values == vector)
        if unit is None:
            return "the total"
        fqn = unit if isinstance(unit, str) else unit[0]
        return f"layer {fqn!r}" if fqn else "the model's own operators"

    def _vectors(self) -> Counter[tuple[int, ...]]:
        """Return the distinct parts, each as its values in all runs, with how often it occurs."""
        return Counter(self._parts().values())

    def _parts(self) -> dict[Unit, tuple[int, ...]]:
        """Return the values of each part in all runs; calls of a layer are one part if sizes decide their number."""
        runs = list(self._runs.values())
        units = dict.fromkeys(unit for run in runs for unit in run)
        together = {unit[0] for unit in units if any(unit not in run for run in runs)}
        joined: dict[Unit, tuple[int, ...]] = {}
        for unit in units:
            values = tuple(run.get(unit, 0) for run in runs)
            key = unit[0] if unit is not None and unit[0] in together else unit
            joined[key] = tuple(map(sum, zip(joined[key], values, strict=True))) if key in joined else values
        return joined

    def _samples(self, index: int, vector: Sequence[int]) -> dict[int, int]:
        """Return the values of a part along one dimension."""
        values = dict(zip(self._runs, vector, strict=True))
        return {point: values[self._on_line(index, point)] for point in self._line(index)}

    def _axes(self, vector: Sequence[int]) -> list[Axis]:
        """Return the axis along each dimension.

        Lines run through the anchor, so a part that is constant along one may still change on another piece.
        """
        axes = [self._axis(index, vector)[0] for index in range(len(self._dimensions))]
        if all(len(axis.pieces) == 1 for axis in axes):
            return axes
        return [
            replace(axis, pieces=(replace(axis.pieces[0], degree=1),))
            if len(axis.pieces) == 1 and not axis.pieces[0].degree
            else axis
            for axis in axes
        ]

    def _axis(self, index: int, vector: Sequence[int]) -> tuple[Axis, ...]:
        samples = self._samples(index, vector)
        axes = candidates(samples)
        if not axes:
            dimension = self._dimensions[index]
            shown = ", ".join(f"{dimension.at(point)}: {value:,}" for point, value in list(samples.items())[:8])
            anchor = self._anchor[index]
            others = {point: value for point, value in samples.items() if point != anchor}
            # Images of the size that a model was trained on are often spared an interpolation of its positions.
            hint = f"; without {dimension.name}={dimension.at(anchor)}, one does" if candidates(others) else ""
            raise FormulaError(f"no polynomial of {dimension.name!r} explains {self._name(vector)} ({shown} ...){hint}")
        return axes

    # --------------------------------------------------------------------------------------- deciding

    def _decide(self, index: int) -> None:
        """Run where candidates of a part differ, until one is left or they agree wherever the model runs."""
        for _ in range(_MOST_QUERIES):
            point = next((point for vector in self._vectors() for point in self._questions(index, vector)), None)
            if point is None:
                return
            self._run(self._on_line(index, point))
        name = self._dimensions[index].name
        raise FormulaError(f"runs at {_MOST_QUERIES} further sizes of {name!r} did not show one formula for each layer")

    def _questions(self, index: int, vector: Sequence[int]) -> Iterator[int]:
        """Yield a number of a size that tells the candidates apart."""
        axes = candidates(self._samples(index, vector))
        if not axes:
            last = self._line(index)[-1]
            further = (*self._further, *(last * eighths // 8 for eighths in _BETWEEN if self._further))
            untried = next((point for point in further if not self._is_tried(index, point)), None)
            if untried is None:
                self._axis(index, vector)  # raises
            else:
                yield untried
            return
        asked = self._telling(index, axes)
        if asked is None and axes[0].gap is not None:
            inside = [point for point in range(*axes[0].gap) if not self._is_tried(index, point)]
            asked = inside[len(inside) // 2] if inside else None
        if asked is not None:
            yield asked

    def _telling(self, index: int, axes: Sequence[Axis]) -> int | None:
        """Return the number of a size that tells most candidates apart; None if there is none."""
        if len(axes) == 1:
            return None
        line = self._line(index)
        near = range(line[0], min(line[-1], line[0] + _NEAR) + 1)
        untried = [point for point in near if not self._is_tried(index, point)]
        few = random.Random(0).sample(untried, min(len(untried), _ASKED))
        # A few sizes tell most of the candidates apart.
        for compared, numbers in ((axes[:: max(len(axes) // _COMPARED, 1)], few), (axes, untried)):
            distinct = {point: len({axis.predict(point) for axis in compared}) for point in numbers}
            most = max(distinct.values(), default=0)
            if most > 1:
                best = [point for point in numbers if distinct[point] == most]
                return best[len(best) // 2]  # halves the range in which a border may lie
        return None

    def _is_tried(self, index: int, point: int) -> bool:
        numbers = self._on_line(index, point)
        return numbers in self._runs or numbers in self._rejected

    # ------------------------------------------------------------------------------------ coefficients

    def _run_grid(self) -> None:
        """Run with all combinations of as many sizes per dimension as the pieces have coefficients."""
        nodes = [[anchor] for anchor in self._anchor]
        # The nearest to the anchor first: models often reject combinations of the smallest sizes.
        near = [self._nearest(index) for index in range(len(self._dimensions))]
        for vector in self._vectors():
            for index, axis in enumerate(self._axes(vector)):
                for piece in axis.pieces:
                    self._add_nodes(nodes[index], piece, near[index])
        if prod(map(len, nodes)) > _MOST_GRID:
            raise FormulaError(f"its formula has more than {_MOST_GRID} coefficients")
        for numbers in product(*nodes):
            self._run(numbers)

    def _nearest(self, index: int) -> list[int]:
        return sorted(self._line(index), key=lambda point: abs(point - self._anchor[index]))

    @staticmethod
    def _add_nodes(nodes: list[int], piece: PolynomialPiece, line: Sequence[int]) -> None:
        """Add numbers of sizes until they tell the entries of the piece's basis apart."""
        held = [node for node in nodes if piece.holds(node)]
        for point in line:
            atoms = {piece.atom(node) for node in held}
            if piece.atom(point) in atoms:
                is_wanted = piece.plus_size and point not in held and len(held) == len(atoms)
            else:
                is_wanted = len(atoms) <= piece.degree
            if is_wanted and piece.holds(point):
                nodes.append(point)
                held.append(point)

    def _coefficients(self) -> Terms:
        terms: Terms = {}
        for vector, times in self._vectors().items():
            if not any(vector):
                continue
            pieces = tuple(axis.pieces for axis in self._axes(vector))
            by_combination = terms.setdefault(pieces, {})
            for combination in product(*(range(len(piece)) for piece in pieces)):
                chosen = tuple(axis[index] for axis, index in zip(pieces, combination, strict=True))
                polynomial = self._polynomial(chosen, vector)
                totals = by_combination.setdefault(combination, {})
                for monomial, coefficient in polynomial.items():
                    totals[monomial] = totals.get(monomial, Fraction(0)) + times * coefficient
        return terms

    def _polynomial(self, pieces: Sequence[PolynomialPiece], vector: Sequence[int]) -> dict[Monomial, Fraction]:
        """Return the coefficients of one part on one piece per dimension."""
        monomials = list(product(*(range(len(piece.basis(0))) for piece in pieces)))
        rows, values = [], []
        for numbers, value in zip(self._runs, vector, strict=True):
            if all(piece.holds(size) for piece, size in zip(pieces, numbers, strict=True)):
                bases = [piece.basis(size) for piece, size in zip(pieces, numbers, strict=True)]
                rows.append([_product(bases, monomial) for monomial in monomials])
                values.append(value)
        solution = solve(rows, values) if rows else None
        if solution is None:
            names = ", ".join(dimension.name for dimension in self._dimensions)
            raise FormulaError(f"no polynomial of {names} explains {self._name(vector)} where they change together")
        return {monomial: coefficient for monomial, coefficient in zip(monomials, solution, strict=True) if coefficient}

    # ------------------------------------------------------------------------------------------ check

    def _check(self, terms: Terms) -> tuple[tuple[Numbers, ...], Numbers]:
        """Run at sizes that were not used; return them, and the numbers of the sizes from which the formula holds.

        Raises:
            FormulaError: the formula is wrong at sizes as large as the recorded ones, or nothing could check it.
        """
        draw = random.Random(0)
        smallest, largest = zip(
            *((line[0], line[-1]) for line in map(self._line, range(len(self._anchor)))), strict=True
        )
        # Where several sizes are small at once, models often spare a copy; lines and random sizes rarely meet that.
        for corner in product(*zip(smallest, self._anchor, strict=True)):
            is_below = any(map(int.__lt__, corner, smallest))
            if not is_below and self._run(corner) and evaluated(terms, corner) != sum(self._runs[corner].values()):
                smallest = self._above(corner, smallest) or smallest
        checks: list[Numbers] = []
        for bounds in (*_ranges(terms, largest), *[None] * _TRIES):
            within = zip(smallest, largest, strict=True) if bounds is None else bounds
            # Small sizes as often as large ones: they are where models do something else.
            numbers = tuple(
                round((least + 1) * ((most + 1) / (least + 1)) ** draw.random()) - 1 for least, most in within
            )
            is_below = any(map(int.__lt__, numbers, smallest))
            if is_below or numbers in self._runs or numbers in self._rejected or not self._run(numbers):
                continue
            measured = sum(self._runs[numbers].values())
            if evaluated(terms, numbers) == measured:
                checks.append(numbers)
                if len(checks) >= _CHECKS and bounds is None:
                    break
                continue
            smallest = self._above(numbers, smallest)
            if not smallest:
                sizes = ", ".join(f"{dimension.name}={size}" for dimension, size in self._sizes(numbers).items())
                value = float(evaluated(terms, numbers))
                raise FormulaError(f"the polynomial found gives {value:,.0f} at {sizes}, a run {measured:,}")
            checks = [check for check in checks if all(map(int.__ge__, check, smallest))]
        if not checks:
            raise FormulaError("the model accepts no further sizes that could check the formula")
        return tuple(tuple(self._sizes(check).values()) for check in checks), smallest

    def _above(self, wrong: Numbers, smallest: Numbers) -> Numbers:
        """Return smallest sizes that exclude a wrong result at small sizes; empty if the sizes are not small."""
        below = [index for index, anchor in enumerate(self._anchor) if wrong[index] < anchor]
        cut = [index for index in below if self._anchor[index] >= _FEW] or below
        if not cut:
            return ()
        return tuple(wrong[index] + 1 if index in cut else least for index, least in enumerate(smallest))


def _from(terms: Terms, smallest: Numbers) -> Terms:
    """Return the terms without pieces that end below the smallest sizes, where the formula does not hold."""
    sums: Terms = {}
    for pieces, by_combination in terms.items():
        kept = [
            {index: piece for index, piece in enumerate(axis) if piece.last is None or piece.last >= least}
            for axis, least in zip(pieces, smallest, strict=True)
        ]
        target = sums.setdefault(tuple(tuple(axis.values()) for axis in kept), {})
        for combination, monomials in by_combination.items():
            if all(index in axis for index, axis in zip(combination, kept, strict=True)):
                indices = tuple(list(axis).index(index) for index, axis in zip(combination, kept, strict=True))
                totals = target.setdefault(indices, {})
                for monomial, coefficient in monomials.items():
                    totals[monomial] = totals.get(monomial, Fraction(0)) + coefficient
    return sums


def _ranges(terms: Terms, largest: Numbers) -> list[tuple[tuple[int, int], ...]]:
    """Return the first and last size number per dimension, for each combination of pieces; most are exact fits."""
    boxes: dict[tuple[tuple[int, int], ...], None] = {}
    for pieces in terms:
        for chosen in product(*pieces) if any(len(piece) > 1 for piece in pieces) else ():
            lasts = (most if piece.last is None else piece.last for piece, most in zip(chosen, largest, strict=True))
            boxes[tuple((piece.first, last) for piece, last in zip(chosen, lasts, strict=True))] = None
    return list(boxes)[:_MOST_QUERIES]


def evaluated(terms: Terms, numbers: Numbers) -> Fraction:
    """Return the value of terms at numbers of sizes."""
    total = Fraction(0)
    for pieces, by_combination in terms.items():
        axis_points = list(zip(pieces, numbers, strict=True))
        chosen = tuple(next(n for n, piece in enumerate(axis) if piece.holds(k)) for axis, k in axis_points)
        bases = [axis[n].basis(k) for (axis, k), n in zip(axis_points, chosen, strict=True)]
        for monomial, coefficient in by_combination[chosen].items():
            total += coefficient * _product(bases, monomial)
    return total


def _product(bases: Sequence[Sequence[int]], monomial: Monomial) -> int:
    return prod(basis[power] for basis, power in zip(bases, monomial, strict=True))


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
