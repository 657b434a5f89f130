"""Regions: what is sharded together between column-parallel and row-parallel layers.

A region begins at the layers that are split by columns, follows their results through functions and small layers, and
ends where every path has reached a ``Linear`` that is split by rows. Nothing sharded may leave it.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.layouts import (
    Blocked,
    FunctionCall,
    Needs,
    Operand,
    Pieces,
    Section,
    Sharded,
    Shares,
    in_pieces,
)
from modelsummary.parallel.record_calls import ELEMENTWISE_LAYERS, Calls
from modelsummary.parallel.rules import layouts_after
from modelsummary.parallel.shared import Shared, add_part, find_shared
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["Region", "grow"]


@dataclass
class Region:
    """Layers that are sharded together.

    Attributes:
        columns: FQNs of layers that are split by columns (of an ``Embedding``: by the width).
        parameters: FQN of a parameter that functions take -> its layout.
        once: FQNs of parameters that only the first rank adds.
        module: FQN of the module whose result is summed over the ranks; empty if the region ends in ``rows``.
        summed: arguments of that module whose gradients are summed.
        rows: FQNs of ``Linear`` layers that are split by rows.
        norms: FQN of a module with replicated parameters -> dimension of its input that is sharded.
        sizes: extents that have to divide by the number of ranks.
        groups: heads of keys and values, and of queries, where the two differ.
        layouts: of every sharded value.
        functions: the functions that take sharded values.
        parts: FQN of a ``Linear`` or a norm -> start and end of each part of its result that all heads share.
        pieces: FQN of a column-parallel layer -> pieces that its columns are; one if it is missing.
        blocked: why it cannot be sharded; empty if it can.
    """

    columns: list[str]
    parameters: dict[str, Sharded] = field(default_factory=dict)
    once: dict[str, None] = field(default_factory=dict)
    module: str = ""
    summed: tuple[int | str, ...] = ()
    rows: dict[str, None] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    groups: tuple[int, int] = (sys.maxsize, 0)
    layouts: dict[Value, Sharded] = field(default_factory=dict)
    functions: list[Event] = field(default_factory=list)
    parts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    pieces: dict[str, list[Section]] = field(default_factory=dict)
    blocked: str = ""

    @property
    def fqns(self) -> list[str]:
        """Its layers with parameters that are sharded."""
        return [*self.columns, *self.rows]

    @property
    def owners(self) -> dict[str, dict[str, Sharded]]:
        """FQN of each module whose own functions take sharded parameters -> their names and layouts."""
        owners: dict[str, dict[str, Sharded]] = {}
        for fqn, layout in self.parameters.items():
            owner, _, name = fqn.rpartition(".")
            owners.setdefault(owner, {})[name] = layout
        return owners


def grow(calls: Calls, first: str, taken: Mapping[str, Any], *, shares: bool = False) -> Region:
    """Return the region that begins at a layer; ``blocked`` says why it does not work.

    Args:
        taken: FQNs of layers that belong to other regions.
        shares: heads may share a replicated tensor, whose gradient is summed; else the layer before it joins.
    """
    seeds: list[str] = [first]
    constants: dict[Value, Sharded] = {}
    parameters: dict[str, Sharded] = {}
    shared: list[Shared] = []
    pieces: dict[str, list[Section]] = {}
    while True:
        attempt = _Attempt(calls, seeds, taken, constants, parameters, shared)
        attempt.region.pieces = pieces
        try:
            attempt.run()
        except Pieces as apart:
            cut = attempt.cut_at(apart)
            if cut:
                pieces = pieces | cut
                continue
            attempt.region.blocked = str(apart)
        except (Needs, Shares) as needs:
            other = None
            if shares and isinstance(needs.value, Value):
                other = find_shared(calls, needs.value, attempt.whole_parts)
            if other is not None and other.values - set().union(*(tensor.values for tensor in shared)):
                shared, constants = [*shared, other], constants | other.expanded
                continue
            if isinstance(needs, Shares):
                attempt.region.blocked = str(needs)
                return attempt.region
            more = [fqn for fqn in _sources(calls, needs.value) if fqn not in seeds]
            equal = {} if more else _constant(calls, needs)
            if (more or equal.keys() - constants.keys()) and not any(fqn in taken for fqn in more):
                # The heads share no result of a layer whose columns are split among them.
                split = [tensor for tensor in shared if tensor.parts.keys() & set(more)]
                shared = [tensor for tensor in shared if tensor not in split]
                copied = {value for tensor in split for value in tensor.expanded}
                constants = {value: layout for value, layout in constants.items() if value not in copied}
                seeds, constants = [*seeds, *more], constants | equal
                continue
            layouts = {} if more else _parameter(calls, needs)
            if layouts.keys() - parameters.keys():
                parameters |= layouts
                continue
            attempt.region.blocked = (
                f"a whole tensor meets a sharded one in {attempt.at}; one that a linear layer makes can be split, too"
            )
        except Blocked as blocked:
            attempt.region.blocked = str(blocked)
        whole = _with_whole_pieces(pieces) if shares and attempt.region.blocked else pieces
        if whole != pieces:  # all heads may share the smallest ones
            pieces = whole
            continue
        return attempt.region


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


def _sources(calls: Calls, leaf: Value | Attribute) -> list[str]:
    return calls.sources(leaf) if isinstance(leaf, Value) else []


def _constant(calls: Calls, needs: Needs) -> dict[Value, Sharded]:
    return calls.constant(needs.value, needs.layout) if isinstance(needs.value, Value) else {}


def _parameter(calls: Calls, needs: Needs) -> dict[str, Sharded]:
    """Return the layout of the parameter that a tensor is made of; empty unless one module's functions take it."""
    fqn = calls.parameter_behind(needs.value)
    owner = "" if fqn is None else fqn.rpartition(".")[0]
    if fqn is None or calls.users.get(owner) != {owner} or calls.holders[owner] != {owner}:
        return {}
    if calls.n_calls[owner] != 1 or needs.layout.outer != 1:
        return {}
    shape = calls.shape_of(needs.value)
    sizes = calls.parameters[fqn].shape
    dims = [dim for dim, size in enumerate(sizes) if shape is not None and size == shape[needs.layout.dim]]
    return {fqn: Sharded(dims[0])} if len(dims) == 1 else {}


class _Attempt:
    """Follows the shards from some layers on."""

    def __init__(
        self,
        calls: Calls,
        seeds: Sequence[str],
        taken: Mapping[str, Any],
        constants: Mapping[Value, Sharded],
        parameters: Mapping[str, Sharded],
        shared: Sequence[Shared],
    ) -> None:
        self._calls, self._taken = calls, taken
        makers = [calls.maker[value] for value in constants]
        self.region = Region(list(seeds), dict(parameters), layouts=dict(constants), functions=makers)
        self._shared = shared
        self._reduced: set[Any] = set().union(*(tensor.values for tensor in shared))
        for tensor in shared:
            for fqn, parts in tensor.parts.items():
                for part in parts:
                    add_part(self.region.parts, fqn, *part)
            self.region.functions += [event for event in tensor.events if event not in makers]
        self.event: Event | None = None
        self._sharded_calls: Counter[str] = Counter()  # of rows and norms
        self._pieces: dict[Value, int] = {}  # in how many parts a value may be cut
        self._columns: dict[Value, tuple[str, int, int]] = {}  # columns of a layer that a value has
        self.whole_parts: set[Value] = set()  # what functions take of pieces that are whole on each rank

    @property
    def at(self) -> str:
        """Name of the event at hand."""
        return f"{self.event.name} of {self.event.fqn or 'the model'}" if self.event is not None else "the model"

    def run(self) -> None:
        """Fill the region. Raises ``Blocked`` or ``Needs``."""
        events, layouts = self._calls.events, self.region.layouts
        position = min(self._calls.places[fqn][0] for fqn in self.region.columns)
        until = max(self._calls.places[fqn][-1] for fqn in self.region.columns)
        until = max([until, *(self._calls.last_use.get(value, 0) for value in layouts)])
        uses = (
            [position for position, event in enumerate(events) if self._takes_parameter(event)]
            if self.region.parameters
            else []
        )
        uses += [self._calls.position[event] for event in self.region.functions]
        position, until = min([position, *uses]), max([until, *uses])
        while position < len(events) and position <= until:
            event = self.event = events[position]
            if event.is_module and event.fqn in self.region.columns:
                self._column(event)
            elif position in self._calls.norms and self._as_norm(*self._calls.norms[position], position):
                position = self._calls.norms[position][1] - 1
            elif self._takes_parameter(event) or any(
                value in layouts for value in values_in((event.args, event.kwargs))
            ):
                self._layer(event) if event.is_module else self._function(event)
            for value in values_in(events[position].result):
                if value in layouts:
                    until = max(until, self._calls.last_use.get(value, 0))
            position += 1
        kept = next((value for value in self._calls.kept if value in layouts), None)
        if kept is not None:
            maker = self._calls.maker[kept]
            raise Blocked(
                f"an attribute or a hook keeps the result of {maker.name} in {maker.fqn or 'the model'}, which would "
                "be sharded; a tensor that nothing keeps can be split"
            )
        if until >= len(events):
            raise Blocked(
                "the model would return a sharded tensor; a layer whose result only linear layers take can be split"
            )
        self._check_calls()

    def _check_calls(self) -> None:
        """Check what only the whole forward shows. Raises ``Blocked``."""
        for fqn, times in self._sharded_calls.items():
            if times != self._calls.n_calls[fqn]:
                raise Blocked(
                    f"{fqn} takes sharded tensors in {times} of its {self._calls.n_calls[fqn]} calls; all of them must"
                )
        both = next((fqn for fqn in self.region.norms if fqn in self.region.owners), None)
        if both is not None:
            raise Blocked(f"parameters of {both} are sharded and whole in one call; a norm with one of the two works")
        if not all(tensor.is_alone(self._calls, self.region.functions) for tensor in self._shared):
            raise Blocked(
                "a tensor that all heads share goes elsewhere, too; one that only the heads take can be split"
            )
        if not self.region.rows:
            raise Blocked(
                "no linear layer takes the result; it can be split if one does, after elementwise functions and views"
            )

    def _takes_parameter(self, event: Event) -> bool:
        parameters = self.region.parameters
        return bool(parameters) and any(
            attribute.fqn in parameters for attribute in attributes_in((event.args, event.kwargs))
        )

    def _column(self, event: Event) -> None:
        self._calls.check_hooks(event)
        value = _sole_input(event)
        if value in self.region.layouts:
            raise Blocked(f"{event.fqn} takes a sharded tensor and would be split by columns; by rows it can be split")
        (result,) = values_in(event.result)
        width, dim = result.shape[-1], len(result.shape) - 1
        pieces = self.region.pieces.get(event.fqn, [Section(width)])
        layout = in_pieces(dim, pieces)
        assert layout is not None
        self.region.sizes |= {size for size, is_whole in pieces if not is_whole}
        if layout.pieces:
            self.region.sizes.add(width)  # the rows of the weight are chunks, from which each rank gets those it needs
        self._pieces[result] = math.gcd(*(piece.size for piece in pieces))
        self._columns[result] = (event.fqn, 0, width)
        self.region.layouts[result] = layout

    def _layer(self, event: Event) -> None:
        """Add a layer that stays in one piece."""
        self._calls.check_hooks(event)
        module = self._calls.modules[event.fqn]
        value = _sole_input(event)
        layout = self.region.layouts[value]
        results = values_in(event.result)
        if self._calls.is_linear(event):
            if layout != Sharded(len(value.shape) - 1):
                raise Blocked(
                    f"{event.fqn} takes a tensor that is sharded along tokens or heads; features can be split"
                )
            if event.fqn in self._taken or len(value.shape) < 2:
                raise Blocked(f"{event.fqn} also takes the result of layers that are split apart; one source works")
            self.region.rows[event.fqn] = None
            self._sharded_calls[event.fqn] += 1
        elif isinstance(module, ELEMENTWISE_LAYERS):
            self._pass_on(value, results)
        elif isinstance(module, nn.GLU):
            self._gated(event, module, value, results)
        elif isinstance(module, (nn.Softmax, nn.LogSoftmax)) and type(module.dim) is int:
            if layout.dim == module.dim % len(value.shape):
                raise Blocked(f"{event.fqn} works along the sharded dimension; along another dimension it can be split")
            self._pass_on(value, results)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            if layout.dim >= len(value.shape) - len(module.normalized_shape) or not layout.is_plain:
                raise Blocked(f"{event.fqn} works along the sharded dimension; along another dimension it can be split")
            if any(True for _ in module.parameters()):
                self._add_norm(event.fqn, layout.dim)
            self._pass_on(value, results)
        else:
            raise Blocked(f"{event.fqn} ({type(module).__name__}) takes no sharded tensor; elementwise layers do")

    def _gated(self, event: Event, module: nn.GLU, value: Value, results: Sequence[Value]) -> None:
        """Follow ``nn.GLU``, which takes the two halves of a dimension."""
        layout = self.region.layouts[value]
        if layout.dim == module.dim % len(value.shape):
            if layout.outer != 2:
                message = f"{event.fqn} works along the sharded dimension; along another dimension it can be split"
                raise Pieces(message, value, (1, 1))
            layout = layout._replace(outer=1)
        self.region.layouts.update(dict.fromkeys(results, layout))

    def cut_at(self, apart: Pieces) -> dict[str, list[Section]]:
        """Return the pieces of the layers from which a value comes, cut where a function takes it apart.

        Empty if no layer can be cut there, or all are already.
        """
        total = sum(apart.sizes)
        borders = [*accumulate(apart.sizes)]
        sources = [(fqn, 0, self._calls.features(fqn)) for fqn in _sources(self._calls, apart.value)]
        cut: dict[str, list[Section]] = {}
        for fqn, start, stop in [self._columns[apart.value]] if apart.value in self._columns else sources:
            if fqn not in self.region.columns or fqn not in self._calls.linears or (stop - start) % total:
                return {}
            unit, features = (stop - start) // total, self._calls.features(fqn)
            before = self.region.pieces.get(fqn, [Section(features)])
            ends = [*accumulate(piece.size for piece in before)]
            cuts = sorted({0, start, *ends, *(start + unit * border for border in borders)})
            cut[fqn] = [
                Section(end - begin, before[bisect_right(ends, begin)].is_whole) for begin, end in pairwise(cuts)
            ]
        return cut if any(sections != self.region.pieces.get(fqn) for fqn, sections in cut.items()) else {}

    def _pass_on(self, value: Value, results: Sequence[Value]) -> None:
        """Give the results the layout of the layer's input."""
        self.region.layouts.update(dict.fromkeys(results, self.region.layouts[value]))
        for result in results:
            if value in self._pieces:
                self._pieces[result] = self._pieces[value]
            if value in self._columns:
                self._columns[result] = self._columns[value]

    def _add_norm(self, fqn: str, dim: int) -> None:
        self._sharded_calls[fqn] += 1
        if self.region.norms.setdefault(fqn, dim) != dim or fqn in self._taken:
            raise Blocked(f"{fqn} takes tensors that are sharded along different dimensions; equal dimensions work")

    def _as_norm(self, event: Event, end: int, begin: int) -> bool:
        """Follow a module whose parameters meet sharded values; return False if it has to be looked into."""
        inputs = values_in((event.args, event.kwargs))
        if len(inputs) != 1 or inputs[0] not in self.region.layouts or not event.args or event.args[0] is not inputs[0]:
            return False
        layout = self.region.layouts[inputs[0]]
        if not layout.is_plain:
            return False
        reduced: set[Any] = set()  # parameters of the module, and what it makes of them alone
        for inner in self._calls.events[begin:end]:
            self.event = inner
            taken = values_in((inner.args, inner.kwargs))
            reduced.update(attributes_in((inner.args, inner.kwargs)))
            if any(value in self.region.layouts for value in taken):
                self._function(inner, reduced)
            elif all(value in reduced for value in taken):
                reduced.update(values_in(inner.result))
        results = values_in(event.result)
        if len(results) != 1 or self.region.layouts.get(results[0]) != layout:
            raise Blocked(
                f"{event.fqn} returns a tensor that is not sharded like its input; a norm that keeps its shape works"
            )
        self._add_norm(event.fqn, layout.dim)
        return True

    def _function(self, event: Event, reduced: Collection[Any] = ()) -> None:
        if event.is_decision:
            raise Blocked(
                f"{event.fqn or 'the model'} decides by values that are sharded; values of whole tensors work"
            )
        assert event.function is not None
        if event.function.short_name.startswith("new_"):
            return  # it takes the dtype and the device
        sizes: set[int] = set()
        call = FunctionCall(event, self._operand, sizes, {*reduced, *self._reduced} if self._reduced else reduced)
        layouts = layouts_after(call)
        self.region.sizes |= sizes
        before = {self._pieces[value] for value in values_in((event.args, event.kwargs)) if value in self._pieces}
        if len(before) > 1 and min(before) < self.region.groups[0]:
            self.region.groups = (min(before), max(before))
        pieces = math.gcd(*before, *sizes)
        self._pieces.update(dict.fromkeys(values_in(event.result), pieces))
        self.region.functions.append(event)
        results = values_in(event.result)
        layouts = layouts if isinstance(layouts, list) else [layouts] * len(results)
        sharded = {result: layout for result, layout in zip(results, layouts, strict=True) if layout is not None}
        self.region.layouts.update(sharded)
        self.whole_parts.update(set(results) - sharded.keys())
        self._follow_columns(event, results)
        for written in attributes_in(event.result) if any(event.writes) else ():
            raise Blocked(f"{call.at} writes a sharded tensor into {written.fqn}; a new tensor works")

    def _follow_columns(self, event: Event, results: Sequence[Value]) -> None:
        """Note which columns of a layer the results have, if a function takes columns of one layer."""
        taken = [value for value in values_in((event.args, event.kwargs)) if value in self._columns]
        if len({self._columns[value] for value in taken}) != 1:
            return
        fqn, start, stop = self._columns[taken[0]]
        shape, dim = taken[0].shape, self.region.layouts[taken[0]].dim
        is_split = len(results) > 1 and sum(result.shape[dim] for result in results) == shape[dim]
        unit = (stop - start) // shape[dim]
        for result in results:
            end = start + unit * result.shape[dim] if is_split else stop
            if result in self.region.layouts and (is_split or math.prod(result.shape) == math.prod(shape)):
                self._columns[result] = (fqn, start, end)
            start = end if is_split else start

    def _operand(self, leaf: Any) -> Operand | None:
        operand = self._calls.operand(leaf, self.region.layouts.get)
        if operand is None or not isinstance(leaf, Attribute) or leaf.fqn not in self.region.parameters:
            return operand
        return replace(operand, layout=self.region.parameters[leaf.fqn])


def _sole_input(event: Event) -> Value:
    """Return the only tensor that a layer takes, by position: torch's styles look for it there."""
    values: list[Value] = values_in((event.args, event.kwargs))
    if len(values) != 1 or not event.args or event.args[0] is not values[0]:
        raise Blocked(f"{event.fqn} is not called with one tensor by position; one positional tensor works")
    (value,) = values
    return value
