"""The operators of torch that the code of a TorchScript file may call.

Allowed are operators that only compute on tensors and numbers, chosen by their schemas: no file names, storages,
streams, generators or objects. Everything else does not exist for the code, whatever name it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.errors import ModelFileError

__all__ = ["DTYPES", "MOST_RESULTS", "RefusedNameError", "call_operator", "dtype_of", "number_of"]

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

Item = Callable[[Tensor], Any]
"""Return the number in a tensor with one element."""
Taker = Callable[[Any, "Item | None"], Any]
"""Return a value as torch takes it; raise ``_Unfit`` if it does not fit. With ``Item``, convert numbers."""

_CPU = torch.device("cpu")
MOST_RESULTS = 20_000  # tensors that one operator returns
# They make room for as many tensors as an argument says.
_COUNTED = frozenset("tensor_split hsplit vsplit dsplit chunk unsafe_chunk".split())
_MOST_NUMBERS = 20_000  # in a list of sizes, or tensors in a list
_CODED = ("int", "dtype", "layout", "memory_format")  # an integer in the code
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
_TYPES: dict[str, tuple[Any, ...]] = {
    "tensor": (Tensor,),
    "float": (float,),
    "bool": (bool,),
    "number": (int, float, complex),
    "complex": (complex,),
    "text": (str,),
    **dict.fromkeys(_CODED, (int,)),
    **dict.fromkeys(("device", "generator"), ()),
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


@lru_cache(maxsize=4096)
def _overloads(namespace: str, name: str) -> tuple[tuple[Any, tuple[tuple[Any, Taker], ...]], ...]:
    """Return the allowed overloads of an operator with their arguments, in the order of torch.

    torch would also choose an overload. But it takes numbers for tensors, and to report a value that fits none, it
    prints the value: lists that share their parts take exponential time.
    """
    packet = getattr(getattr(torch.ops, namespace), name, None) if _is_allowed(namespace, name) else None
    overloads = []
    for overload in packet.overloads() if packet is not None else ():
        function = getattr(packet, overload)
        pairs = [(argument, _taker(argument)) for argument in function._schema.arguments]
        arguments = tuple((argument, taker) for argument, taker in pairs if taker is not None)
        if _torch.has_kernel(function.name()) and len(arguments) == len(pairs):
            overloads.append((function, arguments))
    return tuple(overloads)


def _is_allowed(namespace: str, name: str) -> bool:
    if namespace == "torchvision":
        return name in _TORCHVISION
    if namespace != "aten":
        return False
    if name.startswith("_"):
        return name in _INTERNAL
    return name in _ALLOWED_ANYWAY or not (name.startswith(tuple(_REFUSED_STARTS)) or "backward" in name)


def _taker(argument: Any) -> Taker | None:
    """Return a function that converts a value to what an argument takes; None if the code cannot have such a value."""
    is_unknown = (argument.kwarg_only and argument.is_out) or argument.name == "filename"
    return None if is_unknown else _taker_of(argument.real_type, argument.N)


def _taker_of(kind: Any, length: int | None) -> Taker | None:
    if kind.kind() not in ("OptionalType", "ListType"):
        return partial(_single, _KINDS[kind.kind()]) if kind.kind() in _KINDS else None
    inner = _taker_of(kind.getElementType(), length)
    if inner is None:
        return None
    return partial(_optional, inner) if kind.kind() == "OptionalType" else partial(_listed, inner, length)


class _Unfit(Exception):
    """The value does not fit the argument."""


def call_operator(namespace: str, name: str, args: Sequence[Any], kwargs: dict[str, Any], item: Item) -> Any:
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
            return function(**bound)
    shown = ", ".join(type(arg).__name__ for arg in (*args, *kwargs.values()))
    raise ModelFileError(f"the operator {name[:80]!r} does not take ({shown[:200]})")


def _is_many(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int) and abs(value) > MOST_RESULTS)


def _bound(
    arguments: Sequence[tuple[Any, Taker]], args: Sequence[Any], kwargs: dict[str, Any], item: Item | None
) -> dict[str, Any]:
    """Return the arguments as torch takes them; raise ``_Unfit`` if they do not fit."""
    passed = dict(zip((argument.name for argument, _ in arguments if not argument.kwarg_only), args, strict=False))
    passed |= kwargs
    takers = {argument.name: taker for argument, taker in arguments}
    missing = any(argument.name not in passed and not argument.has_default_value() for argument, _ in arguments)
    if missing or len(passed) < len(args) + len(kwargs) or not passed.keys() <= takers.keys():
        raise _Unfit
    return {name: takers[name](value, item) for name, value in passed.items()}


def _optional(inner: Taker, value: Any, item: Item | None) -> Any:
    return None if value is None else inner(value, item)


def _listed(inner: Taker, length: int | None, value: Any, item: Item | None) -> Any:
    """Return a list; TorchScript implicitly repeats a number for a list of a fixed length."""
    if isinstance(value, (list, tuple)):
        if len(value) > _MOST_NUMBERS:
            raise ModelFileError(f"an operator takes a list of {len(value):,}")
        return [inner(entry, item) for entry in value]
    if item is not None and length is not None:
        return [inner(value, item)] * length
    raise _Unfit


def _single(kind: str, value: Any, item: Item | None) -> Any:
    """Return a value as torch takes it. With ``item``, numbers are converted as TorchScript does implicitly."""
    if isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "bool"):
        return _coded(kind, value) if kind in _CODED else value
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
    return dtype_of(value, kind)


def dtype_of(number: Any, kind: str = "dtype") -> torch.dtype:
    """Return the dtype for which the code has a number; raise ``ModelFileError`` for other numbers, and other kinds."""
    if kind == "dtype" and type(number) is int and number in DTYPES:
        return DTYPES[number]
    raise ModelFileError(f"the code has the {kind} {number!r:.40}, which torch {torch.__version__} does not know")


def number_of(dtype: torch.dtype) -> int:
    """Return the number that the code has for a dtype.

    >>> number_of(torch.float32)
    6
    """
    return _NUMBERS[dtype]
