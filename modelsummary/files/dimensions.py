"""Parse open dimensions: exporters write computed ones as text, such as ``"s0//2 + 1"`` or ``"(((h - 3)//2)) + 1"``."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

__all__ = ["dimension"]

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
