"""``ShapeTensor``: a tensor without data that reports a device.

Torch's C++ code treats it as a tensor of that device: the autocast, autograd and composite kernels of the device run as
in a real run and make the same choices (a fused attention, a cuDNN batch normalisation). The backend operator that they
call last arrives in Python. The device itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from modelsummary import _torch
from modelsummary._torch import tree_map_only
from modelsummary.operators.operator_calls import TensorSpec, spec_of
from modelsummary.operators.operator_rules import op_rule

__all__ = [
    "AS_STRIDED",
    "OnMeta",
    "ShapeTensor",
    "maker_of",
    "new_tensor",
    "run_on_metadata",
    "storage_of",
    "storages_resized",
    "view_of",
    "without_history",
]

_META = torch.device("meta")
AS_STRIDED = torch.ops.aten.as_strided.default
_RESIZE = torch.ops.aten.resize_.default
_STRIDED = torch.strided
_WITHOUT_FUNCTION = frozenset({Tensor, nn.Parameter})  # classes that do not override functions


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor. A trace does not record this as a call of the model."""
    if type(tensor) in _WITHOUT_FUNCTION and not _torch.number_of_function_modes():  # true of most tensors
        return tensor.untyped_storage()
    with _torch.DisableTorchFunction():
        return tensor.untyped_storage()


_execution: list[Any] = []


def executes(kind: type) -> type:
    """Run operators on shape tensors with this class: ``ShapeOnly``, which needs shape tensors itself."""
    _execution[:] = [kind]
    return kind


class ShapeTensor(Tensor):
    """A tensor with a shape, a dtype, a device, and a storage of the right size without memory.

    During a run a dispatch mode handles its operators. ``__torch_dispatch__`` handles operators in another thread, and
    on a tensor that outlives the run.

    >>> x = new_tensor(TensorSpec((2, 3), (3, 1), torch.float32), torch.device("cuda"))
    >>> (x @ x.T).shape, x.device.type
    (torch.Size([2, 2]), 'cuda')
    """

    __torch_function__ = _torch.disabled_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on shapes, outside of any run."""
        device = next((argument.device for argument in args if isinstance(argument, Tensor)), _META)
        return _execution[0](device).run(func, op_rule(func), args, kwargs or {})[0]

    def tolist(self) -> Any:
        """Return the values. Raises ``DataDependentError`` if they are not known."""
        if has_torch_function_unary(self):
            return handle_torch_function(ShapeTensor.tolist, (self,), self)
        return _values(self, "tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array. Raises ``DataDependentError`` if they are not known."""
        if has_torch_function_unary(self):
            return handle_torch_function(ShapeTensor.numpy, (self,), self, force=force)
        with _torch.disable_current_modes():  # ``numpy()`` calls operators, whose results have no memory in a run
            return _values(self, "numpy()").numpy(force=force)

    # ``torch.tensor([tensor])`` converts its elements with Python's dispatch switched off, so that no mode sees it.

    def __index__(self) -> int:
        """Return the value. Raises ``DataDependentError`` if it is not known."""
        return int(_values(self, "torch.tensor()")) if _is_below_python() else super().__index__()

    def __int__(self) -> int:
        """Return the value. Raises ``DataDependentError`` if it is not known."""
        return int(_values(self, "torch.tensor()")) if _is_below_python() else super().__int__()

    def __float__(self) -> float:
        """Return the value. Raises ``DataDependentError`` if it is not known."""
        return float(_values(self, "torch.tensor()")) if _is_below_python() else super().__float__()

    def __format__(self, spec: str) -> str:
        """Return the value as text, as torch does. Raises ``DataDependentError`` for a format of an unknown value."""
        return (
            format(self.item(), spec)
            if self.dim() == 0 and (spec or _is_known(self))
            else object.__format__(self, spec)
        )

    def __coerce_same_metadata_as_tangent__(self, *_: Any) -> ShapeTensor:
        """Return the tensor itself, as a compiled backward expects gradients that are plain tensors."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the text of a tensor on meta, so that a forward that prints a tensor runs without values."""
        return f"tensor(..., device='{self.device}', size={tuple(self.shape)}, dtype={self.dtype})"


def _is_below_python() -> bool:
    return bool(_torch.is_excluded(_torch.DispatchKey.Python))


def _is_known(tensor: Tensor) -> bool:
    current = _execution[0].current
    return current is not None and current.knows_values_of(tensor)


def _values(tensor: Tensor, asker: str) -> Tensor:
    (execution,) = _execution
    values: Tensor = (execution.current or execution(tensor.device)).values(tensor, asker)
    return values


def new_tensor(spec: TensorSpec, device: torch.device) -> Tensor:
    """Return a tensor of this spec on ``device``, with a storage of its own."""
    shape, stride, dtype, _ = spec
    # by position: by name, a tensor takes a quarter longer
    shape_tensor: Tensor = _torch.make_wrapper_subclass(ShapeTensor, shape, stride, None, None, dtype, _STRIDED, device)
    return shape_tensor


def _new_part(spec: TensorSpec, offset: int, nbytes: int, device: torch.device) -> Tensor:
    """Return a tensor of this spec in a larger storage of its own, as a kernel may return a part of what it made."""
    whole = new_tensor(TensorSpec((nbytes // spec.dtype.itemsize,), (1,), spec.dtype), device)
    part: Tensor = run_on_metadata(AS_STRIDED, (whole, spec.shape, spec.stride, offset), {})
    return part


def view_of(base: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Return a view of a shape tensor with other sizes, whose first element is ``offset`` elements after the base's."""
    with _torch.meta_kernels():
        return _as_shape_tensor(base.as_strided(shape, stride, base.storage_offset() + offset))


def maker_of(tensor: Tensor) -> Callable[[torch.device], Tensor]:
    """Return a function from a device to a new tensor like this one, in a storage of the same size."""
    nbytes = tensor.untyped_storage().nbytes()
    if not tensor.is_contiguous() or nbytes == tensor.nbytes:
        return partial(new_tensor, spec_of(tensor))
    return partial(_new_part, spec_of(tensor), int(tensor.storage_offset()), nbytes)


@contextmanager
def storages_resized() -> Iterator[None]:
    """Return a context in which a storage without memory can be resized: ``size`` then returns the new size.

    FSDP frees the storages of gathered parameters and allocates them again. Torch itself would raise.
    """
    original: Any = _torch.StorageBase.resize_

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "meta":
            try:
                storage.data_ptr()
            except RuntimeError:  # it has no memory
                storage._resized = size
                return storage
        return original(storage, size)

    def size(storage: Any) -> int:
        return int(getattr(storage, "_resized", storage.nbytes()))

    storages = torch.UntypedStorage
    with _torch.swapped(storages, "resize_", resize_), _torch.swapped(storages, "size", size):
        yield


def run_on_metadata(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that reads no data, such as a view, directly on shape tensors.

    Results share the storage of the arguments.
    """
    with _torch.meta_kernels():
        out = func(*args, **kwargs)
    return _as_shape_tensor(out) if isinstance(out, Tensor) else tree_map_only(Tensor, _as_shape_tensor, out)


def _as_shape_tensor(tensor: Tensor) -> Tensor:
    if type(tensor) is ShapeTensor:  # an in-place operator returns its argument
        return tensor
    shape_tensor: Tensor = _torch.make_subclass(ShapeTensor, tensor, False)
    return shape_tensor


def without_history(tensor: Tensor) -> Tensor:
    """Return a tensor with the same storage and version, without a ``grad_fn``; modes do not see the operator.

    A tensor that is neither plain nor a shape tensor is returned as it is.
    """
    if tensor.grad_fn is None or type(tensor) not in (Tensor, ShapeTensor):
        return tensor
    with _torch.DisableTorchDispatch():
        alone = tensor.detach()
    return _as_shape_tensor(alone) if type(tensor) is ShapeTensor else alone


class OnMeta:
    """The conversion of one operator's arguments to tensors on meta, which have kernels, and of its results back.

    Args:
        device: device of new results.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origins: dict[int, tuple[Tensor, Tensor]] = {}  # id of a meta tensor -> itself, the shape tensor
        self._storages: dict[int, tuple[Any, Tensor]] = {}  # storage -> its twin, the first tensor met with it
        self._by_twin: dict[int, Tensor] = {}  # the twin of a storage -> that first tensor

    def leave(self, value: Any) -> Any:
        """Return an argument for a meta kernel: tensors on meta, and ``meta`` for devices."""
        kind = type(value)
        if kind is ShapeTensor:
            return self._twin(value)
        if isinstance(value, Tensor):  # it is on meta already, and its views stay there
            self._origins[id(value)] = (value, value)
            if value.layout is _STRIDED:
                self._by_twin[value.untyped_storage()._cdata] = value
            return value
        if kind is torch.device:
            return _META
        if kind in (list, tuple) or isinstance(value, tuple):
            return type(value)(map(self.leave, value)) if kind in (list, tuple) else tuple(map(self.leave, value))
        if kind is dict:
            return {name: self.leave(inner) for name, inner in value.items()}
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
        """Return a result with shape tensors for tensors on meta: an argument, a view of one, or a new tensor."""
        if isinstance(value, Tensor):
            return self._origin(value)
        if type(value) is tuple:  # torch's ``tree_map_only`` takes ten times as long
            return tuple(map(self.enter, value))
        return tree_map_only(Tensor, self._origin, value)

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
        view: Tensor = run_on_metadata(AS_STRIDED, (base, meta.shape, meta.stride(), meta.storage_offset()), {})
        return view

    def _new(self, meta: Tensor) -> Tensor:
        """Return a new tensor in a storage of the same size."""
        return maker_of(meta)(self._device)
