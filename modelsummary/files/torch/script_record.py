"""The record of a TorchScript program: its operators in order, each in the module whose method runs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import Tensor as TorchTensor
from torch import nn

from modelsummary.capture.calls import Call
from modelsummary.capture.operator_mode import Execution
from modelsummary.files.program import Operation, Program, Scope, Tensor
from modelsummary.operators.operator_facts import OpCost, OpRule, tensors_in

__all__ = ["ScriptRecord"]

Scopes = tuple[Scope, ...]


class ScriptRecord:
    """The operators of one run, in order.

    Args:
        execution: runs the operators.

    Attributes:
        scopes: the modules whose methods are running, outermost first, without the model.
    """

    def __init__(self, execution: Execution) -> None:
        self.counting = SimpleNamespace(running=Call(nn.Module(), None))
        self.scopes: Scopes = ()
        self.operations: list[Operation] = []
        self.inputs: list[Tensor] = []
        self._execution = execution
        self._tensors: dict[int, tuple[weakref.ref[TorchTensor], Tensor]] = {}
        self._quantized: dict[Tensor, str] = {}  # the dtypes of quantized tensors
        self._within: list[OpCost] | None = None  # costs inside an operator that is recorded as a whole

    def add(self, tensor: TorchTensor, listed: Tensor, quantized: str = "") -> None:
        """Note which tensor of the program a tensor of the run is."""
        key = id(tensor)
        self._tensors[key] = (weakref.ref(tensor, lambda _: self._tensors.pop(key, None)), listed)
        if quantized:
            self._quantized[listed] = quantized

    def add_inputs(self, inputs: Sequence[TorchTensor]) -> None:
        """Record the arguments of the run."""
        self.inputs = [self.known(each, f"input_{number}", "input") for number, each in enumerate(inputs)]

    def known(self, tensor: TorchTensor, name: str, kind: Any = "activation", quantized: str = "") -> Tensor:
        """Return the tensor of the program that a tensor of the run is; a new one if it is not listed."""
        if id(tensor) not in self._tensors:
            size, dtype = tuple(tensor.shape), quantized or str(tensor.dtype).removeprefix("torch.")
            bits = (32 if "32" in quantized else 8) if quantized else 8 * tensor.element_size()
            self.add(tensor, Tensor(name, size, size, dtype, bits, kind), quantized)
        return self._tensors[id(tensor)][1]

    def quantized(self, tensor: Any) -> str:
        """Return the dtype of a quantized tensor; an empty text for others."""
        listed = self._tensors.get(id(tensor))
        return "" if listed is None else self._quantized.get(listed[1], "")

    def input(self, tensor: TorchTensor) -> TorchTensor:
        """Return an argument of the run unchanged."""
        return tensor

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and record it."""
        out, cost = self._execution.run(func, rule, args, kwargs)
        if self._within is not None:
            self._within.append(cost)
            return out, cost
        made = list(tensors_in(out))
        inputs = [self.known(each, "constant", "buffer") for each in tensors_in((args, kwargs))]
        is_free = cost.bytes_read == cost.bytes_written == 0
        if is_free and len(inputs) == len(made) == 1 and inputs[0].kind == "parameter":
            self.add(made[0], inputs[0])  # a view of a weight
        elif made:
            operation = self._append(rule.name, inputs, made, cost)
            operation.is_free = is_free
            operation.aliases = bool(inputs) and (is_free or 0 in rule.writes)
            operation.gathers = rule.gathers
        return out, cost

    def whole(self, name: str, run: Callable[[], Any], inputs: Sequence[TorchTensor], quantized: str = "") -> Any:
        """Run several operators and record them as one.

        Args:
            name: of the operator, with its namespace.
            inputs: the tensors that it reads.
            quantized: dtype of its results, if they are quantized.
        """
        with self.unrecorded() as costs:
            out = run()
        made = list(tensors_in(out))
        listed = [self.known(each, "constant", "buffer") for each in inputs]
        for tensor in made:
            self._tensors.pop(id(tensor), None)
            self.known(tensor, f"{name.rpartition('.')[2]}_{len(self.operations)}", quantized=quantized)
        if made:
            total = OpCost(sum(each.macs for each in costs), 0, 0, 0, None)
            self._append(name, listed, made, total)
        return out

    @contextmanager
    def unrecorded(self) -> Iterator[list[OpCost]]:
        """Return a context whose operators are not recorded, and the list of their costs."""
        outer, self._within = self._within, []
        try:
            yield self._within
        finally:
            self._within = outer

    def _append(self, name: str, inputs: list[Tensor], made: Sequence[TorchTensor], cost: OpCost) -> Operation:
        last = f"{name.rpartition('.')[2]}_{len(self.operations)}"
        quantized = (
            self._quantized.get(inputs[0], "") if inputs and all(each.is_floating_point() for each in made) else ""
        )
        outputs = [self.known(each, last, quantized=quantized) for each in made]
        operation = Operation(last, name, self.scopes, inputs, outputs)
        operation.macs, operation.elementwise_ops, operation.uncounted = cost.macs, cost.elementwise_ops, cost.uncounted
        self.operations.append(operation)
        return operation

    def program(self, name: str, outputs: Sequence[TorchTensor]) -> Program:
        """Return the recorded operators."""
        results = [self.known(each, "result") for each in outputs]
        return Program(name, self.inputs, results, self.operations)
