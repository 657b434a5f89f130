"""Real execution: operators run as they are, and what they write is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from modelsummary.costs.attention_blocks import BLOCK_MASKED, skipped_macs
from modelsummary.costs.operators import OpCost, OpRule, op_cost, tensors_in

__all__ = ["RealExecution"]

_SMALL = 2**16


class RealExecution:
    """Runs operators; copies memory of the model or the user just before an operator writes into it.

    Copying all parameters up front would double the memory, and a forward rarely writes any. Small tensors that are no
    parameters (running statistics, counters) are copied up front: they may be written where no operator is seen.

    Args:
        tensors: what the run must leave alone: tensors of the model and of its arguments.
        all_buffers: copy all that are no parameters up front: not all runs will be watched.
    """

    def __init__(self, tensors: Iterable[Tensor], *, all_buffers: bool = False) -> None:
        tensors = list(tensors)
        own = list(_in_memory(tensors))
        # An alias keeps memory, shape and strides of a tensor whose data is exchanged or resized.
        self._aliases = [(tensor, tensor.detach()) for tensor in own]
        self._untouched = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._inputs: dict[int, Tensor] = {}
        small = [each for each in own if not isinstance(each, nn.Parameter) and (all_buffers or each.numel() <= _SMALL)]
        self._save(small)
        self._sparse = [(each, each.detach().clone()) for each in tensors if not is_lazy(each) and _is_sparse(each)]

    def input(self, tensor: Tensor) -> Tensor:
        """A copy of an input tensor, the same each time: a forward may write into its argument."""
        copy = self._inputs.get(id(tensor))
        if copy is None:
            copy = self._inputs[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            copy.__dict__.update({**tensor.__dict__, **copy.__dict__})  # a wrapper has tensors of its own there
        return copy

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and tell its cost."""
        if "batch_norm" in rule.name:  # native_batch_norm writes its running statistics; its schema hides it
            self._save(args)
        for place in rule.writes:
            self._save(kwargs.get(place) if isinstance(place, str) else args[place : place + 1])
        out = func(*args, **kwargs)
        cost = op_cost(rule, args, kwargs, out)
        if rule.name in BLOCK_MASKED:
            cost = cost._replace(skipped_macs=skipped_macs(rule.name, args, lambda tensor: tensor))
        return out, cost

    def _save(self, written: Any) -> None:
        for tensor in _in_memory(tensors_in(written)):
            if tensor.untyped_storage().data_ptr() in self._untouched:
                self._untouched.discard(tensor.untyped_storage().data_ptr())
                memory = _bytes_behind(tensor)
                self._copies.append((memory, memory.clone()))

    def put_back(self) -> None:
        """Give the tensors their memory, shapes and values back; their versions do not move by that."""
        try:
            self._put_back()
        except KeyboardInterrupt:  # halfway, maybe
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
    """The whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout not in (torch.strided, torch.jagged) and not tensor.is_meta


def _in_memory(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those with a storage of their own, no meta, sparse or lazy ones; of a wrapper (a distributed tensor, a quantised
    weight) what it wraps.
    """
    for tensor in tensors:
        if is_lazy(tensor):
            continue
        if is_traceable_wrapper_subclass(tensor):
            yield from _in_memory(tensors_in([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]))
        elif tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested and _has_storage(tensor):
            yield tensor


def _has_storage(tensor: Tensor) -> bool:
    """A wrapper that does not tell what it wraps has none, and says so only when it is asked."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
