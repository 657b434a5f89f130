"""Make the result of an operator again, from the one that an equal call returned.

Calls are equal if the operator, its constants, and the shapes, strides and dtypes of its tensors are equal. Making a
tensor of known strides takes less time than the kernel, which finds the strides: half of the time for a view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from modelsummary.capture.execution.shape_tensor import AS_STRIDED, ShapeTensor, maker_of, view_of

__all__ = ["Remake", "remake_of"]

Remake: TypeAlias = "Callable[[Sequence[Any], torch.device], Any]"
"""A function of the arguments of a call and of the device of its results that returns the results; None if it cannot
make them from these arguments."""


def remake_of(func: Any, is_view: bool, args: Sequence[Any], tensors: Sequence[Tensor], out: Any) -> Remake | None:
    """Return a function that makes results like ``out``; None if the operator must run each time.

    Args:
        is_view: whether the results are views of an argument.
    """
    outputs = out if isinstance(out, (list, tuple)) else (out,)
    if not outputs or any(type(output) is not ShapeTensor for output in outputs):
        return None
    kind = None if outputs[0] is out else type(out)
    if is_view:
        return _views(func, args, outputs, kind)
    storages = {tensor.untyped_storage()._cdata for tensor in tensors if type(tensor) is ShapeTensor}
    if any(output.untyped_storage()._cdata in storages for output in outputs):  # not declared by operators of FSDP
        return None
    return _new_tensors(outputs, kind)


def _new_tensors(outputs: Sequence[Tensor], kind: type | None) -> Remake:
    makers = [maker_of(output) for output in outputs]
    if kind is None:
        (maker,) = makers
        return lambda _, device: maker(device)
    return lambda _, device: kind(maker(device) for maker in makers)


def _views(func: Any, args: Sequence[Any], outputs: Sequence[Tensor], kind: type | None) -> Remake | None:
    """Return None unless the results are views of the first argument whose layouts follow from its strides."""
    base = args[0] if args else None
    if type(base) is not ShapeTensor or func is AS_STRIDED:  # its result does not begin relative to its argument
        return None
    if any(output is base or not _is_strided_view(output, base) for output in outputs):
        return None
    layouts = [
        (output.shape, output.stride(), int(output.storage_offset() - base.storage_offset())) for output in outputs
    ]

    def remake(args: Sequence[Any], _: torch.device) -> Any:
        base = args[0]
        if type(base) is not ShapeTensor:
            return None
        return view_of(base, *layouts[0]) if kind is None else kind(view_of(base, *layout) for layout in layouts)

    return remake


def _is_strided_view(view: Tensor, base: Tensor) -> bool:
    """Return True if a view differs from its base in nothing but sizes, strides and offset."""
    return (
        view.dtype is base.dtype
        and view.is_conj() is base.is_conj()
        and view.is_neg() is base.is_neg()
        and view.untyped_storage()._cdata == base.untyped_storage()._cdata
    )
