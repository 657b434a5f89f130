"""Formulas of a file's figures: its open dimensions are the symbols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from modelsummary.errors import FormulaError, InputError, LayerNotFoundError, close_to
from modelsummary.files.program import Operation, Program, Tensor
from modelsummary.formulas.expressions import dimension
from modelsummary.formulas.figures import CONSTANT, FiguresAt, check_figure
from modelsummary.layer_info import LayerInfo

__all__ = ["FileFormulas"]


class FileFormulas:
    """The formulas of a program, from the formulas of its operators."""

    def __init__(self, program: Program, root: LayerInfo) -> None:
        self._program = program
        self._rows = {row.fqn: row for row in root.walk()}

    def formula(self, figure: str, layer: str = "") -> Any:
        """Return a figure of a layer as a sympy expression; see ``FileStatistics.formula``."""
        import sympy

        check_figure(figure)
        row = self._rows.get(layer)
        if row is None:
            raise LayerNotFoundError(f"no layer named {layer!r}{close_to(layer, self._rows)}")
        if figure in CONSTANT:
            return sympy.Integer(getattr(row, CONSTANT[figure]))
        if figure in ("macs", "flops"):
            parts = (each.macs if each.macs_expr is None else each.macs_expr for each in self._operations(row))
            return sympy.Integer(2 if figure == "flops" else 1) * sympy.Add(*parts)
        if figure == "total_output_bytes":
            return sympy.Add(*(_bytes(each.outputs) for each in self._operations(row) if each.executed))
        if figure in ("input_bytes", "output_bytes") and not layer:
            return _bytes(self._program.inputs if figure == "input_bytes" else self._program.outputs)
        raise FormulaError(f"no formula of {figure}{f' of {layer}' if layer else ''}: files have none")

    def at(self, sizes: Mapping[str, int], layer: str = "") -> FiguresAt:
        """Return the figures at these sizes of all open dimensions."""
        tensors = [*self._program.inputs, *self._program.outputs]
        expressions = [self.formula("macs"), *(dim for each in tensors for dim in _symbolic(each))]
        names = {symbol.name for expression in expressions for symbol in expression.free_symbols}
        if set(sizes) != names:
            wanted = ", ".join(f"{name}=" for name in sorted(names)) or "no size"
            raise InputError(f"expected {wanted} (the open dimensions of the file), got {dict(sizes)}")
        for name, size in sizes.items():
            if type(size) is not int or size < 1:
                raise InputError(f"{name} must be an integer >= 1, got {size!r}")
        return FiguresAt(self, dict(sizes), layer)

    def evaluate(self, figure: str, sizes: Mapping[str, int], layer: str = "") -> int:
        """Return a figure at these sizes."""
        found = self.formula(figure, layer)
        left = found.xreplace({symbol: sizes[symbol.name] for symbol in found.free_symbols if symbol.name in sizes})
        if left.free_symbols:
            raise FormulaError(
                f"{figure} depends on {', '.join(map(str, left.free_symbols))}, which follow from values"
            )
        return int(left)

    def largest(self, _figure: str, _layer: str = "") -> dict[str, int]:
        """Return nothing: formulas of operators need no runs, so no size is beyond one that ran."""
        return {}

    def _operations(self, row: LayerInfo) -> list[Operation]:
        inside = {each.fqn for each in row.walk()}
        return [each for each in self._program.operations if each.name in inside]


def _symbolic(tensor: Tensor) -> list[Any]:
    """Return the sizes of a tensor as expressions. Raise ``FormulaError`` if they are unknown."""
    import sympy

    if tensor.shape is None:
        raise FormulaError(f"the size of tensor {tensor.name!r} is not known")
    return [dimension(dim) if isinstance(dim, str) else sympy.Integer(dim) for dim in tensor.shape]


def _bytes(tensors: Iterable[Tensor]) -> Any:
    """Return the bytes of distinct tensors as an expression; elements smaller than a byte are packed."""
    import sympy

    total = sympy.Integer(0)
    for tensor in dict.fromkeys(tensors):
        bits = prod(_symbolic(tensor), start=sympy.Integer(tensor.bits))
        total += bits / 8 if tensor.bits % 8 == 0 else sympy.ceiling(bits / 8)
    return total
