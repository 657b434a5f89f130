"""The work of one operator call as kernels: operator class, dtype, sizes, FLOPs and bytes.

Sizes by class: ``gemm`` (batch, m, n, k); ``conv`` (groups, m, n, k) of the implicit matrix product, then the height
and width of the image that m covers; ``depthwise`` (elements of the result, positions of the kernel); ``attention``
(batch x heads, queries, keys, head size); ``rnn`` (steps, batch, input, hidden); ``norm``, ``softmax`` and
``reduction`` (rows, width); ``batch_norm`` (channels, elements per channel); others (elements,).
Operators of unknown work are of class ``other``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from modelsummary.costs.operator_calls import OperatorCall, TensorSpec
from modelsummary.costs.operators import OpRule

__all__ = ["CLASSES", "POINTWISE", "Work", "class_of", "is_free", "work_of"]

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
# Namespaces whose operators mean what their names say; "" has higher-order operators. The work of others is unknown,
# except for multiply-adds that a formula counts.
_KNOWN_NAMESPACES = frozenset(["", *"aten quantized quantized_decomposed torchvision fsdp bitsandbytes".split()])
_HIGHER_ORDER = ("query", "key", "value")  # the first arguments of flex_attention


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


_COPIES = frozenset(
    "clone _to_copy copy copy_ copy_sparse_to_sparse_ cat _cat cat_relu stack _stack contiguous roll flip repeat zeros"
    " zeros_like new_zeros _new_zeros_with_same_feature_meta ones ones_like new_ones full full_like new_full fill fill_"
    " zero zero_ arange range linspace logspace scalar_tensor eye slice_backward select_backward diagonal_backward"
    " unfold_backward as_strided_scatter diagonal_scatter slice_scatter select_scatter slice_inverse pixel_shuffle"
    " pixel_unshuffle tril tril_ triu triu_ tril_indices triu_indices block_diag diag_embed complex polar rot90 lift"
    " im2col col2im from_file _chunk_cat chunk_cat all_gather_copy_in all_gather_copy_out split_with_sizes_copy"
    " _pin_memory sparse_mask _sparse_mask_projection _spdiags _lazy_clone _conj_physical _mkldnn_reshape"
    " _mkldnn_transpose _mkldnn_transpose_ _nested_compute_contiguous_strides_offsets"
    " _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward".split()
)
_INDEXED = frozenset(
    "embedding embedding_dense_backward embedding_renorm embedding_renorm_ embedding_4bit embedding_byte gather scatter"
    " scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index index_select index_select_backward"
    " index_put index_put_ _index_put_impl _index_put_impl_ index_add index_add_ index_copy index_copy_ index_fill"
    " index_fill_ index_reduce index_reduce_ take put put_ sort topk kthvalue mode median nanmedian nonzero"
    " nonzero_static unique _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive _embedding_bag"
    " _embedding_bag_forward_only _embedding_bag_backward _embedding_bag_dense_backward"
    " _embedding_bag_per_sample_weights_backward embedding_bag_2bit_rowwise_offsets embedding_bag_4bit"
    " embedding_bag_4bit_rowwise_offsets embedding_bag_byte embedding_bag_byte_rowwise_offsets"
    " max_pool2d_with_indices_backward max_pool3d_with_indices_backward masked_select masked_scatter masked_scatter_"
    " bincount histc histogram _histogramdd_from_bin_cts _histogramdd_bin_edges _histogramdd_from_bin_tensors"
    " searchsorted bucketize isin repeat_interleave randperm one_hot nms qnms _convert_indices_from_coo_to_csr"
    " _convert_indices_from_csr_to_coo _coalesce _unsafe_index _unsafe_index_put _unsafe_masked_index"
    " _unsafe_masked_index_put_accumulate segment_reduce _segment_reduce_backward".split()
)
_WRITES_ROWS = frozenset(
    "index_copy index_copy_ index_put _index_put_impl index_put_ _index_put_impl_ scatter_".split()
)
_BY_NAME = {  # class -> a pattern of names without the last underscore; the first that matches counts
    "batch_norm": re.compile(r"batch_norm"),
    "norm": re.compile(r"(layer|group|rms|instance|local_response|cross_map)_norm"),
    "softmax": re.compile(r"softmax"),
    "pool": re.compile(r"pool|upsample|grid_sampler|roi_(align|pool)|interpolate"),
    "reduction": re.compile(
        r"^(nan)?(sum|mean)$|^_sparse_(csr_)?(sum|prod)$|^_aminmax$|^_is_(all|any)_true$|^allclose$|^hash_tensor$|^native_norm$"
        r"|_powsum$|^(var|std)(_mean)?$|^a?(max|min)$|^arg(max|min)$|^aminmax$|^prod$|^all$|^any$"
        r"|^linalg_vector_norm$|^norm$|^logsumexp$|cum(sum|prod|max|min)|logcumsumexp|_loss(2d)?(_forward|_backward)?$"
        r"|^count_nonzero$|^equal$|^dist$|^trace$|^renorm$|^binary_cross_entropy$|^is_nonzero$"
    ),
    "copy": re.compile(
        r"_copy$|^_copy_from|_?to_(sparse|dense|mkldnn)|^_?(reflection|replication|constant|to)_?pad(ded)?"
        r"|pad(ded)?_to_|(pre|un)?pack(ed)?_|(pre|un)pack|_pack$|channel_shuffle|reorder|flatten_weight"
        r"|^_nested_(from|tensor_from)|convert_weight|^_cslt_compress|^_sparse_semi_structured_(apply|tile)"
    ),
    "elementwise": re.compile(
        r"_backward(_data)?$|_grad$|dropout|^_foreach_|^_fused_|^_?thnn_fused|quant|bernoulli|^(log_)?normal"
        r"|^(rand|cauchy|exponential|geometric|multinomial|poisson|binomial)|^random|uniform|^_?standard_gamma|^_philox"
        r"|^_?sample_dirichlet|^masked_fill|_masked_scale|^(linalg_)?cross$|^_?amp_|prelu|rrelu|^_weight_norm|^floor_div"
        r"|^fmod|^remainder|^bitwise|^__i?[lr]shift|^clamp|_window$|^_?(add|mul|div|sub|rsub)(_scalar)?(_relu)?$|^glu|^_make_per"
        r"|^int_repr|hardswish|^log_sigmoid|^(leaky_relu|relu6|celu|elu|sigmoid|threshold)$|_with_logits$|affine_grid"
        r"|^_transform_bias|^q_per_channel|fftfreq|^box_iou"
    ),
}


def is_free(call: OperatorCall) -> bool:
    """Return True if a call launches no kernel, as views and allocations do."""
    return call.rule.is_free


def work_of(call: OperatorCall) -> tuple[Work, ...]:
    """Return the work of each kernel of a call; an empty tuple for a view or an allocation."""
    if is_free(call):
        return ()
    namespace, _, base = call.name.rpartition(".")
    maker = _MAKERS.get(base) if namespace in _KNOWN_NAMESPACES else None
    if maker is not None:
        try:
            return tuple(maker(call, _bound(call)))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):  # other arguments, or a sparse matrix
            pass
    return (_simple(call, base),)


def _bound(call: OperatorCall) -> dict[str, Any]:
    """Return the arguments of a call by the names of its schema, with defaults; of a higher-order operator by place."""
    schema = getattr(call.func, "_schema", None)
    if schema is None:
        return dict(zip(_HIGHER_ORDER, call.args, strict=False))
    defaults = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    names = (each.name for each in schema.arguments)
    return {**defaults, **dict(zip(names, call.args, strict=False)), **call.kwargs}


def _dtype(call: OperatorCall) -> torch.dtype:
    dtypes = [spec.dtype for spec in (*call.tensors, *call.outputs)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if floats:
        return floats[0]
    if call.cost.macs and call.tensors and call.tensors[0].dtype.itemsize == 1:
        return torch.int8  # products of integers, of which quantised tensors consist
    return call.outputs[0].dtype if call.outputs else dtypes[0] if dtypes else torch.float32


def _work(
    call: OperatorCall, op_class: str, sizes: Sequence[int], part: str = "", flops: int | None = None, nbytes: int = -1
) -> Work:
    cost = call.cost
    moved = cost.bytes_read + cost.bytes_written if nbytes < 0 else nbytes
    name = f"{call.name} ({part})" if part else call.name
    return Work(name, op_class, _dtype(call), tuple(sizes), 2 * cost.macs if flops is None else flops, moved)


def class_of(rule: OpRule) -> str:
    """Return the class of an operator without multiply-adds, by its properties and its name.

    >>> from modelsummary.costs.operators import op_rule
    >>> class_of(op_rule(torch.ops.aten.relu_.default)), class_of(op_rule(torch.ops.aten.linalg_qr.default))
    ('elementwise', 'other')
    """
    namespace, _, base = rule.name.rpartition(".")
    if rule.matrix_like and rule.formula is None:
        return "other"
    if namespace not in _KNOWN_NAMESPACES:
        return "elementwise" if rule.is_pointwise or not rule.matrix_like else "other"  # a conversion, by its name
    if base in _COPIES or base in _INDEXED:
        return "copy" if base in _COPIES else "index"
    base = base.removesuffix("_")
    by_name = next((op_class for op_class, pattern in _BY_NAME.items() if pattern.search(base)), "")
    return by_name or ("elementwise" if rule.is_pointwise or rule.per_element else "other")


def _simple(call: OperatorCall, base: str) -> Work:
    if call.cost.macs:
        return _work(call, "gemm", _product_sizes(call))
    first = call.tensors[0] if call.tensors else (call.outputs[0] if call.outputs else None)
    written = sum(spec.numel for spec in call.outputs)
    op_class = "other" if call.cost.uncounted is not None else class_of(call.rule)
    if op_class == "index":
        rows = _written_rows(call, base)
        return (
            _work(call, "index", [written])
            if rows is None
            else _work(call, "index", [rows.numel], nbytes=2 * rows.nbytes)
        )
    if op_class in ("copy", "pool"):
        return _work(call, op_class, [written])
    if op_class == "batch_norm":
        return _batch_norm(call)
    if op_class == "norm":
        return _work(call, "norm", _norm_sizes(call))
    if op_class == "softmax":
        return _work(call, "softmax", _rows_of(first))
    if op_class == "reduction":
        return _work(call, "reduction", _rows_of(first, call.outputs))
    return _work(call, op_class, [max((spec.numel for spec in (*call.outputs, *call.tensors)), default=0)])


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

_Bound = Mapping[str, Any]


def _mm(call: OperatorCall, bound: _Bound) -> list[Work]:
    a, b = [each for name, each in bound.items() if name in _FACTORS and isinstance(each, TensorSpec)][-2:]
    batch = a.shape[0] if len(a.shape) == 3 else 1
    m, k = a.shape[-2:] if len(a.shape) > 1 else (1, a.shape[0])
    n = b.shape[-1] if len(b.shape) > 1 else 1
    return [_work(call, "gemm", (batch, m, n, k))]


def _grouped_mm(call: OperatorCall, bound: _Bound) -> list[Work]:
    """Return the work of one product per group; rows are taken to be shared out evenly."""
    a, b = [each for name, each in bound.items() if name in _FACTORS][-2:]
    groups = next((each.shape[0] for each in (a, b, call.outputs[0]) if len(each.shape) == 3), 1)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if len(a.shape) == len(b.shape) == 2:
        k //= groups
    elif len(a.shape) == 2:
        m //= groups
    elif len(b.shape) == 2:
        n //= groups
    return [_work(call, "gemm", (groups, max(m, 1), max(n, 1), max(k, 1)))]


def _linear(call: OperatorCall, _: _Bound) -> list[Work]:
    """Return a product of rows with a weight, which may be packed: the result has its columns."""
    x, columns = call.tensors[0], call.outputs[0].shape[-1]
    k = x.shape[-1]
    return [_work(call, "gemm", (1, x.numel // max(k, 1), columns, k))]


def _convolution(call: OperatorCall, bound: _Bound) -> list[Work]:
    x, weight = bound["input"] if "input" in bound else bound["self"], bound["weight"]
    transposed = bound.get("transposed", "transpose" in call.name)
    groups = bound.get("groups", 1 if transposed else x.shape[1] // weight.shape[1])
    out = call.outputs[0]
    large, small = (x, out) if transposed else (out, x)
    is_3x3 = tuple(weight.shape[2:]) == (3, 3) and groups == 1 and not transposed
    is_dense = {*bound.get("stride", ()), *bound.get("dilation", ())} == {1}
    part = _described("3x3" if is_3x3 and is_dense else "", x)
    parts = [_conv(call, part, large, small, weight, groups, 2 * call.cost.macs)]
    if bound.get("bias") is not None and call.name in _ADDS_BIAS:
        parts.append(_work(call, "elementwise", [out.numel], "bias", 0, 2 * out.nbytes))
    return parts


def _packed_convolution(call: OperatorCall, _: _Bound) -> list[Work]:
    """Return a convolution whose weight is packed: its sizes follow from its result and its multiply-adds."""
    out = call.outputs[0]
    m, n = max(out.numel // max(out.shape[1], 1), 1), out.shape[1]
    sizes = (1, m, n, max(call.cost.macs // (m * n), 1), *_image(out))
    return [_work(call, "conv", sizes, _described("", out))]


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


def _convolution_backward(call: OperatorCall, bound: _Bound) -> list[Work]:
    grad, x, weight = (bound[name] for name in ("grad_output", "input", "weight"))
    transposed, groups, mask = (bound[name] for name in ("transposed", "groups", "output_mask"))
    large = x if transposed else grad
    flops = 2 * large.numel * prod(weight.shape[1:])
    positions, channels = prod(weight.shape[2:]), weight.shape[1]
    parts = []
    depthwise = groups > 1 and channels == 1
    small_kernel = tuple(weight.shape[2:]) == (3, 3) and groups == 1 and not transposed
    kind = "3x3" if small_kernel and {*bound["stride"], *bound["dilation"]} == {1} else ""
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


def _attention(call: OperatorCall, bound: _Bound) -> list[Work]:
    """Return the work of fused attention; blocks that a block mask excludes are not computed."""
    query, key, value = (bound[name] for name in ("query", "key", "value"))
    computed = call.cost.macs - (call.cost.skipped_macs or 0)
    is_causal = bound.get("is_causal") or bound.get("custom_mask_type")
    heads_inside = (
        re.search(r"\._(flash|efficient|cudnn)_attention_", call.name) is not None
    )  # (batch, length, heads, size)
    length_dim = -3 if heads_inside else -2
    queries, keys = query.shape[length_dim], key.shape[length_dim]
    outer = query.numel // max(queries * query.shape[-1], 1)
    sizes = (outer, queries, keys, max(query.shape[-1], value.shape[-1]))
    return [_work(call, "attention", sizes, "causal" if is_causal else "", 2 * computed)]


def _rnn(call: OperatorCall, bound: _Bound) -> list[Work]:
    x = bound["input"]
    hidden = call.outputs[0].shape[-1] if call.outputs else 1
    return [_work(call, "rnn", (x.shape[0], x.shape[1], x.shape[2], hidden))]


# names of the factors of a product in the schemas of torch; ``self`` is a bias where two others follow
_FACTORS = frozenset("self tensor mat1 mat2 mat_a mat_b batch1 batch2 mat vec vec1 vec2 other".split())
_ADDS_BIAS = frozenset(f"aten.{name}" for name in "convolution _convolution convolution_overrideable".split())
_MAKERS: dict[str, Callable[[OperatorCall, _Bound], list[Work]]] = {
    **dict.fromkeys("mm bmm _int_mm mv dot vdot addmm baddbmm addmv _addmm_activation addbmm".split(), _mm),
    **dict.fromkeys("_scaled_mm _scaled_mm_v2".split(), _mm),
    **dict.fromkeys("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2".split(), _grouped_mm),
    **dict.fromkeys("linear mkldnn_linear _weight_int8pack_mm _weight_int4pack_mm linear_relu".split(), _linear),
    **dict.fromkeys("_weight_int4pack_mm_for_cpu _dyn_quant_matmul_4bit linear_dynamic".split(), _linear),
    **dict.fromkeys("linear_relu_dynamic linear_dynamic_fp16 linear_relu_dynamic_fp16 gemm_4bit".split(), _linear),
    **dict.fromkeys("gemv_4bit int8_linear_matmul int8_scaled_mm int8_mixed_scaled_mm".split(), _linear),
    **dict.fromkeys("convolution _convolution convolution_overrideable deform_conv2d".split(), _convolution),
    **dict.fromkeys("cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu".split(), _convolution),
    **dict.fromkeys("cudnn_convolution_transpose mkldnn_convolution miopen_convolution".split(), _convolution),
    **dict.fromkeys("miopen_convolution_relu miopen_convolution_add_relu".split(), _convolution),
    **dict.fromkeys("miopen_convolution_transpose miopen_depthwise_convolution".split(), _convolution),
    **dict.fromkeys(
        "_conv_depthwise2d conv_depthwise3d _slow_conv2d_forward slow_conv3d_forward".split(), _convolution
    ),
    **dict.fromkeys("thnn_conv2d slow_conv3d slow_conv_dilated2d slow_conv_dilated3d".split(), _convolution),
    **dict.fromkeys("slow_conv_transpose2d slow_conv_transpose3d".split(), _convolution),
    **{
        f"{kind}{size}d{suffix}": _packed_convolution
        for kind in ("conv", "conv_transpose")
        for size in (1, 2, 3)
        for suffix in ("", "_relu", "_add", "_add_relu", "_dynamic")
    },
    **dict.fromkeys("convolution_backward convolution_backward_overrideable".split(), _convolution_backward),
    **dict.fromkeys("mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn miopen_rnn".split(), _rnn),
    **dict.fromkeys("flex_attention flex_attention_backward".split(), _attention),
    **{
        f"_scaled_dot_product_{kind}{suffix}": _attention
        for kind in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
        for suffix in ("", "_backward")
    },
    **{f"_scaled_dot_product_fused_attention_overrideable{suffix}": _attention for suffix in ("", "_backward")},
    **{
        f"_{kind}_attention_{suffix}": _attention
        for kind in ("flash", "efficient", "cudnn")
        for suffix in ("forward", "backward", "forward_no_dropout_inplace")
    },
}
