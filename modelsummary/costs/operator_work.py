"""The work of one operator call as kernels: operator class, dtype, sizes, FLOPs and bytes.

Sizes by class: ``gemm`` (batch, m, n, k); ``conv`` (groups, m, n, k) of the implicit matrix product, then the height
and width of the image that m covers; ``depthwise`` (elements of the result, positions of the kernel); ``attention``
(batch x heads, queries, keys, head size); ``rnn`` (steps, batch, input, hidden); ``norm``, ``softmax`` and
``reduction`` (rows, width); ``batch_norm`` (channels, elements per channel); others (elements,).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from modelsummary.costs.operator_calls import OperatorCall, TensorSpec, specs_in

__all__ = ["CLASSES", "POINTWISE", "Work", "is_free", "work_of"]

CLASSES = (
    "gemm",
    "conv",
    "depthwise",
    "attention",
    "rnn",
    "norm",
    "batch_norm",
    "softmax",
    "reduction",
    "pool",
    "elementwise",
    "copy",
    "index",
    "other",
)
POINTWISE = frozenset({"elementwise", "copy", "batch_norm"})


class Work(NamedTuple):
    """The work of one kernel.

    Attributes:
        name: name of the operator, and its part in parentheses, such as ``"aten.convolution_backward (weight)"``.
        op_class: operator class, one of ``CLASSES``.
        dtype: dtype in which it computes.
        sizes: sizes by class, listed in the module's docstring.
        flops: twice its multiply-adds.
        nbytes: bytes that it reads and writes.
    """

    name: str
    op_class: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    flops: int
    nbytes: int


_NOTHING = frozenset(
    f"aten.{name}"
    for name in "empty empty_like empty_strided new_empty new_empty_strided detach alias _unsafe_view set_"
    " as_strided_ _local_scalar_dense lift_fresh sym_size resize_".split()
)
_COPIES = frozenset(
    "clone _to_copy copy copy_ cat stack contiguous constant_pad_nd roll flip repeat zeros zeros_like new_zeros ones"
    " ones_like full full_like new_full fill fill_ zero_ arange scalar_tensor eye slice_backward select_backward"
    " unfold_backward reflection_pad2d reflection_pad2d_backward replication_pad2d im2col col2im pixel_shuffle"
    " pixel_unshuffle tril triu lift_fresh_copy split_with_sizes_copy slice_scatter select_scatter".split()
)
_INDEXED = frozenset(
    "embedding embedding_dense_backward gather scatter scatter_add scatter_ scatter_add_ index index_select index_put"
    " index_put_ _index_put_impl_ index_add index_add_ index_copy take where_index sort topk nonzero unique"
    " _embedding_bag max_pool2d_with_indices_backward".split()
)
_WRITES_ROWS = frozenset("index_copy index_put _index_put_impl index_put_ _index_put_impl_ scatter_".split())
_NORMS = ("layer_norm", "group_norm", "rms_norm")
_REDUCTIONS = frozenset(
    "sum mean var var_mean std std_mean amax amin max min argmax argmin prod all any linalg_vector_norm norm logsumexp"
    " cumsum cumprod nll_loss_forward nll_loss_backward mse_loss".split()
)


def is_free(call: OperatorCall) -> bool:
    """Return True if a call launches no kernel, as views and allocations do."""
    return call.rule.is_view or call.name in _NOTHING or not call.name.startswith(("aten.", "torchvision."))


def work_of(call: OperatorCall) -> tuple[Work, ...]:
    """Return the work of each kernel of a call; an empty tuple for a view or an allocation."""
    if is_free(call):
        return ()
    base = call.name.partition(".")[2]
    maker = _MAKERS.get(base)
    if maker is not None:
        try:
            return tuple(maker(call))
        except (IndexError, TypeError, AttributeError):  # an overload with other arguments
            pass
    return (_simple(call, base),)


def _dtype(call: OperatorCall) -> torch.dtype:
    floats = [spec.dtype for spec in (*call.tensors, *call.outputs) if spec.dtype.is_floating_point]
    return floats[0] if floats else (call.outputs[0].dtype if call.outputs else torch.float32)


def _work(
    call: OperatorCall, op_class: str, sizes: Sequence[int], part: str = "", flops: int | None = None, nbytes: int = -1
) -> Work:
    cost = call.cost
    moved = cost.bytes_read + cost.bytes_written if nbytes < 0 else nbytes
    name = f"{call.name} ({part})" if part else call.name
    return Work(name, op_class, _dtype(call), tuple(sizes), 2 * cost.macs if flops is None else flops, moved)


def _simple(call: OperatorCall, base: str) -> Work:
    base = base.removesuffix("_") if base not in _COPIES | _INDEXED else base
    first = call.tensors[0] if call.tensors else (call.outputs[0] if call.outputs else None)
    if call.cost.macs:
        return _work(call, "gemm", _product_sizes(call))
    if base in _COPIES:
        return _work(call, "copy", [sum(spec.numel for spec in call.outputs)])
    if base in _INDEXED:
        written = _written_rows(call, base)
        if written is not None:
            return _work(call, "index", [written.numel], nbytes=2 * written.nbytes)
        return _work(call, "index", [sum(spec.numel for spec in call.outputs)])
    if "batch_norm" in base:
        return _batch_norm(call)
    if any(norm in base for norm in _NORMS):
        return _work(call, "norm", _norm_sizes(call))
    if "softmax" in base:
        return _work(call, "softmax", _rows_of(first))
    if "pool" in base or "upsample" in base or "grid_sampler" in base:
        return _work(call, "pool", [sum(spec.numel for spec in call.outputs)])
    if base in _REDUCTIONS:
        return _work(call, "reduction", _rows_of(first, call.outputs))
    is_pointwise = torch.Tag.pointwise in getattr(call.func, "tags", ()) or base.endswith(("_backward", "dropout"))
    elements = max((spec.numel for spec in (*call.outputs, *call.tensors)), default=0)
    return _work(call, "elementwise" if is_pointwise or call.rule.per_element else "other", [elements])


def _written_rows(call: OperatorCall, base: str) -> TensorSpec | None:
    """Return the values that an operator writes to some places of a tensor in place; None for other operators."""
    if not call.rule.writes or base not in _WRITES_ROWS:
        return None
    first = call.tensors[0]
    return next((spec for spec in reversed(call.tensors[1:]) if spec.dtype is first.dtype), None)


def _rows_of(spec: TensorSpec | None, outputs: Sequence[TensorSpec] = ()) -> tuple[int, int]:
    if spec is None or not spec.numel:
        return 0, 0
    width = max(spec.numel // max(outputs[0].numel, 1), 1) if outputs else (spec.shape or (1,))[-1]
    return spec.numel // max(width, 1), width


def _product_sizes(call: OperatorCall) -> tuple[int, int, int, int]:
    """Return the sizes of a product, derived from its result and its multiply-adds."""
    out = call.outputs[0] if call.outputs else TensorSpec((1,), (1,), torch.float32)
    n = max((out.shape or (1,))[-1], 1)
    m = max(out.numel // n, 1)
    return 1, m, n, max(call.cost.macs // (m * n), 1)


def _norm_sizes(call: OperatorCall) -> tuple[int, int]:
    """Return the number of rows, and their width: the elements that are normalised together."""
    statistics = [spec for spec in call.outputs[1:] if spec.numel] or [
        spec for spec in call.tensors if 0 < spec.numel < call.tensors[0].numel
    ]
    x = max(call.tensors, key=lambda spec: spec.numel)
    rows = statistics[0].numel if statistics else x.numel // max((x.shape or (1,))[-1], 1)
    if "backward" in call.name:
        rows = x.numel // max((x.shape or (1,))[-1], 1)
    return max(rows, 1), max(x.numel // max(rows, 1), 1)


def _batch_norm(call: OperatorCall) -> Work:
    """Return the work of a batch norm; in training, statistics take an extra pass over the input."""
    x = max(call.tensors, key=lambda spec: spec.numel)
    backward = "backward" in call.name
    training = backward or any(value is True for value in call.args[5:6])
    moved = call.cost.bytes_read + call.cost.bytes_written
    moved += (2 if backward else 1) * x.nbytes if training else 0
    channels = x.shape[1] if len(x.shape) > 1 else 1
    part = "" if training else "inference"
    return _work(call, "batch_norm", (channels, x.numel // max(channels, 1)), part, nbytes=moved)


# ------------------------------------------------------------------------------------------ matrix products


def _mm(call: OperatorCall, first: int = 0) -> list[Work]:
    a, b = call.args[first], call.args[first + 1]
    batch = a.shape[0] if len(a.shape) == 3 else 1
    m, k = a.shape[-2:] if len(a.shape) > 1 else (1, a.shape[0])
    n = b.shape[-1] if len(b.shape) > 1 else 1
    return [_work(call, "gemm", (batch, m, n, k))]


def _addmm(call: OperatorCall) -> list[Work]:
    return _mm(call, 1)


def _grouped_mm(call: OperatorCall) -> list[Work]:
    """Return the work of one product per group; rows are taken to be shared out evenly."""
    a, b = call.args[:2]
    groups = next((each.shape[0] for each in (a, b, call.outputs[0]) if len(each.shape) == 3), 1)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if len(a.shape) == len(b.shape) == 2:
        k //= groups
    elif len(a.shape) == 2:
        m //= groups
    elif len(b.shape) == 2:
        n //= groups
    return [_work(call, "gemm", (groups, max(m, 1), max(n, 1), max(k, 1)))]


def _linear(call: OperatorCall) -> list[Work]:
    x, weight = call.args[:2]
    k = x.shape[-1]
    return [_work(call, "gemm", (1, x.numel // max(k, 1), weight.shape[0], k))]


def _convolution(call: OperatorCall) -> list[Work]:
    x, weight, bias = call.args[:3]
    transposed, groups = (call.args[6], call.args[8]) if len(call.args) > 8 else (False, call.args[-1])
    out = call.outputs[0]
    large, small = (x, out) if transposed else (out, x)
    small_kernel = tuple(weight.shape[2:]) == (3, 3) and groups == 1 and not transposed
    part = _described("3x3" if small_kernel and set(call.args[3]) == set(call.args[5]) == {1} else "", x)
    parts = [_conv(call, part, large, small, weight, groups, 2 * call.cost.macs)]
    if bias is not None:
        parts.append(_work(call, "elementwise", [out.numel], "bias", 0, 2 * out.nbytes))
    return parts


def _described(part: str, x: TensorSpec, *more: str) -> str:
    """Return the parts of a description, with the layout of images whose channels are next to each other."""
    is_last = len(x.shape) > 2 and x.shape[1] > 1 and x.stride[1] == 1
    return ", ".join(each for each in (part, *more, "channels last" if is_last else "") if each)


def _conv(
    call: OperatorCall, part: str, result: TensorSpec, given: TensorSpec, weight: TensorSpec, groups: int, flops: int
) -> Work:
    """Return the implicit matrix product of a convolution: positions x output channels x summed elements."""
    moved = result.nbytes + given.nbytes + weight.nbytes
    positions = prod(weight.shape[2:])
    if groups > 1 and weight.shape[1] == 1:
        return _work(call, "depthwise", (result.numel, positions), part, flops, moved)
    m = max(result.numel // max(result.shape[1], 1), 1)
    sizes = (groups, m, weight.shape[0] // groups, weight.shape[1] * positions, *_image(result))
    return _work(call, "conv", sizes, part, flops, moved)


def _image(x: TensorSpec) -> tuple[int, int]:
    return (prod(x.shape[2:-1]), x.shape[-1]) if len(x.shape) > 2 else (1, 1)


def _convolution_backward(call: OperatorCall) -> list[Work]:
    grad, x, weight = call.args[:3]
    transposed, groups, mask = call.args[7], call.args[9], call.args[10]
    large = x if transposed else grad
    flops = 2 * large.numel * prod(weight.shape[1:])
    positions, channels = prod(weight.shape[2:]), weight.shape[1]
    parts = []
    depthwise = groups > 1 and channels == 1
    small_kernel = tuple(weight.shape[2:]) == (3, 3) and groups == 1 and not transposed
    kind = "3x3" if small_kernel and set(call.args[4]) == set(call.args[6]) == {1} else ""
    moved = grad.nbytes + x.nbytes + weight.nbytes
    pixels = max(large.numel // max(large.shape[1], 1), 1)
    if mask[0]:
        pixels_in = max(x.numel // max(x.shape[1], 1), 1)
        sizes = (groups, pixels_in, x.shape[1] // groups, (weight.shape[0] // groups) * positions, *_image(x))
        taken = (x.numel, positions) if depthwise else sizes
        parts.append(
            _work(call, "depthwise" if depthwise else "conv", taken, _described("input", grad, kind), flops, moved)
        )
    if mask[1]:
        sizes = (groups, weight.shape[0] // groups, channels * positions, pixels, *_image(x))
        taken = (x.numel, positions) if depthwise else sizes
        parts.append(
            _work(call, "depthwise" if depthwise else "conv", taken, _described("weight", grad, kind), flops, moved)
        )
    if mask[2]:
        parts.append(_work(call, "reduction", (grad.shape[1], pixels), "bias", 0, grad.nbytes))
    return parts


def _attention(call: OperatorCall) -> list[Work]:
    tensors = [spec for spec in specs_in(call.args) if len(spec.shape) >= 3]
    query, key, value = tensors[1:4] if "backward" in call.name else tensors[:3]
    outer = prod(query.shape[:-2])
    sizes = (outer, query.shape[-2], key.shape[-2], max(query.shape[-1], value.shape[-1]))
    return [_work(call, "attention", sizes, "causal" if _is_causal(call) else "")]


def _is_causal(call: OperatorCall) -> bool:
    """Return True for attention with a causal mask; its place among the arguments differs between kernels."""
    place = [argument.name for argument in call.func._schema.arguments].index("is_causal")
    return bool(call.args[place] if place < len(call.args) else call.kwargs.get("is_causal", False))


def _rnn(call: OperatorCall) -> list[Work]:
    x = call.args[0]
    hidden = call.outputs[0].shape[-1] if call.outputs else 1
    return [_work(call, "rnn", (x.shape[0], x.shape[1], x.shape[2], hidden))]


_MAKERS: dict[str, Callable[[OperatorCall], list[Work]]] = {
    **dict.fromkeys("mm bmm _int_mm mv dot".split(), _mm),
    **dict.fromkeys("addmm baddbmm addmv _addmm_activation addbmm".split(), _addmm),
    **dict.fromkeys("_grouped_mm _scaled_grouped_mm".split(), _grouped_mm),
    **dict.fromkeys("linear mkldnn_linear".split(), _linear),
    "convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys("mkldnn_rnn_layer mkldnn_rnn_layer_backward".split(), _rnn),
    **{
        f"_scaled_dot_product_{kind}{suffix}": _attention
        for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
        for suffix in ("", "_backward")
    },
}
