"""Run TorchScript once, on shapes if possible, and record its operators in order.

The interpreter does not report which module runs. An operator that uses a parameter or buffer belongs to the module
that registers it. An operator between two such operators belongs to the innermost module around both. If modules share
a tied weight, look-ups belong to the embedding, and other operators to the first other module.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch import nn

from modelsummary.capture.calls import Call
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.operator_mode import Execution, Operators
from modelsummary.capture.run import nothing_hidden
from modelsummary.costs.operators import OpCost, OpRule, tensors_in
from modelsummary.files.program import GivenSizes, Operation, Program, Scope, Tensor

__all__ = ["recorded"]

Scopes = tuple[Scope, ...]


def recorded(path: str, sizes: GivenSizes, dtypes: Mapping[str | int, torch.dtype]) -> Program:
    """Return the program of the TorchScript module in a file; this runs its code, and passes on its exceptions.

    Args:
        path: the file.
        sizes: sizes of the inputs, in the order of the arguments or by name.
        dtypes: dtypes of some inputs; default: the dtype of the first floating point parameter.
    """
    try:
        model = _read(path, "meta")
        record = _Record(model)
        outputs = _run(model, sizes, dtypes, record, ShapeOnly())
    except Exception:  # values decide, or an operator has no meta kernel
        model = _read(path, "cpu")
        record = _Record(model)
        outputs = _run(model, sizes, dtypes, record, RealExecution([*model.parameters(), *model.buffers()]))
    return record.program(outputs)


def _read(path: str, device: str) -> torch.jit.ScriptModule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit.* is deprecated")
        model: torch.jit.ScriptModule = torch.jit.load(os.fspath(path), map_location=device)
    return model


def _run(
    model: Any, sizes: GivenSizes, dtypes: Mapping[str | int, torch.dtype], record: _Record, execution: Any
) -> list[TorchTensor]:
    """Return the results of the model."""
    device = "meta" if isinstance(execution, ShapeOnly) else "cpu"
    usual = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
    inputs = {name: torch.zeros(size, dtype=dtypes.get(name, usual), device=device) for name, size in sizes.items()}
    named = {name: tensor for name, tensor in inputs.items() if isinstance(name, str)}
    record.add_inputs(list(inputs.values()))
    record.execution = execution
    with torch.no_grad(), nothing_hidden(), Operators(record.counting, record):
        return list(tensors_in(model(**named) if named else model(*inputs.values())))


class _Record:
    """The operators of one run, in order.

    Tensors are identified by the address of their implementation. All are kept alive, so no address is used twice.
    """

    execution: Execution

    def __init__(self, model: torch.jit.ScriptModule) -> None:
        self.name = str(model.original_name)
        self.counting = SimpleNamespace(running=Call(nn.Module(), None))
        self.inputs: list[Tensor] = []
        self.operations: list[Operation] = []
        self._owners: list[Scopes | None] = []  # of each operation; None if it uses no parameter
        self._alive: list[TorchTensor] = []
        self._tensors: dict[int, Tensor] = {}
        self._homes: dict[Tensor, list[Scopes]] = {}
        self.owned: list[tuple[Scopes, list[Tensor]]] = []
        scopes: dict[str, Scopes] = {"": ()}
        for fqn, module in model.named_modules():
            if fqn:
                around = scopes[fqn.rpartition(".")[0]]
                scopes[fqn] = (*around, Scope(fqn, fqn, str(getattr(module, "original_name", type(module).__name__))))
            own = [
                ("parameter", module.named_parameters(recurse=False)),
                ("buffer", module.named_buffers(recurse=False)),
            ]
            found = [self._known(tensor, name, kind) for kind, tensors in own for name, tensor in tensors]
            for tensor in found:
                self._homes.setdefault(tensor, []).append(scopes[fqn])
            self.owned.append((scopes[fqn], found))

    def _known(self, tensor: TorchTensor, name: str, kind: Any = "activation") -> Tensor:
        key = tensor._cdata
        if key not in self._tensors:
            size, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            trains = kind == "parameter" and tensor.requires_grad
            self._tensors[key] = Tensor(name, size, size, dtype, 8 * tensor.element_size(), kind, trains)
            self._alive.append(tensor)
        return self._tensors[key]

    def add_inputs(self, inputs: Sequence[TorchTensor]) -> None:
        """Record the arguments of the run."""
        self.inputs = [self._known(each, f"input_{number}", "input") for number, each in enumerate(inputs)]

    def input(self, tensor: TorchTensor) -> TorchTensor:
        """Return an argument of the run unchanged."""
        return tensor

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and record it."""
        out, cost = self.execution.run(func, rule, args, kwargs)
        made = list(tensors_in(out))
        inputs = [self._known(each, "constant", "buffer") for each in tensors_in((args, kwargs))]
        is_free = cost.bytes_read == cost.bytes_written == 0
        if is_free and len(inputs) == len(made) == 1 and inputs[0].kind == "parameter":
            self._tensors[made[0]._cdata] = inputs[0]  # a view of a weight
            self._alive += made
        elif made:
            name = f"{rule.name.rpartition('.')[2]}_{len(self.operations)}"
            operation = Operation(name, rule.name, (), inputs, [self._known(each, name) for each in made])
            operation.macs, operation.elementwise_ops, operation.uncounted = (
                cost.macs,
                cost.elementwise_ops,
                cost.uncounted,
            )
            operation.is_free = is_free
            operation.aliases = bool(inputs) and (is_free or 0 in rule.writes)
            operation.gathers = rule.gathers
            self.operations.append(operation)
            homes = next((self._homes[each] for each in inputs if each in self._homes), None)
            self._owners.append(_home(rule.name, homes) if homes else None)
        return out, cost

    def program(self, outputs: Sequence[TorchTensor]) -> Program:
        """Return the recorded operators, each in the module that it most likely belongs to."""
        following: Scopes | None = None
        ahead: list[Scopes | None] = []
        for owner in reversed(self._owners):
            following = owner if owner is not None else following
            ahead.append(following)
        before: Scopes | None = None
        for operation, owner, after in zip(self.operations, self._owners, reversed(ahead), strict=True):
            before = owner if owner is not None else before
            operation.scopes = owner if owner is not None else _common(before, after)
        results = [self._known(each, "result") for each in outputs]
        return Program(self.name, self.inputs, results, self.operations, owned=self.owned)


def _home(operator: str, homes: Sequence[Scopes]) -> Scopes:
    """Return the module that an operator belongs to; a weight may be tied between an embedding and a product."""
    looks_up = "embedding" in operator
    fitting = (each for each in homes if each and ("embedding" in each[-1].class_name.lower()) == looks_up)
    return next(fitting, homes[0])


def _common(one: Scopes | None, other: Scopes | None) -> Scopes:
    """Return the modules around both."""
    shared: list[Scope] = []
    for left, right in zip(one or (), other or (), strict=False):
        if left != right:
            break
        shared.append(left)
    return tuple(shared)
