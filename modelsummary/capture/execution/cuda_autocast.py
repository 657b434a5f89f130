"""Autocast on shapes as CUDA runs it, where no CUDA device is present and operators run as on the CPU.

Autocast casts other operators on CUDA than on the CPU: norms, softmax, exponentials and sums run in float32 on CUDA,
and in half precision on the CPU. The lists are in ``ATen/autocast_mode.h``; torch documents them in its "Autocast Op
Reference". Inside the context, the operators that torch casts on CUDA alone are also cast on the CPU, by kernels in
torch's own dispatcher, so that operators called from C++ code are cast as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.capture.execution.shape_tensor import ShapeTensor

__all__ = ["cuda_autocast"]

aten = torch.ops.aten
_KEY = "AutocastCPU"
_SOFTMAX = {aten.softmax.int: aten._softmax.default, aten.log_softmax.int: aten._log_softmax.default}

# Operators by what autocast does with their arguments on CUDA. Operators that it treats alike on the CPU are left out.
_IN_HALF = (
    "_convolution convolution addmv addr chain_matmul einsum linalg_multi_dot mv _thnn_fused_lstm_cell"
    " _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention"
)
_IN_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor"
    " pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm"
    " nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp norm.Scalar norm.ScalarOpt_dim upsample_nearest1d"
    " _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d"
    " _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d"
    " upsample_bicubic2d _upsample_bicubic2d_aa"
)
_TO_FLOAT32 = (
    "softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum"
    " sum.dim_IntList"
)
_IN_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Return a context in which autocast on the CPU also casts the operators that are cast on CUDA alone.

    Operators of other threads are cast as usual.

    >>> with torch.autocast("cpu", torch.bfloat16), cuda_autocast():
    ...     torch.ones(2, dtype=torch.bfloat16).softmax(0).dtype
    torch.float32
    """
    thread = get_ident()
    missing = set(_torch.kernels_for("AutocastCUDA")) - set(_torch.kernels_for(_KEY))
    with _torch.scoped_library("aten", "IMPL") as library:
        for names, policy in (
            (_IN_HALF, _in_half),
            (_IN_FLOAT32, _in_float32),
            (_TO_FLOAT32, _to_float32),
            (_IN_WIDEST, _in_widest),
        ):
            for name in names.split():
                if f"aten::{name}" in missing:
                    library.impl(name, _kernel(name, policy, thread), _KEY, with_keyset=True)
        yield


_Policy = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _kernel(name: str, policy: _Policy, thread: int) -> Callable[..., Any]:
    """Return the kernel of an operator that casts and then runs it without autocast, as torch's own kernels do."""
    base, _, overload = name.partition(".")
    operator = getattr(getattr(aten, base), overload or "default")
    key = getattr(_torch.DispatchKey, _KEY)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() != thread:
            return operator.redispatch(keys.remove(key), *args, **kwargs)
        with _torch.exclude_dispatch_key(key):
            return policy(operator, args, kwargs)

    return kernel


def _is_eligible(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if _is_eligible(tensor) else tensor, value)


def _in_half(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = torch.get_autocast_dtype("cpu")
    return operator(*_cast(args, dtype), **_cast(kwargs, dtype))


def _in_float32(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))


def _to_float32(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that casts by itself, with a result in float32 unless a dtype is given."""
    position = [argument.name for argument in operator._schema.arguments].index("dtype")
    is_given = kwargs.get("dtype") is not None or any(dtype is not None for dtype in args[position : position + 1])
    if is_given or not _is_eligible(args[0]):
        return operator(*args, **kwargs)
    if operator in _SOFTMAX and type(args[0]) is ShapeTensor and args[0].dtype is torch.float16:
        # the kernel on CUDA reads float16
        return _SOFTMAX[operator](args[0], args[1], True)
    return operator(*args[:position], **{**kwargs, "dtype": torch.float32})


def _in_widest(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_mixed = len({tensor.dtype for tensor in tensors_of((args, kwargs)) if _is_eligible(tensor)}) > 1
    return _in_float32(operator, args, kwargs) if is_mixed else operator(*args, **kwargs)
