"""Formulas as sympy expressions of named sizes, whether they were found by runs or parsed from a file.

Exporters write computed dimensions as text, such as ``"s0//2 + 1"`` or ``"(((h - 3)//2)) + 1"``. The names are plain
symbols, so ``formula.subs({"batch": 8})`` works for every formula.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelsummary.formulas.axis import PolynomialPiece
    from modelsummary.formulas.dimensions import Dimension
    from modelsummary.formulas.fitting import Terms

__all__ = ["dimension", "expression_of"]

_LONGEST = 300  # characters
_LARGEST_POWER = 4
_MOST_ARGUMENTS = 8  # of max and min, whose time grows with the square of their number
_FUNCTIONS = {
    "floor": "floor",
    "ceil": "ceiling",
    "ceiling": "ceiling",
    "max": "Max",
    "Max": "Max",
    "min": "Min",
    "Min": "Min",
}


@lru_cache(4096)
def dimension(text: str) -> Any:
    """Return an open dimension as a sympy expression of the names in it.

    The text is parsed, never evaluated. A text that is not a formula, such as ``batch size``, becomes one symbol.

    >>> dimension("((h - 3)//2) + 1").subs("h", 9)
    4
    """
    import sympy

    if len(text) <= _LONGEST and text.count(",") < _MOST_ARGUMENTS and not text.isidentifier():
        try:
            return _expression(ast.parse(text, mode="eval").body)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, ZeroDivisionError):
            pass
    return sympy.Symbol(text)


def _expression(node: ast.expr) -> Any:
    import sympy

    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sympy.Integer(node.value)
    if isinstance(node, ast.Name):
        return sympy.Symbol(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_expression(node.operand)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in _FUNCTIONS
        and not node.keywords
    ):
        return getattr(sympy, _FUNCTIONS[node.func.id])(*map(_expression, node.args))
    if isinstance(node, ast.BinOp):
        left, right = _expression(node.left), _expression(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div) and right != 0:
            return left / right
        if isinstance(node.op, ast.FloorDiv) and right != 0:
            return sympy.floor(left / right)
        if isinstance(node.op, ast.Mod) and right != 0:
            return sympy.Mod(left, right)
        if isinstance(node.op, ast.Pow) and right.is_Integer and 0 <= right <= _LARGEST_POWER:
            return left**right
    raise ValueError("not a formula of sizes")


def expression_of(terms: Terms, dimensions: Sequence[Dimension]) -> Any:
    """Return fitted terms as a sympy expression; 0 without terms."""
    import sympy

    total = sympy.Integer(0)
    for pieces, by_combination in terms.items():
        branches = []
        for combination, monomials in by_combination.items():
            chosen = [axis[index] for axis, index in zip(pieces, combination, strict=True)]
            bases = [_basis(piece, variable) for piece, variable in zip(chosen, dimensions, strict=True)]
            products = (
                sympy.Rational(coefficient)
                * sympy.prod([base[power] for base, power in zip(bases, monomial, strict=True)])
                for monomial, coefficient in monomials.items()
            )
            polynomial = sympy.expand(sympy.Add(*products))
            branches.append((polynomial, _range(chosen, dimensions)))
        total += branches[0][0] if len(branches) == 1 else sympy.Piecewise(*branches)
    return sympy.expand(total)


def _basis(piece: PolynomialPiece, dimension: Dimension) -> list[Any]:
    """Return the basis of a piece in terms of the size."""
    import sympy

    steps = (sympy.Symbol(dimension.name) - dimension.first) / sympy.Integer(dimension.step)
    atom = steps if piece.divisor == 1 else sympy.floor(sympy.expand((steps + piece.shift) / piece.divisor))
    powers = [atom**power for power in range(piece.degree + 1)]
    return [*powers, steps] if piece.plus_size else powers


def _range(pieces: Sequence[PolynomialPiece], dimensions: Sequence[Dimension]) -> Any:
    """Return the condition that the sizes are in the ranges of the pieces."""
    import sympy

    conditions = []
    for piece, dimension in zip(pieces, dimensions, strict=True):
        symbol = sympy.Symbol(dimension.name)
        if piece.first > 0:
            conditions.append(symbol >= dimension.at(piece.first))
        if piece.last is not None:
            conditions.append(symbol <= dimension.at(piece.last))
    return sympy.And(*conditions)
