"""Tensors that all heads share: each rank computes a part of their gradient, which a layer before them sums.

In multi-query attention all heads share keys and values, in multi-head latent attention the rotary part of the keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from modelsummary.parallel.placements import Shard
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["Shared", "add_part", "find_shared"]

_EXPANDS = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave"})


@dataclass
class Shared:
    """A tensor that all heads share, back to the layers it comes from.

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


def find_shared(calls: Calls, value: Value, pieces: Collection[Value] = ()) -> Shared | None:
    """Return the shared tensor behind a value that meets sharded heads; None if it is something else.

    Args:
        pieces: results of functions that take pieces which are whole on each rank; their layer sums the gradients.
    """
    shared = Shared()
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
            add_part(shared.parts, layer.fqn, 0, tensor.shape[-1])
            continue
        assert event is not None
        part = _part_of_layer(calls, event, tensor)
        if part is not None:
            shared.values.add(tensor)
            add_part(shared.parts, *part)
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


def add_part(parts: dict[str, list[tuple[int, int]]], fqn: str, start: int, stop: int) -> None:
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
    if event.function.short_name not in _EXPANDS or not before:
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
