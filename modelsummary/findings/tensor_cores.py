"""Shapes and attention that miss the fast kernels of tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from modelsummary.findings.evidence import HALF, Evidence
from modelsummary.findings.ruleset import Defect, rule
from modelsummary.layer_info import CallKey
from modelsummary.operators.operator_calls import Line, OperatorCall
from modelsummary.operators.operator_work import ALIGNED_BYTES, Work, alignment_of, work_of

_SMALLEST = 64  # narrower matrices gain nothing from padding
_LEAST_SHARE = 0.01  # of the multiply-adds of the model
_LARGEST_HEAD = 256
OF_TORCH = "aten._safe_softmax"  # only torch's own attention calls it
_BEFORE = frozenset("aten.add aten.sub aten.masked_fill aten.where".split())
_AFTER = "aten.native_dropout"
_ARGUMENTS = (
    "pass tensors of 4 dimensions whose last stride is 1, either a mask or is_causal, and as many heads of keys as of "
    "queries; enable_gqa is fused in half precision alone"
)
_CALL = "call torch.nn.functional.scaled_dot_product_attention"
_OF_WEIGHTS = "pass need_weights=False, as nobody reads the weights that it returns"
_FUSED_DTYPES = (*HALF, torch.float32)


def places_in_parts(evidence: Evidence) -> set[tuple[CallKey | None, Line | None]]:
    """Return the calls and lines at which torch runs its own attention in parts; the casts there are torch's."""
    return {evidence.place(index) for index, call in evidence.forward() if call.name == OF_TORCH}


@rule("S501", "width-not-aligned")
def width_not_aligned(evidence: Evidence) -> Iterator[Defect]:
    """Yield half-precision products whose weight has rows or columns that are not multiples of 16 bytes.

    cuBLAS loads operands 16 bytes at a time only if their rows begin at multiples of 16 bytes
    (https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication). Rows of the weight and of
    the result begin so if its widths are multiples; the number of rows that are multiplied does not matter. Products of
    less than a hundredth of the multiply-adds are left out.
    """
    if evidence.half is None:
        return
    total = sum(call.cost.macs for _, call in evidence.forward())
    for index, call in evidence.forward():
        if not call.rule.facts.multiplies or call.cost.macs < _LEAST_SHARE * total:
            continue
        if call.outputs[0].dtype not in HALF or not any(is_weight(evidence, index)):
            continue
        step = ALIGNED_BYTES // call.outputs[0].dtype.itemsize
        columns = call.outputs[0].shape[-1]
        inner = call.cost.macs // max(call.outputs[0].numel, 1)
        for name, size in (("outputs", columns), ("inputs", inner)):
            if size >= _SMALLEST and size % step:
                padded = -(-size // step) * step
                what = f"has {size} {name}, no multiple of {step}, in {str(call.outputs[0].dtype)[6:]}"
                now, then = (_product_seconds(evidence, call, {size: width}) for width in (size, padded))
                remedy = (
                    f"pad to a multiple of {step}, such as {padded}, for loads of 16 bytes at a time; predicted are "
                    f"{1e6 * now:,.1f} us as it is and {1e6 * then:,.1f} us padded"
                )
                gain = max(now - then, 0.0)
                yield Defect(what, remedy, evidence.row(index), seconds=gain, is_call=False)


def _product_seconds(evidence: Evidence, call: OperatorCall, widths: Mapping[int, int]) -> float:
    """Return the predicted seconds of a product and, in training, of its gradients, with other widths.

    Args:
        widths: a size of the weight -> the size to take for it.
    """
    seconds = 0.0
    for work in work_of(call):
        if work.op_class == "gemm":
            batch, m, *weight = work.sizes
            n, k = (widths.get(size, size) for size in weight)
            alignment = alignment_of(work.dtype.itemsize, (n, k))  # a row of each of the matrices has n or k elements
            gradients = ((m, k, n), (n, k, m)) if evidence.trace.train else ()
            for sizes in ((m, n, k), *gradients):
                rows, columns, inner = sizes
                nbytes = batch * (rows * inner + inner * columns + rows * columns) * work.dtype.itemsize
                flops = 2 * batch * m * n * k
                sized = work._replace(sizes=(batch, *sizes), flops=flops, nbytes=nbytes, alignment=alignment)
                seconds += evidence.seconds_of(sized)
    return seconds


def is_weight(evidence: Evidence, index: int) -> Iterator[bool]:
    """Yield for each argument of an operator whether it is a parameter, or a cast of one."""
    run = evidence.run(index)
    for spec, storage in zip(run.call.tensors, run.reads, strict=False):
        maker = evidence.maker.get(storage)
        is_cast = (
            maker is not None and any(evidence.call(maker).tensors[:1]) and evidence.call(maker).tensors[0].is_param
        )
        yield len(spec.shape) > 1 and (spec.is_param or is_cast)


@rule("S502", "head-size-padded", is_priced=True)
def head_size_padded(evidence: Evidence) -> Iterator[Defect]:
    """Yield fused attention for which torch pads the heads to a multiple of 8 in each call."""
    for index, call in evidence.forward():
        if not is_fused_attention(call):
            continue
        reads = evidence.run(index).reads[:3]
        pads = [evidence.maker[storage] for storage in reads if storage in evidence.maker]
        pads = [pad for pad in pads if evidence.call(pad).name == "aten.constant_pad_nd"]
        if pads and evidence.call(pads[0]).tensors[0].shape[-1] != call.tensors[0].shape[-1]:
            size, padded = evidence.call(pads[0]).tensors[0].shape[-1], call.tensors[0].shape[-1]
            nbytes = sum(evidence.call(pad).outputs[0].nbytes for pad in pads)
            what = f"has heads of {size}, which attention pads to {padded} in each call"
            seconds = sum(map(evidence.seconds, pads))
            remedy = f"choose heads of {padded}"
            yield Defect(what, remedy, evidence.row(index), evidence.line(index), nbytes, seconds)


def is_fused_attention(call: OperatorCall) -> bool:
    """Return True for attention that is one kernel."""
    return call.rule.name.startswith("aten._scaled_dot_product_") and call.cost.macs > 0


@rule("S503", "attention-not-fused", is_priced=True)
def attention_not_fused(evidence: Evidence) -> Iterator[Defect]:
    """Yield attention in several kernels: a product of activations, a softmax, and a product with the result.

    The cost is the time beyond the one of a fused kernel, and the scores that are written. Attention whose weights are
    returned, or read otherwise, needs them and is left out.
    """
    for attention in attentions(evidence):
        softmax, scores = evidence.call(attention.softmax), evidence.call(attention.scores)
        dtype = (
            evidence.half if attention.is_torchs and evidence.half else evidence.call(attention.values).outputs[0].dtype
        )
        is_multihead = isinstance(evidence.module(attention.scores), nn.MultiheadAttention)
        remedy = _remedy(softmax, scores, dtype, _OF_WEIGHTS if is_multihead else _CALL)
        if remedy is None or (attention.is_torchs and not evidence.is_on_target):
            continue
        fused = evidence.seconds_of(_fused_work(evidence, attention, dtype))
        seconds = sum(map(evidence.seconds, attention.indices)) - fused
        if seconds > 0:
            parts = attention.indices - {attention.values}
            nbytes = sum(evidence.call(part).cost.bytes_written for part in parts)
            row, line = evidence.row(attention.scores), evidence.line(attention.scores)
            yield Defect(*remedy, row, line, nbytes, seconds)


class Attention(NamedTuple):
    """Attention in several kernels.

    Attributes:
        scores, softmax, values: the two products, and the softmax between them.
        between: pointwise operators between these, such as the scale and the mask.
        is_torchs: whether torch's ``scaled_dot_product_attention`` runs it.
    """

    scores: int
    softmax: int
    values: int
    between: tuple[int, ...]
    is_torchs: bool

    @property
    def indices(self) -> frozenset[int]:
        """The operators."""
        return frozenset({self.scores, self.softmax, self.values, *self.between})


def attentions(evidence: Evidence) -> Iterator[Attention]:
    """Yield the attention that runs in several kernels and needs its scores for nothing else."""
    for index, call in evidence.forward():
        if call.rule.facts.on_scores == "softmax" and evidence.run(index).reads:
            attention = _attention(evidence, index)
            if attention is not None:
                yield attention


def _attention(evidence: Evidence, softmax: int) -> Attention | None:
    """Return the attention around a softmax; None if it is not between two products of activations."""
    run = evidence.run(softmax)
    elements = run.call.outputs[0].numel
    before = list(evidence.chain(run.reads[0]))
    if not before or not _is_of_activations(evidence, before[-1], elements):
        return None
    if not all(_is_scale_or_mask(evidence.call(index), elements) for index in before[:-1]):
        return None
    between, storage = before[:-1], run.makes[0]
    while not evidence.is_held(storage):
        uses = [use for use in evidence.readers[storage] if use not in evidence.dead]
        if len(uses) != 1:
            return None
        use = evidence.call(uses[0])
        if use.rule.facts.multiplies:
            is_torchs = run.call.name == OF_TORCH
            return Attention(before[-1], softmax, uses[0], tuple(between), is_torchs)
        if not (use.name == _AFTER or _is_copy(use)) or use.outputs[0].numel != elements:
            return None
        between.append(uses[0])
        storage = evidence.run(uses[0]).makes[0]
    return None


def _is_scale_or_mask(call: OperatorCall, elements: int) -> bool:
    """Return True for what a fused kernel does between product and softmax: scale rows, and add or fill a mask."""
    name = call.name.removesuffix("_")
    if name in ("aten.mul", "aten.div"):
        factors = [spec for spec in call.tensors if spec.numel != elements]
        return len(factors) == len(call.tensors) - 1 and all(spec.shape[-1:] in ((), (1,)) for spec in factors)
    return name in _BEFORE or _is_copy(call)


def _is_copy(call: OperatorCall) -> bool:
    return call.rule.facts.casts or call.rule.facts.copies


def _is_of_activations(evidence: Evidence, product: int, elements: int) -> bool:
    """Return True for a product of two activations with that many elements."""
    call = evidence.call(product)
    return (
        bool(call.rule.facts.multiplies) and call.outputs[0].numel == elements and not any(is_weight(evidence, product))
    )


def _fused_work(evidence: Evidence, attention: Attention, dtype: torch.dtype) -> Work:
    """Return the work of a fused kernel of the same attention."""
    scores, values = evidence.call(attention.scores), evidence.call(attention.values)
    queries, keys = scores.outputs[0].shape[-2:]
    size = _head_size(scores)
    heads = scores.outputs[0].numel // max(queries * keys, 1)
    nbytes = (heads * (queries + 2 * keys) * size + values.outputs[0].numel) * dtype.itemsize
    flops = 2 * (scores.cost.macs + values.cost.macs)
    return Work("attention", "attention", dtype, (heads, queries, keys, size), flops, nbytes)


def _head_size(scores: OperatorCall) -> int:
    return scores.cost.macs // max(scores.outputs[0].numel, 1)


def _remedy(softmax: OperatorCall, scores: OperatorCall, dtype: torch.dtype, fused: str) -> tuple[str, str] | None:
    """Return what is wrong, and what to do; None if no fused kernel takes heads of this size.

    Args:
        fused: what to do about attention that is written in parts.
    """
    size = _head_size(scores)
    width = ALIGNED_BYTES // dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    is_possible = dtype in _FUSED_DTYPES and size <= _LARGEST_HEAD and size % width == 0
    if softmax.name != OF_TORCH:
        what = "computes attention in parts and writes all scores"
        return (what, fused) if is_possible else None
    what = "scaled_dot_product_attention has no fused kernel"
    if dtype not in _FUSED_DTYPES:
        return f"{what} for {name}", "cast queries, keys and values to float32 or half precision"
    if size % width:
        return f"{what} for heads of {size} in {name}", f"choose heads of a multiple of {width}"
    return f"{what} for these arguments", _ARGUMENTS
