"""The effects of a call's operators: costs, in-place writes, random numbers, sizes made from values."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from modelsummary.capture.execution.shape_only import selects_by_mask
from modelsummary.capture.operator_mode import Costs, Execution
from modelsummary.costs.operators import OpCost, OpRule, tensors_in
from modelsummary.costs.tensor_bytes import storage_of

__all__ = ["Effects", "Noted"]


class Running(Protocol):
    """The tracer, as far as ``Noted`` uses it."""

    running: Effects
    is_open: bool


class Effects(Costs):
    """The effects of the operators of one call, without the calls inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: set[int] = set()
        self.is_random = self.is_dynamic = False


class Noted:
    """An execution that notes the effects of each operator for the running call."""

    def __init__(self, execution: Execution, tracer: Running) -> None:
        self._execution = execution
        self._tracer = tracer

    def input(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the wrapped execution passes to the forward."""
        return self._execution.input(tensor)

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and note its effects."""
        was_open, self._tracer.is_open = self._tracer.is_open, False  # not the model's code
        try:
            out, cost = self._execution.run(func, rule, args, kwargs)
        finally:
            self._tracer.is_open = was_open
        counters = self._tracer.running
        for place in rule.writes:
            for tensor in tensors_in(kwargs.get(place) if isinstance(place, str) else args[place : place + 1]):
                counters.writes.add(storage_of(tensor))
        if rule.name == "aten.native_batch_norm" and args[5]:  # in training it writes; the schema does not declare it
            counters.writes.update(storage_of(statistic) for statistic in args[3:5] if statistic is not None)
        counters.is_random = counters.is_random or rule.is_random
        if rule.needs_values or selects_by_mask(rule, args):
            counters.is_dynamic = True
        return out, cost
