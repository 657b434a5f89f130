"""``ShapeTensor``: a tensor without data that is on a device all the same.

To torch's C++ code it is a tensor of its device: the autocast, autograd and composite kernels of that device run as in
a real run and make the same choices (a fused attention, a cuDNN batch normalisation). What they call at the end, the
operator of a backend, arrives in Python. The device itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_map_only

from modelsummary import _torch

__all__ = [
    "OnMeta",
    "ShapeTensor",
    "Spec",
    "new_tensor",
    "run_on_metadata",
    "spec_of",
    "storages_resized",
    "without_history",
]

_META = torch.device("meta")
_META_KEY = _torch.DispatchKey.Meta
_AS_STRIDED = torch.ops.aten.as_strided.default
_DETACH = torch.ops.aten.detach.default
_RESIZE = torch.ops.aten.resize_.default
_STRIDED = torch.strided


class Spec(NamedTuple):
    """What a plain tensor is without its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def spec_of(tensor: Tensor) -> Spec:
    """Return the spec of a strided tensor."""
    return Spec(tensor.shape, tensor.stride(), tensor.dtype)


class ShapeTensor(Tensor):
    """A tensor with a shape, a dtype, a device and a storage of the right size that has no memory.

    Within a run a dispatch mode sees its operators first. ``__torch_dispatch__`` is for those of another thread, and
    for a tensor that outlives the run.
    """

    __torch_function__ = _torch.disabled_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on shapes, outside of any run."""
        from modelsummary.capture.execution.shape_only import ShapeOnly
        from modelsummary.costs.operators import op_rule

        device = next((each.device for each in args if isinstance(each, Tensor)), _META)
        return ShapeOnly(device).run(func, op_rule(func), args, kwargs or {})[0]

    def tolist(self) -> Any:
        """Return the values. Raises ``DataDependentError`` if they are not known."""
        if has_torch_function_unary(self):
            return handle_torch_function(ShapeTensor.tolist, (self,), self)
        return _values(self, "tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array. Raises ``DataDependentError`` if they are not known."""
        if has_torch_function_unary(self):
            return handle_torch_function(ShapeTensor.numpy, (self,), self, force=force)
        return _values(self, "numpy()").numpy(force=force)

    # ``torch.tensor([tensor])`` asks its elements for numbers with Python's dispatch switched off: no mode hears of it.

    def __index__(self) -> int:
        """Return the value. Raises ``DataDependentError`` if it is not known."""
        return int(_values(self, "torch.tensor()")) if _is_below_python() else super().__index__()

    def __int__(self) -> int:
        """Return the value. Raises ``DataDependentError`` if it is not known."""
        return int(_values(self, "torch.tensor()")) if _is_below_python() else super().__int__()

    def __float__(self) -> float:
        """Return the value. Raises ``DataDependentError`` if it is not known."""
        return float(_values(self, "torch.tensor()")) if _is_below_python() else super().__float__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what a tensor on meta shows; a forward that prints needs no values."""
        return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype})"


def _is_below_python() -> bool:
    return bool(_torch.is_excluded(_torch.DispatchKey.Python))


def _values(tensor: Tensor, asker: str) -> Tensor:
    from modelsummary.capture.execution.shape_only import ShapeOnly

    return (ShapeOnly.current or ShapeOnly(tensor.device)).values(tensor, asker)


def new_tensor(spec: Spec, device: torch.device) -> Tensor:
    """Return a tensor of this spec on ``device``, with a storage of its own."""
    shape, stride, dtype = spec
    made: Tensor = Tensor._make_wrapper_subclass(ShapeTensor, shape, stride, dtype=dtype, device=device)
    return made


@contextmanager
def storages_resized() -> Iterator[None]:
    """Context in which storages without memory may be resized, which torch refuses: they keep their size.

    FSDP frees the storages of gathered parameters and allocates them again.
    """

    original: Any = _torch.StorageBase.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != "meta":
            try:
                storage.data_ptr()
            except RuntimeError:  # it has no memory
                return storage
        return original(storage, size)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


def run_on_metadata(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that looks at no data, such as a view, on shape tensors as they are.

    Results share the storage of the arguments.
    """
    with _torch.DisableTorchDispatch(), _torch.IncludeDispatchKey(_META_KEY):
        out = func(*args, **kwargs)
    return tree_map_only(Tensor, _as_shape_tensor, out) if type(out) is not Tensor else _as_shape_tensor(out)


def _as_shape_tensor(tensor: Tensor) -> Tensor:
    if type(tensor) is ShapeTensor:  # an operator in place returns its argument
        return tensor
    made: Tensor = Tensor._make_subclass(ShapeTensor, tensor, False)
    return made


def without_history(tensor: Tensor) -> Tensor:
    """Return a tensor of the same storage that no autograd node made; no mode hears of it.

    Of a kind that is neither plain nor a shape tensor: the tensor itself.
    """
    if tensor.grad_fn is None:
        return tensor
    if type(tensor) is ShapeTensor:
        alone: Tensor = run_on_metadata(_DETACH, (tensor,), {})
        return alone
    if type(tensor) is Tensor:
        with _torch.DisableTorchDispatch():
            return tensor.detach()
    return tensor


class OnMeta:
    """Stands in for the arguments of one operator with tensors on meta, which have kernels, and takes results back.

    Args:
        device: of new results.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origins: dict[int, tuple[Tensor, Tensor]] = {}  # id of a meta tensor -> itself, what it stands for
        self._storages: dict[int, tuple[Any, Tensor]] = {}  # storage -> its twin, the first tensor met with it
        self._by_twin: dict[int, Tensor] = {}  # the twin of a storage -> that first tensor

    def leave(self, value: Any) -> Any:
        """Return an argument for a meta kernel: tensors on meta, and ``meta`` for devices."""
        kind = type(value)
        if kind is ShapeTensor:
            return self._twin(value)
        if isinstance(value, Tensor):  # is on meta already, and its views stay there
            self._origins[id(value)] = (value, value)
            if value.layout is _STRIDED:
                self._by_twin[value.untyped_storage()._cdata] = value
            return value
        if kind is torch.device:
            return _META
        if kind in (list, tuple) or isinstance(value, tuple):
            return type(value)(map(self.leave, value)) if kind in (list, tuple) else tuple(map(self.leave, value))
        if kind is dict:
            return {name: self.leave(each) for name, each in value.items()}
        return value

    def _twin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            twin = torch.UntypedStorage(storage.nbytes(), device=_META)
            self._storages[storage._cdata] = (twin, tensor)
            self._by_twin[twin._cdata] = tensor
        twin = self._storages[storage._cdata][0]
        meta = torch.empty(0, dtype=tensor.dtype, device=_META)
        meta.set_(twin, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            _torch.set_conj(meta, True)
        if tensor.is_neg():
            _torch.set_neg(meta, True)
        self._origins[id(meta)] = (meta, tensor)
        return meta

    def enter(self, value: Any) -> Any:
        """Return a result with shape tensors for what is on meta: the argument itself, a view of one, or a new one."""
        return self._origin(value) if isinstance(value, Tensor) else tree_map_only(Tensor, self._origin, value)

    def _origin(self, meta: Tensor) -> Tensor:
        if type(meta) is ShapeTensor or not meta.is_meta or meta.layout is not _STRIDED or meta.is_quantized:
            return meta
        if id(meta) in self._origins:
            origin = self._origins[id(meta)][1]
            if origin.shape != meta.shape:  # a result that was passed in, and has been resized
                run_on_metadata(_RESIZE, (origin, meta.shape), {})
            return origin
        base = self._by_twin.get(meta.untyped_storage()._cdata)
        if base is None:
            return self._new(meta)
        if type(base) is not ShapeTensor:
            return meta
        if meta.dtype is not base.dtype:
            raise RuntimeError(f"an operator returned a view of {base.dtype} as {meta.dtype}")
        view: Tensor = run_on_metadata(_AS_STRIDED, (base, meta.shape, meta.stride(), meta.storage_offset()), {})
        return view

    def _new(self, meta: Tensor) -> Tensor:
        """Return a new tensor, in a storage of the same size: a kernel may return a part of what it made."""
        nbytes = meta.untyped_storage().nbytes()
        if not meta.is_contiguous() or nbytes == meta.nbytes:
            return new_tensor(spec_of(meta), self._device)
        whole = new_tensor(Spec(torch.Size((nbytes // meta.element_size(),)), (1,), meta.dtype), self._device)
        view: Tensor = run_on_metadata(_AS_STRIDED, (whole, meta.shape, meta.stride(), meta.storage_offset()), {})
        return view
