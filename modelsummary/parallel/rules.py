"""Where the shards are after a function of torch: one rule for each family of functions.

A rule raises ``Blocked`` if it cannot tell, and ``Needs`` with an operand that has to be sharded, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.expert_shards import ExpertShards
from modelsummary.parallel.function_names import ELEMENTWISE, FACTORIES
from modelsummary.parallel.index_rules import indexed, selected
from modelsummary.parallel.layouts import (
    Blocked,
    FunctionCall,
    Needs,
    Operand,
    Pieces,
    Sharded,
    Shares,
    dim_of,
    dims_of,
    part_of,
    reshaped,
    sharded_operand,
)
from modelsummary.record.events import Value, values_in

__all__ = ["ELEMENTWISE", "FACTORIES", "layout_after", "layouts_after", "terms_of"]


def layout_after(call: FunctionCall) -> Sharded | None:
    """Return the layout that all results of a call have. Raises like ``layouts_after``."""
    layout = layouts_after(call)
    if isinstance(layout, list):
        raise Blocked(f"{call.at} takes unequal parts of the sharded dimension; equal parts work")
    return layout


def layouts_after(call: FunctionCall) -> Sharded | list[Sharded | None] | None:
    """Return the layout of the results of a call that takes sharded operands; of each, if they differ.

    Raises:
        Blocked: the call cannot take them.
        Needs: another operand has to be sharded as well.
    """
    rule = _RULES.get(call.name)
    if rule is None:
        raise Blocked(f"{call.at} has no rule for sharded tensors; elementwise functions, views and products have one")
    if any(operand.shape == () and operand.layout is not None for operand in call.operands):
        raise Blocked(f"{call.at} takes a number that differs between ranks; a number of a whole tensor works")
    if call.name not in _TAKES_PIECES and any(
        operand.layout is not None and operand.layout.pieces for operand in call.operands
    ):
        raise Blocked(f"{call.at} takes a tensor of unequal pieces; elementwise functions, views and splits work")
    return rule(call)


# -------------------------------------------------------------------------------------------------- rules


def _elementwise(call: FunctionCall) -> Sharded:
    shape = call.result_shape
    layouts: set[Sharded] = set()
    for operand in call.operands:
        if operand.layout is not None:
            layouts.add(operand.layout._replace(dim=operand.layout.dim + len(shape) - len(operand.shape)))
    if len(layouts) != 1:
        raise Blocked(call.differ)
    (layout,) = layouts
    for operand in call.operands:
        if operand.layout is None:
            dim = layout.dim - (len(shape) - len(operand.shape))
            if layout.pieces and dim >= 0 and operand.shape[dim] != 1:
                raise Blocked(call.differ)
            call.meets(operand, dim, shape[layout.dim], layout.outer)
    return layout


def _like(call: FunctionCall) -> Sharded:
    """Return the layout of a constant that has the shape of the first operand."""
    return sharded_operand(call)[1]


def _along(position: int, name: str = "dim", default: Any = None, *, reduces: bool = False) -> Any:
    """Return a rule for functions that work along dimensions, none of which may be sharded."""

    def rule(call: FunctionCall) -> Sharded:
        if isinstance(call.argument(position, name), (Value, Attribute)):  # max(x, y)
            return _elementwise(call)
        operand, layout = sharded_operand(call)
        dim = call.argument(position, name, default)
        dims = dims_of(None if type(dim) is bool else dim, len(operand.shape))  # std(True) takes no dimension
        if layout.dim in dims:
            raise Blocked(call.along)
        if not reduces or len(call.result_shape) == len(operand.shape):
            return layout
        return layout._replace(dim=layout.dim - sum(reduced_dim < layout.dim for reduced_dim in dims))

    return rule


def _norm(call: FunctionCall) -> Sharded:
    """Follow ``layer_norm`` and ``rms_norm``, which work along the last dimensions."""
    operand, layout = sharded_operand(call)
    if layout.dim >= len(operand.shape) - len(call.argument(1, "normalized_shape")):
        raise Blocked(call.along)
    for parameter in call.operands[1:]:
        call.meets(parameter, -1, 0)
    return layout


def _view(call: FunctionCall) -> Sharded:
    operand, layout = sharded_operand(call)
    if math.prod(operand.shape) != math.prod(call.result_shape):
        raise Blocked(f"{call.at} reads a tensor as another dtype; views of the same dtype work")
    return reshaped(operand.shape, call.result_shape, layout, call.sizes)


def _permuted(order: Callable[[FunctionCall, int], Sequence[int]]) -> Any:
    def rule(call: FunctionCall) -> Sharded:
        operand, layout = sharded_operand(call)
        return layout._replace(dim=list(order(call, len(operand.shape))).index(layout.dim))

    return rule


def _transposed(call: FunctionCall, ndim: int) -> Sequence[int]:
    order = list(range(ndim))
    one, other = dim_of(call.argument(1, "dim0"), ndim), dim_of(call.argument(2, "dim1"), ndim)
    order[one], order[other] = other, one
    return order


def _permutation(call: FunctionCall, ndim: int) -> Sequence[int]:
    dims = call.argument(1, "dims")
    return [dim_of(dim, ndim) for dim in (dims if isinstance(dims, (tuple, list)) else call.event.args[1:])]


def _last_two(_call: FunctionCall, ndim: int) -> Sequence[int]:
    return [*range(ndim - 2), ndim - 1, ndim - 2]


def _squeezed(call: FunctionCall) -> Sharded:
    """Follow a function that adds or removes a dimension of size one; the others keep their order."""
    operand, layout = sharded_operand(call)
    after = call.result_shape
    if call.name == "unsqueeze":
        return layout._replace(dim=layout.dim + (dim_of(call.argument(1, "dim"), len(after)) <= layout.dim))
    dims = call.argument(1, "dim")
    gone = dims_of(dims, len(operand.shape)) & {dim for dim, size in enumerate(operand.shape) if size == 1}
    return layout._replace(dim=layout.dim - sum(dim < layout.dim for dim in gone))


def _expanded(call: FunctionCall) -> Sharded:
    operand, layout = sharded_operand(call)
    return layout._replace(dim=layout.dim + len(call.result_shape) - len(operand.shape))


def _repeated(call: FunctionCall) -> Sharded:
    operand, layout = sharded_operand(call)
    after = call.result_shape
    dim = layout.dim + len(after) - len(operand.shape)
    if after[dim] != operand.shape[layout.dim]:
        raise Blocked(f"{call.at} repeats the sharded dimension; other dimensions can be repeated")
    return layout._replace(dim=dim)


def _repeat_interleaved(call: FunctionCall) -> Sharded:
    operand, layout = sharded_operand(call)
    dim = call.argument(2, "dim")
    if dim is None or type(call.argument(1, "repeats")) is not int:
        raise Blocked(f"{call.at} repeats each element a different number of times; one number and dim= work")
    dim_of(dim, len(operand.shape))
    return layout


def _parted(call: FunctionCall) -> Sharded | list[Sharded | None] | None:
    """Follow ``chunk`` and ``split`` along another dimension, or of a dimension of several pieces into whole pieces."""
    operand, layout = sharded_operand(call)
    if dim_of(call.argument(2, "dim", 0), len(operand.shape)) != layout.dim:
        return layout
    parts = [value.shape[layout.dim] for value in values_in(call.event.result)]
    if len(parts) == 1:
        return layout
    borders = [0, *accumulate(parts)]
    try:
        layouts = [part_of(call, operand, layout, *bounds) for bounds in pairwise(borders)]
    except Pieces:
        raise Pieces(call.along, operand.leaf, parts) from None
    return layouts if None in layouts or len(set(layouts)) > 1 else layouts[0]


def _gated(call: FunctionCall) -> Sharded:
    """Follow ``glu``, which takes the two halves of a dimension."""
    operand, layout = sharded_operand(call)
    if dim_of(call.argument(1, "dim", -1), len(operand.shape)) != layout.dim:
        return layout
    if layout.outer != 2:
        raise Pieces(call.along, operand.leaf, (1, 1))
    return layout._replace(outer=1)


def _unbound(call: FunctionCall) -> Sharded:
    """Follow ``unbind`` along another dimension."""
    operand, layout = sharded_operand(call)
    dim = dim_of(call.argument(1, "dim", 0), len(operand.shape))
    if dim == layout.dim:
        raise Pieces(call.along, operand.leaf, (1,) * operand.shape[dim])
    return layout._replace(dim=layout.dim - (dim < layout.dim))


def _flipped(call: FunctionCall) -> Sharded:
    operand, layout = sharded_operand(call)
    dims = call.argument(2 if call.name == "roll" else 1, "dims")
    if call.name == "flip" and type(dims) is int:
        dims = call.event.args[1:]
    if layout.dim in dims_of(dims, len(operand.shape)):
        raise Blocked(call.along)
    return layout


def _padded(call: FunctionCall) -> Sharded:
    operand, layout = sharded_operand(call)
    pad = call.argument(1, "pad")
    if layout.dim >= len(operand.shape) - len(pad) // 2:
        raise Blocked(f"{call.at} pads the sharded dimension; other dimensions can be padded")
    return layout


def _concatenated(call: FunctionCall) -> Sharded:
    layouts = {operand.layout for operand in call.operands if operand.layout is not None}
    if len(layouts) != 1:
        raise Blocked(call.differ)
    (layout,) = layouts
    shape = next(operand.shape for operand in call.operands if operand.layout is not None)
    stacks = call.name == "stack"
    dim = dim_of(call.argument(1, "dim", 0), len(shape) + stacks)
    if dim == layout.dim and not stacks:
        raise Blocked(f"{call.at} joins along the sharded dimension; along another dimension it can be split")
    for operand in call.operands:
        if operand.layout is None and operand.shape != (0,):  # torch skips these, which have no dimension to be sharded
            if not isinstance(operand.leaf, Value):
                raise Blocked(
                    f"{call.at} takes a constant of the whole size beside a sharded tensor; computed tensors work"
                )
            raise Needs(operand.leaf, layout)
    return layout._replace(dim=layout.dim + (stacks and dim <= layout.dim))


def terms_of(call: FunctionCall) -> tuple[list[tuple[Operand, str]], str]:
    """Return the operands of a product with a label for each of their dimensions, and the labels of its result."""
    if call.name == "einsum":
        equation = call.event.args[0]
        if not isinstance(equation, str) or "->" not in equation:
            raise Blocked(f"{call.at} has an equation without an arrow; one with an arrow works")
        terms, result = ExpertShards.labels("einsum", [len(operand.shape) for operand in call.operands], equation)
        return list(zip(call.operands, terms, strict=True)), result
    begin, names = (1, ("batch1", "batch2")) if call.name == "baddbmm" else (0, ("input", "other"))
    names = ("input", "mat2") if call.name in ("bmm", "mm") else names
    one, other = call.operand(begin, names[0]), call.operand(begin + 1, names[1])
    if len(one.shape) < 2 or len(other.shape) < 2:
        raise Blocked(f"{call.at} takes a vector; matrices work")
    terms, result = ExpertShards.labels("matmul", [len(one.shape), len(other.shape)])
    added = [(operand, result[len(result) - len(operand.shape) :]) for operand in [call.operand(0)] * begin]
    return [*zip((one, other), terms, strict=True), *added], result


def _product(call: FunctionCall) -> Sharded:
    """Follow a product whose sharded dimension is one of its result."""
    terms, result = terms_of(call)
    labels = {(term[operand.layout.dim], operand.layout.outer) for operand, term in terms if operand.layout is not None}
    if len(labels) != 1:
        raise Blocked(call.differ)
    ((label, outer),) = labels
    if label not in result:
        raise Blocked(f"{call.at} sums over the sharded dimension; linear layers that take it alone can")
    layout = Sharded(result.index(label), outer)
    for operand, term in terms:
        if operand.layout is None:
            call.meets(operand, term.find(label), call.result_shape[layout.dim], outer)
    return layout


def _attention(call: FunctionCall) -> Sharded:
    """Follow ``scaled_dot_product_attention``, sharded by the heads or by the batch."""
    parts = [call.operand(position, name) for position, name in enumerate(("query", "key", "value"))]
    mask = call.operand(3, "attn_mask") if call.argument(3, "attn_mask") is not None else None
    ndim = len(parts[0].shape)
    layouts = {
        operand.layout._replace(dim=operand.layout.dim + ndim - len(operand.shape))
        for operand in (*parts, mask)
        if operand is not None and operand.layout is not None
    }
    if len(layouts) != 1:
        raise Blocked(call.differ)
    (layout,) = layouts
    if layout.dim >= ndim - 2:
        raise Blocked(call.along)
    for operand in parts:
        if operand.layout is None:
            if operand.shape[layout.dim] == 1 and operand.leaf in call.reduced:
                continue
            if operand.shape[layout.dim] == 1 or not isinstance(operand.leaf, Value):
                raise Shares(
                    f"{call.at} takes a whole key or value that all heads share; one that a linear layer makes works",
                    operand.leaf,
                )
            raise Needs(operand.leaf, layout)
        call.sizes.add(operand.shape[layout.dim] // layout.outer)
    if mask is not None and mask.layout is None:
        call.meets(mask, layout.dim - ndim + len(mask.shape), parts[0].shape[layout.dim], layout.outer)
    return layout


def _as_complex(call: FunctionCall) -> Sharded:
    operand, layout = sharded_operand(call)
    if layout.dim == len(operand.shape) - 1:
        raise Blocked(call.along)
    return layout


_TAKES_PIECES = ELEMENTWISE | frozenset(
    """
view reshape flatten unflatten transpose swapaxes swapdims permute squeeze unsqueeze getitem split chunk tensor_split
split_with_sizes
""".split()
)
_RULES: dict[str, Callable[[FunctionCall], Sharded | list[Sharded | None] | None]] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys("zeros_like ones_like empty_like full_like".split(), _like),
    **dict.fromkeys("softmax log_softmax softmin cumsum cumprod logcumsumexp".split(), _along(1)),
    **dict.fromkeys(("sort", "argsort"), _along(1, default=-1)),
    **dict.fromkeys("sum mean amax amin std var prod logsumexp".split(), _along(1, reduces=True)),
    **dict.fromkeys("argmax argmin max min any all median".split(), _along(1, reduces=True)),
    "topk": _along(2, default=-1),
    "norm": _along(2, reduces=True),
    "normalize": _along(2, default=1),
    "glu": _gated,
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys("view reshape view_as reshape_as flatten unflatten".split(), _view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _permuted(_transposed)),
    "permute": _permuted(_permutation),
    **dict.fromkeys(("t", "T", "mT", "mH"), _permuted(_last_two)),
    **dict.fromkeys(("squeeze", "unsqueeze"), _squeezed),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    "repeat": _repeated,
    "repeat_interleave": _repeat_interleaved,
    "getitem": indexed,
    **dict.fromkeys("select narrow index_select gather".split(), selected(1)),
    **dict.fromkeys("split chunk tensor_split split_with_sizes".split(), _parted),
    "unbind": _unbound,
    **dict.fromkeys(("flip", "roll"), _flipped),
    "pad": _padded,
    **dict.fromkeys("cat concat concatenate stack".split(), _concatenated),
    **dict.fromkeys("matmul bmm baddbmm mm einsum".split(), _product),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("view_as_complex", "view_as_real"), _as_complex),
}
