"""Sequence parallelism: between row- and column-parallel layers, each rank holds a chunk of the sequence.

A stream begins at the results of row-parallel layers, attentions and embeddings, which are reduced and scattered by
one collective. It passes through functions and norms; column-parallel layers and attentions gather it. Where a whole
tensor meets the stream, or a layer needs a whole tensor, the tensor is cut or gathered at the boundary of a module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from modelsummary.parallel.attention_heads import attention_inputs
from modelsummary.parallel.derive import Derivation
from modelsummary.parallel.layouts import Blocked, FunctionCall, Needs, Sharded
from modelsummary.parallel.record_calls import ELEMENTWISE_LAYERS, Calls
from modelsummary.parallel.regions import Region
from modelsummary.parallel.rules import ELEMENTWISE, layout_after
from modelsummary.parallel.stream import Boundary, Stream
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["find_stream"]

_MOST_ATTEMPTS = 60


def find_stream(
    derivation: Derivation,
    n_ranks: int,
    *,
    with_embeddings: bool,
    cuts_inputs: bool,
    whole: Collection[int] = (),
) -> Stream:
    """Return what can be sharded along the sequence.

    Args:
        with_embeddings: the results of embeddings are scattered, too. A model that reads the length of the sequence
            from them then sees the length of a chunk.
        cuts_inputs: whole tensors that meet the stream are cut where they enter a module, if possible, rather than
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
    stream = Stream(starts)
    obstacle = _no_sequence(shapes, dims, n_ranks)
    for _ in range(_MOST_ATTEMPTS):
        if not any(layers[fqn].role in ("row", "heads") for fqn in stream.scattered):
            break
        walk = _Walk(derivation, n_ranks, stream, whole)
        try:
            walk.run()
        except Needs as needs:
            following = walk.cut(needs, cuts_inputs=cuts_inputs)
            obstacle = walk.meets_whole(needs)
        except Blocked as blocked:
            obstacle = str(blocked)
            following = walk.gather()
        else:
            wrong = walk.inconsistent()
            if not wrong:
                return walk.stream
            following = stream.without(wrong)
        if following is None:
            break
        stream = following
    raise Blocked(obstacle)


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
    return not region.norms and all(
        event.name in ELEMENTWISE
        and all(
            value in region.layouts or len(value.shape) < 2 or value.shape[0] == 1
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


class _Walk:
    """Follows the stream through a record.

    Args:
        stream: what is known so far; its scattered layers and boundaries are kept.
        whole: positions of functions that take whole tensors.
    """

    def __init__(
        self,
        derivation: Derivation,
        n_ranks: int,
        stream: Stream,
        whole: Collection[int],
    ) -> None:
        self._calls, self._layers, self._n_ranks, self._whole = derivation.calls, derivation.layers, n_ranks, whole
        self._regions = {fqn: region for region in derivation.regions for fqn in region.columns}
        self._merged: dict[str, Sharded] = {}  # FQN of a row-parallel layer of two dimensions -> layout of its tokens
        calls = derivation.calls
        self.stream = Stream(stream.scattered, stream.entries, stream.exits)
        self._origins: dict[Value, frozenset[str]] = {}
        self._position = 0
        self._event: Event | None = None
        self._spans: dict[str, list[tuple[Event, int, int]]] = {}
        for event, (begin, end) in calls.entered.items():
            self._spans.setdefault(event.fqn, []).append((event, begin, end))
        for fqn, places in calls.places.items():
            self._spans.setdefault(fqn, []).extend(
                (calls.events[position], position, position + 1) for position in places
            )
        for boundary in (*stream.entries, *stream.exits):
            self._apply(boundary)

    def _apply(self, boundary: Boundary) -> None:
        """Note the layouts that values have inside of a module, or behind it."""
        is_entry = boundary in self.stream.entries
        for event, begin, end in self._spans[boundary.fqn]:
            value = _argument(event, boundary.position) if is_entry else _results(event)[int(boundary.position)]
            if isinstance(value, Value):
                first, last = (begin, end) if is_entry else (end, len(self._calls.events) + 1)
                self.stream.change(value, first, last, _after(boundary))

    def run(self) -> None:
        """Fill the stream. Raises ``Blocked`` or ``Needs``."""
        events = self._calls.events
        while self._position < len(events):
            position = self._position
            event = self._event = events[position]
            if position in self._calls.norms and self._norm_of_functions(*self._calls.norms[position]):
                self._position = self._calls.norms[position][1]
                continue
            layer = self._layers.get(event.fqn) if event.is_module else None
            if layer is not None and layer.role == "heads":
                self._attention(event)
            elif event.is_module and event.fqn in self.stream.scattered:
                self._start(event)
            elif self._sharded(event):
                self._layer(event) if event.is_module else self._function(event)
            self._note_results(event, position)
            self._position += 1
        self._event = self._calls.record.root
        if any(self.stream.layout_at(value, self._position) for value in values_in(self._event.result)):
            raise Blocked("the model returns a chunk of the sequence; the whole sequence is expected")
        kept = next((value for value in self._calls.kept if self.stream.layout_at(value, self._position)), None)
        if kept is not None:
            maker = self._calls.maker[kept]
            raise Blocked(
                f"an attribute or a hook keeps a chunk of the sequence, the result of {maker.name} in "
                f"{maker.fqn or 'the model'}; return it instead"
            )

    def meets_whole(self, needs: Needs) -> str:
        """Return why the event at hand cannot go on: it takes chunks, and a tensor that nothing cuts."""
        assert self._event is not None
        shape = self._calls.shape_of(needs.value)
        return (
            f"{self._event.name} in {self._event.fqn or 'the model'} takes a chunk of the sequence and a whole tensor "
            f"of the shape {list(shape or ())}; one that enters or leaves a module beside the chunk can be cut"
        )

    def _sharded(self, event: Event) -> dict[Value, Sharded]:
        layouts = ((value, self._layout(value)) for value in values_in((event.args, event.kwargs)))
        return {value: layout for value, layout in layouts if layout is not None}

    def _layout(self, value: Value) -> Sharded | None:
        return self.stream.layout_at(value, self._position)

    def _note_results(self, event: Event, position: int) -> None:
        exits = {
            boundary.position: boundary
            for boundary in self.stream.exits
            if event.is_module and boundary.fqn == event.fqn
        }
        values = values_in(event.result)
        if exits or any(self.stream.layout_at(value, position) is not None for value in values):
            changed = {_results(event)[int(index)]: boundary for index, boundary in exits.items()}
            self.stream.results[position] = [
                self.stream.layout_at(value, position) if value not in changed else _after(changed[value])
                for value in values
            ]

    def _give(self, event: Event, layout: Sharded, origins: frozenset[str]) -> None:
        inputs = values_in((event.args, event.kwargs))
        for value in values_in(event.result):
            if value not in inputs:  # a function may return what it takes, such as ``to`` for the same dtype
                self.stream.layouts[value] = layout
                self._origins[value] = origins

    def _origins_of(self, event: Event) -> frozenset[str]:
        return frozenset().union(*(self._origins.get(value, frozenset()) for value in self._sharded(event)))

    def _start(self, event: Event) -> None:
        """Scatter the result of a row-parallel layer or an embedding."""
        if self._sharded(event):
            raise Blocked(f"{event.fqn} is split by rows and takes a chunk of the sequence; shards of features work")
        layout = Sharded(1) if self.stream.scattered[event.fqn] == 1 else self._merged.get(event.fqn)
        if layout is None:
            raise Blocked(f"{event.fqn} returns tokens whose batch is merged and of which no chunk came; chunks work")
        self._give(event, layout, frozenset({event.fqn}))

    def _attention(self, event: Event) -> None:
        """Gather the inputs of an ``nn.MultiheadAttention``, and scatter its result."""
        inputs = attention_inputs(event)
        layouts = tuple(self._layout(tensor) if isinstance(tensor, Value) else None for tensor in inputs)
        chunks = self._sharded(event)
        is_chunked = all(value in inputs and layout == Sharded(1) for value, layout in chunks.items())
        if not is_chunked or self.stream.attended.setdefault(event.fqn, layouts) != layouts:
            raise Blocked(
                f"{event.fqn} takes other chunks in each call, or chunks of a mask; chunks of query, key and value work"
            )
        if event.fqn in self.stream.scattered:
            result = values_in(event.result)[0]
            self.stream.layouts[result], self._origins[result] = Sharded(1), frozenset({event.fqn})

    def _layer(self, event: Event) -> None:
        self._calls.check_hooks(event)
        module = self._calls.modules[event.fqn]
        layer = self._layers.get(event.fqn)
        (value, layout), *others = self._sharded(event).items()
        if others or not event.args or event.args[0] is not value:
            raise Blocked(
                f"{event.fqn} is not called with one chunk of the sequence by position; one positional tensor works"
            )
        if layer is not None and layer.role in ("column", "head") and self._can_gather(event, value, layout):
            self.stream.gathered[event.fqn] = layout.dim
        elif isinstance(module, ELEMENTWISE_LAYERS) and layer is None:
            self._give(event, layout, self._origins_of(event))
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and layer is None:
            if layout.dim >= len(value.shape) - len(module.normalized_shape):
                raise Blocked(f"{event.fqn} works along the sequence; along features it takes chunks")
            self._add_norm(event, layout)
        else:
            raise Blocked(f"{event.fqn} takes no chunk of the sequence; elementwise layers and norms do")

    def _can_gather(self, event: Event, value: Value, layout: Sharded) -> bool:
        """Return True if a column-parallel layer may take the chunks of all ranks, one after the other.

        With batch and sequence merged, the tokens then change their order; the layers that follow have to scatter them.
        """
        if self.stream.gathered.get(event.fqn, layout.dim) != layout.dim:
            return False
        region = self._regions.get(event.fqn)
        if layout.dim or len(value.shape) != 2:
            return layout == Sharded(1) and len(value.shape) == 3
        if region is None or any(self.stream.scattered.get(row) != 0 for row in region.rows):
            return False
        return all(self._merged.setdefault(row, layout) == layout for row in region.rows)

    def _add_norm(self, event: Event, layout: Sharded) -> None:
        has_parameters = any(True for _ in self._calls.modules[event.fqn].parameters())
        if has_parameters and self.stream.norms.setdefault(event.fqn, layout.dim) != layout.dim:
            raise Blocked(
                f"{event.fqn} takes tensors that are sharded along different dimensions; equal dimensions work"
            )
        self._give(event, layout, self._origins_of(event))

    def _norm_of_functions(self, event: Event, end: int) -> bool:
        """Follow a norm that is written in Python; return False if it takes nothing sharded."""
        begin = self._position
        chunks = self._sharded(event)
        if not chunks or event.fqn in self._layers:
            return False
        (value, layout), *others = chunks.items()
        if others or not event.args or event.args[0] is not value:
            return False
        origins = self._origins_of(event)
        reduced: set[object] = set()
        for position in range(begin, end):
            self._position, self._event = position, self._calls.events[position]
            inner = self._event
            reduced.update(attributes_in((inner.args, inner.kwargs)))
            if self._sharded(inner):
                self._function(inner, reduced)
            else:
                reduced.update(values_in(inner.result))
            self._note_results(inner, position)
        results = values_in(event.result)
        if len(results) != 1 or self.stream.layouts.get(results[0]) != layout:
            raise Blocked(
                f"{event.fqn} returns a tensor that is not sharded like its input; a norm of equal shape works"
            )
        self._add_norm(event, layout)
        self._origins[results[0]] = origins
        return True

    def _function(self, event: Event, reduced: set[object] | None = None) -> None:
        if event.is_decision:
            raise Blocked(f"{event.fqn} decides by values that are sharded; values of whole tensors work")
        if self._position in self._whole:
            raise Blocked(
                f"{event.name}() in {event.fqn or 'the model'} takes no chunk of the sequence; -1 in sizes works"
            )
        call = self._call(event, reduced or set())
        layout = layout_after(call)
        if layout is None or any(size % self._n_ranks for size in call.sizes):
            raise Blocked(f"{call.at} gives sizes that do not divide by {self._n_ranks}; multiples of it work")
        self._give(event, layout, self._origins_of(event))

    def _call(self, event: Event, reduced: set[object]) -> FunctionCall:
        return FunctionCall(event, lambda leaf: self._calls.operand(leaf, self._layout), set(), reduced)

    # ----------------------------------------------------------------------------------------- boundaries

    def _around(self) -> Iterator[tuple[Event, int, int]]:
        """Yield the running module and the modules around it but the model, innermost first, with their positions."""
        event = self._event
        while event is not None and event.parent is not None:
            if event in self._calls.entered:
                yield event, *self._calls.entered[event]
            elif event.is_module:
                yield event, self._position, self._position + 1
            event = event.parent

    def _with(self, added: Boundary, *, is_entry: bool) -> Stream | None:
        """Return the stream with a further boundary; None if the module has it already."""
        old = self.stream.entries if is_entry else self.stream.exits
        if any((boundary.fqn, boundary.position) == (added.fqn, added.position) for boundary in old):
            return None
        more = {**old, added: None}
        return Stream(
            self.stream.scattered,
            more if is_entry else self.stream.entries,
            self.stream.exits if is_entry else more,
        )

    def _without(self, fqns: frozenset[str]) -> Stream | None:
        kept = {fqn: dim for fqn, dim in self.stream.scattered.items() if fqn not in fqns}
        return Stream(kept, self.stream.entries, self.stream.exits) if len(kept) < len(self.stream.scattered) else None

    def gather(self) -> Stream | None:
        """Return the stream with a whole tensor at the event at hand; None if no module can gather it."""
        assert self._event is not None
        if self._event.is_module and self._event.fqn in self.stream.scattered:
            return self._without(frozenset({self._event.fqn}))
        boundary = self._taken_whole()
        if boundary is not None:
            return self._with(boundary, is_entry=True) or self._give_up()
        pending = list(self._values_at_hand().items())
        for value, layout in pending:  # and the chunks that functions make them of
            maker = self._calls.maker.get(value)
            if maker is not None and maker.is_module and maker.fqn in self.stream.scattered:
                return self._without(frozenset({maker.fqn}))
            before = values_in((maker.args, maker.kwargs)) if maker is not None and not maker.is_module else ()
            pending += [(source, chunk) for source in before if (chunk := self._layout(source)) is not None]
            for module, position in self._returners(value) if layout.outer == 1 else ():
                stream = self._with(Boundary(module.fqn, position, layout, True), is_entry=False)
                if stream is not None:
                    return stream
        return self._give_up()

    def _taken_whole(self) -> Boundary | None:
        """Return the module that takes a chunk which has to be whole.

        That is the outermost module in which only layers take the chunk, else the innermost one.
        """
        boundary = None
        for module, begin, end in self._around():
            arguments = [*enumerate(module.args), *module.kwargs.items()]
            for position, value in arguments:
                layout = self.stream.layout_at(value, begin) if isinstance(value, Value) else None
                if layout is None or layout.outer != 1 or sum(argument is value for _, argument in arguments) > 1:
                    continue
                takers = [self._calls.position[event] for event in self._calls.takers.get(value, ())]
                events = [self._calls.events[index] for index in takers if begin <= index < end]
                if boundary is None or all(self._is_layer(event) for event in events):
                    boundary = Boundary(module.fqn, position, layout, True)
        return boundary

    def _is_layer(self, event: Event) -> bool:
        """Return True for a layer that takes no chunk of the sequence, or gathers it."""
        passes = (*ELEMENTWISE_LAYERS, nn.LayerNorm, nn.RMSNorm)
        return event.is_module and not isinstance(self._calls.modules[event.fqn], passes)

    def _values_at_hand(self) -> dict[Value, Sharded]:
        assert self._event is not None
        if self._event.parent is None:  # the model returns
            layouts = ((value, self.stream.layout_at(value, self._position)) for value in values_in(self._event.result))
            return {value: layout for value, layout in layouts if layout is not None}
        return self._sharded(self._event)

    def _give_up(self) -> Stream | None:
        """Return the stream without the layers from which the tensors at hand come."""
        origins = frozenset().union(*(self._origins.get(value, ()) for value in self._values_at_hand()))
        return self._without(origins)

    def cut(self, needs: Needs, *, cuts_inputs: bool) -> Stream | None:
        """Return the stream with a chunk of a whole tensor at the event at hand; None if no module can cut it."""
        value, layout = needs.value, needs.layout
        if not isinstance(value, Value):
            return self.gather()
        if layout.outer != 1 or value.shape[layout.dim] % self._n_ranks:
            return self._give_up()
        ways = [self._cut_at_exit, self._cut_at_entry]
        for way in reversed(ways) if cuts_inputs else ways:
            stream = way(value, layout)
            if stream is not None:
                return stream
        return self._give_up()

    def _cut_at_exit(self, value: Value, layout: Sharded) -> Stream | None:
        for module, position in self._returners(value):
            stream = self._with(Boundary(module.fqn, position, layout, False), is_entry=False)
            if stream is not None:
                return stream
        return None

    def _cut_at_entry(self, value: Value, layout: Sharded) -> Stream | None:
        for module, _, _ in reversed(list(self._around())):
            for position, argument in (*enumerate(module.args), *module.kwargs.items()):
                if argument is value:
                    return self._with(Boundary(module.fqn, position, layout, False), is_entry=True)
        return None

    def _returners(self, value: Value) -> Iterator[tuple[Event, int]]:
        """Yield the modules that returned a value before the event at hand: inner ones first."""
        returners = []
        for fqn, spans in self._spans.items():
            for event, begin, end in spans:
                if fqn and end <= self._position and value in (results := _results(event)):
                    returners.append((len(spans), end - begin, -len(fqn), event, results.index(value)))
        for *_, event, position in sorted(returners, key=lambda returner: returner[:3]):
            yield event, position

    def inconsistent(self) -> list[Any]:
        """Return the layers and boundaries that do not see the same layouts in all calls of their module."""
        stream = self.stream
        wrong: list[Any] = [
            fqn
            for fqn in (*stream.gathered, *stream.norms)
            if any(stream.layout_at(event.args[0], begin) is None for event, begin, _ in self._spans[fqn])
        ]
        for boundary in stream.entries:
            for event, begin, _ in self._spans[boundary.fqn]:
                value = _argument(event, boundary.position)
                before = stream.layout_at(value, begin, outside=begin) if isinstance(value, Value) else boundary
                if before != (boundary.layout if boundary.gathers else None):
                    wrong.append(boundary)
        for boundary in stream.exits:
            for event, _, end in self._spans[boundary.fqn]:
                value = _results(event)[int(boundary.position)]
                before = stream.layout_at(value, end, outside=end)
                if before != (boundary.layout if boundary.gathers else None):
                    wrong.append(boundary)
        return wrong


def _after(boundary: Boundary) -> Sharded | None:
    """Return the layout behind a boundary."""
    return None if boundary.gathers else boundary.layout


def _argument(event: Event, position: int | str) -> object:
    if isinstance(position, str):
        return event.kwargs.get(position)
    return event.args[position] if len(event.args) > position else None


def _results(event: Event) -> list[Any]:
    """Return what a module returns, alone or in a tuple; nothing for a tuple of one, which torch's style unpacks."""
    result = event.result
    if isinstance(result, tuple):
        return list(result) if len(result) > 1 else []
    return [result]
