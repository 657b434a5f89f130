"""The work of one operator call as kernels: operator class, dtype, sizes, FLOPs and bytes.

Sizes by class: ``gemm`` (batch, m, n, k); ``conv`` (groups, m, n, k) of the implicit matrix product, then the height
and width of the image that m covers; ``depthwise`` (elements of the result, positions of the kernel); ``attention``
(batch x heads, queries, keys, head size); ``rnn`` (steps, batch, input, hidden); ``norm``, ``softmax`` and
``reduction`` (rows, width); ``batch_norm`` (channels, images, elements of a channel of an image); ``pool``,
``elementwise``, ``copy``, ``index`` and ``other`` (elements,).
Operators of unknown work are of class ``other``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import torch

from modelsummary.operators.operator_calls import OperatorCall, TensorSpec

__all__ = ["ALIGNED_BYTES", "POINTWISE", "Work", "alignment_of", "has_channels_last", "is_innermost", "work", "work_of"]

POINTWISE = frozenset({"elementwise", "copy", "batch_norm"})
ALIGNED_BYTES = 16  # the most that a kernel of products loads at a time


class Work(NamedTuple):
    """The work of one kernel.

    Attributes:
        operator: name of the operator.
        op_class: operator class, one of those in the module's docstring.
        dtype: dtype in which it computes.
        sizes: sizes by class, listed in the module's docstring.
        flops: twice its multiply-adds.
        nbytes: bytes that it reads and writes.
        part: ``"input"``, ``"weight"`` or ``"bias"`` for the kernels of a convolution; ``"inference"`` for a batch norm
            that computes no statistics, ``"without cuDNN"`` for one that torch's own kernels compute;
            ``"element by element"`` for a kernel that loads single elements, as its tensors differ in dtype or strides;
            ``"strided"`` for a copy in another order of dimensions, ``"transposed"`` if another dimension becomes
            innermost; ``"over rows"`` for a reduction of elements that are not next to each other; ``"query sums"`` for
            the conversion of gradients that attention added up; ``"triton"`` for a kernel that Inductor generated.
        is_backward: computes gradients; such kernels of some classes are far slower.
        is_3x3: a dense 3 x 3 convolution of stride 1, which Winograd's algorithm computes.
        is_causal: attention to earlier positions only.
        is_efficient: attention by the memory-efficient kernel.
        is_masked: attention that adds a mask to its scores.
        drops: attention with dropout.
        channels_last: the channels of an image are next to each other.
        is_product: a convolution that multiplies its weight and each image as it is, whose channels are its rows.
        is_grouped: products of groups of rows with weights of their own, as of experts.
        is_added: a product adds its result to a sum, which it reads and writes.
        alignment: bytes of which the rows of a product's matrices begin at multiples; 16 is the most that counts.

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
    is_masked: bool = False
    drops: bool = False
    channels_last: bool = False
    is_product: bool = False
    is_grouped: bool = False
    is_added: bool = False
    alignment: int = 16

    @property
    def name(self) -> str:
        """The operator, and in parentheses what distinguishes this kernel, for tables."""
        marks = {"3x3": self.is_3x3, "causal": self.is_causal, "channels last": self.channels_last}
        details = ", ".join(filter(None, (self.part, *(mark for mark, holds in marks.items() if holds))))
        return f"{self.operator} ({details})" if details else self.operator


def work_of(call: OperatorCall) -> tuple[Work, ...]:
    """Return the work of each kernel of a call; an empty tuple for a view or an allocation."""
    if not call.rule.launches_kernel:
        return ()
    if call.rule.facts.kernels is not None:
        try:
            return tuple(call.rule.facts.kernels(call, call.bound))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):  # other arguments, or a sparse matrix
            pass
    return (_simple(call),)


def alignment_of(itemsize: int, steps: Iterable[int]) -> int:
    """Return the bytes, at most 16, of which the rows of a matrix begin at multiples.

    Args:
        steps: elements from one row to the next; 1 is a step in a row.

    >>> alignment_of(2, [1024, 1]), alignment_of(2, [50_258, 1])
    (16, 4)
    """
    return gcd(ALIGNED_BYTES, *(step * itemsize for step in steps if step > 1))


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
    **facts: Any,
) -> Work:
    """Return a kernel of a call, with the multiply-adds and bytes of the call unless they are given."""
    cost = call.cost
    moved = cost.bytes_read + cost.bytes_written if nbytes < 0 else nbytes
    computed = 2 * cost.macs if flops is None else flops
    backward = "backward" in call.name
    return Work(call.name, op_class, _dtype(call), tuple(sizes), computed, moved, part, backward)._replace(**facts)


def _simple(call: OperatorCall) -> Work:
    if call.cost.macs:
        return work(call, "gemm", _product_sizes(call))
    first = call.tensors[0] if call.tensors else (call.outputs[0] if call.outputs else None)
    written = sum(spec.numel for spec in call.outputs)
    op_class = "other" if call.cost.uncounted is not None else call.rule.op_class
    if op_class == "index":
        rows = _written_rows(call)
        return (
            work(call, "index", [written])
            if rows is None
            else work(call, "index", [rows.numel], nbytes=2 * rows.nbytes)
        )
    if op_class == "copy":
        return work(call, "copy", [written], _copy_part(call))
    if op_class == "pool":
        return work(call, "pool", [written])
    if op_class == "batch_norm":
        return _batch_norm(call)
    if op_class == "norm":
        return work(call, "norm", _norm_sizes(call))
    if op_class == "softmax":
        return work(call, "softmax", _rows_of(first))
    if op_class == "reduction":
        return work(call, "reduction", _rows_of(first, call.outputs), "" if is_innermost(call) else "over rows")
    part = "element by element" if op_class == "elementwise" and _loads_single_elements(call) else ""
    return work(call, op_class, [max((spec.numel for spec in (*call.outputs, *call.tensors)), default=0)], part)


def _written_rows(call: OperatorCall) -> TensorSpec | None:
    """Return the values that an operator writes to some places of a tensor in place; None for other operators."""
    if not (call.rule.writes and call.rule.facts.writes_rows):
        return None
    first = call.tensors[0]
    return next((spec for spec in reversed(call.tensors[1:]) if spec.dtype is first.dtype), None)


def _copy_part(call: OperatorCall) -> str:
    """Return ``"strided"`` or ``"transposed"`` for a copy of one tensor into another order of its dimensions.

    What joins tensors, or converts to a wider dtype, loads elements one by one.
    """
    if not (call.tensors and call.outputs):
        return ""
    source, target = call.tensors[-1], call.outputs[0]
    if source.shape != target.shape:
        return "element by element" if call.rule.facts.joins else ""
    dims = [pair for size, *pair in zip(source.shape, source.stride, target.stride, strict=True) if size > 1]
    order = [step for before, step in sorted(dims) if before]  # 0: one element is written several times
    if order != sorted(order):
        return "transposed" if order[0] != min(order) else "strided"
    is_widened = source.dtype.itemsize < target.dtype.itemsize and source.dtype.is_floating_point
    return "element by element" if is_widened else ""


def _loads_single_elements(call: OperatorCall) -> bool:
    """Return True if torch's kernel cannot load several elements at once: tensors differ in dtype, shape or strides.

    The lists of a foreach kernel hold operands of many sizes, but the operands of one result are alike.
    """
    if call.args and type(call.args[0]) in (list, tuple):
        return False
    whole = [spec for spec in (*call.tensors, *call.outputs) if spec.numel > 1 and spec.dtype.is_floating_point]
    return len({(spec.shape, spec.stride, spec.dtype) for spec in whole}) > 1


def is_innermost(call: OperatorCall) -> bool:
    """Return True for a reduction over elements that are next to each other in memory."""
    if not call.tensors:
        return True
    x, dims = call.tensors[0], call.bound.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not dims or not x.shape:
        return True
    reduced = {dim % len(x.shape) for dim in dims}
    strides = [
        (stride, dim in reduced) for dim, (size, stride) in enumerate(zip(x.shape, x.stride, strict=True)) if size > 1
    ]
    return [inner for _, inner in sorted(strides)] == sorted([inner for _, inner in strides], reverse=True)


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
    """Return the work of a batch norm; in training, statistics take an extra pass over the input.

    In channels last, cuDNN's persistent kernel keeps on the chip what it has read. Images in bfloat16 are not given to
    cuDNN (``_batch_norm_impl_index`` in aten/src/ATen/native/Normalization.cpp).
    """
    x = max(call.tensors, key=lambda spec: spec.numel)
    backward = "backward" in call.name
    training = backward or call.bound.get("training", call.bound.get("train")) is True
    channels_last = has_channels_last(x)
    moved = call.cost.bytes_read + call.cost.bytes_written
    moved += (2 if backward else 1) * x.nbytes if training and not channels_last else 0
    channels = x.shape[1] if len(x.shape) > 1 else 1
    is_native = x.dtype is torch.bfloat16 and not channels_last
    part = "inference" if not training else "without cuDNN" if is_native else ""
    image = prod(x.shape[2:])
    sizes = channels, x.numel // max(channels * image, 1), image
    return work(call, "batch_norm", sizes, part, nbytes=moved, channels_last=channels_last)


def has_channels_last(x: TensorSpec) -> bool:
    """Return True for an image whose channels are next to each other.

    >>> has_channels_last(TensorSpec((2, 3, 4, 4), (48, 1, 12, 3), torch.float32))
    True
    """
    return len(x.shape) > 2 and x.shape[1] > 1 and x.stride[1] == 1
