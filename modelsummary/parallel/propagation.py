"""Propagation: from start conditions, what each rank holds of every value, call by call.

One engine follows the record with one table of rules (``modelsummary.parallel.rules``). Its users say where it begins,
which calls end it, and what a refusal leads to: column- and row-parallel layers, and stacked
parameters (``regions``), chunks of the sequence (``sequence``) and of the vocabulary (``loss``).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from modelsummary.capture.templates import Attribute, leaves_of
from modelsummary.parallel.placements import Blocked, FunctionCall, Placement, Shard
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.rules import layer_function, placements_after
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["Propagation", "first_complete", "sole_input"]

_Propagation = TypeVar("_Propagation", bound="Propagation")


class Propagation:
    """Placements of the values of a record, from start conditions.

    Args:
        placements: of values, or of parameters, with which it starts; anything else is whole.

    Attributes:
        sums: the results of the ranks may sum up to a value.
        dimension, tensor: names of what is sharded, for messages.
        returns: why the model cannot return it.
        sizes: extents of sharded dimensions that have to divide by the number of ranks.
        functions: functions that take what is sharded.
        event, position: the call at hand.
        refused: why it does not reach its end; None if it does.
    """

    sums: ClassVar[bool] = False
    dimension: ClassVar[str] = "the sharded dimension"
    tensor: ClassVar[str] = "sharded tensor"
    returns: ClassVar[str] = (
        "the model would return a sharded tensor; a layer whose result only linear layers take can be split"
    )

    def __init__(self, calls: Calls, placements: Mapping[Any, Placement]) -> None:
        self.calls = calls
        self.placements: dict[Any, Placement] = dict(placements)
        self.sizes: set[int] = set()
        self.functions: list[Event] = []
        self.event: Event | None = None
        self.position = self.until = 0
        self.refused: Blocked | None = None

    # ------------------------------------------------------------------------------- what users say

    def run(self) -> None:
        """Follow the record. Raises ``Blocked``."""
        raise NotImplementedError

    def others(self: _Propagation, refused: Blocked) -> Iterable[_Propagation]:  # noqa: ARG002
        """Yield propagations from other start conditions, to which a refusal leads."""
        return ()

    def begins_or_ends(self, event: Event) -> bool:  # noqa: ARG002
        """Handle a call at which the placements begin, end or change; return False for any other."""
        return False

    def takes_norm(self, event: Event, placement: Shard) -> bool:  # noqa: ARG002
        """Return True if a module of functions on its own parameters may take a value of a placement as a whole."""
        return False

    def add_norm(self, event: Event, placement: Shard) -> None:
        """Note a norm that takes a value of a placement. Raises ``Blocked``."""

    def finish(self, event: Event) -> None:
        """Note what is there behind a call."""

    # ---------------------------------------------------------------------------------- the engine

    def placement(self, leaf: Any) -> Placement | None:
        """Return the placement of a tensor at the call at hand; None if it is whole."""
        return self.placements.get(leaf) if isinstance(leaf, (Value, Attribute)) else None

    @property
    def shards(self) -> dict[Value, Shard]:
        """The values of which ranks hold chunks, with their placements."""
        return {
            leaf: placement
            for leaf, placement in self.placements.items()
            if isinstance(leaf, Value) and isinstance(placement, Shard)
        }

    def sharded(self, event: Event) -> dict[Any, Placement]:
        """Return the tensors that a call takes and that are not whole, with their placements."""
        leaves = dict.fromkeys(
            leaf for leaf in leaves_of((event.args, event.kwargs)) if isinstance(leaf, (Value, Attribute))
        )
        placements = ((leaf, self.placement(leaf)) for leaf in leaves)
        return {leaf: placement for leaf, placement in placements if placement is not None}

    def follow(self, begin: int, end: int, until: int | None = None) -> None:
        """Follow the calls between two positions. Raises ``Blocked``.

        Args:
            until: end behind this call, or behind the last one that takes what is sharded. Default: at ``end``.
        """
        self.position, self.until = begin, end if until is None else until
        while self.position < end and self.position <= self.until:
            event = self.event = self.calls.events[self.position]
            norm = self.calls.norms.get(self.position)
            if norm is not None and self._norm(norm[0], self.position, norm[1]):
                continue
            self._call(event)
            self.position += 1

    def _call(self, event: Event, reduced: Collection[Any] = ()) -> None:
        if not self.begins_or_ends(event) and self.sharded(event):
            self.apply_rule(event, reduced)
        self.finish(event)

    def _norm(self, event: Event, begin: int, end: int) -> bool:
        """Follow a module whose parameters meet what is sharded; return False if it has to be looked into."""
        inputs = values_in((event.args, event.kwargs))
        placement = self.placement(inputs[0]) if len(inputs) == 1 and is_first(event, inputs[0]) else None
        if not isinstance(placement, Shard) or not self.takes_norm(event, placement):
            return False
        reduced: set[Any] = set()  # parameters of the module, and what it makes of them alone
        for self.position in range(begin, end):
            inner = self.event = self.calls.events[self.position]
            reduced.update(attributes_in((inner.args, inner.kwargs)))
            if not self.sharded(inner) and reduced.issuperset(values_in((inner.args, inner.kwargs))):
                reduced.update(values_in(inner.result))
            self._call(inner, reduced)
        results = values_in(event.result)
        if len(results) != 1 or self.placement(results[0]) != placement:
            raise Blocked(
                f"{event.fqn} returns a tensor that is not sharded like its input; a norm that keeps its shape works"
            )
        self.add_norm(event, placement)
        self.position = end
        return True

    def call_of(self, event: Event, reduced: Collection[Any] = ()) -> FunctionCall:
        """Return a call with the placements of what it takes.

        Args:
            reduced: replicated tensors that may meet sharded ones.
        """
        layer = None
        if event.is_module:
            self.calls.check_hooks(event)
            module = self.calls.modules[event.fqn]
            layer = layer_function(module) or (type(module).__name__, {})
        return FunctionCall(
            event,
            lambda leaf: self.calls.operand(leaf, self.placement),
            reduced,
            layer=layer,
            sums=self.sums,
            sharded=(self.tensor, self.dimension),
        )

    def meets_whole(self, leaf: Any, works: str) -> Blocked:
        """Return the refusal of the call at hand, which takes what is sharded, and a whole tensor that nothing cuts."""
        assert self.event is not None
        at = f"{self.event.name} in {self.event.fqn or 'the model'}"
        shape = list(self.calls.shape_of(leaf) or ())
        return Blocked(f"{at} takes a {self.tensor} and a whole tensor of the shape {shape}; {works}")

    def check_results(self, returned: Iterable[Value]) -> None:
        """Check that the model neither returns nor keeps what is sharded. Raises ``Blocked``."""
        kept = next((value for value in self.calls.kept if self.placement(value) is not None), None)
        if kept is not None:
            maker = self.calls.maker[kept]
            raise Blocked(
                f"an attribute or a hook keeps a {self.tensor}, the result of {maker.name} in "
                f"{maker.fqn or 'the model'}; a tensor that nothing keeps works"
            )
        if any(self.placement(value) is not None for value in returned):
            raise Blocked(self.returns)

    def apply_rule(self, event: Event, reduced: Collection[Any] = ()) -> None:
        """Give the results of a call the placements that its rule says. Raises ``Blocked``."""
        if event.is_decision:
            raise Blocked(
                f"{event.fqn or 'the model'} decides by values that are sharded; values of whole tensors work"
            )
        call = self.call_of(event, reduced)
        if call.name.startswith("new_") or all(operand.placement is None for operand in call.operands):
            return  # it takes the dtype and the device
        placements = placements_after(call)
        results = values_in(event.result)
        self.give(call, placements if isinstance(placements, list) else [placements] * len(results))

    def give(self, call: FunctionCall, placements: Sequence[Placement | None]) -> None:
        """Give the results of a call their placements. Raises ``Blocked``."""
        self.sizes |= call.sizes
        if call.event.is_module:
            self._layer(call)
        else:
            self.functions.append(call.event)
        for value, placement in zip(values_in(call.event.result), placements, strict=True):
            if placement is not None:
                self.place(value, placement)

    def _layer(self, call: FunctionCall) -> None:
        """Note a layer with parameters of its own: a norm."""
        if any(True for _ in self.calls.modules[call.event.fqn].parameters()):
            placement = self.placement(sole_input(self.calls, call.event))
            if not isinstance(placement, Shard) or not self.takes_norm(call.event, placement):
                raise Blocked(f"{call.at} takes pieces of a dimension; one chunk of it on each rank works")
            self.add_norm(call.event, placement)

    def place(self, value: Value, placement: Placement) -> None:
        """Let a value have a placement from the call at hand on."""
        self.placements[value] = placement
        self.until = max(self.until, self.calls.last_use.get(value, 0))


def first_complete(first: _Propagation, most: int = sys.maxsize) -> _Propagation:
    """Return the first propagation that reaches its end, of one and those to which refusals lead; else the last.

    Args:
        most: propagations to try.
    """
    pending = [first]
    for _ in range(most):
        propagation = pending.pop()
        try:
            propagation.run()
        except Blocked as refused:
            propagation.refused = refused
            pending += reversed([*propagation.others(refused)])
        else:
            break
        if not pending:
            break
    return propagation


def sole_input(calls: Calls, event: Event) -> Value:
    """Return the only tensor that a layer takes. Torch's styles look for it among the positions."""
    values: list[Value] = values_in((event.args, event.kwargs))
    linear = calls.linears.get(event.fqn)
    takes_names = linear is not None and not linear.is_torch
    if len(values) != 1 or not (takes_names or is_first(event, values[0])):
        raise Blocked(f"{event.fqn} is not called with one tensor by position; one positional tensor works")
    return values[0]


def is_first(event: Event, value: Value) -> bool:
    """Return True if a value is the first positional argument of a call."""
    return bool(event.args) and event.args[0] is value
