"""Regions: what is sharded together between column-parallel and row-parallel layers.

A region begins at the layers that are split by columns, follows their results through functions and small layers, and
ends where every path has reached a ``Linear`` that is split by rows. Nothing sharded may leave it.

Of a module whose functions take its own parameters, such as experts that are stacked in one tensor, each rank holds a
chunk of every parameter, and what the module returns is summed over the ranks. A value is then whole, sharded, or
partial: the ranks' tensors sum up to it.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from torch import nn

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.placements import (
    Blocked,
    FunctionCall,
    Partial,
    Placement,
    Section,
    Shard,
    WrongPlacement,
    in_pieces,
)
from modelsummary.parallel.propagation import Propagation, first_complete, sole_input
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.rules import terms_of
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["Region", "grow", "grow_stacked", "is_stack", "summed_arguments"]

_COPIES = Families.EXPANDS | {"repeat", "repeat_interleave"}


class Region(Propagation):
    """A propagation from sharded parameters: layers that are sharded together, with their activations.

    Args:
        columns: FQNs of layers that are split by columns (of an ``Embedding``: by the width).
        parameters: FQN of a parameter that functions take -> its placement; ``Partial``: only the first rank adds it.

    Attributes:
        module: FQN of the module whose result is summed over the ranks; empty if the region ends in ``rows``.
        summed: arguments of that module whose gradients are summed.
        rows: FQNs of ``Linear`` layers that are split by rows.
        norms: FQN of a module with replicated parameters -> dimension of its input that is sharded.
        groups: heads of keys and values, and of queries, where the two differ.
        parts: FQN of a ``Linear`` or a norm -> start and end of each part of its result that all heads share.
        pieces: FQN of a column-parallel layer -> pieces that its columns are; one if it is missing.
    """

    def __init__(self, calls: Calls, columns: Sequence[str], parameters: Mapping[str, Placement]) -> None:
        super().__init__(calls, {Attribute(fqn): placement for fqn, placement in parameters.items()})
        self.columns, self.parameters = list(columns), dict(parameters)
        self.module = ""
        self.summed: tuple[int | str, ...] = ()
        self.rows: dict[str, None] = {}
        self.norms: dict[str, int] = {}
        self.groups = (sys.maxsize, 0)
        self.parts: dict[str, list[tuple[int, int]]] = {}
        self.pieces: dict[str, list[Section]] = {}

    @property
    def split(self) -> list[str]:
        """Its layers with parameters that are sharded."""
        return [*self.columns, *self.rows]

    @property
    def owners(self) -> dict[str, dict[str, Shard]]:
        """FQN of each module whose own functions take sharded parameters -> their names and placements."""
        owners: dict[str, dict[str, Shard]] = {}
        for fqn, placement in self.parameters.items():
            owner, _, name = fqn.rpartition(".")
            if isinstance(placement, Shard):
                owners.setdefault(owner, {})[name] = placement
        return owners

    @property
    def fqns(self) -> list[str]:
        """All its modules."""
        return [*self.split, *self.norms, *self.owners]


@dataclass
class _Shared:
    """A tensor that all heads share, back to the layers it comes from; each rank computes a part of its gradient.

    In multi-query attention these are keys and values, in multi-head latent attention the rotary part of the keys.

    Attributes:
        values: what is made of the layers' results alone, until heads take it; whole on each rank.
        expanded: copies of it, one for each head -> their placement.
        parts: FQN of a ``Linear``, or of a norm behind it, -> start and end of each part of its result, along the last
            dimension, in order.
        events: the functions that make the values.
    """

    values: set[Value] = field(default_factory=set)
    expanded: dict[Value, Shard] = field(default_factory=dict)
    parts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def is_alone(self, calls: Calls, functions: Collection[Event]) -> bool:
        """Return True if nothing takes the values but these functions and the functions of the heads."""
        members = {*self.events, *functions}
        takers = (event for value in self.values for event in calls.takers.get(value, ()))
        return all(event in members or self._returns_own(event) for event in takers)

    def _returns_own(self, event: Event) -> bool:
        """Return True for a function that returns what it takes, such as ``to`` for the same dtype."""
        return not event.is_module and set(values_in(event.result)) <= self.values and not event.is_decision


def grow(calls: Calls, first: str, taken: Mapping[str, Any], *, shares: bool = False) -> Region:
    """Return the region that begins at a layer; ``refused`` says why it does not work.

    Args:
        taken: FQNs of layers that belong to other regions.
        shares: heads may share a replicated tensor, whose gradient is summed; else the layer before it joins.
    """
    return first_complete(_Columns(calls, [first], taken, shares=shares))


def _with_whole_pieces(pieces: Mapping[str, Sequence[Section]]) -> dict[str, list[Section]]:
    """Return pieces of layers, of which the smallest are whole on each rank, unless all are equal or some are whole."""
    marked = {}
    for fqn, sections in pieces.items():
        least = min(piece.size for piece in sections)
        is_mixed = any(piece.is_whole or piece.size > least for piece in sections)
        marked[fqn] = [Section(size, is_whole or (is_mixed and size == least)) for size, is_whole in sections]
        if any(piece.is_whole for piece in sections):
            marked[fqn] = list(sections)
    return marked


class _Columns(Region):
    """Shards of the results of column-parallel layers, up to row-parallel layers.

    Args:
        columns, parameters: as ``Region`` takes them.
        taken, shares: as ``grow`` takes them.
        constants: tensors of equal elements that are made smaller.
        shared: tensors that all heads share.
        pieces: FQN of a layer -> pieces that its columns are.
    """

    def __init__(
        self,
        calls: Calls,
        columns: Sequence[str],
        taken: Mapping[str, Any],
        *,
        shares: bool,
        constants: Mapping[Value, Shard] | None = None,
        parameters: Mapping[str, Placement] | None = None,
        shared: Sequence[_Shared] = (),
        pieces: Mapping[str, list[Section]] | None = None,
    ) -> None:
        super().__init__(calls, columns, parameters or {})
        self._taken, self._shares, self._constants, self._shared = taken, shares, constants or {}, shared
        self.placements |= self._constants
        self.functions = [calls.maker[value] for value in self._constants]
        self.pieces |= pieces or {}
        self._reduced: set[Any] = set().union(*(tensor.values for tensor in shared))
        for tensor in shared:
            for fqn, parts in tensor.parts.items():
                for part in parts:
                    _add_part(self.parts, fqn, *part)
            self.functions += [event for event in tensor.events if event not in self.functions]
        self._n_sharded: Counter[str] = Counter()  # calls of rows and norms that take what is sharded
        self._n_parts: dict[Value, int] = {}  # in how many parts a value may be cut
        self._columns: dict[Value, tuple[str, int, int]] = {}  # columns of a layer that a value has
        self._whole_parts: set[Value] = set()  # what functions take of pieces that are whole on each rank

    # ------------------------------------------------------------------------------------------- begin and end

    def run(self) -> None:
        """Fill the region. Raises ``Blocked``."""
        calls = self.calls
        positions = [position for fqn in self.columns for position in calls.places[fqn]]
        positions += [calls.position[event] for event in self.functions]
        for position, event in enumerate(calls.events) if self.parameters else ():
            if any(attribute.fqn in self.parameters for attribute in attributes_in((event.args, event.kwargs))):
                positions.append(position)
        until = max([*positions, *(calls.last_use.get(value, 0) for value in self._constants)])
        self.follow(min(positions), len(calls.events), until)
        self.check_results(calls.returned)
        self._check_calls()

    def _check_calls(self) -> None:
        """Check what only the whole forward shows. Raises ``Blocked``."""
        for fqn, times in self._n_sharded.items():
            if times != self.calls.n_calls[fqn]:
                raise Blocked(
                    f"{fqn} takes sharded tensors in {times} of its {self.calls.n_calls[fqn]} calls; all of them must"
                )
        both = next((fqn for fqn in self.norms if fqn in self.owners), None)
        if both is not None:
            raise Blocked(f"parameters of {both} are sharded and whole in one call; a norm with one of the two works")
        if not all(tensor.is_alone(self.calls, self.functions) for tensor in self._shared):
            raise Blocked(
                "a tensor that all heads share goes elsewhere, too; one that only the heads take can be split"
            )
        if not self.rows:
            raise Blocked(
                "no linear layer takes the result; it can be split if one does, after elementwise functions and views"
            )

    def begins_or_ends(self, event: Event) -> bool:
        """Begin at the columns, and end at linear layers that are split by rows."""
        if event.is_module and event.fqn in self.columns:
            self._begin(event)
            return True
        if self.calls.is_linear(event) and self.sharded(event):
            self._end(event)
            return True
        return False

    def _begin(self, event: Event) -> None:
        self.calls.check_hooks(event)
        if self.placement(sole_input(self.calls, event)) is not None:
            raise Blocked(f"{event.fqn} takes a sharded tensor and would be split by columns; by rows it can be split")
        (result,) = values_in(event.result)
        width, dim = result.shape[-1], len(result.shape) - 1
        pieces = self.pieces.get(event.fqn, [Section(width)])
        placement = in_pieces(dim, pieces)
        assert placement is not None
        self.sizes |= {size for size, is_whole in pieces if not is_whole}
        if placement.pieces:
            self.sizes.add(width)  # the rows of the weight are chunks, from which each rank gets those it needs
        self._n_parts[result] = math.gcd(*(piece.size for piece in pieces))
        self._columns[result] = (event.fqn, 0, width)
        self.place(result, placement)

    def _end(self, event: Event) -> None:
        self.calls.check_hooks(event)
        value = sole_input(self.calls, event)
        if self.placement(value) != Shard(len(value.shape) - 1):
            raise Blocked(f"{event.fqn} takes a tensor that is sharded along tokens or heads; features can be split")
        if event.fqn in self._taken or len(value.shape) < 2:
            raise Blocked(f"{event.fqn} also takes the result of layers that are split apart; one source works")
        self.rows[event.fqn] = None
        self._n_sharded[event.fqn] += 1

    def takes_norm(self, event: Event, placement: Shard) -> bool:  # noqa: ARG002
        """Return True for one chunk of a dimension, which torch's style for norms takes."""
        return placement.is_plain

    def add_norm(self, event: Event, placement: Shard) -> None:
        """Note a norm with parameters. Raises ``Blocked``."""
        self._n_sharded[event.fqn] += 1
        if self.norms.setdefault(event.fqn, placement.dim) != placement.dim or event.fqn in self._taken:
            raise Blocked(
                f"{event.fqn} takes tensors that are sharded along different dimensions; equal dimensions work"
            )

    # --------------------------------------------------------------------------------------------- what is noted

    def call_of(self, event: Event, reduced: Collection[Any] = ()) -> FunctionCall:
        """Return a call; the gradients of shared tensors are summed."""
        return super().call_of(event, {*reduced, *self._reduced} if self._reduced else reduced)

    def give(self, call: FunctionCall, placements: Sequence[Placement | None]) -> None:
        """Give the results of a call their placements, and note the heads. Raises ``Blocked``."""
        super().give(call, placements)
        event, results = call.event, values_in(call.event.result)
        before = {self._n_parts[value] for value in values_in((event.args, event.kwargs)) if value in self._n_parts}
        if len(before) > 1 and min(before) < self.groups[0]:
            self.groups = (min(before), max(before))
        if before or call.sizes:
            self._n_parts.update(dict.fromkeys(results, math.gcd(*before, *call.sizes)))
        self._whole_parts.update(
            value for value, placement in zip(results, placements, strict=True) if placement is None
        )
        self._follow_columns(event, results)
        if any(event.writes):
            for written in attributes_in(event.result):
                raise Blocked(f"{call.at} writes a sharded tensor into {written.fqn}; a new tensor works")

    def _follow_columns(self, event: Event, results: Sequence[Value]) -> None:
        """Note which columns of a layer the results have, if a function takes columns of one layer."""
        taken = [value for value in values_in((event.args, event.kwargs)) if value in self._columns]
        if len({self._columns[value] for value in taken}) != 1:
            return
        fqn, start, stop = self._columns[taken[0]]
        shape, placement = taken[0].shape, self.placements[taken[0]]
        assert isinstance(placement, Shard)
        dim = placement.dim
        keeps_dims = all(len(result.shape) == len(shape) for result in results)  # not so for unbind()
        is_split = keeps_dims and len(results) > 1 and sum(result.shape[dim] for result in results) == shape[dim]
        unit = (stop - start) // shape[dim]
        for result in results:
            end = start + unit * result.shape[dim] if is_split else stop
            if result in self.placements and (is_split or math.prod(result.shape) == math.prod(shape)):
                self._columns[result] = (fqn, start, end)
            start = end if is_split else start

    # ---------------------------------------------------------------------------------- other start conditions

    def others(self, refused: Blocked) -> Iterator[_Columns]:
        """Yield the propagation from wider start conditions, which make a placement that a refusal asks for."""
        wrong = refused if isinstance(refused, WrongPlacement) else None
        wider = None if wrong is None else self._wider(wrong)
        if wider is None and wrong is not None and wrong.of_whole:
            at = "the model" if self.event is None else f"{self.event.name} of {self.event.fqn or 'the model'}"
            taken = next((fqn for fqn in self.calls.sources(wrong.value) if fqn in self._taken), None)
            advice = "a tensor that a linear layer makes can be split, too"
            if taken is not None:
                advice = f"{taken}, which makes it, is split with other layers, and a layer of its own works"
            self.refused = Blocked(f"a whole tensor meets a sharded one in {at}; {advice}")
        if wider is None and self._shares and (wrong is None or wrong.placement is not None):
            whole = _with_whole_pieces(self.pieces)  # all heads may share the smallest ones
            wider = None if whole == self.pieces else {"pieces": whole}
        if wider is not None:
            start: dict[str, Any] = {"columns": self.columns, "parameters": self.parameters, "pieces": self.pieces}
            start |= {"constants": self._constants, "shared": self._shared, **wider}
            yield _Columns(self.calls, taken=self._taken, shares=self._shares, **start)

    def _wider(self, wrong: WrongPlacement) -> dict[str, Any] | None:
        """Return the start conditions that make a placement; None if nothing does."""
        calls, value, placement = self.calls, wrong.value, wrong.placement
        if isinstance(placement, Shard) and placement.pieces:
            cut = self._cut_at(value, [piece.size for piece in placement.pieces])
            return {"pieces": {**self.pieces, **cut}} if cut else None
        if self._shares and isinstance(value, Value):
            other = _find_shared(calls, value, self._whole_parts)
            if other is not None and other.values - self._reduced:
                return {"shared": [*self._shared, other], "constants": {**self._constants, **other.expanded}}
        if not isinstance(placement, Shard):
            return None
        more = [fqn for fqn in calls.sources(value) if fqn not in self.columns]
        if any(fqn in self._taken for fqn in more):
            return None
        if more:
            # The heads share no result of a layer whose columns are split among them.
            split = [tensor for tensor in self._shared if tensor.parts.keys() & set(more)]
            copied = {copy for tensor in split for copy in tensor.expanded}
            return {
                "columns": [*self.columns, *more],
                "shared": [tensor for tensor in self._shared if tensor not in split],
                "constants": {copy: shard for copy, shard in self._constants.items() if copy not in copied},
            }
        constants = calls.constant(value, placement)
        if constants.keys() - self._constants.keys():
            return {"constants": {**self._constants, **constants}}
        parameters = _parameter(calls, value, placement)
        return {"parameters": {**self.parameters, **parameters}} if parameters.keys() - self.parameters.keys() else None

    def _cut_at(self, value: Any, sizes: Sequence[int]) -> dict[str, list[Section]]:
        """Return the pieces of the layers from which a value comes, cut where a function takes it apart.

        Empty if no layer can be cut there, or all are already.
        """
        total, borders = sum(sizes), [*accumulate(sizes)]
        sources = [(fqn, 0, self.calls.features(fqn)) for fqn in self.calls.sources(value)]
        cut: dict[str, list[Section]] = {}
        for fqn, start, stop in [self._columns[value]] if value in self._columns else sources:
            if fqn not in self.columns or fqn not in self.calls.linears or (stop - start) % total:
                return {}
            unit, features = (stop - start) // total, self.calls.features(fqn)
            before = self.pieces.get(fqn, [Section(features)])
            ends = [*accumulate(piece.size for piece in before)]
            cuts = sorted({0, start, *ends, *(start + unit * border for border in borders)})
            cut[fqn] = [
                Section(end - begin, before[bisect_right(ends, begin)].is_whole) for begin, end in pairwise(cuts)
            ]
        return cut if any(sections != self.pieces.get(fqn) for fqn, sections in cut.items()) else {}


def _parameter(calls: Calls, value: Any, placement: Shard) -> dict[str, Shard]:
    """Return the placement of the parameter that a tensor is made of; empty unless one module's functions take it."""
    fqn = calls.parameter_behind(value)
    owner = "" if fqn is None else fqn.rpartition(".")[0]
    if fqn is None or calls.users.get(owner) != {owner} or calls.holders[owner] != {owner}:
        return {}
    if calls.n_calls[owner] != 1 or placement.outer != 1:
        return {}
    shape = calls.shape_of(value)
    sizes = calls.parameters[fqn].shape
    dims = [dim for dim, size in enumerate(sizes) if shape is not None and size == shape[placement.dim]]
    return {fqn: Shard(dims[0])} if len(dims) == 1 else {}


# ----------------------------------------------------------------------------- tensors that all heads share


def _find_shared(calls: Calls, value: Value, pieces: Collection[Value] = ()) -> _Shared | None:
    """Return the shared tensor behind a value that meets sharded heads; None if it is something else.

    Args:
        pieces: results of functions that take pieces which are whole on each rank; their layer sums the gradients.
    """
    shared = _Shared()
    pending = [value]
    while pending:
        tensor = pending.pop()
        if tensor in shared.values or tensor in shared.expanded or not tensor.requires_grad:
            continue
        if tensor in pieces:
            shared.values.add(tensor)
            continue
        event = calls.maker.get(tensor)
        layer = calls.norm_of.get(tensor, event)
        if layer is None:
            return None
        if layer.is_module:
            module = calls.modules[layer.fqn]
            # The gradient of a norm's result is summed before it reaches the weight of the norm.
            if layer is event and not (calls.is_linear(event) or isinstance(module, (nn.LayerNorm, nn.RMSNorm))):
                return None
            shared.values.add(tensor)
            _add_part(shared.parts, layer.fqn, 0, tensor.shape[-1])
            continue
        assert event is not None
        part = _part_of_layer(calls, event, tensor)
        if part is not None:
            shared.values.add(tensor)
            _add_part(shared.parts, *part)
            continue
        if any(calls.needs_grad(attribute) for attribute in attributes_in((event.args, event.kwargs))):
            return None  # the gradient of a parameter on the way would be in parts
        shared.events.append(event)
        dim = _expanded_dim(event, tensor)
        if dim is not None:
            shared.expanded[tensor] = Shard(dim)
        else:
            shared.values.add(tensor)
        pending += values_in((event.args, event.kwargs))
    # What is made of the copies is sharded like them.
    after = set(shared.expanded)
    for event in sorted(shared.events, key=calls.position.__getitem__):
        if after & set(values_in((event.args, event.kwargs))):
            after.update(values_in(event.result))
    shared.values -= after
    has_source = shared.parts or not shared.values.isdisjoint(pieces)
    return shared if has_source and (shared.expanded or value in shared.values) else None


def _add_part(parts: dict[str, list[tuple[int, int]]], fqn: str, start: int, stop: int) -> None:
    """Add a part of a layer's result, and join parts that touch."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted([*parts.get(fqn, []), (start, stop)]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    parts[fqn] = joined


def _expanded_dim(event: Event, value: Value) -> int | None:
    """Return the dimension in which a function copies a dimension of size one; None if it copies nothing, or more."""
    assert event.function is not None
    before = values_in(event.args)
    if event.function.short_name not in _COPIES or not before:
        return None
    lead = len(value.shape) - len(before[0].shape)
    sizes = (1,) * lead + before[0].shape
    dims = [dim for dim, (one, many) in enumerate(zip(sizes, value.shape, strict=True)) if one == 1 < many]
    return dims[0] if len(dims) == 1 else None


def _part_of_layer(calls: Calls, event: Event, value: Value) -> tuple[str, int, int] | None:
    """Return the layer and the range if a function cuts a value off the last dimension of a layer's result."""
    assert event.function is not None
    inputs = values_in(event.args)
    if event.function.short_name not in ("split", "chunk", "split_with_sizes", "getitem") or len(inputs) != 1:
        return None
    maker = calls.maker.get(inputs[0])
    if maker is None or not calls.is_linear(maker):
        return None
    width = inputs[0].shape[-1]
    if event.function.short_name == "getitem":
        index = event.args[1]
        last = index[-1] if isinstance(index, (tuple, list)) and Ellipsis in index else None
        if not isinstance(last, slice) or len(value.shape) != len(inputs[0].shape):
            return None
        start, stop, step = last.indices(width)
        return (maker.fqn, start, stop) if step == 1 else None
    pieces = values_in(event.result)
    if sum(piece.shape[-1] for piece in pieces) != width:
        return None
    start = sum(piece.shape[-1] for piece in pieces[: pieces.index(value)])
    return maker.fqn, start, start + value.shape[-1]


# -------------------------------------------------------------------- modules whose functions take their own parameters


def is_stack(module: nn.Module) -> bool:
    """Return True for a module with stacked weights; a stack of one has several, unlike embeddings of positions."""
    weights = [weight for weight in module._parameters.values() if weight is not None and weight.dim() >= 3]
    return any(weight.shape[0] > 1 for weight in weights) or sum(min(weight.shape[1:]) > 1 for weight in weights) > 1


def grow_stacked(calls: Calls, fqn: str) -> Region:
    """Return the region of a module with stacked parameters. Raises ``Blocked`` if it cannot be sharded."""
    event, begin, end = calls.spans[fqn][0]
    taken: dict[str, list[Event]] = {}
    for inner in calls.events[begin:end]:
        for attribute in attributes_in((inner.args, inner.kwargs)):
            taken.setdefault(attribute.fqn, []).append(inner)
    stacked = [name for name in taken if name in calls.parameters and calls.parameters[name].dim() >= 3]
    stacked = stacked or [
        name
        for name, takers in taken.items()
        if any(not taker.is_module and taker.name in Families.PRODUCTS for taker in takers)
    ]
    if not stacked:
        raise Blocked("no product takes its parameters; matrix products and einsum work")
    if calls.n_calls[fqn] != 1:
        raise Blocked(f"it is called {calls.n_calls[fqn]} times; one call works")
    if calls.users.get(fqn) != {fqn} or calls.holders[fqn] != {fqn}:
        raise Blocked("its parameters are used elsewhere, too; parameters of its own work")
    first = calls.parameters[stacked[0]]
    reason = ""
    for dim in (*range(1, first.dim()), 0):  # the first dimension of stacked experts is their number
        for outer in (outer for outer in (1, 2, 3) if first.shape[dim] % outer == 0):
            chunks = first_complete(_Chunks(calls, event, {stacked[0]: Shard(dim, outer)}))
            others = [name for name in chunks.parameters if name.rpartition(".")[0] != fqn]
            if chunks.refused is not None:
                reason = reason or str(chunks.refused)
            elif others:
                reason = f"{others[0]} is a parameter of another module; parameters of {fqn} itself work"
            else:
                return chunks
    raise Blocked(reason)


class _Chunks(Region):
    """Chunks of the parameters of a module, through its calls.

    Args:
        parameters: FQN -> how it is sharded; ``Partial``: one rank adds it.
    """

    sums: ClassVar[bool] = True

    def __init__(self, calls: Calls, module: Event, parameters: Mapping[str, Placement]) -> None:
        super().__init__(calls, [], parameters)
        self.module, self._module = module.fqn, module
        for fqn, placement in parameters.items():
            if isinstance(placement, Shard):
                self.sizes.add(calls.parameters[fqn].shape[placement.dim] // placement.outer)

    def run(self) -> None:
        """Follow the calls of the module. Raises ``Blocked``."""
        module, (begin, end) = self._module, self.calls.entered[self._module]
        self.summed = tuple(summed_arguments(module))
        self.follow(begin, end)
        for value in values_in(module.result):
            if value.dtype.is_floating_point and not isinstance(self.placement(value), Partial):
                raise Blocked(
                    f"{module.fqn} returns no sum over the ranks; a result that is linear in its last weight works"
                )
        for event in self.calls.events[begin:end]:
            for attribute in attributes_in((event.args, event.kwargs)):
                if self.calls.needs_grad(attribute) and attribute not in self.placements:
                    raise Blocked(
                        f"each rank would have a part of the gradient of {attribute.fqn}; parameters as wide work"
                    )

    def begins_or_ends(self, event: Event) -> bool:
        """Refuse layers with parameters."""
        if event.is_module and any(True for _ in self.calls.modules[event.fqn].parameters()):
            raise Blocked(f"{event.fqn} has parameters; layers without parameters work")
        return False

    def call_of(self, event: Event, reduced: Iterable[Any] = ()) -> FunctionCall:
        """Return a call; the style of the module sums all gradients."""
        taken = {*values_in((event.args, event.kwargs)), *attributes_in((event.args, event.kwargs))}
        return super().call_of(event, {*taken, *reduced})

    def others(self, refused: Blocked) -> Iterator[_Chunks]:
        """Yield propagations in which the parameter that a whole tensor is made of is sharded, too."""
        if not isinstance(refused, WrongPlacement) or not refused.of_whole:
            return
        leaf, placement = refused.value, refused.placement
        fqn = self.calls.parameter_behind(self._factor(leaf, placement.dim) if isinstance(placement, Shard) else leaf)
        if fqn is None or fqn in self.parameters:
            return
        if not isinstance(placement, Shard):
            yield _Chunks(self.calls, self._module, {**self.parameters, fqn: Partial()})
            return
        shape = self.calls.shape_of(leaf)
        for dim, size in enumerate(self.calls.parameters[fqn].shape):
            if shape is not None and size == shape[placement.dim]:
                yield _Chunks(self.calls, self._module, {**self.parameters, fqn: Shard(dim, placement.outer)})

    def _factor(self, leaf: Any, dim: int) -> Any:
        """Return the factor of a product that a dimension of its result comes from; any other tensor as it is."""
        event = self.calls.maker.get(leaf) if isinstance(leaf, Value) else None
        if event is None or event.is_module or event.name not in Families.PRODUCTS:
            return leaf
        terms, result = terms_of(self.call_of(event))
        n_factors = len(terms) if event.name == "einsum" else 2
        factors = [operand.leaf for operand, term in terms[:n_factors] if result[dim] in term]
        return factors[0] if len(factors) == 1 else leaf


def summed_arguments(module: Event) -> Iterable[int | str]:
    """Yield the arguments of a module that are floating point tensors. Raises ``Blocked`` for tensors in containers."""
    for position, argument in (*enumerate(module.args), *module.kwargs.items()):
        if isinstance(argument, Value):
            if argument.dtype.is_floating_point:
                yield position
        elif any(value.dtype.is_floating_point for value in values_in(argument)):
            raise Blocked(f"{module.fqn} takes tensors in a container; tensors that are arguments of their own work")
