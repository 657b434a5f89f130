"""What the names of operators say: most of torch's 2,000 belong to a family that shares a part of its name.

A row of the table comes before its family.
"""

from __future__ import annotations

import re

__all__ = ["COLLECTIVES", "class_by_name", "counted_by_name", "launches_nothing", "may_multiply"]

COLLECTIVES = frozenset("c10d c10d_functional _c10d_functional".split())
# Collectives, FSDP's copies, bookkeeping, and torchvision's pooling and box operators, which multiply no matrices.
_FREE_NAMESPACES = COLLECTIVES | frozenset("fsdp prim profiler rngprims torchvision".split())
# Namespaces of torch with names as in aten: the name says whether an operator multiplies.
_NAMED_NAMESPACES = frozenset("aten quantized quantized_decomposed".split())
# Namespaces whose operators mean what their names say. The work of others is unknown, except for multiply-adds that a
# formula counts.
_KNOWN_NAMESPACES = _NAMED_NAMESPACES | frozenset("torchvision fsdp bitsandbytes".split())

# Words in the names of operators that multiply matrices (or solve, factorise, transform), and words in the names of
# their helpers, which do not.
_PRODUCT_WORDS = frozenset(
    "mm addmm bmm baddbmm addbmm matmul smm hspmm sspaddmm mv addmv addr ger dot vdot outer gemm"
    " convolution conv conv1d conv2d conv3d linear bilinear trilinear attention attn mha transformer rnn lstm gru"
    " linalg fft stft istft cholesky qr svd eig eigh solve lstsq lu geqrf orgqr ormqr cdist pdist matrix".split()
)
_HELPER_WORDS = frozenset(
    "thnn prepack pack unpack reorder convert flatten check cross diagonal vector powsum vander fftfreq rfftfreq"
    " cache search norm".split()
)
# Words in the names of operators that only convert their arguments, in any namespace.
_CONVERSIONS = frozenset("quant dequant quantize dequantize qparams".split())

# Operators without a kernel that their schemas do not reveal: allocations, hidden views, sparse and nested tensors
# around tensors that exist, a copy to the host, another name for a storage, checks of the compiler.
_NO_KERNELS = re.compile(
    r"aten::(empty|empty_like|empty_strided|empty_permuted|new_empty|new_empty_strided|_empty_affine_quantized|resize"
    r"|_efficientzerotensor|resize_as|record_stream"
    r"|_unsafe_view|unsafe_(split|split_with_sizes|chunk)|_nested_(get_|view_from|tensor_(size|strides|storage_off)).*"
    r"|_?sparse_(coo|compressed|csr|csc|bsr|bsc)_tensor.*|sparse_resize.*|resize_as_sparse_?|_?resize_output_?|_coalesced_?"
    r"|_local_scalar_dense|_functional_(assert|sym_constrain).*|_make_dep_token|set|shallow_copy_data_)"
)
# Operators with one element-wise operation per element of their input, or per element of their result.
_PER_INPUT = re.compile(
    r".*(batch|layer|group|instance|rms)_norm|_?(safe_|log_)?softmax$|.*pool[123]?d|cum(sum|prod|max|min)"
    r"|logcumsumexp|linalg_vector_norm|(nan)?(sum|mean|median|prod)$|all$|any$|arg(max|min)$|a(max|min)$|aminmax$"
    r"|count_nonzero$|logsumexp$|norm$|std$|var$|(std|var)_mean$|max$|min$"
)
_PER_OUTPUT = re.compile(r"_?upsample|_?grid_sampler|cudnn_grid_sampler|native_dropout|_weight_norm_interface")

_CLASSES = {  # class -> a pattern of names without the last underscore; the first that matches counts
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


def may_multiply(namespace: str, base: str) -> bool:
    """Return True if an operator may multiply matrices: by its name, or if its library is unknown.

    >>> may_multiply("aten", "addmm"), may_multiply("aten", "relu"), may_multiply("mylib", "my_op")
    (True, False, True)
    """
    words = set(base.split("_"))
    looks_like_product = not words.isdisjoint(_PRODUCT_WORDS) and words.isdisjoint(_HELPER_WORDS)
    if namespace in _NAMED_NAMESPACES:
        return looks_like_product
    return namespace not in _FREE_NAMESPACES and (looks_like_product or words.isdisjoint(_CONVERSIONS))


def launches_nothing(name: str) -> bool:
    """Return True for an operator without a kernel whose schema does not say so.

    >>> launches_nothing("aten::empty_like"), launches_nothing("aten::zeros_like")
    (True, False)
    """
    return _NO_KERNELS.fullmatch(name) is not None


def class_by_name(namespace: str, base: str) -> str | None:
    """Return the class of an operator, ``""`` for a name that says nothing; None if names of the library say nothing.

    >>> class_by_name("aten", "avg_pool2d"), class_by_name("aten", "relu"), class_by_name("mylib", "avg_pool2d")
    ('pool', '', None)
    """
    if namespace not in _KNOWN_NAMESPACES:
        return None
    base = base.removesuffix("_")
    return next((op_class for op_class, pattern in _CLASSES.items() if pattern.search(base)), "")


def counted_by_name(base: str, *, is_binary: bool) -> str:
    """Return whose elements count as element-wise operations: "in", "out" or ``""`` for a name that says nothing.

    Args:
        base: name of the operator without its namespace.
        is_binary: it is pointwise with two operands, as ``max(a, b)``; ``max(a)`` is a reduction.

    >>> counted_by_name("max", is_binary=False), counted_by_name("max", is_binary=True)
    ('in', '')
    """
    base = base.removesuffix("_")
    if _PER_OUTPUT.match(base):
        return "out"
    return "in" if _PER_INPUT.match(base) and not is_binary else ""
