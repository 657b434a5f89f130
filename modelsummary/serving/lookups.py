"""Look-ups in tables, such as learned positions, whose end is the end of what a model accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.operators.operator_calls import DistinctCall
from modelsummary.operators.operator_rules import OpCost, OpRule
from modelsummary.operators.table import Arguments

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
        self.input, self.stand_in = shapes.input, shapes.stand_in
        self._shapes, self._model = shapes, model
        self._checks = False
        self.distinct: DistinctCall | None = None
        shapes.follow_values(_MOST_ELEMENTS)

    def check(self) -> None:
        """Check the look-ups from now on, as far as their indices are known."""
        self._checks = True

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator. Raises ``IndexError`` for an index out of range."""
        if self._checks and rule.gathers:
            for table, dim, index in _lookups(rule.signature.bind(args, kwargs)):
                values = self._shapes.known_value(index)
                if values is not None and values.numel():
                    self._check(table, dim, int(values.max()))
        result = self._shapes.run(func, rule, args, kwargs)
        self.distinct, self._shapes.distinct = self._shapes.distinct, None
        return result

    def _check(self, table: Tensor, dim: int, largest: int) -> None:
        if largest >= table.shape[dim]:
            named = (*self._model.named_parameters(), *self._model.named_buffers())
            name = next((name for name, tensor in named if tensor is table), "a tensor")
            raise IndexError(f"index {largest} is out of range for {name} of shape {list(table.shape)}")


def _lookups(call: Arguments) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yield the table in which an operator looks up, the dimension, and the indices."""
    if "weight" in call:  # of an embedding
        yield call["weight"], 0, call["indices"]
    elif "dim" in call:
        yield call["self"], call["dim"], call["index"]
    elif "indices" in call:
        for dim, index in enumerate(call["indices"]):
            if index is not None and not index.dtype.is_floating_point and index.element_size() > 1:  # no mask
                yield call["self"], dim, index
