"""Sequence parallelism: between row- and column-parallel layers, each rank holds a chunk of the sequence.

Chunks begin at the results of row-parallel layers, attentions and embeddings, which are reduced and scattered by
one collective. They pass through functions and norms; column-parallel layers and attentions gather them. Where a whole
tensor meets a chunk, or a layer needs a whole tensor, the tensor is cut or gathered at the boundary of a module.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from torch import nn

from modelsummary.parallel.derive import Derivation
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.layer_plans import INPUTS, attention_inputs, with_layouts
from modelsummary.parallel.placements import Blocked, FunctionCall, Partial, Placement, Shard, WrongPlacement
from modelsummary.parallel.plan_entries import LayerPlan
from modelsummary.parallel.propagation import Propagation, first_complete, sole_input
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.redistributions import Redistribution, prepared_inputs, results_of
from modelsummary.parallel.regions import Region
from modelsummary.parallel.rules import ELEMENTWISE_LAYERS
from modelsummary.record.events import Event, Value, values_in

__all__ = ["Chunks", "find_chunks"]

_MOST_ATTEMPTS = 60
_Following = tuple[Mapping[str, int], Sequence[Redistribution]]  # other start conditions


def find_chunks(
    derivation: Derivation, n_ranks: int, *, with_embeddings: bool, cuts_inputs: bool, whole: Collection[int] = ()
) -> Chunks:
    """Return what can be sharded along the sequence.

    Args:
        with_embeddings: the results of embeddings are scattered, too. A model that reads the length of the sequence
            from them then sees the length of a chunk.
        cuts_inputs: whole tensors that meet a chunk are cut where they enter a module, if possible, rather than
            where they leave one.
        whole: positions of functions that do something else with a chunk, and take whole tensors.

    Raises:
        Blocked: nothing can be sharded; the message is about what was met last.
    """
    calls, layers = derivation.calls, derivation.layers
    roles = ("row", "heads", "embedding") if with_embeddings else ("row", "heads")
    shapes = {fqn: _result_shapes(calls, fqn) for fqn, layer in layers.items() if layer.role in roles}
    dims = {fqn: _token_dim(derivation, fqn, sizes) for fqn, sizes in shapes.items()}
    starts = {
        fqn: dim
        for fqn, dim in dims.items()
        if dim is not None and all(shape[dim] % n_ranks == 0 for shape in shapes[fqn])
    }
    if not any(layers[fqn].role in ("row", "heads") for fqn in starts):
        raise Blocked(_no_sequence(shapes, dims, n_ranks))
    first = Chunks(derivation, n_ranks, starts, cuts_inputs=cuts_inputs, whole=whole)
    last = first_complete(first, _MOST_ATTEMPTS)
    if last.refused is not None:
        raise Blocked(str(last.refused))
    return last


def _result_shapes(calls: Calls, fqn: str) -> list[tuple[int, ...]]:
    """Return the shape of each result of a layer, of an attention the first."""
    return [values_in(calls.events[position].result)[0].shape for position in calls.places[fqn]]


def _token_dim(derivation: Derivation, fqn: str, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """Return the dimension of the tokens in results of a layer; None if there is none.

    It is the second of three, or the first of two where batch and sequence are merged and nothing in the layer's region
    depends on the order of the tokens.
    """
    n_dims = {len(shape) for shape in shapes}
    if n_dims == {3}:
        return 1
    region = next((region for region in derivation.regions if fqn in region.rows), None)
    return 0 if n_dims == {2} and region is not None and _is_tokenwise(region) else None


def _is_tokenwise(region: Region) -> bool:
    """Return True if a row of what a region returns depends on the same row of what it takes alone."""
    shards = region.shards
    return not region.norms and all(
        event.name in Families.ELEMENTWISE
        and all(
            value in shards or len(value.shape) < 2 or value.shape[0] == 1
            for value in values_in((event.args, event.kwargs))
        )
        for event in region.functions
    )


def _no_sequence(shapes: Mapping[str, Sequence[tuple[int, ...]]], dims: Mapping[str, int | None], n_ranks: int) -> str:
    """Return why no result can be scattered along its tokens."""
    for fqn, dim in dims.items():
        if dim is None:
            continue
        for shape in shapes[fqn]:
            if shape[dim] % n_ranks:
                return (
                    f"{fqn} returns {list(shape)}, and {n_ranks} ranks do not divide its {shape[dim]} tokens, which "
                    f"torch gathers in equal chunks; multiples of {n_ranks} work (a class token is one, too)"
                )
    if not any(shapes.values()):
        return "no layer is row-parallel; layers whose activations are sharded work"
    wholes = ((fqn, shape) for fqn, results in shapes.items() for shape in results if dims[fqn] is None)
    fqn, shape = next(wholes, ("", ()))
    if not fqn:
        return "layers take chunks in some of their calls and whole tensors in others; one of the two works"
    return f"{fqn} returns {list(shape)}, in which no dimension holds tokens; [batch, tokens, features] works"


class Chunks(Propagation):
    """Chunks of the sequence, from the results of row-parallel layers, attentions and embeddings.

    Args:
        derivation: what is sharded over ``n_ranks`` otherwise.
        scattered: FQN of a row-parallel layer, attention or embedding -> dimension along which its result is scattered.
        redistributions: tensors that are gathered or cut where they enter or leave a module.
        cuts_inputs, whole: as ``find_chunks`` takes them.

    Attributes:
        norms: FQN of a norm -> dimension of its input that is sharded.
        gathered: FQN of a column-parallel layer that takes a chunk -> dimension along which it is gathered.
        attended: FQN of an ``nn.MultiheadAttention`` -> placements of its query, key and value; None: whole.
        results: position of an event -> placements of its results, after the redistributions of that module.
    """

    dimension: ClassVar[str] = "the sequence"
    tensor: ClassVar[str] = "chunk of the sequence"
    returns: ClassVar[str] = "the model returns a chunk of the sequence; the whole sequence is expected"

    def __init__(
        self,
        derivation: Derivation,
        n_ranks: int,
        scattered: Mapping[str, int],
        redistributions: Sequence[Redistribution] = (),
        *,
        cuts_inputs: bool,
        whole: Collection[int],
    ) -> None:
        super().__init__(derivation.calls, {})
        self._derivation, self._layers, self._n_ranks = derivation, derivation.layers, n_ranks
        self.scattered, self.redistributions = scattered, redistributions
        self._cuts_inputs, self._whole = cuts_inputs, whole
        self.norms: dict[str, int] = {}
        self.gathered: dict[str, int] = {}
        self.attended: dict[str, tuple[Shard | None, ...]] = {}
        self.results: dict[int, list[Shard | None]] = {}
        self._regions = {fqn: region for region in derivation.regions for fqn in region.columns}
        self._merged: dict[str, Shard] = {}  # FQN of a row-parallel layer of two dimensions -> placement of its tokens
        self._origins: dict[Value, frozenset[str]] = {}
        self._wrong: list[Any] = []
        # value -> positions between which a redistribution changes its placement, and the other placement
        self._scopes: dict[Value, list[tuple[float, float, Shard | None]]] = {}
        for redistribution in redistributions:
            for event, begin, end in self.calls.spans[redistribution.fqn]:
                value = redistribution.tensor(event)
                if isinstance(value, Value):
                    # What leaves a module is redistributed before it enters the next one.
                    scope = (begin, end) if redistribution.is_input else (end - 0.5, math.inf)
                    self._scopes.setdefault(value, []).append((*scope, redistribution.after))

    def run(self) -> None:
        """Follow the record. Raises ``Blocked``."""
        self.follow(0, len(self.calls.events))
        self.event = self.calls.record.root
        self.check_results(values_in(self.event.result))
        self._wrong = self._inconsistent()
        if self._wrong:
            raise Blocked("layers take chunks in some of their calls and whole tensors in others; one of the two works")

    # -------------------------------------------------------------------------------------- what it says

    def placement_at(self, value: Any, position: float, outside: float = math.inf) -> Shard | None:
        """Return the placement of a value for the event at a position; None if it is whole.

        Args:
            outside: ignore modules that are entered at this position or later.
        """
        latest, latest_begin = self.placements.get(value), -1.0
        for begin, end, placement in self._scopes.get(value, ()):
            if latest_begin <= begin <= position < end and begin < outside:
                latest, latest_begin = placement, begin
        assert not isinstance(latest, Partial)
        return latest

    def layer(self, layer: LayerPlan, *, takes_whole: bool) -> LayerPlan:
        """Return the plan of a layer with the chunks that it takes and returns.

        Args:
            takes_whole: a module around it gathers its input.
        """
        layouts: dict[str, Any] = {}
        if any(self.attended.get(layer.fqn, ())):
            layouts["input_layouts"] = [*self.attended[layer.fqn]]
        elif layer.fqn in self.gathered and not takes_whole:
            layouts["input_layouts"] = Shard(self.gathered[layer.fqn])
        if layer.fqn in self.scattered:
            layouts["output_layouts"] = Shard(self.scattered[layer.fqn])
        return with_layouts(layer, **layouts)

    def boundaries(self) -> Iterator[Redistribution]:
        """Yield all tensors that are gathered or cut where they enter or leave a module or layer."""
        for fqn, placements in self.attended.items():
            for position, (name, placement) in enumerate(zip(INPUTS, placements, strict=True)):
                yield from (Redistribution(fqn, True, key, placement, None) for key in (position, name))
        prepared = prepared_inputs(self.calls, self._layers, self)
        within = set(chain(*prepared.values()))
        for fqn, dim in self.gathered.items():
            event, *_ = self.calls.spans[fqn][0]
            for key in (0, *event.kwargs) if fqn not in within else ():
                yield Redistribution(fqn, True, key, Shard(dim), None)
        for fqn, dim in self.scattered.items():
            yield Redistribution(fqn, False, 0, None, Shard(dim))
        yield from (*prepared, *self.redistributions)

    # ------------------------------------------------------------------------------------ call by call

    def placement(self, leaf: Any) -> Shard | None:
        """Return the placement of a tensor at the call at hand."""
        return self.placement_at(leaf, self.position) if isinstance(leaf, Value) else None

    def begins_or_ends(self, event: Event) -> bool:
        """Begin at layers whose results are scattered, and end at layers that gather what they take."""
        layer = self._layers.get(event.fqn) if event.is_module else None
        if layer is not None and layer.role == "heads":
            self._attention(event)
        elif event.is_module and event.fqn in self.scattered:
            self._start(event)
        elif not self.sharded(event):
            return True
        elif layer is not None:
            self._gather(event, layer)
        elif self.position in self._whole:
            raise Blocked(
                f"{event.name}() in {event.fqn or 'the model'} takes no chunk of the sequence; -1 in sizes works"
            )
        else:
            return False
        return True

    def takes_norm(self, event: Event, placement: Shard) -> bool:  # noqa: ARG002
        """Return True for a norm that is not sharded itself."""
        return event.fqn not in self._layers

    def add_norm(self, event: Event, placement: Shard) -> None:
        """Note a norm with parameters. Raises ``Blocked``."""
        if self.norms.setdefault(event.fqn, placement.dim) != placement.dim:
            raise Blocked(
                f"{event.fqn} takes tensors that are sharded along different dimensions; equal dimensions work"
            )

    def give(self, call: FunctionCall, placements: Sequence[Placement | None]) -> None:
        """Give the results of a call their placements, which must be equal chunks. Raises ``Blocked``."""
        n_ranks = self._n_ranks
        if None in placements or any(size % n_ranks for size in call.sizes):
            raise Blocked(f"{call.at} gives sizes that do not divide by {n_ranks}; multiples of it work")
        if len(set(placements)) > 1:
            raise Blocked(f"{call.at} takes unequal parts of the sequence; equal parts work")
        super().give(call, placements)

    def place(self, value: Value, placement: Placement) -> None:
        """Let a value that the call at hand makes have a placement."""
        assert self.event is not None
        assert isinstance(placement, Shard)
        if value not in values_in((self.event.args, self.event.kwargs)):  # ``to`` for the same dtype returns its input
            self.placements[value] = placement
            self._origins[value] = self._origins_of(self.sharded(self.event))

    def finish(self, event: Event) -> None:
        """Note the placements of what a call returns, behind the redistributions of its module."""
        changed = {
            redistribution.tensor(event): redistribution.after
            for redistribution in self.redistributions
            if event.is_module and redistribution.fqn == event.fqn and not redistribution.is_input
        }
        values = values_in(event.result)
        placements = [self.placement(value) for value in values]
        if changed or any(placement is not None for placement in placements):
            self.results[self.position] = [
                changed.get(value, placement) for value, placement in zip(values, placements, strict=True)
            ]

    def _origins_of(self, values: Iterable[Value]) -> frozenset[str]:
        return frozenset().union(*(self._origins.get(value, frozenset()) for value in values))

    def _scatter(self, value: Value, placement: Shard, fqn: str) -> None:
        self.placements[value], self._origins[value] = placement, frozenset({fqn})

    def _start(self, event: Event) -> None:
        """Scatter the result of a row-parallel layer or an embedding."""
        if self.sharded(event):
            raise Blocked(f"{event.fqn} is split by rows and takes a chunk of the sequence; shards of features work")
        placement = Shard(1) if self.scattered[event.fqn] == 1 else self._merged.get(event.fqn)
        if placement is None:
            raise Blocked(f"{event.fqn} returns tokens whose batch is merged and of which no chunk came; chunks work")
        for value in values_in(event.result):
            self._scatter(value, placement, event.fqn)

    def _attention(self, event: Event) -> None:
        """Gather the inputs of an ``nn.MultiheadAttention``, and scatter its result."""
        inputs = attention_inputs(event)
        placements = tuple(self.placement(tensor) for tensor in inputs)
        chunks = self.sharded(event)
        is_chunked = all(value in inputs and placement == Shard(1) for value, placement in chunks.items())
        if not is_chunked or self.attended.setdefault(event.fqn, placements) != placements:
            raise Blocked(
                f"{event.fqn} takes other chunks in each call, or chunks of a mask; chunks of query, key and value work"
            )
        if event.fqn in self.scattered:
            self._scatter(values_in(event.result)[0], Shard(1), event.fqn)

    def _gather(self, event: Event, layer: LayerPlan) -> None:
        """Let a column-parallel layer gather the chunk that it takes."""
        self.calls.check_hooks(event)
        value = sole_input(self.calls, event)
        placement = self.placement(value)
        assert placement is not None
        if layer.role not in ("column", "head") or not self._can_gather(event, value, placement):
            raise Blocked(f"{event.fqn} takes no chunk of the sequence; elementwise layers and norms do")
        self.gathered[event.fqn] = placement.dim

    def _can_gather(self, event: Event, value: Value, placement: Shard) -> bool:
        """Return True if a column-parallel layer may take the chunks of all ranks, one after the other.

        With batch and sequence merged, the tokens then change their order; the layers that follow have to scatter them.
        """
        if self.gathered.get(event.fqn, placement.dim) != placement.dim:
            return False
        region = self._regions.get(event.fqn)
        if placement.dim or len(value.shape) != 2:
            return placement == Shard(1) and len(value.shape) == 3
        if region is None or any(self.scattered.get(row) != 0 for row in region.rows):
            return False
        return all(self._merged.setdefault(row, placement) == placement for row in region.rows)

    # ------------------------------------------------------------------------------------ redistributions

    def others(self, refused: Blocked) -> Iterator[Chunks]:
        """Yield the propagation with a tensor redistributed at the boundary of a module, or from fewer layers."""
        following: _Following | None
        if self._wrong:
            kept = [redistribution for redistribution in self.redistributions if redistribution not in self._wrong]
            is_boundary = all(isinstance(wrong, Redistribution) for wrong in self._wrong)
            following = (self.scattered, kept) if is_boundary else None
        elif isinstance(refused, WrongPlacement) and refused.of_whole:
            self.refused = self.meets_whole(
                refused.value, "one that enters or leaves a module beside the chunk can be cut"
            )
            following = self._cut(refused)
        else:
            following = self._gathered()
        if following is not None and any(self._layers[fqn].role in ("row", "heads") for fqn in following[0]):
            yield Chunks(self._derivation, self._n_ranks, *following, cuts_inputs=self._cuts_inputs, whole=self._whole)

    def _around(self) -> Iterator[tuple[Event, int, int]]:
        """Yield the running module and the modules around it but the model, innermost first, with their positions."""
        event = self.event
        while event is not None and event.parent is not None:
            if event.is_module:
                yield event, *self.calls.span(event)
            event = event.parent

    def _with(self, *ways: Redistribution) -> _Following | None:
        """Return the start with the first of some redistributions that no module has yet; None if there is none."""
        taken = {redistribution[:3] for redistribution in self.redistributions}
        added = next((way for way in ways if way[:3] not in taken), None)
        return None if added is None else (self.scattered, [*self.redistributions, added])

    def _without(self, fqns: frozenset[str]) -> _Following | None:
        left = {fqn: dim for fqn, dim in self.scattered.items() if fqn not in fqns}
        return (left, self.redistributions) if len(left) < len(self.scattered) else None

    def _gathered(self) -> _Following | None:
        """Return the start with a whole tensor at the event at hand; None if no module can gather it."""
        assert self.event is not None
        if self.event.is_module and self.event.fqn in self.scattered:
            return self._without(frozenset({self.event.fqn}))
        redistribution = self._taken_whole()
        if redistribution is not None:
            return self._with(redistribution) or self._give_up()
        pending = list(self._values_at_hand().items())
        for value, placement in pending:  # and the chunks that functions make them of
            maker = self.calls.maker.get(value)
            if maker is not None and maker.is_module and maker.fqn in self.scattered:
                return self._without(frozenset({maker.fqn}))
            before = values_in((maker.args, maker.kwargs)) if maker is not None and not maker.is_module else ()
            pending += [(source, chunk) for source in before if (chunk := self.placement(source)) is not None]
            following = self._with(*self._at_exits(value, placement, None)) if placement.outer == 1 else None
            if following is not None:
                return following
        return self._give_up()

    def _taken_whole(self) -> Redistribution | None:
        """Return the module that takes a chunk which has to be whole.

        That is the outermost module in which only layers take the chunk, else the innermost one.
        """
        redistribution = None
        for module, begin, end in self._around():
            arguments = [*enumerate(module.args), *module.kwargs.items()]
            for position, value in arguments:
                placement = self.placement_at(value, begin) if isinstance(value, Value) else None
                if placement is None or placement.outer != 1 or sum(argument is value for _, argument in arguments) > 1:
                    continue
                takers = [self.calls.position[event] for event in self.calls.takers.get(value, ())]
                events = [self.calls.events[index] for index in takers if begin <= index < end]
                if redistribution is None or all(self._is_layer(event) for event in events):
                    redistribution = Redistribution(module.fqn, True, position, placement, None)
        return redistribution

    def _is_layer(self, event: Event) -> bool:
        """Return True for a layer that takes no chunk of the sequence, or gathers it."""
        passes = (*ELEMENTWISE_LAYERS, nn.LayerNorm, nn.RMSNorm)
        return event.is_module and not isinstance(self.calls.modules[event.fqn], passes)

    def _values_at_hand(self) -> dict[Value, Shard]:
        assert self.event is not None
        is_end = self.event.parent is None  # the model returns
        values = values_in(self.event.result if is_end else (self.event.args, self.event.kwargs))
        placements = ((value, self.placement_at(value, self.position)) for value in values)
        return {value: placement for value, placement in placements if placement is not None}

    def _give_up(self) -> _Following | None:
        """Return the start without the layers from which the tensors at hand come."""
        origins = frozenset().union(*(self._origins.get(value, ()) for value in self._values_at_hand()))
        return self._without(origins)

    def _cut(self, wrong: WrongPlacement) -> _Following | None:
        """Return the start with a chunk of a whole tensor at the event at hand; None if no module can cut it."""
        value, placement = wrong.value, wrong.placement
        if not isinstance(value, Value) or not isinstance(placement, Shard):
            return self._gathered()
        if placement.outer != 1 or value.shape[placement.dim] % self._n_ranks:
            return self._give_up()
        exits, entries = [*self._at_exits(value, None, placement)], [*self._at_entries(value, placement)][:1]
        return (self._with(*entries, *exits) if self._cuts_inputs else self._with(*exits, *entries)) or self._give_up()

    def _at_entries(self, value: Value, placement: Shard) -> Iterator[Redistribution]:
        """Yield what cuts a value where it enters a running module: outer ones first."""
        for module, _, _ in reversed(list(self._around())):
            for position, argument in (*enumerate(module.args), *module.kwargs.items()):
                if argument is value:
                    yield Redistribution(module.fqn, True, position, None, placement)

    def _at_exits(self, value: Value, before: Shard | None, after: Shard | None) -> Iterator[Redistribution]:
        """Yield what redistributes a value where modules returned it before the event at hand: inner ones first."""
        returners = []
        for fqn, spans in self.calls.spans.items():
            for event, begin, end in spans:
                if fqn and end <= self.position and value in (results := results_of(event)):
                    returners.append((len(spans), end - begin, -len(fqn), fqn, results.index(value)))
        for *_, fqn, position in sorted(returners, key=lambda returner: returner[:3]):
            yield Redistribution(fqn, False, position, before, after)

    def _inconsistent(self) -> list[Any]:
        """Return the layers and boundaries that do not see the same placements in all calls of their module."""
        wrong: list[Any] = [
            fqn
            for fqn in (*self.gathered, *self.norms)
            if any(
                self.placement_at(value, begin) is None
                for event, begin, _ in self.calls.spans[fqn]
                for value in values_in((event.args, event.kwargs))[:1]
            )
        ]
        for redistribution in self.redistributions:
            for event, begin, end in self.calls.spans[redistribution.fqn]:
                value = redistribution.tensor(event)
                at = begin if redistribution.is_input else end - 0.5
                before = self.placement_at(value, at, outside=at) if isinstance(value, Value) else redistribution
                if before != redistribution.before:
                    wrong.append(redistribution)
        return wrong
