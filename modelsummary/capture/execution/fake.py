"""Fake execution: tensors without data that say they are on the target device, so operators choose its kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy

__all__ = ["FakeTensors"]


class FakeTensors:
    """Makes fake twins of tensors; twins share memory where the tensors do.

    Args:
        device: of the twins.
        dtype: of the floating point twins; None: that of each tensor.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device, self._dtype = device, dtype
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}  # id(tensor) -> tensor (kept alive), twin
        self._storages: dict[tuple[int, torch.dtype], Any] = {}

    def twin(self, tensor: Tensor) -> Tensor:
        """The fake twin of a tensor, the same each time."""
        known = self._twins.get(id(tensor))
        if known is None:
            known = self._twins[id(tensor)] = (tensor, self._new(tensor))
        return known[1]

    def twin_of_meta(self, tensor: Tensor) -> Tensor:
        """The twin of a tensor on meta that is no twin yet."""
        return tensor if isinstance(tensor, FakeTensor) else self.twin(tensor)

    def _new(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        key = (tensor.untyped_storage()._cdata, dtype)
        if key not in self._storages:
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            self._storages[key] = torch.UntypedStorage(elements * dtype.itemsize, device="meta")
        meta = torch.empty(0, dtype=dtype, device="meta").set_(
            self._storages[key], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        fake: Tensor = FakeTensor(self.mode, meta, self._device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def _has_no_twin(self, value: Any) -> bool:
        if isinstance(value, FakeTensor):
            return value.fake_mode is not self.mode
        return type(value) in (nn.Parameter, Tensor) and not is_lazy(value)

    def replace_tensors_of(self, modules: Iterable[nn.Module]) -> None:
        """Put twins in the place of parameters, buffers and plain tensor attributes."""
        for module in modules:
            places: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
            for tensors in places:
                for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
                    if self._has_no_twin(tensor):
                        tensors[name] = self.twin(tensor)
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [each if each is None else self.twin(each) for each in module._flat_weights]
