"""The work of one operator call as kernels: operator class, dtype, sizes, FLOPs and bytes.

Sizes by class: ``gemm`` (batch, m, n, k); ``conv`` (groups, m, n, k) of the implicit matrix product, then the height
and width of the image that m covers; ``depthwise`` (elements of the result, positions of the kernel); ``attention``
(batch x heads, queries, keys, head size); ``rnn`` (steps, batch, input, hidden); ``norm``, ``softmax`` and
``reduction`` (rows, width); ``batch_norm`` (channels, elements per channel); others (elements,).
Operators of unknown work are of class ``other``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_facts import OpRule

__all__ = ["CLASSES", "POINTWISE", "Work", "class_of", "is_free", "work", "work_of"]

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


class Work(NamedTuple):
    """The work of one kernel.

    Attributes:
        operator: name of the operator.
        op_class: operator class, one of ``CLASSES``.
        dtype: dtype in which it computes.
        sizes: sizes by class, listed in the module's docstring.
        flops: twice its multiply-adds.
        nbytes: bytes that it reads and writes.
        part: ``"input"``, ``"weight"`` or ``"bias"`` for the kernels of a convolution, ``"inference"`` for a batch norm
            that computes no statistics.
        is_backward: computes gradients; such kernels of some classes are far slower.
        is_3x3: a dense 3 x 3 convolution of stride 1, which Winograd's algorithm computes.
        is_causal: attention to earlier positions only.
        is_efficient: attention by the memory-efficient kernel.
        channels_last: the channels of an image are next to each other.

    >>> Work("aten.convolution", "conv", torch.float32, (1, 64, 8, 27, 8, 8), 27_648, 9_000, is_3x3=True).name
    'aten.convolution (3x3)'
    """

    operator: str
    op_class: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    flops: int
    nbytes: int
    part: str = ""
    is_backward: bool = False
    is_3x3: bool = False
    is_causal: bool = False
    is_efficient: bool = False
    channels_last: bool = False

    @property
    def name(self) -> str:
        """The operator, and in parentheses what distinguishes this kernel, for tables."""
        marks = {"3x3": self.is_3x3, "causal": self.is_causal, "channels last": self.channels_last}
        said = ", ".join(filter(None, (self.part, *(mark for mark, holds in marks.items() if holds))))
        return f"{self.operator} ({said})" if said else self.operator


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
    if call.rule.facts.kernels is not None:
        try:
            return tuple(call.rule.facts.kernels(call, call.bound))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):  # other arguments, or a sparse matrix
            pass
    return (_simple(call),)


def _dtype(call: OperatorCall) -> torch.dtype:
    dtypes = [spec.dtype for spec in (*call.tensors, *call.outputs)]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if floats:
        return floats[0]
    if call.cost.macs and call.tensors and call.tensors[0].dtype.itemsize == 1:
        return torch.int8  # products of integers, of which quantised tensors consist
    return call.outputs[0].dtype if call.outputs else dtypes[0] if dtypes else torch.float32


def work(
    call: OperatorCall,
    op_class: str,
    sizes: Sequence[int],
    part: str = "",
    flops: int | None = None,
    nbytes: int = -1,
    **facts: bool,
) -> Work:
    """Return a kernel of a call, with the multiply-adds and bytes of the call unless they are given."""
    cost = call.cost
    moved = cost.bytes_read + cost.bytes_written if nbytes < 0 else nbytes
    computed = 2 * cost.macs if flops is None else flops
    backward = "backward" in call.name
    return Work(call.name, op_class, _dtype(call), tuple(sizes), computed, moved, part, backward, **facts)


def class_of(rule: OpRule) -> str:
    """Return the class of an operator without multiply-adds, by its properties and its name.

    >>> from modelsummary.operators.operator_facts import op_rule
    >>> class_of(op_rule(torch.ops.aten.relu_.default)), class_of(op_rule(torch.ops.aten.linalg_qr.default))
    ('elementwise', 'other')
    """
    namespace, _, base = rule.name.rpartition(".")
    if rule.matrix_like and rule.facts.macs is None:
        return "other"
    if namespace not in _KNOWN_NAMESPACES:
        return "elementwise" if rule.is_pointwise or not rule.matrix_like else "other"  # a conversion, by its name
    if base in _COPIES or base in _INDEXED:
        return "copy" if base in _COPIES else "index"
    base = base.removesuffix("_")
    by_name = next((op_class for op_class, pattern in _BY_NAME.items() if pattern.search(base)), "")
    return by_name or ("elementwise" if rule.is_pointwise or rule.per_element else "other")


def _simple(call: OperatorCall) -> Work:
    if call.cost.macs:
        return work(call, "gemm", _product_sizes(call))
    first = call.tensors[0] if call.tensors else (call.outputs[0] if call.outputs else None)
    written = sum(spec.numel for spec in call.outputs)
    op_class = "other" if call.cost.uncounted is not None else class_of(call.rule)
    if op_class == "index":
        rows = _written_rows(call)
        return (
            work(call, "index", [written])
            if rows is None
            else work(call, "index", [rows.numel], nbytes=2 * rows.nbytes)
        )
    if op_class in ("copy", "pool"):
        return work(call, op_class, [written])
    if op_class == "batch_norm":
        return _batch_norm(call)
    if op_class == "norm":
        return work(call, "norm", _norm_sizes(call))
    if op_class == "softmax":
        return work(call, "softmax", _rows_of(first))
    if op_class == "reduction":
        return work(call, "reduction", _rows_of(first, call.outputs))
    return work(call, op_class, [max((spec.numel for spec in (*call.outputs, *call.tensors)), default=0)])


def _written_rows(call: OperatorCall) -> TensorSpec | None:
    """Return the values that an operator writes to some places of a tensor in place; None for other operators."""
    if not call.rule.writes or call.name.removeprefix("aten.") not in _WRITES_ROWS:
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
    training = backward or call.bound.get("training", call.bound.get("train")) is True
    moved = call.cost.bytes_read + call.cost.bytes_written
    moved += (2 if backward else 1) * x.nbytes if training else 0
    channels = x.shape[1] if len(x.shape) > 1 else 1
    part = "" if training else "inference"
    return work(call, "batch_norm", (channels, x.numel // max(channels, 1)), part, nbytes=moved)
