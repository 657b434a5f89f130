"""Look-ups in tables, such as learned positions, whose end is the end of what a model accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.costs.operators import OpCost, OpRule

__all__ = ["CheckedLookups"]

_MOST_ELEMENTS = 2**25  # of positions and padding masks: batch x context


class CheckedLookups:
    """An execution on shapes in which an index beyond the end of a table fails, as it does in a real run.

    Kernels on shapes do not read indices, so that a position of 1,000 in a table of 64 rows would pass.

    Args:
        shapes: the execution that runs the operators.
        model: the model, whose tables errors name.
    """

    def __init__(self, shapes: ShapeOnly, model: nn.Module) -> None:
        self.input = shapes.input
        self._shapes, self._model = shapes, model
        self._checks = False
        shapes.follow_values(_MOST_ELEMENTS)

    def check(self) -> None:
        """Check the look-ups from now on, as far as their indices are known."""
        self._checks = True

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator. Raises ``IndexError`` for an index out of range."""
        for dim, index in _lookups(rule.name, args) if self._checks else ():
            values = self._shapes.known_value(index)
            if values is not None and values.numel():
                self._check(args[0], dim, int(values.max()))
        return self._shapes.run(func, rule, args, kwargs)

    def _check(self, table: Tensor, dim: int, largest: int) -> None:
        if largest >= table.shape[dim]:
            named = (*self._model.named_parameters(), *self._model.named_buffers())
            name = next((name for name, each in named if each is table), "a tensor")
            raise IndexError(f"index {largest} is out of range for {name} of shape {list(table.shape)}")


def _lookups(operator: str, args: tuple[Any, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yield the dimension of the first argument in which an operator looks up, with the indices."""
    if operator == "aten.embedding":
        yield 0, args[1]
    elif operator in ("aten.index_select", "aten.gather"):
        yield args[1], args[2]
    elif operator == "aten.index":
        for dim, index in enumerate(args[1]):
            if index is not None and not index.dtype.is_floating_point and index.element_size() > 1:  # no mask
                yield dim, index
