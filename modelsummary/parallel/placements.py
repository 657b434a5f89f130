"""Where the shards of a tensor are: placements, and the calls that take sharded tensors.

Ranks hold plain local tensors. A value is replicated (None), a ``Shard``: the ranks hold equal contiguous chunks of
one dimension, or of each piece of it, in the order of their ranks, or ``Partial``: the ranks' tensors sum up to it. The
rules (``modelsummary.parallel.rules``) give the placement of a function's results from the placements of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from modelsummary.capture.templates import Attribute, leaves_of
from modelsummary.record.events import Event, Value

__all__ = [
    "Blocked",
    "FunctionCall",
    "Operand",
    "Partial",
    "Placement",
    "Section",
    "Shard",
    "WrongPlacement",
    "apart",
    "dim_of",
    "in_pieces",
    "local_position",
    "local_shape",
    "parts_of",
    "reshaped",
    "sharded_operand",
]

# Name of an argument -> names that torch takes for it, too.
_NUMPY_NAMES = {"input": ("x", "a", "x1"), "other": ("x2",), "dim": ("axis",), "dim0": ("axis0",), "dim1": ("axis1",)}


class Section(NamedTuple):
    """A piece of a sharded dimension, in its elements: cut into chunks, or whole on each rank."""

    size: int
    is_whole: bool = False


class Shard(NamedTuple):
    """The dimension whose chunks the ranks hold.

    Attributes:
        dim: the dimension, from 0.
        outer: the dimension is ``outer`` pieces, each cut into chunks; 1 for an ordinary shard. Batch and heads merged
            into one dimension give a shard with the batch outside.
        pieces: of unequal size, or of which some are whole on each rank; empty if all are equal and cut.
    """

    dim: int
    outer: int = 1
    pieces: tuple[Section, ...] = ()

    @property
    def is_plain(self) -> bool:
        """True for one chunk of the dimension on each rank."""
        return self.outer == 1 and not self.pieces


@dataclass(frozen=True)
class Partial:
    """The ranks' tensors sum up to the value, or it is their mean.

    Attributes:
        reduce_op: ``"sum"`` or ``"avg"``, as of torch's ``Partial``.
    """

    reduce_op: str = "sum"


Placement = Shard | Partial


class Blocked(Exception):
    """A sharded value cannot pass here; the message says why."""


class WrongPlacement(Blocked):
    """An operand has to have another placement.

    Args:
        value: the operand.
        placement: chunks, or a sum, of what is whole; pieces of what is sharded; None: whole, and something sums the
            parts of its gradient.
    """

    def __init__(self, message: str, value: Any, placement: Placement | None) -> None:
        super().__init__(message)
        self.value, self.placement = value, placement

    @property
    def of_whole(self) -> bool:
        """True for a whole tensor of which ranks have to hold chunks or parts of a sum."""
        return isinstance(self.placement, Partial) or (self.placement is not None and not self.placement.pieces)


@dataclass(frozen=True)
class Operand:
    """A tensor that a call takes.

    Attributes:
        leaf: in the template of the call.
        shape: of the whole tensor.
        placement: None if it is replicated.
        needs_grad: a gradient flows into it.
        is_index: it holds integers.
        is_zeros: a function made it of zeros.
    """

    leaf: Any
    shape: tuple[int, ...]
    placement: Placement | None
    needs_grad: bool
    is_index: bool
    is_zeros: bool

    @property
    def shard(self) -> Shard | None:
        """Its placement; None if it is replicated, or partial."""
        return self.placement if isinstance(self.placement, Shard) else None

    @property
    def is_partial(self) -> bool:
        """True if the ranks' tensors sum up to it, or it is their mean."""
        return isinstance(self.placement, Partial)


class FunctionCall:
    """A function, or the function that a layer calls, with what is known of its operands.

    Args:
        operand: makes the operand of a leaf that is a tensor; None for other leaves.
        layer: name of the function that a layer calls, and what it gives it besides tensors; for functions None.
        sharded: names of a tensor that is sharded, and of its dimension, for messages.

    Attributes:
        name, args, kwargs: of the function.
        sizes: extents of sharded dimensions that have to divide by the number of ranks; rules add to it.
        reduced: replicated tensors that may meet sharded ones here: something else reduces their gradients.
        sums: the results of the ranks may sum up to the result.
        tensor, dimension: names of what is sharded, for messages.
    """

    def __init__(
        self,
        event: Event,
        operand: Callable[[Any], Operand | None],
        reduced: Collection[Any] = (),
        *,
        layer: tuple[str, Mapping[str, Any]] | None = None,
        sums: bool = False,
        sharded: tuple[str, str] = ("sharded tensor", "the sharded dimension"),
    ) -> None:
        self.event, self._operand, self.reduced, self.sums = event, operand, reduced, sums
        self.tensor, self.dimension = sharded
        name, options = (event.name, {}) if layer is None else layer
        self.name, self.args, self.kwargs = name, event.args, {**event.kwargs, **options}
        self.at = event.fqn if event.is_module else f"{name}() in {event.fqn or 'the model'}"
        self.sizes: set[int] = set()
        self.operands = [
            tensor for leaf in leaves_of((event.args, event.kwargs)) if (tensor := operand(leaf)) is not None
        ]
        if name in ("to", "type_as"):  # they take dtype and device of the other tensor
            del self.operands[1:]

    @property
    def along(self) -> str:
        """Message about a function that works along the sharded dimension."""
        return f"{self.at} works along {self.dimension}; along another dimension it can be split"

    @property
    def differ(self) -> str:
        """Message about a function whose operands are sharded along different dimensions."""
        return f"{self.at} takes tensors that are sharded along different dimensions; equal dimensions work"

    def wrong(self, operand: Operand, placement: Placement) -> WrongPlacement:
        """Return the refusal of an operand that is whole, and has to have a placement."""
        return WrongPlacement(
            f"{self.at} takes a whole tensor and a {self.tensor}; one that is sharded, too, works",
            operand.leaf,
            placement,
        )

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return the template of an argument, by position, by name, or by the name that NumPy gives it."""
        if len(self.args) > position:
            return self.args[position]
        names = (name, *_NUMPY_NAMES.get(name, ()))
        return next((self.kwargs[alias] for alias in names if alias in self.kwargs), default)

    def operand(self, position: int, name: str = "input") -> Operand:
        """Return the operand that an argument is. Raises ``Blocked`` if it is not a tensor."""
        operand = self._operand(self.argument(position, name))
        if operand is None:
            raise Blocked(f"{self.at} takes a number where a tensor can be split")
        return operand

    @property
    def first(self) -> Operand:
        """The first operand."""
        return self.operands[0]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        result = next((leaf for leaf in leaves_of(self.event.result) if isinstance(leaf, (Value, Attribute))), None)
        if isinstance(result, Value):
            return result.shape
        taken = next((operand for operand in self.operands if result is not None and operand.leaf == result), None)
        if taken is None or any(self.event.writes):
            raise Blocked(f"{self.at} returns a tensor of the model; a new tensor works")
        return taken.shape  # a cast to the same dtype returns what it takes

    def meets(self, other: Operand, dim: int, total: int, outer: int = 1) -> None:
        """Check an operand that is replicated, beside one that is sharded along a dimension of ``total`` elements.

        Args:
            dim: that dimension in the operand; negative if it has none.
        """
        if dim < 0 or other.shape[dim] == 1:
            if other.needs_grad and other.leaf not in self.reduced:
                message = f"{self.at} would leave a part of the gradient of a replicated tensor on each rank"
                message = f"{message}; a tensor without a gradient works"
                raise WrongPlacement(message, other.leaf, None)
        elif other.shape[dim] == total and isinstance(other.leaf, (Value, Attribute)):
            raise self.wrong(other, Shard(dim, outer))
        else:
            raise Blocked(f"{self.at} takes a constant of the whole size beside a sharded tensor; sizes of one work")


def dim_of(dim: Any, ndim: int) -> int:
    """Return a dimension, counted from 0. Raises ``Blocked`` if it is not an integer."""
    if type(dim) is not int:
        raise Blocked("a dimension is not a plain integer; plain integers work")
    return dim + ndim if dim < 0 else dim


def sharded_operand(call: FunctionCall, position: int = 0) -> tuple[Operand, Shard]:
    """Return the operand at a position, which must be the sharded one, and its placement."""
    operand = call.operand(position)
    if operand.shard is None:
        raise Blocked(
            f"{call.at} takes a whole tensor and sharded parameters; a sharded tensor in the first place works"
        )
    return operand, operand.shard


def reshaped(before: Sequence[int], after: Sequence[int], placement: Shard, sizes: set[int]) -> Shard:
    """Return the placement after a view that keeps the order of the elements.

    >>> reshaped((2, 8, 64), (2, 8, 4, 16), Shard(2), set()) == Shard(2)  # heads
    True
    >>> reshaped((2, 4, 8, 16), (8, 8, 16), Shard(1), set()) == Shard(0, outer=2)  # batch and heads in one
    True

    Raises:
        Blocked: afterwards the chunks do not lie along one dimension.
    """
    if placement.pieces:
        return _in_heads(before, after, placement, sizes)
    lead = math.prod(before[: placement.dim]) * placement.outer
    extent = before[placement.dim] // placement.outer
    passed = 1
    for dim, size in enumerate(after):
        if size != 1 and lead % passed == 0 and passed * size > lead:
            outer = lead // passed
            now, remainder = divmod(size, outer)
            if remainder == 0 and (now % extent == 0 or extent % now == 0):
                sizes.add(min(now, extent))
                return Shard(dim, outer)
            break
        passed *= size
    raise Blocked(
        f"a view of {tuple(before)} as {tuple(after)} cuts across the shards; a view that keeps heads together works"
    )


def local_shape(shape: Sequence[int], placement: Placement | None, n_ranks: int) -> tuple[int, ...]:
    """Return the shape of what one rank holds of a tensor."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    return tuple(
        local_position(size, placement, n_ranks) if dim == placement.dim else size for dim, size in enumerate(shape)
    )


def local_position(position: int, placement: Shard, n_ranks: int) -> int:
    """Return where a rank holds what begins at a position of the sharded dimension; at its end, the rank's extent.

    >>> local_position(10, Shard(0, pieces=(Section(8), Section(4, is_whole=True))), 2)
    6
    """
    if not placement.pieces:
        return position // n_ranks
    local = 0
    for size, is_whole in placement.pieces:
        before = min(size, position)
        local += before if is_whole else before // n_ranks
        position -= before
    return local


def in_pieces(dim: int, pieces: Sequence[Section]) -> Shard | None:
    """Return the placement of a dimension of these pieces; None if all are whole.

    >>> in_pieces(1, [Section(8), Section(4), Section(4)]).pieces
    (Section(size=8, is_whole=False), Section(size=4, is_whole=False), Section(size=4, is_whole=False))
    """
    if all(piece.is_whole for piece in pieces):
        return None
    return Shard(dim, len(pieces)) if len(set(pieces)) == 1 else Shard(dim, pieces=tuple(pieces))


def apart(call: FunctionCall, sizes: Sequence[int], why: str = "") -> WrongPlacement:
    """Return the refusal of a function that takes the sharded dimension apart, into pieces of these sizes."""
    operand, placement = sharded_operand(call)
    pieces = Shard(placement.dim, pieces=tuple(Section(size) for size in sizes))
    return WrongPlacement(why or call.along, operand.leaf, pieces)


def parts_of(call: FunctionCall, borders: Sequence[int]) -> list[Shard | None]:
    """Return the placements of the parts of the sharded dimension between borders; None if one is whole on each rank.

    Raises:
        WrongPlacement: a piece that is cut into chunks lies on both sides of a border.
    """
    operand, placement = sharded_operand(call)
    return [_part_of(call, operand, placement, bounds, borders) for bounds in pairwise(borders)]


def _part_of(
    call: FunctionCall, operand: Operand, placement: Shard, bounds: tuple[int, int], borders: Sequence[int]
) -> Shard | None:
    size, (start, stop) = operand.shape[placement.dim], bounds
    pieces = []
    begin = 0
    for piece in placement.pieces or [Section(size // placement.outer)] * placement.outer:
        inside = max(0, min(begin + piece.size, stop) - max(begin, start))
        if inside and inside < piece.size and not piece.is_whole:
            raise apart(call, [after - before for before, after in pairwise(borders)])
        pieces += [piece._replace(size=inside)] if inside else []
        begin += piece.size
    return in_pieces(placement.dim, pieces)


def _in_heads(before: Sequence[int], after: Sequence[int], placement: Shard, sizes: set[int]) -> Shard:
    """Return the placement after a view that takes a dimension of pieces apart into heads and their features."""
    dim = placement.dim + len(after) - len(before) - 1 if len(after) > len(before) else placement.dim
    is_same = math.prod(before[: placement.dim]) == math.prod(after[:dim])
    width, remainder = divmod(before[placement.dim], after[dim]) if is_same and after[dim] else (0, 1)
    if remainder or any(size % width for size, _ in placement.pieces):
        raise Blocked(f"a view of {tuple(before)} as {tuple(after)} cuts across pieces; whole heads in each piece work")
    heads = [piece._replace(size=piece.size // width) for piece in placement.pieces]
    if any(size == 1 and not is_whole for size, is_whole in heads):
        raise Blocked(f"a view of {tuple(before)} as {tuple(after)} has a piece of one head; more heads can be split")
    sizes.update(size for size, is_whole in heads if not is_whole)
    return Shard(dim, pieces=tuple(heads))
