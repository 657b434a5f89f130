"""Figures along one dimension against the functions that made them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelsummary.formulas.axis import PolynomialPiece, candidates

NUMBERS = (0, 1, 2, 3, 4, 7, 10, 15, 30, 31, 32, 33, 39, 65, 181)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=4))
def test_polynomials(coefficients):
    def figure(k):
        return sum(each * k**power for power, each in enumerate(coefficients))

    (axis,) = candidates({k: figure(k) for k in NUMBERS})
    assert axis.pieces[0].divisor == 1
    scale = figure(1000) / axis.predict(1000) if axis.predict(1000) else 0
    assert all(scale * axis.predict(k) == figure(k) for k in (5, 100, 999))


@pytest.mark.parametrize(("divisor", "shift"), [(2, 0), (2, 1), (4, 3), (7, 6), (32, 31), (224, 27)])
def test_rounded_sizes(divisor, shift):
    samples = {k: ((k + shift) // divisor) ** 2 * 12 for k in (*NUMBERS, 300, 301, 500, 777, 953)}
    found = candidates(samples)
    assert any(axis.pieces[0].divisor == divisor and axis.pieces[0].shift == shift for axis in found)
    assert all(12 * axis.predict(k) == samples[k] for axis in found for k in samples)


def test_two_pieces():
    # a window of 20: every size beyond it sees 20 others
    (axis,) = candidates({k: k * min(k, 20) for k in NUMBERS})
    assert [piece.degree for piece in axis.pieces] == [2, 1]
    assert axis.gap == (15, 30)  # the border is between these
    # one special case: a size of 1 costs nothing
    (axis,) = candidates({k: 3 * k + 5 if k else 0 for k in NUMBERS})
    assert axis.pieces == (PolynomialPiece(last=0), PolynomialPiece(degree=1, first=1))
    assert axis.gap is None


def test_roundings_of_the_right_piece():
    # a picture is pooled to at least 7 of its patches of 32
    found = candidates({k: max(k // 32, 7) for k in (*NUMBERS, 211, 307, 313, 511, 801, 901)})
    assert (32, 0) in {(axis.pieces[1].divisor, axis.pieces[1].shift % 32) for axis in found}
    assert len(found) > 1  # a further run tells them apart


def test_the_search_for_two_pieces_ends():
    # long constant, then a few steps: thousands of roundings explain them
    samples = {k: max(k // 128, 7) for k in (*NUMBERS, 300, 500, 999, 1000, 1001, 1008, 2003, 4057)}
    assert len(candidates(samples)) == 256


def test_a_multiple_of_the_size_beside_a_rounded_one():
    # tokens are padded to chunks of 64 after a first layer
    samples = {k: 7 * (k + 1) + 500 * ((k + 64) // 64) for k in (*NUMBERS, 63, 97, 150, 211)}
    found = candidates(samples)
    assert (64, 0) in {(axis.pieces[0].divisor, axis.pieces[0].shift % 64) for axis in found}
    assert all(axis.pieces[0].plus_size and axis.predict(k) == samples[k] for axis in found for k in samples)


def test_no_formula():
    assert candidates({k: 2**k for k in NUMBERS}) == ()
