"""Real execution: operators run as they are, and what they write into the model is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from modelsummary.capture.facts import tensors_of_modules
from modelsummary.op_costs import OpCost, OpRule, op_cost, tensors_in

__all__ = ["RealExecution"]


class RealExecution:
    """Runs operators; copies a tensor of the model or the user just before an operator writes into it.

    Copying all parameters up front would double the memory, and a forward rarely writes any.

    Args:
        modules: all modules of the model.
        inputs: the user's tensors.
    """

    def __init__(self, modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> None:
        own = {id(tensor): tensor for tensor in (*_tensors_held_by(modules), *inputs) if _has_values(tensor)}
        self._data = [(tensor, tensor.data) for tensor in own.values()]
        self._owned: dict[int, list[Tensor]] = {}
        for tensor in own.values():
            self._owned.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._copies: list[tuple[Tensor, Tensor, AbstractContextManager[None]]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """A copy of an input tensor: a forward may write into its argument."""
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and tell its cost."""
        if "batch_norm" in rule.name:  # native_batch_norm writes its running statistics; its schema hides it
            self._save(args)
        for place in rule.writes:
            self._save(kwargs.get(place) if isinstance(place, str) else args[place : place + 1])
        out = func(*args, **kwargs)
        return out, op_cost(rule, args, kwargs, out)

    def _save(self, written: Any) -> None:
        for tensor in tensors_in(written):
            if _has_values(tensor):
                for owned in self._owned.pop(tensor.untyped_storage().data_ptr(), ()):
                    self._copies.append((owned, owned.detach().clone(), _version_of(owned)))

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the tensors their memory and their values back."""
        for tensor, data in self._data:
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
        for tensor, values, version in self._copies:
            with version, torch.inference_mode(tensor.is_inference()):
                tensor.detach().copy_(values)


def _tensors_held_by(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes of a module."""
    yield from tensors_of_modules(modules)
    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _version_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Context that ends with the version the tensor has now, so graphs that saved it stay valid."""
    return nullcontext() if tensor.is_inference() else _unsafe_preserve_version_counter(tensor)


def _has_values(tensor: Tensor) -> bool:
    """A tensor with memory of its own: no meta, sparse, lazy or wrapped one."""
    if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested
