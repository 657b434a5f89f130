"""The operators of torch that the code of a TorchScript file may call.

Allowed are operators that only compute on tensors and numbers, chosen by their schemas: no file names, storages,
streams, generators or objects. Everything else does not exist for the code, whatever name it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.errors import ModelFileError

__all__ = ["DTYPES", "RefusedNameError", "call_operator", "number_of"]

# The numbers of c10::ScalarType, which the code has for dtypes.
DTYPES: dict[int, torch.dtype] = {
    scalar_type: getattr(torch, name)
    for scalar_type, name in enumerate(
        "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool qint8 quint8 qint32"
        " bfloat16 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz"
        " float8_e4m3fnuz uint16 uint32 uint64".split()
    )
    if hasattr(torch, name)
}
_NUMBERS = {dtype: scalar_type for scalar_type, dtype in DTYPES.items()}
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)

_CPU = torch.device("cpu")
_MOST_RESULTS = 20_000
# They make room for as many tensors as an argument says.
_COUNTED = frozenset("tensor_split hsplit vsplit dsplit chunk unsafe_chunk".split())
_MOST_NUMBERS = 20_000  # in a list of sizes, or tensors in a list
_KINDS = {
    "TensorType": "tensor",
    "IntType": "int",
    "SymIntType": "int",
    "FloatType": "float",
    "BoolType": "bool",
    "NumberType": "number",
    "ComplexType": "complex",
    "ScalarTypeType": "dtype",
    "LayoutType": "layout",
    "MemoryFormatType": "memory_format",
    "DeviceObjType": "device",
    "StringType": "text",
    "GeneratorType": "generator",
}
# Underscored operators that exporters and tracers write; others are internal, and check less.
_INTERNAL = frozenset(
    "_convolution _convolution_mode _softmax _log_softmax _safe_softmax _unsafe_view _reshape_alias _weight_norm"
    " _weight_norm_interface _native_multi_head_attention _transformer_encoder_layer_fwd _shape_as_tensor _to_copy"
    " _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _unique _unique2"
    " _batch_norm_impl_index _scaled_dot_product_flash_attention_for_cpu _prelu_kernel _trilinear _conj _dim_arange"
    " _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _pad_circular _pad_enum"
    " _embedding_bag _is_all_true _is_any_true _native_batch_norm_legit _native_batch_norm_legit_no_training"
    " _pack_padded_sequence _pad_packed_sequence __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__"
    " _nested_tensor_from_mask_left_aligned _fft_c2c _fft_c2r _fft_r2c _linalg_svd _linalg_eigh _linalg_det".split()
)
# Libraries of other devices, other layouts, quantisation, sharing of memory, and loops whose length is a value.
_REFUSED_STARTS = (
    "cudnn mkldnn miopen fbgemm sparse nested record_ resize set_ requires_grad retain mps_ quantize choose_qparams"
    " to_sparse to_mkldnn from_file is_pinned pin_memory sym_ special_chebyshev special_hermite special_laguerre"
    " special_legendre special_shifted hash_ segment_reduce output_nr get_gradients shallow data crow col_i ccol row_i"
    " indices values coalesce dense_dim hspmm smm sspaddmm unflatten_dense flatten_dense copy_sparse q_ qscheme"
    " empty_quantized fused_ batch_norm_ slow_conv thnn_ is_vulkan is_set_to is_distributed is_inference unsafe_"
    " convolution_ conv_depthwise3d normal_functional can_cast promote_types result_type align_ rename refine geqrf"
    " combinations chain_matmul linalg_multi_dot histogram orgqr ormqr lu_unpack linalg_ldl linalg_householder".split()
)
_ALLOWED_ANYWAY = frozenset({"unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"})
_TORCHVISION = frozenset("nms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d".split())


class RefusedNameError(ModelFileError):
    """Error for a name that the code of a file may not use."""

    def __init__(self, name: str) -> None:
        super().__init__(f"its code has {name[:80]!r}, which is not an operator without effects; it is not run")


@dataclass(slots=True)
class _Argument:
    name: str
    kind: str
    is_optional: bool
    is_list: bool
    has_optional_items: bool
    fixed_length: int | None
    only_by_name: bool
    has_default: bool


@lru_cache(maxsize=4096)
def _overloads(namespace: str, name: str) -> tuple[tuple[Any, tuple[_Argument, ...]], ...]:
    """Return the allowed overloads of an operator with their arguments, in the order of torch."""
    if not _is_allowed(namespace, name):
        return ()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return ()
    overloads = []
    for overload in packet.overloads():
        function = getattr(packet, overload)
        arguments = [_argument(argument) for argument in function._schema.arguments]
        if _torch.has_kernel(function.name()) and None not in arguments:
            overloads.append((function, tuple(argument for argument in arguments if argument is not None)))
    return tuple(overloads)


def _is_allowed(namespace: str, name: str) -> bool:
    if namespace == "torchvision":
        return name in _TORCHVISION
    if namespace != "aten":
        return False
    if name.startswith("_"):
        return name in _INTERNAL
    return name in _ALLOWED_ANYWAY or not (name.startswith(tuple(_REFUSED_STARTS)) or "backward" in name)


def _argument(argument: Any) -> _Argument | None:
    """Return what an argument takes; None if the code cannot have such a value."""
    kind, is_optional, is_list, has_optional_items = argument.real_type, False, False, False
    if argument.kwarg_only and argument.is_out:
        return None
    if kind.kind() == "OptionalType":
        kind, is_optional = kind.getElementType(), True
    if kind.kind() == "ListType":
        kind, is_list = kind.getElementType(), True
        if kind.kind() == "OptionalType":
            kind, has_optional_items = kind.getElementType(), True
    if kind.kind() not in _KINDS or argument.name == "filename":
        return None
    return _Argument(
        argument.name,
        _KINDS[kind.kind()],
        is_optional,
        is_list,
        has_optional_items,
        argument.N,
        argument.kwarg_only,
        argument.has_default_value(),
    )


class _Unfit(Exception):
    """The value does not fit the argument."""


def call_operator(
    namespace: str, name: str, args: Sequence[Any], kwargs: dict[str, Any], item: Callable[..., Any]
) -> Any:
    """Run an operator and return its result.

    Args:
        item: returns the number in a tensor with one element.

    Raises:
        RefusedNameError: the code may not call it.
        ModelFileError: no overload takes these arguments.
    """
    overloads = _overloads(namespace, name)
    if name in _COUNTED and any(type(value) is not bool and _is_many(value) for value in (*args[1:], *kwargs.values())):
        raise ModelFileError(f"the operator {name!r} divides a tensor into very many")
    if not overloads:
        raise RefusedNameError(f"{'torch' if namespace == 'aten' else 'ops.' + namespace}.{name}")
    for is_lenient in (False, True):
        for function, arguments in overloads:
            try:
                bound = _bound(arguments, args, kwargs, item if is_lenient else None)
            except _Unfit:
                continue
            return function(*bound[0], **bound[1])
    shown = ", ".join(type(arg).__name__ for arg in (*args, *kwargs.values()))
    raise ModelFileError(f"the operator {name[:80]!r} does not take ({shown[:200]})")


def _is_many(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and abs(value) > _MOST_RESULTS)


def _bound(
    arguments: Sequence[_Argument], args: Sequence[Any], kwargs: dict[str, Any], item: Callable[..., Any] | None
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as torch takes them; raise ``_Unfit`` if they do not fit."""
    positional = [argument for argument in arguments if not argument.only_by_name]
    if len(args) > len(positional) or len(kwargs) > len(arguments):
        raise _Unfit
    values: list[Any] = []
    for argument, value in zip(positional, args, strict=False):
        if argument.name in kwargs:
            raise _Unfit
        values.append(_converted(argument, value, item))
    named: dict[str, Any] = {}
    for argument in (*positional[len(args) :], *(keyword for keyword in arguments if keyword.only_by_name)):
        if argument.name in kwargs:
            named[argument.name] = _converted(argument, kwargs[argument.name], item)
        elif not argument.has_default:
            raise _Unfit
    if len(values) + len(named) != len(args) + len(kwargs):
        raise _Unfit
    return values, {name: value for name, value in named.items() if value is not None}


def _converted(argument: _Argument, value: Any, item: Callable[..., Any] | None) -> Any:
    if value is None:
        if argument.is_optional or argument.kind == "generator":
            return None
        raise _Unfit
    if not argument.is_list:
        return _single(argument.kind, value, item)
    if isinstance(value, (list, tuple)):
        if len(value) > _MOST_NUMBERS:
            raise ModelFileError(f"an operator takes a list of {len(value):,}")
        if argument.has_optional_items:
            return [None if entry is None else _single(argument.kind, entry, item) for entry in value]
        return [_single(argument.kind, entry, item) for entry in value]
    if item is not None and argument.fixed_length is not None:
        return [_single(argument.kind, value, item)] * argument.fixed_length
    raise _Unfit


def _single(kind: str, value: Any, item: Callable[..., Any] | None) -> Any:
    """Return a value as torch takes it. With ``item``, numbers are converted as TorchScript does implicitly."""
    is_number = isinstance(value, (int, float, complex)) and not isinstance(value, bool)
    if kind == "tensor" and isinstance(value, Tensor):
        return value
    if kind in ("int", "dtype", "layout", "memory_format") and isinstance(value, int) and not isinstance(value, bool):
        return _coded(kind, value)
    if kind == "number" and is_number:
        return value
    if (kind == "float" and isinstance(value, float)) or (kind == "complex" and isinstance(value, complex)):
        return value
    if (kind == "bool" and isinstance(value, bool)) or (kind == "text" and isinstance(value, str)):
        return value
    if kind == "device" and isinstance(value, torch.device):
        return _CPU  # of whatever device a model was saved
    if item is not None:
        if isinstance(value, Tensor) and kind in ("int", "float", "number", "bool"):
            return _single(kind, item(value), None)
        if kind in ("float", "complex") and isinstance(value, (int, float)):
            return float(value)
        if kind in ("int", "number") and isinstance(value, bool):
            return int(value)
        if kind == "bool" and isinstance(value, int):
            return bool(value)
    raise _Unfit


def _coded(kind: str, value: int) -> Any:
    if not -(2**63) <= value < 2**63:
        raise ModelFileError(f"the code has the number {value!r:.40}, which no operator takes")
    if kind == "int":
        return value
    if kind == "layout" and value == 0:
        return torch.strided
    if kind == "memory_format" and 0 <= value < len(_MEMORY_FORMATS):
        return _MEMORY_FORMATS[value]
    if kind == "dtype" and value in DTYPES:
        return DTYPES[value]
    raise ModelFileError(f"the code has the {kind} {value}, which torch {torch.__version__} does not know")


def number_of(dtype: torch.dtype) -> int:
    """Return the number that the code has for a dtype.

    >>> number_of(torch.float32)
    6
    """
    return _NUMBERS[dtype]
