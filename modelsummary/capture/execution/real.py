"""Real execution: operators compute, and the memory that they write is restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary._torch import is_traceable_wrapper_subclass
from modelsummary.operators.attention import BLOCK_MASKED, skipped_macs
from modelsummary.operators.operator_calls import DistinctCall
from modelsummary.operators.operator_rules import OpCost, OpRule, op_cost, tensors_in

__all__ = ["RealExecution"]

_SMALL = 2**16


class RealExecution:
    """An execution that computes. It copies memory of the model or the user just before an operator writes to it.

    Copying all parameters up front would double the memory, and a forward rarely writes any. Small tensors other than
    parameters (running statistics, counters) are copied up front, as code may write them without an operator.

    Args:
        tensors: tensors of the model and of its arguments, which the run must leave unchanged.
        all_buffers: whether to copy all tensors except parameters up front, for runs whose operators are not seen.

    Attributes:
        ran: called after each operator.
    """

    def __init__(self, tensors: Iterable[Tensor], *, all_buffers: bool = False) -> None:
        self.ran: Callable[[], object] = lambda: None
        self.distinct: DistinctCall | None = None
        tensors = list(tensors)
        stored = list(_in_memory(tensors))
        # An alias keeps the memory, shape and strides of a tensor whose data is replaced or resized.
        self._aliases = [(tensor, tensor.detach()) for tensor in stored]
        self._untouched = {tensor.untyped_storage().data_ptr() for tensor in stored}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._inputs: dict[int, Tensor] = {}
        small = [
            tensor
            for tensor in stored
            if not isinstance(tensor, nn.Parameter) and (all_buffers or tensor.numel() <= _SMALL)
        ]
        self._save(small)
        self._sparse = [
            (tensor, tensor.detach().clone()) for tensor in tensors if not is_lazy(tensor) and _is_sparse(tensor)
        ]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, which operators get."""
        return tensor

    def input(self, tensor: Tensor) -> Tensor:
        """Return a copy of an input tensor, which a forward may write to; the same copy each time."""
        copy = self._inputs.get(id(tensor))
        if copy is None:
            copy = self._inputs[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            copy.__dict__.update({**tensor.__dict__, **copy.__dict__})  # a wrapper has tensors of its own there
        return copy

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and return its result and cost."""
        if rule.may_write:
            self._save(rule.written(args, kwargs))
        out = func(*args, **kwargs)
        self.ran()
        cost = op_cost(rule, args, kwargs, out)
        if rule.name in BLOCK_MASKED:
            cost = cost._replace(skipped_macs=skipped_macs(rule, args, lambda tensor: tensor))
        return out, cost

    def _save(self, written: Any) -> None:
        for tensor in _in_memory(tensors_in(written)):
            if tensor.untyped_storage().data_ptr() in self._untouched:
                self._untouched.discard(tensor.untyped_storage().data_ptr())
                memory = _bytes_behind(tensor)
                self._copies.append((memory, memory.clone()))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory of tensors that later runs may write while no operator is seen."""
        self._save(tensors)

    def end(self) -> None:
        """Restore memory, shapes and values of the tensors, without changing their version counters."""
        try:
            self._put_back()
        except KeyboardInterrupt:  # possibly halfway
            self._put_back()
            raise

    @torch.no_grad()
    def _put_back(self) -> None:
        for tensor, alias in self._aliases:
            if (tensor.data_ptr(), tensor.shape, tensor.stride()) != (alias.data_ptr(), alias.shape, alias.stride()):
                tensor.data = alias
        for memory, saved in self._copies:
            memory.copy_(saved)
        for tensor, values in self._sparse:
            tensor.copy_(values)


def _bytes_behind(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout not in (torch.strided, torch.jagged) and not tensor.is_meta


def _in_memory(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors with a storage of their own: not meta, sparse or lazy ones.

    Of a wrapper (a distributed tensor, a quantised weight), yield its inner tensors.
    """
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        if is_traceable_wrapper_subclass(tensor):
            yield from _in_memory(tensors_in([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]))
        elif tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested and _has_storage(tensor):
            yield tensor


def _has_storage(tensor: Tensor) -> bool:
    """Return False for a wrapper that hides its inner tensors: its storage raises when it is accessed."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
