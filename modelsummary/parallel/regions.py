"""Regions: what is sharded together between column-parallel and row-parallel layers.

A region begins at the layers that are split by columns, follows their results through functions and small layers, and
ends where every path has reached a ``Linear`` that is split by rows. Nothing sharded may leave it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from modelsummary.capture.modules import named_modules
from modelsummary.capture.templates import Attribute
from modelsummary.parallel.layouts import ELEMENTWISE, FACTORIES, Blocked, Call, Needs, Operand, Sharded, layout_after
from modelsummary.record.events import Event, Record, Value, attributes_in, values_in
from modelsummary.record.rules import is_layer
from modelsummary.record.tensors import Foreign

__all__ = ["Calls", "Region", "grow", "is_embedding", "is_linear"]


def is_linear(module: nn.Module | None) -> bool:
    """Return True if torch's styles can split a module as a ``Linear``."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and _is_plain(module, 2)


def is_embedding(module: nn.Module | None) -> bool:
    """Return True if torch's styles can split a module as an ``Embedding``."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.sparse
        and _is_plain(module, 2)
    )


def _is_plain(module: nn.Module, ndim: int) -> bool:
    """Return True if the weight is a parameter of the module itself: not quantised, not parametrised."""
    weight = module._parameters.get("weight")
    own = set(module._parameters) <= {"weight", "bias"}
    return weight is not None and own and weight.dim() == ndim and weight.dtype.is_floating_point


_ELEMENTWISE_LAYERS = (
    nn.Dropout, nn.Dropout1d, nn.Identity, nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.ELU,
    nn.SELU, nn.CELU, nn.LeakyReLU, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink,
    nn.LogSigmoid, nn.Threshold, nn.Hardshrink, nn.Softshrink, nn.AlphaDropout,
)  # fmt: skip


class Calls:
    """The calls of a record in order, down to the layers that are taken whole.

    Args:
        model: that was recorded.

    Attributes:
        modules: FQN -> module.
        events: functions and whole layers; of modules that are looked into, what they call.
        entered: module event that is looked into -> positions in ``events`` of what it calls.
        maker: value -> the event that made it.
        last_use: value -> position of the last event that takes it; the number of events if the model returns it.
        places: FQN of a whole layer -> positions of its calls in ``events``.
        norms: position of the first call of a module that calls functions on its own parameters alone -> the call of
            the module, and the position behind its last.
        n_calls: FQN -> calls of that module.
        takers: value -> the events that take it.
        holders: FQN -> modules that hold a parameter of that module, itself among them.
        users: FQN -> modules that call a function on a parameter of that module.
    """

    def __init__(self, model: nn.Module, record: Record) -> None:
        self.model = model
        self.record = record
        self.modules: dict[str, nn.Module] = dict(named_modules(model))
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors = self.parameters | dict(model.named_buffers(remove_duplicate=False))
        self.events: list[Event] = []
        self.entered: dict[Event, tuple[int, int]] = {}
        self._flatten(record.root)
        self.maker: dict[Value, Event] = {}
        self.last_use: dict[Value, int] = {}
        for place, event in enumerate(self.events):
            for value in values_in((event.args, event.kwargs)):
                self.last_use[value] = place
            for value in values_in(event.result):
                self.maker.setdefault(value, event)
        for value in values_in(record.root.result):
            self.last_use[value] = len(self.events)
        self.places: dict[str, list[int]] = {}
        for place, event in enumerate(self.events):
            if event.is_module:
                self.places.setdefault(event.fqn, []).append(place)
        self.takers: dict[Value, list[Event]] = {}
        for event in self.events:
            for value in values_in((event.args, event.kwargs)):
                self.takers.setdefault(value, []).append(event)
        self._find_users()
        self.norms: dict[int, tuple[Event, int]] = {}
        self.n_calls = Counter(event.fqn for event in (*self.entered, *self.events) if event.is_module)
        for event, (begin, end) in self.entered.items():
            if begin < end and _only_own_parameters(event, self.modules[event.fqn]):
                self.norms[begin] = (event, end)

    def _find_users(self) -> None:
        """Which modules hold each parameter, and which call functions on it."""
        holders: dict[int, set[str]] = {}
        for fqn, module in self.modules.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    holders.setdefault(id(parameter), set()).add(fqn)
        self.holders = {
            fqn: {one for each in module._parameters.values() if each is not None for one in holders[id(each)]}
            for fqn, module in self.modules.items()
        }
        self.users: dict[str, set[str]] = {}
        for event in self.events:
            for attribute in attributes_in((event.args, event.kwargs)) if not event.is_module else ():
                for fqn in holders.get(id(self.parameters.get(attribute.fqn)), ()):
                    self.users.setdefault(fqn, set()).add(event.fqn)

    def _flatten(self, event: Event) -> None:
        module = self.modules[event.fqn]
        if event.is_module and not self._is_whole(event, module):
            begin = len(self.events)
            for child in event.children:
                self._flatten(child) if child.is_module else self.events.append(child)
            self.entered[event] = (begin, len(self.events))
        else:
            self.events.append(event)

    def _is_whole(self, event: Event, module: nn.Module) -> bool:
        if isinstance(module, nn.Embedding) and event.children and _is_scaled_lookup(event):
            return True
        return is_linear(module) or is_embedding(module) or (is_layer(module) and not event.children)

    def shape_of(self, leaf: Any) -> tuple[int, ...] | None:
        """Return the shape of a tensor in a template; None for anything else."""
        if isinstance(leaf, Value):
            return leaf.shape
        if isinstance(leaf, Foreign):
            return tuple(leaf.tensor.shape)
        if isinstance(leaf, Attribute):
            tensor = self._tensors.get(leaf.fqn)
            if tensor is None:
                owner, _, name = leaf.fqn.rpartition(".")
                tensor = getattr(self.modules.get(owner), name, None)
            return tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
        return None

    def needs_grad(self, leaf: Any) -> bool:
        """Return True if a gradient flows into a tensor."""
        if isinstance(leaf, Value):
            return leaf.requires_grad
        if isinstance(leaf, Attribute):
            found = self._tensors.get(leaf.fqn)
            return found is not None and found.requires_grad
        return isinstance(leaf, Foreign) and leaf.tensor.requires_grad

    def sources(self, value: Value) -> list[str]:
        """Return the ``Linear`` and ``Embedding`` layers from which a value comes through functions and norms."""
        found: dict[str, None] = {}
        seen: set[Value] = set()
        pending = [value]
        while pending:
            event = self.maker.get(pending.pop())
            if event is None:
                continue
            module = self.modules[event.fqn] if event.is_module else None
            if is_linear(module) or is_embedding(module):
                found[event.fqn] = None
                continue
            if module is not None and not isinstance(module, (*_ELEMENTWISE_LAYERS, nn.LayerNorm, nn.RMSNorm)):
                continue
            before = [each for each in values_in((event.args, event.kwargs)) if each not in seen]
            seen.update(before)
            pending.extend(before)
        return list(found)

    def constant(self, value: Value, layout: Sharded) -> dict[Value, Sharded]:
        """Return the tensors of equal elements that a value is made of, with the layout that gives it this one.

        Their sizes follow from numbers that the model divides, too; empty if it is made of something else.
        """
        found: dict[Value, Sharded] = {}
        pending = [(value, layout.dim)]
        while pending:
            each, dim = pending.pop()
            event = self.maker.get(each)
            if event is None or event.function is None or each.requires_grad:
                return {}
            if event.function.short_name in FACTORIES:
                found[each] = layout._replace(dim=dim)
            elif event.function.short_name in ELEMENTWISE:
                for before in values_in((event.args, event.kwargs)):
                    place = dim - len(each.shape) + len(before.shape)
                    if place >= 0 and before.shape[place] == each.shape[dim]:
                        pending.append((before, place))
            else:
                return {}
        return found


@dataclass
class Region:
    """Layers that are sharded together.

    Attributes:
        columns: FQNs of layers that are split by columns (of an ``Embedding``: by the width).
        rows: FQNs of ``Linear`` layers that are split by rows.
        norms: FQN of a module with replicated parameters -> dimension of its input that is sharded.
        sizes: extents that have to divide by the number of ranks.
        groups: heads of keys and values, and of queries, where the two differ.
        layouts: of every sharded value.
        functions: the functions that take sharded values.
        blocked: why it cannot be sharded; empty if it can.
    """

    columns: list[str]
    rows: dict[str, None] = field(default_factory=dict)
    norms: dict[str, int] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)
    groups: tuple[int, int] = (sys.maxsize, 0)
    layouts: dict[Value, Sharded] = field(default_factory=dict)
    functions: list[Event] = field(default_factory=list)
    blocked: str = ""

    @property
    def fqns(self) -> list[str]:
        """Its layers with parameters that are sharded."""
        return [*self.columns, *self.rows]


def grow(calls: Calls, first: str, taken: Mapping[str, Any]) -> Region:
    """Return the region that begins at a layer; ``blocked`` says why it does not work.

    Args:
        taken: FQNs of layers that belong to other regions.
    """
    seeds: list[str] = [first]
    constants: dict[Value, Sharded] = {}
    while True:
        attempt = _Attempt(calls, seeds, taken, constants)
        try:
            attempt.run()
        except Needs as needs:
            more = [fqn for fqn in calls.sources(needs.value) if fqn not in seeds]
            made = {} if more else calls.constant(needs.value, needs.layout)
            if (more or made.keys() - constants.keys()) and not any(fqn in taken for fqn in more):
                seeds, constants = [*seeds, *more], constants | made
                continue
            attempt.region.blocked = f"a replicated tensor meets a sharded one in {attempt.at}"
        except Blocked as blocked:
            attempt.region.blocked = str(blocked)
        return attempt.region


class _Attempt:
    """Follows the shards from some layers on."""

    def __init__(
        self, calls: Calls, seeds: Sequence[str], taken: Mapping[str, Any], constants: Mapping[Value, Sharded]
    ) -> None:
        self._calls, self._taken = calls, taken
        makers = [calls.maker[value] for value in constants]
        self.region = Region(list(seeds), layouts=dict(constants), functions=makers)
        self.event: Event | None = None
        self._sharded_calls: Counter[str] = Counter()  # of rows and norms
        self._pieces: dict[Value, int] = {}  # in how many parts a value may be cut

    @property
    def at(self) -> str:
        """Name of the event at hand."""
        return f"{self.event.name} of {self.event.fqn or 'the model'}" if self.event is not None else "the model"

    def run(self) -> None:
        """Fill the region. Raises ``Blocked`` or ``Needs``."""
        events, layouts = self._calls.events, self.region.layouts
        place = min(self._calls.places[fqn][0] for fqn in self.region.columns)
        until = max(self._calls.places[fqn][-1] for fqn in self.region.columns)
        until = max([until, *(self._calls.last_use.get(value, 0) for value in layouts)])
        while place < len(events) and place <= until:
            event = self.event = events[place]
            if event.is_module and event.fqn in self.region.columns:
                self._column(event)
            elif place in self._calls.norms and self._as_norm(*self._calls.norms[place], place):
                place = self._calls.norms[place][1] - 1
            elif any(value in layouts for value in values_in((event.args, event.kwargs))):
                if event.is_module:
                    self._layer(event)
                else:
                    self._function(event)
            for value in values_in(events[place].result):
                if value in layouts:
                    until = max(until, self._calls.last_use.get(value, 0))
            place += 1
        if until >= len(events):
            raise Blocked("a sharded tensor is in the result of the model")
        for fqn, times in self._sharded_calls.items():
            if times != self._calls.n_calls[fqn]:
                raise Blocked(f"{fqn} takes sharded tensors in {times} of its {self._calls.n_calls[fqn]} calls")
        if not self.region.rows:
            raise Blocked("no Linear takes the sharded result")

    def _column(self, event: Event) -> None:
        module = self._calls.modules[event.fqn]
        given = _sole_input(event)
        if given in self.region.layouts:
            raise Blocked(f"{event.fqn} takes a sharded tensor")
        (result,) = values_in(event.result)
        width = module.weight.shape[0] if isinstance(module, nn.Linear) else module.weight.shape[1]  # type: ignore[union-attr,index]
        self.region.sizes.add(int(width))
        self._pieces[result] = int(width)
        self.region.layouts[result] = Sharded(len(result.shape) - 1)

    def _layer(self, event: Event) -> None:
        """A layer that is taken whole."""
        module = self._calls.modules[event.fqn]
        value = _sole_input(event)
        layout = self.region.layouts[value]
        results = values_in(event.result)
        if is_linear(module):
            if layout != Sharded(len(value.shape) - 1):
                raise Blocked(f"{event.fqn} takes a tensor that is sharded along another dimension than its features")
            if event.fqn in self._taken or len(value.shape) < 2:
                raise Blocked(f"{event.fqn} belongs to another region")
            self.region.rows[event.fqn] = None
            self._sharded_calls[event.fqn] += 1
        elif isinstance(module, _ELEMENTWISE_LAYERS):
            self._pass_on(value, results)
        elif isinstance(module, (nn.Softmax, nn.LogSoftmax)) and type(module.dim) is int:
            if layout.dim == module.dim % len(value.shape):
                raise Blocked(f"{event.fqn} works along the sharded dimension")
            self._pass_on(value, results)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            if layout.dim >= len(value.shape) - len(module.normalized_shape) or layout.outer != 1:
                raise Blocked(f"{event.fqn} works along the sharded dimension")
            if any(True for _ in module.parameters()):
                self._add_norm(event.fqn, layout.dim)
            self._pass_on(value, results)
        else:
            raise Blocked(f"{event.fqn} ({type(module).__name__}) takes no sharded tensor")

    def _pass_on(self, value: Value, results: Sequence[Value]) -> None:
        """The results are sharded like what the layer takes."""
        self.region.layouts.update(dict.fromkeys(results, self.region.layouts[value]))
        if value in self._pieces:
            self._pieces.update(dict.fromkeys(results, self._pieces[value]))

    def _add_norm(self, fqn: str, dim: int) -> None:
        self._sharded_calls[fqn] += 1
        if self.region.norms.setdefault(fqn, dim) != dim or fqn in self._taken:
            raise Blocked(f"{fqn} takes tensors that are sharded along different dimensions")

    def _as_norm(self, event: Event, end: int, begin: int) -> bool:
        """Follow a module whose parameters meet sharded values; return False if it has to be looked into."""
        inputs = values_in((event.args, event.kwargs))
        if len(inputs) != 1 or inputs[0] not in self.region.layouts or not event.args or event.args[0] is not inputs[0]:
            return False
        layout = self.region.layouts[inputs[0]]
        if layout.outer != 1:
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
            raise Blocked(f"{event.fqn} returns a tensor that is sharded otherwise than what it takes")
        self._add_norm(event.fqn, layout.dim)
        return True

    def _function(self, event: Event, reduced: Collection[Any] = ()) -> None:
        if event.is_decision:
            raise Blocked(f"{event.fqn} decides by values that are sharded")
        own: set[int] = set()
        call = Call(event, self._operand, own, reduced)
        layout = layout_after(call)
        assert layout is not None
        self.region.sizes |= own
        before = {self._pieces[value] for value in values_in((event.args, event.kwargs)) if value in self._pieces}
        if len(before) > 1 and min(before) < self.region.groups[0]:
            self.region.groups = (min(before), max(before))
        pieces = math.gcd(*before, *own)
        self._pieces.update(dict.fromkeys(values_in(event.result), pieces))
        self.region.functions.append(event)
        self.region.layouts.update(dict.fromkeys(values_in(event.result), layout))
        for written in attributes_in(event.result):
            raise Blocked(f"{call.name}() writes a sharded tensor into {written.fqn}")

    def _operand(self, leaf: Any) -> Operand | None:
        shape = self._calls.shape_of(leaf)
        if shape is None:
            return None
        layout = self.region.layouts.get(leaf) if isinstance(leaf, Value) else None
        return Operand(leaf, shape, layout, self._calls.needs_grad(leaf))


def _sole_input(event: Event) -> Value:
    """The only tensor that a layer takes, by position: torch's styles look for it there."""
    values: list[Value] = values_in((event.args, event.kwargs))
    if len(values) != 1 or not event.args or event.args[0] is not values[0]:
        raise Blocked(f"{event.fqn} is not called with one tensor by position")
    return values[0]


def _is_scaled_lookup(event: Event) -> bool:
    """Return True if an embedding of its own class looks rows up, and then scales them by a number."""
    first, *others = (each.function.short_name if each.function is not None else "" for each in event.children)
    return first == "embedding" and set(others) <= {"mul", "to"}


def _only_own_parameters(event: Event, module: nn.Module) -> bool:
    """Return True if a module calls functions alone and takes its own parameters: a norm written in Python."""
    own = {f"{event.fqn}.{name}" for name, each in module._parameters.items() if each is not None}
    if not own or any(child.is_module for child in event.children):
        return False
    if any(each.numel() != 1 for each in module.buffers()):  # a DTensor takes a plain tensor of one element only
        return False
    used = {each.fqn for child in event.children for each in attributes_in((child.args, child.kwargs))}
    return bool(used & own) and used <= own | {f"{event.fqn}.{name}" for name in module._buffers}
