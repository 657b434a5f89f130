"""Numbers for the symbolic sizes of an exported program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor as TorchTensor

from modelsummary.errors import InputError
from modelsummary.files.program import GivenSizes, Tensor, sizes_by_name

__all__ = ["Symbols"]


class Symbols:
    """The values of symbols: given sizes, else the sizes of the exported example.

    Args:
        inputs: name -> fake tensor of the program's inputs.
        sizes: sizes of inputs by name or position; default: the exported sizes.

    Attributes:
        open: symbol -> exported size, for the symbols used so far that no given size binds.

    Raises:
        InputError: a size does not fit.
    """

    def __init__(self, inputs: Mapping[str, Any], sizes: GivenSizes) -> None:
        self._values: dict[Any, int] = {}
        self.open: dict[str, int] = {}
        for name, size in sizes_by_name(list(inputs), sizes).items():
            self._bind(inputs[name].shape, size)

    def _bind(self, shape: Sequence[Any], size: Sequence[int]) -> None:
        shown = [str(dim) for dim in shape]
        if len(shape) != len(size):
            raise InputError(f"an input takes size [{', '.join(shown)}], got {list(size)}")
        for dim, number in zip(shape, size, strict=True):
            if isinstance(dim, torch.SymInt):
                self._values |= _solved(self._bound(dim), number)
            if self.number(dim) != number:
                raise InputError(f"an input was exported with size [{', '.join(shown)}], got {list(size)}")

    def number(self, size: Any) -> int:
        """Return the integer to count with; raise ``ValueError`` if the size depends on values."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = self._bound(size)
        known = size.node.shape_env.backed_var_to_val if size.node.shape_env is not None else {}
        if not expression.free_symbols <= known.keys():
            raise ValueError(f"{expression} depends on values")
        hints = {symbol: int(known[symbol]) for symbol in expression.free_symbols}
        self.open |= {str(symbol): number for symbol, number in hints.items()}
        return int(expression.xreplace(hints))

    def _bound(self, size: torch.SymInt) -> Any:
        """Return the size as a sympy expression of the symbols without a given value."""
        return size.node.expr.subs(self._values)

    def tensor(self, name: str, value: TorchTensor, **facts: Any) -> Tensor:
        """Describe a fake tensor as plain data."""
        try:
            size = tuple(self.number(dim) for dim in value.shape)
        except ValueError:
            size = None
        bound = (self._bound(dim) if isinstance(dim, torch.SymInt) else dim for dim in value.shape)
        shape = tuple(str(dim) if getattr(dim, "free_symbols", None) else int(dim) for dim in bound)
        dtype = str(value.dtype).removeprefix("torch.")
        return Tensor(name, shape, size, dtype, 8 * value.dtype.itemsize, **facts)

    def meta(self, value: Any) -> Any:
        """Return a meta tensor for a fake tensor, an integer for a symbolic size, and other values unchanged."""
        if isinstance(value, TorchTensor):
            sizes = [self.number(dim) for dim in value.shape]
            strides = [self.number(dim) for dim in value.stride()]
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
        return self.number(value) if isinstance(value, torch.SymInt) else value


def _solved(expression: Any, number: int) -> dict[Any, int]:
    """Solve a size such as 2*s for its symbol; return {symbol: value}, or {} without an integer solution."""
    if len(expression.free_symbols) != 1:
        return {}
    (symbol,) = expression.free_symbols
    slope = expression.diff(symbol)
    start = (expression - slope * symbol).expand()
    if not (slope.is_Integer and slope and start.is_Integer) or (number - int(start)) % int(slope):
        return {}
    return {symbol: (number - int(start)) // int(slope)}
