"""Twins: tensors without data that replace a model's tensors and its inputs during a run on shapes.

Here they are made; ``shape_only`` runs the operators on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary import _torch
from modelsummary._torch import FakeTensor, replace_shards
from modelsummary.capture.execution.known_values import KnownValues
from modelsummary.capture.execution.shape_tensor import (
    AS_STRIDED,
    ShapeTensor,
    new_tensor,
    run_on_metadata,
    storage_of,
)
from modelsummary.capture.modules import own_tensors
from modelsummary.operators.operator_calls import TensorSpec, spec_of
from modelsummary.operators.tensor_bytes import is_wrapper

__all__ = ["Twins"]

_META = torch.device("meta")
_STRIDED = torch.strided
_REPLACED = (nn.Parameter, Tensor, FakeTensor)


class Twins:
    """The twins of one run: one per tensor. The twins of tensors that share memory share a storage.

    Args:
        device: device of the twins, except for twins of tensors found on meta.
        dtype: dtype of the twins of floating point tensors; None: the dtype of each tensor.
        known_values: receives the values of integers and of small tensors.
        note_obstacle: called with the description of a tensor that cannot have a twin.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        known_values: KnownValues,
        note_obstacle: Callable[[str], None],
    ) -> None:
        self._device, self._dtype, self._known, self._note_obstacle = device, dtype, known_values, note_obstacle
        self._twins: dict[int, tuple[Any, Tensor]] = {}  # id(tensor) -> tensor, or a reference to a stray one; twin
        self._storages: dict[tuple[int, torch.dtype], Tensor] = {}  # of tensors that have twins -> the whole of it

    def end(self) -> None:
        """Forget all twins, and the values of the tensors that they stand for."""
        self._twins.clear()
        self._storages.clear()
        self._known = KnownValues()

    def of_input(self, tensor: Tensor) -> Tensor:
        """Return the twin of an input tensor. Values of floating point inputs count as unknown."""
        if type(tensor) is ShapeTensor or id(tensor) in self._twins:
            return self.of(tensor)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return self._new_twin(tensor)
        return self._adopt(tensor)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the twin of an argument of an operator; a tensor that the forward made on meta is its own twin."""
        if type(tensor) is ShapeTensor:
            return tensor
        known_twin = self._twins.get(id(tensor))
        if known_twin is not None:
            return known_twin[1]
        return tensor if tensor.is_meta else self._adopt(tensor, is_stray=True)

    def replace_tensors_of(self, modules: Iterable[nn.Module]) -> None:
        """Replace parameters, buffers and plain tensor attributes by twins."""
        modules = list(modules)
        for group in {id(group): group for module in modules for group in _torch.fsdp_groups(module)}.values():
            replace_shards(group, self._of_shard, self._dtype)
        for module in modules:
            for held, name, tensor in own_tensors(module):
                if type(tensor) in _REPLACED or ((_is_plain(tensor) or is_wrapper(tensor)) and not is_lazy(tensor)):
                    held[name] = self._of_own(tensor)
            if isinstance(module, nn.RNNBase):
                flat = module._flat_weights
                module._flat_weights = [weight if weight is None else self.of(weight) for weight in flat]

    def _of_shard(self, tensor: Tensor) -> Tensor:
        """Return the twin of a tensor of FSDP2, which is then its own twin where a module has it."""
        twin = self._of_own(tensor)
        self._twins[id(twin)] = (twin, twin)
        return twin

    def _adopt(self, tensor: Tensor, is_stray: bool = False) -> Tensor:
        """Return the twin of a tensor whose values are known until they are overwritten.

        The values of a stray tensor are copied: its memory may belong to other code, such as a numpy array, which can
        write to it at any time.
        """
        twin = self._new_twin(tensor, is_stray)
        if type(tensor) is not FakeTensor:  # a fake tensor has no values
            self._known.borrow(twin, tensor, copy=is_stray)
        return twin

    def _new_twin(self, tensor: Tensor, is_stray: bool = False) -> Tensor:
        is_fake = type(tensor) is FakeTensor
        twin = self.without_data(tensor, is_stray)
        if twin is None:
            return tensor
        if type(tensor) is nn.Parameter or (is_fake and isinstance(tensor, nn.Parameter)):
            twin.requires_grad_(tensor.requires_grad)
            twin._is_param = True  # makes isinstance(twin, nn.Parameter) true
        elif tensor.requires_grad and tensor.is_leaf:
            twin.requires_grad_()
        if tensor.__dict__ and not is_fake:
            twin.__dict__.update({**tensor.__dict__, **twin.__dict__})  # a wrapper has tensors of its own there
        key = id(tensor)
        self._twins[key] = (weakref.ref(tensor, lambda _: self._twins.pop(key)) if is_stray else tensor, twin)
        return twin

    def _wrapper_twin(self, tensor: Any) -> Tensor:
        """Return a wrapper, such as a distributed or a quantised tensor, around the twins of its inner tensors."""
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        inner = {name: self._of_own(value) if isinstance(value, Tensor) else value for name, value in inner.items()}
        twin: Tensor = tensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
        return nn.Parameter(twin, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin

    def _of_own(self, tensor: Tensor) -> Tensor:
        known_twin = self._twins.get(id(tensor))
        return known_twin[1] if known_twin is not None else self._adopt(tensor)

    def without_data(self, tensor: Tensor, is_stray: bool) -> Tensor | None:
        """Return a tensor like this one without data, or None if its layout does not allow one.

        Twins of the model's tensors share storages where the tensors do.
        """
        if is_wrapper(tensor):
            return self._wrapper_twin(tensor)
        if tensor.layout is not _STRIDED or tensor.is_quantized or tensor.is_nested:
            try:
                if tensor.is_sparse:
                    raise RuntimeError("views of a sparse tensor on meta lose the number of stored elements")
                return torch.empty_like(tensor, device=_META)
            except (RuntimeError, AssertionError):
                self._note_obstacle(f"a {'nested' if tensor.is_nested else tensor.layout} tensor")
                return None
        spec = spec_of(tensor)
        if self._dtype is not None and tensor.dtype.is_floating_point:
            spec = spec._replace(dtype=self._dtype)
        if is_stray:
            return new_tensor(spec, self._device)
        try:
            storage = storage_of(tensor)
        except (NotImplementedError, RuntimeError):  # a wrapper without a storage
            return new_tensor(spec, self._device)
        whole = self._storages.get((storage._cdata, spec.dtype))
        if whole is None:
            if storage.nbytes() == tensor.nbytes:
                whole = self._storages[storage._cdata, spec.dtype] = new_tensor(spec, self._device)
                return whole
            n_elements = storage.nbytes() // tensor.element_size()
            whole = new_tensor(TensorSpec((n_elements,), (1,), spec.dtype), self._device)
            self._storages[storage._cdata, spec.dtype] = whole
        view: Tensor = run_on_metadata(AS_STRIDED, (whole, spec.shape, spec.stride, tensor.storage_offset()), {})
        return view


def _is_plain(value: Tensor) -> bool:
    """Return True for a tensor, real or fake, whose class does not override operators."""
    return type(value) in _REPLACED or type(value).__torch_dispatch__ is _torch.disabled_dispatch
