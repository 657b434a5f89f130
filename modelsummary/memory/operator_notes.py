"""Note the operators of a step on shapes with their arguments, without following storages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.operator_mode import Execution
from modelsummary.costs.operators import OpCost, OpRule
from modelsummary.costs.tensor_bytes import inner_tensors, is_distributed
from modelsummary.memory.allocations import Allocation, Allocations

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OperatorNotes"]


class OperatorNotes(Allocations):
    """Allocations that note operators and their arguments alone, not when storages are freed.

    Views are noted without arguments: they run no kernel, and their results have the storage of an argument.
    It is an execution around another one instead of a second dispatch mode, which would take longer. It holds every
    storage that it has seen, so that no two share an address. On shapes they take no memory.
    """

    def __init__(self, block_bytes: int = 1, where: Callable[[], int] = lambda: 0) -> None:
        super().__init__(block_bytes, where)
        self._seen: dict[int, torch.UntypedStorage] = {}

    def around(self, execution: Execution) -> Execution:
        """Return the execution that runs operators and notes them."""
        self._execution, self.input = execution, execution.input
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and note it; return its result and cost."""
        out, cost = self._execution.run(func, rule, args, kwargs)
        self.operators.append((rule.name, self._where()))
        if self.log is not None and rule.is_view:
            self.log.note(func, (), {}, None, rule)
        elif self.log is not None:
            self.log.note(func, args, kwargs, out, rule, cost)
        return out, cost

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Note which storages belong to parameters."""
        if kind == "params":
            self._params.update(self._identity(inner) for tensor in tensors for inner in inner_tensors(tensor))

    def of(self, tensor: Tensor) -> Allocation | None:  # noqa: ARG002
        """Return None: no storage is followed."""
        return None

    def keep(self, tensor: Tensor) -> None:
        """Do nothing: bytes do not matter."""

    def note_node(self, node: Any) -> None:
        """Do nothing: bytes do not matter."""

    def _identity(self, tensor: Tensor) -> int:
        if type(tensor) is not ShapeTensor and is_distributed(type(tensor)):
            (tensor,) = inner_tensors(tensor)
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        self._seen[key] = storage
        return key
