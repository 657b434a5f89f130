"""Where the shards are after a function of torch or a layer: one rule for each family of functions.

A layer has the rule of the function that it calls, or of one like it. Another function needs a name in a family of
``modelsummary.parallel.function_names``, which ``ExpertShards`` follows, too, or a row in ``_RULES``. A rule raises
``Blocked`` if it cannot tell, and ``WrongPlacement`` if an operand has to have another placement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import nn

from modelsummary.capture.templates import Attribute, map_template
from modelsummary.parallel.expert_shards import ExpertShards
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.placements import (
    Blocked,
    FunctionCall,
    Operand,
    Partial,
    Placement,
    Shard,
    WrongPlacement,
    apart,
    dim_of,
    parts_of,
    reshaped,
    sharded_operand,
)
from modelsummary.record.events import Value, values_in

__all__ = [
    "DROPOUT_LAYERS",
    "ELEMENTWISE_LAYERS",
    "begin_of",
    "layer_function",
    "part_at",
    "placements_after",
    "terms_of",
]


def _indexed(call: FunctionCall) -> Shard | None:
    """Follow ``x[...]``, which must take the sharded dimension whole, or pieces of it; None if these are whole."""
    index = call.args[1]
    if call.first.shard is None and len(call.operands) == 2 and _is_lookup(index) and call.operands[1].is_index:
        return _looked_up(call, call.operands[1], call.first)
    operand, placement = sharded_operand(call)
    parts = [part for _, part in _spread(index, len(operand.shape))]
    tensors = {other.leaf: len(other.shape) for other in call.operands[1:] if other.shard is None and other.is_index}
    lookups = [part for part in parts if _is_lookup(part)]
    kinds = (slice,) if lookups else (slice, int)  # an integer beside a tensor may move its dimension to the front
    plain = [part for part in parts if part is not None and not _is_lookup(part)]
    if len(lookups) > 1 or len(tensors) != len(call.operands) - 1 or not all(isinstance(part, kinds) for part in plain):
        raise Blocked(f"{call.at} takes elements by a tensor; integers, slices or one tensor of integers work")
    dim, result = 0, 0
    for part in parts:
        if part is None:
            result += 1
            continue
        if dim == placement.dim:
            size = operand.shape[dim]
            if isinstance(part, slice) and _takes_all(part, size, placement, call.sizes):
                return placement._replace(dim=result)
            if type(part) is int and not placement.pieces:
                raise apart(call, (1,) * size, _part(call))
            bounds = _bounds(part, size)
            if bounds is None:
                raise Blocked(_part(call))
            borders = sorted({0, size, *bounds})
            sharded = parts_of(call, borders)[borders.index(bounds[0])]
            if sharded is not None and type(part) is int:
                raise Blocked(_part(call))
            return None if sharded is None else sharded._replace(dim=result)
        dim += 1
        is_slice = isinstance(part, slice)
        result += (tensors[part] if isinstance(part, (Value, Attribute)) else 1) if _is_lookup(part) else is_slice
    raise Blocked(_part(call))


def _looked_up(call: FunctionCall, numbers: Operand, table: Operand) -> Shard:
    """Return the placement of the rows of a table that sharded numbers take."""
    if numbers.shard is None or table.shard is not None:
        raise Blocked(f"{call.at} takes rows of a sharded table; rows of a whole table work")
    call.meets(table, -1, 0)
    return numbers.shard


def _bounds(part: Any, size: int) -> tuple[int, int] | None:
    """Return the start and the end of what a part of an index takes of a dimension; None if it is not one stretch.

    >>> _bounds([-2, -1], 10), _bounds(slice(None, None, 2), 10)
    ((8, 10), None)
    """
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        return (start, stop) if step == 1 and start < stop else None
    if type(part) is int:
        part = [part]
    if not isinstance(part, list) or not part or not all(type(index) is int for index in part):
        return None
    start = part[0] % size
    return (
        (start, start + len(part)) if [index % size for index in part] == [*range(start, start + len(part))] else None
    )


def begin_of(index: Any, shape: Sequence[int], dim: int) -> int:
    """Return where ``x[index]`` begins along a dimension of ``x``; 0 if it does not take one stretch of it.

    >>> begin_of((Ellipsis, slice(16, None)), (2, 48), 1)
    16
    """
    parts = [part for _, part in _spread(index, len(shape)) if part is not None]
    return (_bounds(parts[dim], shape[dim]) or (0, 0))[0]


def part_at(index: Any, ndim: int, dim: int) -> int | None:
    """Return the position in an index of the slice that takes a dimension; None if the index has lookups, or no slice.

    >>> part_at((Ellipsis, slice(16, None)), 3, 2)
    1
    """
    parts = [(position, part) for position, part in _spread(index, ndim) if part is not None]
    position, part = parts[dim]
    is_slice = position >= 0 and isinstance(part, slice)
    return position if is_slice and not any(_is_lookup(part) for _, part in parts) else None


def _spread(index: Any, ndim: int) -> list[tuple[int, Any]]:
    """Return the parts of an index, each with its position in it: one for each dimension, and None for new dimensions.

    >>> _spread((None, Ellipsis, 0), 3)
    [(0, None), (-1, slice(None, None, None)), (-1, slice(None, None, None)), (2, 0)]
    """
    is_one = _is_lookup(index) or not isinstance(index, tuple)  # an attribute is a tuple
    parts = list(enumerate((index,) if is_one else index))
    taken = sum(part is not None and part is not Ellipsis for _, part in parts)
    ellipsis = next((position for position, part in parts if part is Ellipsis), len(parts))
    parts[ellipsis : ellipsis + 1] = [(-1, slice(None))] * (ndim - taken)
    return parts


def _part(call: FunctionCall) -> str:
    return f"{call.at} takes a part of {call.dimension}; equal parts of it work"


def _is_lookup(index: Any) -> bool:
    """Return True for a tensor or a list of integers."""
    is_list = isinstance(index, list) and all(type(element) is int for element in index)
    return is_list or isinstance(index, (Value, Attribute))


def _takes_all(part: slice, size: int, placement: Shard, sizes: set[int]) -> bool:
    """Return True if a slice takes a dimension whole, or the same elements of each group, such as every second one."""
    start, stop, step = part.indices(size)
    if (start, stop, step) == (0, size, 1):
        return True
    if placement.pieces:
        return False
    extent = size // placement.outer
    if step < 2 or start >= step or stop != size or extent % step:
        return False
    sizes.add(extent // step)
    return True


def _selected(position: int) -> Any:
    """Return the rule of functions that take or set elements along a dimension, the argument at a position."""

    def rule(call: FunctionCall) -> Shard:
        operand, placement = sharded_operand(call)
        dim = dim_of(call.argument(position, "dim"), len(operand.shape))
        if dim == placement.dim:
            raise Blocked(_part(call))
        for index in call.operands[1:]:
            if call.name in ("gather", "scatter"):  # each row of the index is for the same row
                if index.shard is None:
                    raise call.wrong(index, placement)
                if index.shard != placement:
                    raise Blocked(call.differ)
            elif index.shard is not None:
                raise Blocked(f"{call.at} takes sharded indices; whole indices work")
        gone = len(call.result_shape) < len(operand.shape) and dim < placement.dim
        return placement._replace(dim=placement.dim - gone)

    return rule


# ------------------------------------------------------------------------------------------------------------- indexing


DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
ELEMENTWISE_LAYERS = (
    nn.Dropout, nn.Dropout1d, nn.Identity, nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.ELU,
    nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink,
    nn.LogSigmoid, nn.Threshold, nn.Hardshrink, nn.Softshrink, nn.AlphaDropout,
)  # fmt: skip


def layer_function(module: nn.Module) -> tuple[str, Mapping[str, Any]] | None:
    """Return the function that a layer calls, and what it gives it besides tensors; None without a rule for it.

    >>> layer_function(nn.GLU())
    ('glu', {'dim': -1})
    """
    for kinds, name, options in _LAYERS:
        if isinstance(module, kinds):
            return name, {option: getattr(module, option) for option in options}
    return None


def placements_after(call: FunctionCall) -> Placement | list[Shard | None] | None:
    """Return the placement of the results of a call that takes sharded operands; of each, if they differ.

    Raises:
        Blocked: the call cannot take them.
        WrongPlacement: an operand has to have another placement.
    """
    rule = _RULES.get(call.name)
    if any(operand.is_partial for operand in call.operands) and not _adds_partial(call):
        return _linear(call)
    if rule is None and call.event.is_module:
        raise Blocked(f"{call.at} ({call.name}) takes no {call.tensor}; elementwise layers take one")
    if rule is None:
        raise Blocked(f"{call.at} has no rule for sharded tensors; elementwise functions, views and products have one")
    if any(operand.shape == () and operand.shard is not None for operand in call.operands):
        raise Blocked(f"{call.at} takes a number that differs between ranks; a number of a whole tensor works")
    if call.name not in _TAKES_PIECES and any(
        operand.shard is not None and operand.shard.pieces for operand in call.operands
    ):
        raise Blocked(f"{call.at} takes a tensor of unequal pieces; elementwise functions, views and splits work")
    return rule(call)


# -------------------------------------------------------------------------------------------------- rules


def _elementwise(call: FunctionCall) -> Shard:
    shape = call.result_shape
    placements: set[Shard] = set()
    for operand in call.operands:
        if operand.shard is not None:
            placements.add(operand.shard._replace(dim=operand.shard.dim + len(shape) - len(operand.shape)))
    if len(placements) != 1:
        raise Blocked(call.differ)
    (placement,) = placements
    for operand in call.operands:
        if operand.shard is None:
            dim = placement.dim - (len(shape) - len(operand.shape))
            if placement.pieces and dim >= 0 and operand.shape[dim] != 1:
                raise Blocked(call.differ)
            call.meets(operand, dim, shape[placement.dim], placement.outer)
    return placement


def _like(call: FunctionCall) -> Shard:
    """Return the placement of a constant that has the shape of the first operand."""
    return sharded_operand(call)[1]


def _along(call: FunctionCall) -> Shard:
    """Follow functions that work along dimensions, none of which may be sharded."""
    if call.name in ("max", "min") and isinstance(call.argument(1, "other"), (Value, Attribute)):
        return _elementwise(call)
    operand, placement = sharded_operand(call)
    dims = ExpertShards.dims_of(call.name, call.args, call.kwargs, len(operand.shape))
    if placement.dim in dims:
        raise Blocked(call.along)
    for parameter in call.operands[1:]:
        call.meets(parameter, -1, 0)
    if len(call.result_shape) == len(operand.shape):
        return placement
    return placement._replace(dim=placement.dim - sum(dim < placement.dim for dim in dims))


def _view(call: FunctionCall) -> Shard:
    operand, placement = sharded_operand(call)
    if math.prod(operand.shape) != math.prod(call.result_shape):
        raise Blocked(f"{call.at} reads a tensor as another dtype; views of the same dtype work")
    return reshaped(operand.shape, call.result_shape, placement, call.sizes)


def _moved(call: FunctionCall) -> Shard:
    """Follow a function that moves, adds or removes dimensions."""
    operand, placement = sharded_operand(call)
    function = call.event.function
    assert function is not None

    def probed(probe: Any) -> Any:
        args, kwargs = map_template(lambda leaf: probe if leaf == operand.leaf else leaf, (call.args, call.kwargs))
        return function(*args, **kwargs)

    return placement._replace(dim=ExpertShards.moved(probed, operand.shape, placement.dim))


def _expanded(call: FunctionCall) -> Shard:
    operand, placement = sharded_operand(call)
    return placement._replace(dim=placement.dim + len(call.result_shape) - len(operand.shape))


def _repeated(call: FunctionCall) -> Shard:
    operand, placement = sharded_operand(call)
    after = call.result_shape
    dim = placement.dim + len(after) - len(operand.shape)
    if after[dim] != operand.shape[placement.dim]:
        raise Blocked(f"{call.at} repeats {call.dimension}; other dimensions can be repeated")
    return placement._replace(dim=dim)


def _repeat_interleaved(call: FunctionCall) -> Shard:
    operand, placement = sharded_operand(call)
    dim = call.argument(2, "dim")
    if dim is None or type(call.argument(1, "repeats")) is not int:
        raise Blocked(f"{call.at} repeats each element a different number of times; one number and dim= work")
    dim_of(dim, len(operand.shape))
    return placement


def _parted(call: FunctionCall) -> Shard | list[Shard | None] | None:
    """Follow ``chunk`` and ``split`` along another dimension, or of a dimension of several pieces into whole pieces."""
    operand, placement = sharded_operand(call)
    if dim_of(call.argument(2, "dim", 0), len(operand.shape)) != placement.dim:
        return placement
    parts = [value.shape[placement.dim] for value in values_in(call.event.result)]
    if len(parts) == 1:
        return placement
    placements = parts_of(call, [0, *accumulate(parts)])
    return placements if None in placements or len(set(placements)) > 1 else placements[0]


def _gated(call: FunctionCall) -> Shard:
    """Follow ``glu``, which takes the two halves of a dimension."""
    operand, placement = sharded_operand(call)
    if dim_of(call.argument(1, "dim", -1), len(operand.shape)) != placement.dim:
        return placement
    if placement.outer != 2:
        raise apart(call, (1, 1))
    return placement._replace(outer=1)


def _unbound(call: FunctionCall) -> Shard:
    """Follow ``unbind`` along another dimension."""
    operand, placement = sharded_operand(call)
    dim = dim_of(call.argument(1, "dim", 0), len(operand.shape))
    if dim == placement.dim:
        raise apart(call, (1,) * operand.shape[dim])
    return placement._replace(dim=placement.dim - (dim < placement.dim))


def _padded(call: FunctionCall) -> Shard:
    operand, placement = sharded_operand(call)
    pad = call.argument(1, "pad")
    if placement.dim >= len(operand.shape) - len(pad) // 2:
        raise Blocked(f"{call.at} pads {call.dimension}; other dimensions can be padded")
    return placement


def _concatenated(call: FunctionCall) -> Shard:
    placements = {operand.shard for operand in call.operands if operand.shard is not None}
    if len(placements) != 1:
        raise Blocked(call.differ)
    (placement,) = placements
    shape = next(operand.shape for operand in call.operands if operand.shard is not None)
    stacks = call.name == "stack"
    dim = dim_of(call.argument(1, "dim", 0), len(shape) + stacks)
    joined = [operand for operand in call.operands if operand.shape != (0,)]  # torch skips others, as of an empty cache
    if dim == placement.dim and not stacks and len(joined) > 1:
        raise Blocked(f"{call.at} joins along {call.dimension}; along another dimension it can be split")
    for operand in joined:
        if operand.shard is None:
            if not isinstance(operand.leaf, Value):
                raise Blocked(
                    f"{call.at} takes a constant of the whole size beside a sharded tensor; computed tensors work"
                )
            raise call.wrong(operand, placement)
    return placement._replace(dim=placement.dim + (stacks and dim <= placement.dim))


def terms_of(call: FunctionCall) -> tuple[list[tuple[Operand, str]], str]:
    """Return the operands of a product with a label for each of their dimensions, and the labels of its result."""
    if call.name == "einsum":
        equation = call.args[0]
        if not isinstance(equation, str) or "->" not in equation:
            raise Blocked(f"{call.at} has an equation without an arrow; one with an arrow works")
        terms, result = ExpertShards.labels("einsum", [len(operand.shape) for operand in call.operands], equation)
        return list(zip(call.operands, terms, strict=True)), result
    begin = 1 if call.name in ("addmm", "baddbmm") else 0
    names = {"linear": ("input", "weight"), "matmul": ("input", "other"), "baddbmm": ("batch1", "batch2")}
    name, other_name = names.get(call.name, ("input", "mat2"))
    factors = [call.operand(begin, name), call.operand(begin + 1, other_name)]
    ndims = [len(operand.shape) for operand in factors]
    if min(ndims) < 2 and call.name != "linear":
        raise Blocked(f"{call.at} takes a vector; matrices work")
    if call.name in Families.GROUPED:
        terms, result = ["g" * (ndims[0] - 2) + "tk", "g" * (ndims[1] - 2) + "kn"], "g" * (ndims[0] - 2) + "tn"
    else:
        terms, result = ExpertShards.labels(call.name, ndims)
    added = [operand for operand in call.operands if operand not in factors and not operand.is_index]
    return [*zip(factors, terms, strict=True), *((it, result[len(result) - len(it.shape) :]) for it in added)], result


def _product(call: FunctionCall) -> Placement:
    """Follow a product, whose results sum up to the whole if it sums over the sharded dimension."""
    terms, result = terms_of(call)
    labels = {(term[operand.shard.dim], operand.shard.outer) for operand, term in terms if operand.shard is not None}
    if len(labels) != 1:
        raise Blocked(call.differ)
    ((label, outer),) = labels
    if call.name in Families.GROUPED and label not in "kn":
        raise Blocked(call.along)
    if label in result:
        placement = Shard(result.index(label), outer)
        if any(operand.is_partial for operand, _ in terms):
            raise Blocked(f"{call.at} adds a sum over the ranks to a sharded tensor; one kind works")
        for operand, term in terms:
            if operand.shard is None:
                call.meets(operand, term.find(label), call.result_shape[placement.dim], outer)
        return placement
    if not call.sums:
        raise Blocked(f"{call.at} sums over {call.dimension}; linear layers that take it alone can")
    n_factors = len(terms) if call.name == "einsum" else 2
    for position, (operand, term) in enumerate(terms):
        if operand.placement is None and label in term:
            raise call.wrong(operand, Shard(term.index(label), outer))
        if operand.placement is None and position >= n_factors:
            raise call.wrong(operand, Partial())
    return Partial()


def _adds_partial(call: FunctionCall) -> bool:
    """Return True for a product to which a bias is added that one rank holds, and whose factors are whole or chunks."""
    if call.name not in ("linear", "addmm", "baddbmm"):
        return False
    (first, _), (second, _), *added = terms_of(call)[0]
    return not (first.is_partial or second.is_partial) and any(operand.is_partial for operand, _ in added)


def _linear(call: FunctionCall) -> Partial | None:
    """Follow a function of a sum or a mean over the ranks; it must be linear in it."""
    n_partial = sum(operand.is_partial for operand in call.operands)
    name, is_mean = call.name, any(operand.placement == Partial("avg") for operand in call.operands)
    what = "a mean over the ranks" if is_mean else "a sum over the ranks"
    if any(operand.shard is not None for operand in call.operands):
        raise Blocked(f"{call.at} takes a sharded tensor and {what}; one kind works")
    if name in Families.FACTORIES:  # zeros of the same shape
        return None
    others = [operand for operand in call.operands if operand.placement is None and not operand.is_zeros]
    if name in Families.TERMS and not is_mean:
        if others:
            raise call.wrong(others[0], Partial())
        terms = call.argument(0, "input"), call.argument(1, "other")
        if any(isinstance(term, (int, float)) and term != 0 for term in terms):
            raise Blocked(f"{call.at} adds a number to a sum over the ranks, each of which would add it; zero works")
    if name in ("index_add", "scatter_add") and call.first in others:
        raise Blocked(f"{call.at} adds a sum over the ranks to a whole tensor; zeros work")
    is_linear = {
        **dict.fromkeys(Families.TERMS, True),
        **dict.fromkeys(Families.JOINS, is_mean or not others),
        **dict.fromkeys(_LINEAR, n_partial == 1 and call.first.is_partial and not call.kwargs.get("rounding_mode")),
        **dict.fromkeys(Families.PRODUCTS - {"addmm", "baddbmm"}, n_partial == 1 and len(call.operands) == 2),
        **dict.fromkeys(("mul", "imul", "rmul", "multiply", "einsum"), n_partial == 1),
        **dict.fromkeys(("index_add", "scatter_add"), call.operands[-1].is_partial),
        "masked_fill": call.argument(2, "value") == 0,
    }
    if not is_linear.get(name, False):
        raise Blocked(f"{call.at} takes {what}; linear functions of it work")
    return Partial("avg") if is_mean else Partial()


def _attention(call: FunctionCall) -> Shard:
    """Follow ``scaled_dot_product_attention``, sharded by the heads or by the batch."""
    parts = [call.operand(position, name) for position, name in enumerate(("query", "key", "value"))]
    mask = call.operand(3, "attn_mask") if call.argument(3, "attn_mask") is not None else None
    ndim = len(parts[0].shape)
    placements = {
        operand.shard._replace(dim=operand.shard.dim + ndim - len(operand.shape))
        for operand in (*parts, mask)
        if operand is not None and operand.shard is not None
    }
    if len(placements) != 1:
        raise Blocked(call.differ)
    (placement,) = placements
    if placement.dim >= ndim - 2:
        raise Blocked(call.along)
    for operand in parts:
        if operand.shard is None:
            if operand.shape[placement.dim] == 1 and operand.leaf in call.reduced:
                continue
            if operand.shape[placement.dim] == 1 or not isinstance(operand.leaf, Value):
                raise WrongPlacement(
                    f"{call.at} takes a whole key or value that all heads share; one that a linear layer makes works",
                    operand.leaf,
                    None,
                )
            raise call.wrong(operand, placement)
        call.sizes.add(operand.shape[placement.dim] // placement.outer)
    if mask is not None and mask.shard is None:
        call.meets(mask, placement.dim - ndim + len(mask.shape), parts[0].shape[placement.dim], placement.outer)
    return placement


def _embedded(call: FunctionCall) -> Shard:
    """Follow ``embedding``, which takes rows of a table by sharded numbers."""
    if call.argument(3, "max_norm") is not None:
        raise Blocked(f"{call.at} changes the norm of the rows that it takes; max_norm=None works")
    return _looked_up(call, call.operand(0), call.operand(1, "weight"))


def _as_complex(call: FunctionCall) -> Shard:
    operand, placement = sharded_operand(call)
    if call.name == "view_as_complex" and placement.dim == len(operand.shape) - 1:
        raise Blocked(call.along)
    return placement


# Functions that are linear in their first operand, the others being no sums.
_LINEAR = Families.LINEAR | Families.VIEWS | frozenset("sum mean div truediv itruediv identity".split())
# Classes of layers, a function with their rule, and their attributes that it takes.
_LAYERS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (nn.Identity, "identity", ()),
    (ELEMENTWISE_LAYERS, "relu", ()),
    (nn.GLU, "glu", ("dim",)),
    ((nn.Softmax, nn.LogSoftmax), "softmax", ("dim",)),
    ((nn.LayerNorm, nn.RMSNorm), "layer_norm", ("normalized_shape",)),
    (nn.CrossEntropyLoss, "cross_entropy", ("label_smoothing",)),
)
_SPLITS = frozenset("split chunk tensor_split split_with_sizes".split())
_TAKES_PIECES = Families.ELEMENTWISE | Families.MOVES | Families.RESHAPES | _SPLITS | {"getitem"}
_RULES: dict[str, Callable[[FunctionCall], Placement | list[Shard | None] | None]] = {
    **dict.fromkeys(Families.ELEMENTWISE, _elementwise),
    **dict.fromkeys("zeros_like ones_like empty_like full_like".split(), _like),
    **dict.fromkeys(Families.ALONG | Families.REDUCES | {"flip", "roll"}, _along),
    "glu": _gated,
    **dict.fromkeys(Families.RESHAPES, _view),
    **dict.fromkeys(Families.MOVES, _moved),
    **dict.fromkeys(Families.EXPANDS, _expanded),
    "repeat": _repeated,
    "repeat_interleave": _repeat_interleaved,
    "getitem": _indexed,
    **dict.fromkeys("select narrow index_select gather scatter".split(), _selected(1)),
    **dict.fromkeys(_SPLITS, _parted),
    "unbind": _unbound,
    "pad": _padded,
    **dict.fromkeys(Families.JOINS - {"vstack", "hstack"}, _concatenated),
    **dict.fromkeys(Families.PRODUCTS, _product),
    "scaled_dot_product_attention": _attention,
    "embedding": _embedded,
    **dict.fromkeys(("view_as_complex", "view_as_real"), _as_complex),
}
