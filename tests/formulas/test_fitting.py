"""Formulas found from functions of the sizes, against these functions, and exact equations against their solutions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelsummary.formulas.dimensions import Dimension, Place
from modelsummary.formulas.expressions import expression_of
from modelsummary.formulas.fitting import evaluated, fitted, solve

BATCH = Dimension("batch", 2, (Place(0, 0, 0),))
HEIGHT = Dimension("height", 64, (Place(0, 0, 2),))
WIDTH = Dimension("width", 64, (Place(0, 0, 3),))


def patches(size):
    """Pictures are pooled to at least 7 x 7 of their patches of 32, as ``vgg11`` of timm does."""
    return max(size // 32, 7) - 6


def test_a_rounded_piece_beside_a_constant_one():
    def values(sizes):
        return {"layer": patches(sizes[HEIGHT]) * patches(sizes[WIDTH])}

    found = fitted(values, [HEIGHT, WIDTH])
    for sizes in ((1, 1), (301, 250), (900, 64), (512, 777), (255, 256)):
        numbers = tuple(each.number(size) for each, size in zip((HEIGHT, WIDTH), sizes, strict=True))
        assert evaluated(found.terms, numbers) == patches(sizes[0]) * patches(sizes[1])


@pytest.mark.parametrize("size", [223, 224, 225, 256])
def test_a_border_at_the_recorded_size(size):
    height = Dimension("height", size, (Place(0, 0, 2),))
    found = fitted(lambda sizes: {"layer": patches(sizes[height])}, [height])
    assert all(evaluated(found.terms, (height.number(each),)) == patches(each) for each in range(1, 700, 3))


def test_a_multiple_of_the_size_beside_whole_chunks():
    def figure(batch, tokens):
        return batch * (7 * tokens + 500 * -(-tokens // 64)) + 3 * tokens

    tokens = Dimension("sequence", 16, (Place(0, 0, 1),))
    found = fitted(lambda sizes: {"layer": figure(sizes[BATCH], sizes[tokens])}, [BATCH, tokens])
    expression = expression_of(found.terms, [BATCH, tokens])
    for sizes in ((1, 1), (3, 64), (3, 65), (12, 5000)):
        assert expression.subs({"batch": sizes[0], "sequence": sizes[1]}) == figure(*sizes)
    assert str(expression) == "7*batch*sequence + 500*batch*floor(sequence/64 + 63/64) + 3*sequence"


@given(st.lists(st.fractions(max_denominator=6, min_value=-9, max_value=9), min_size=1, max_size=4), st.randoms())
def test_equations(solution, draw):
    rows = [[draw.randint(-5, 5) for _ in solution] for _ in range(3)]
    rows += [[int(row == column) for column in range(len(solution))] for row in range(len(solution))]
    values = [sum(entry * x for entry, x in zip(row, solution, strict=True)) for row in rows]
    scaled = [[60 * entry for entry in row] for row in rows]
    assert solve(scaled, [int(60 * value) for value in values]) == solution
    values[0] += 1  # the first row follows from the last ones
    assert solve(scaled, [int(60 * value) for value in values]) is None


def test_equations_without_one_solution():
    assert solve([[1, 1]], [2]) is None
    assert solve([[1], [1]], [2, 3]) is None
    assert solve([[2], [4]], [3, 6]) == [Fraction(3, 2)]
