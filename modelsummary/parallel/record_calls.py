"""The calls of a record in order, and what is known of the values that they hand to one another."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.modules import named_modules
from modelsummary.capture.templates import Attribute, ObjectState
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.linear_layers import LinearLayer, is_embedding, linear_layers
from modelsummary.parallel.placements import Blocked, Operand, Placement, Shard
from modelsummary.parallel.rules import ELEMENTWISE_LAYERS
from modelsummary.record.events import Event, Record, Value, attributes_in, values_in
from modelsummary.record.tensors import Foreign
from modelsummary.record.trace_rules import TraceRules, is_layer

__all__ = ["TRACE_RULES", "Calls"]

# nn.TransformerEncoderLayer is opened, too: its MLP can be split.
TRACE_RULES = TraceRules(
    is_whole=lambda module: is_layer(module) and not isinstance(module, nn.TransformerEncoderLayer),
    opens_checkpoints=True,
    follows_kept=True,
)


class Calls:
    """The calls of a record in order, down to the layers that are taken whole.

    Args:
        model: that was recorded.
        linears: its linear layers. Default: as the record shows them.

    Attributes:
        modules: FQN -> module.
        linears: FQN -> linear layer, by its class or by what it calls.
        events: functions and whole layers; of modules that are looked into, what they call.
        entered: module event that is looked into -> positions in ``events`` of what it calls.
        position: event -> its position in ``events``.
        maker: value -> the event that made it.
        returned: values in the result of the model, and ``kept``. Those in its cache are left out: the model itself
            takes them back, and each rank keeps the keys and values of its own heads.
        kept: values that attributes or other objects hold behind the forward, such as a loss that the loop reads there.
        last_use: value -> position of the last event that takes it; the number of events if the model returns it.
        places: FQN of a whole layer -> positions of its calls in ``events``.
        norms: position of the first call of a module that calls functions on its own parameters alone -> the call of
            the module, and the position behind its last.
        norm_of: value -> the call of such a module that returns it.
        spans: FQN of a module -> its calls, with the positions in ``events`` at which they begin and end.
        n_calls: FQN -> calls of that module.
        takers: value -> the events that take it.
        holders: FQN -> modules that hold a parameter of that module, itself among them.
        users: FQN -> modules that call a function on a parameter of that module.
    """

    def __init__(self, model: nn.Module, record: Record, linears: Mapping[str, LinearLayer] | None = None) -> None:
        self.model = model
        self.record = record
        self.modules: dict[str, nn.Module] = dict(named_modules(model))
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._tensors = self.parameters | dict(model.named_buffers(remove_duplicate=False))
        self.linears = linear_layers(record, self.modules) if linears is None else linears
        self.events: list[Event] = []
        self.entered: dict[Event, tuple[int, int]] = {}
        self._flatten(record.root)
        self.position = {event: position for position, event in enumerate(self.events)}
        self.maker: dict[Value, Event] = {}
        self.last_use: dict[Value, int] = {}
        self.takers: dict[Value, list[Event]] = {}
        self.places: dict[str, list[int]] = {}
        for position, event in enumerate(self.events):
            for value in values_in((event.args, event.kwargs)):
                self.last_use[value] = position
                self.takers.setdefault(value, []).append(event)
            for value in values_in(event.result):
                self.maker.setdefault(value, event)
            if event.is_module:
                self.places.setdefault(event.fqn, []).append(position)
        cached = set(values_in(_cache_in(record.root.result, model)))
        self.kept = {value for value in values_in(record.root.kept) if value in self.maker} - cached
        self.returned = [value for value in (*values_in(record.root.result), *self.kept) if value not in cached]
        for value in self.returned:
            self.last_use[value] = len(self.events)
        self._find_users()
        self.norms: dict[int, tuple[Event, int]] = {}
        self.spans: dict[str, list[tuple[Event, int, int]]] = {}
        for event in (*self.entered, *(event for event in self.events if event.is_module)):
            self.spans.setdefault(event.fqn, []).append((event, *self.span(event)))
        self.n_calls = Counter({fqn: len(spans) for fqn, spans in self.spans.items()})
        for event, (begin, end) in self.entered.items():
            if begin < end and _only_own_parameters(event, self.modules[event.fqn]):
                self.norms[begin] = (event, end)
        self.norm_of = {value: event for event, _ in self.norms.values() for value in values_in(event.result)}

    def _find_users(self) -> None:
        """Note which modules hold each parameter, and which call functions on it."""
        holders: dict[int, set[str]] = {}
        for fqn, module in self.modules.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    holders.setdefault(id(parameter), set()).add(fqn)
        self.holders: dict[str, set[str]] = {}
        for fqn, module in self.modules.items():
            parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
            self.holders[fqn] = set().union(*(holders[id(parameter)] for parameter in parameters))
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
        return event.fqn in self.linears or is_embedding(module) or (is_layer(module) and not event.children)

    def span(self, event: Event) -> tuple[int, int]:
        """Return the positions in ``events`` of what a call of a module calls; of a whole layer, of the call itself."""
        return self.entered[event] if event in self.entered else (self.position[event], self.position[event] + 1)

    def is_linear(self, event: Event | None) -> bool:
        """Return True for a call of a linear layer."""
        return event is not None and event.is_module and event.fqn in self.linears

    def check_hooks(self, event: Event) -> None:
        """Raise ``Blocked`` if a hook of a layer would take parts of tensors; torch's own hooks make weights."""
        module = self.modules[event.fqn]
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks):
            raise Blocked(f"a hook of {event.fqn} would take a part of a tensor; a layer without hooks can be split")

    def features(self, fqn: str) -> int:
        """Return how many features a linear layer returns, or how many rows an embedding has."""
        layer = self.linears.get(fqn)
        weight = self.modules[fqn].get_parameter("weight" if layer is None else layer.weight)
        return int(weight.shape[0 if layer is None else layer.dim])

    def shape_of(self, leaf: Any) -> tuple[int, ...] | None:
        """Return the shape of a tensor in a template; None for anything else."""
        tensor = self.tensor_of(leaf)
        if tensor is None:
            return () if isinstance(leaf, Attribute) else None
        return tuple(tensor.shape)

    def tensor_of(self, leaf: Any) -> Value | Tensor | None:
        """Return what has the shape and dtype of a tensor in a template; None for anything else."""
        if isinstance(leaf, Foreign):
            return leaf.tensor
        if isinstance(leaf, Attribute):
            tensor = self._tensors.get(leaf.fqn)
            if tensor is None:
                owner, _, name = leaf.fqn.rpartition(".")
                tensor = getattr(self.modules.get(owner), name, None)
            return tensor if isinstance(tensor, Tensor) else None
        return leaf if isinstance(leaf, (Value, Tensor)) else None

    def operand(self, leaf: Any, placement_of: Callable[[Any], Placement | None]) -> Operand | None:
        """Return a tensor of a template as an operand; None for anything else."""
        shape = self.shape_of(leaf)
        if shape is None:
            return None
        tensor = self.tensor_of(leaf)
        is_index = tensor is not None and not tensor.dtype.is_floating_point and tensor.dtype != torch.bool
        return Operand(leaf, shape, placement_of(leaf), self.needs_grad(leaf), is_index, self.is_zeros(leaf))

    def needs_grad(self, leaf: Any) -> bool:
        """Return True if a gradient flows into a tensor."""
        if isinstance(leaf, Value):
            return leaf.requires_grad
        if isinstance(leaf, Attribute):
            attribute = self._tensors.get(leaf.fqn)
            return attribute is not None and attribute.requires_grad
        tensor = leaf.tensor if isinstance(leaf, Foreign) else leaf
        return isinstance(tensor, Tensor) and tensor.requires_grad

    def behind(self, *leaves: Any, through: Callable[[Any, Event], bool]) -> Iterator[tuple[Any, Event | None]]:
        """Yield tensors and what they are made of, each once, with the call that made it.

        Args:
            through: returns True for a tensor and the call that made it if what that call takes follows.
        """
        pending, seen = list(leaves), set[Any]()
        while pending:
            leaf = pending.pop()
            maker = self.maker.get(leaf) if isinstance(leaf, Value) else None
            yield leaf, maker
            if maker is not None and through(leaf, maker):
                taken = (maker.args, maker.kwargs)
                fresh = [tensor for tensor in (*attributes_in(taken), *values_in(taken)) if tensor not in seen]
                seen.update(fresh)
                pending.extend(fresh)

    def sources(self, leaf: Any) -> list[str]:
        """Return the ``Linear`` and ``Embedding`` layers from which a tensor comes through functions and norms."""

        def is_source(event: Event) -> bool:
            return self.is_linear(event) or (event.is_module and is_embedding(self.modules[event.fqn]))

        def passes(_: Any, event: Event) -> bool:
            kinds = (*ELEMENTWISE_LAYERS, nn.LayerNorm, nn.RMSNorm)
            return not is_source(event) and (not event.is_module or isinstance(self.modules[event.fqn], kinds))

        makers = (maker for _, maker in self.behind(leaf, through=passes) if maker is not None and is_source(maker))
        return list(dict.fromkeys(maker.fqn for maker in makers))

    def parameter_behind(self, leaf: Any) -> str | None:
        """Return the FQN of the parameter that functions make a tensor of; None if it comes from anything else.

        Where a gradient flows into the tensor, only what takes a part of the gradient counts.
        """
        has_gradient = self.needs_grad(leaf)

        def counts(source: Any) -> bool:
            tensor = self.tensor_of(source)
            return (
                tensor is not None and tensor.dtype.is_floating_point and (not has_gradient or self.needs_grad(source))
            )

        fqns: set[str] = set()
        for source, maker in self.behind(leaf, through=lambda source, event: counts(source) and not event.is_module):
            if isinstance(source, Attribute) and counts(source):
                fqns.add(source.fqn)
            elif isinstance(source, Value) and counts(source) and (maker is None or maker.is_module):
                return None
        fqn = fqns.pop() if len(fqns) == 1 else None
        return fqn if fqn in self.parameters else None

    def is_zeros(self, leaf: Any) -> bool:
        """Return True if a function made a tensor of zeros."""
        maker = self.maker.get(leaf) if isinstance(leaf, Value) else None
        function = maker.function if maker is not None else None
        return function is not None and function.short_name in Families.FACTORIES and "zeros" in function.short_name

    def constant(self, leaf: Any, placement: Shard) -> dict[Value, Shard]:
        """Return the tensors of equal elements that a tensor is made of, with the placement that gives it this one.

        Their sizes follow from numbers that the model divides, too; empty if it is made of something else.
        """
        constants: dict[Value, Shard] = {}
        pending = [(leaf, placement.dim)] if isinstance(leaf, Value) else []
        seen = set(pending)
        while pending:
            tensor, dim = pending.pop()
            event = self.maker.get(tensor)
            if event is None or event.function is None or tensor.requires_grad:
                return {}
            if event.function.short_name in Families.FACTORIES:
                constants[tensor] = placement._replace(dim=dim)
            elif event.function.short_name in Families.ELEMENTWISE or _is_slice(event, tensor):
                for before in values_in((event.args, event.kwargs)):
                    dim_before = dim - len(tensor.shape) + len(before.shape)
                    is_as_wide = dim_before >= 0 and before.shape[dim_before] == tensor.shape[dim]
                    if is_as_wide and (before, dim_before) not in seen:
                        seen.add((before, dim_before))
                        pending.append((before, dim_before))
            else:
                return {}
        return constants


def _cache_in(result: Any, model: nn.Module) -> Any:
    """Return the part of a template of a result that is a cache: the forward takes it back under the same name.

    Of a tuple, that is the last item, if it is an object or a container.
    """
    names = [name for name in inspect.signature(model.forward).parameters if "past" in name or "cache" in name]
    if isinstance(result, tuple) and not hasattr(result, "_fields"):
        return result[-1] if names and len(result) > 1 and not isinstance(result[-1], Value) else None
    fields = result.attributes if type(result) is ObjectState else result
    if not isinstance(fields, Mapping):
        fields = getattr(fields, "__dict__", {})
    return [fields[name] for name in names if name in fields and not isinstance(fields[name], Value)]


def _is_slice(event: Event, value: Value) -> bool:
    """Return True if a function takes a part of a tensor and keeps its dimensions."""
    before = values_in(event.args)
    is_indexing = event.function is not None and event.function.short_name == "getitem"
    return is_indexing and len(before) == 1 and len(before[0].shape) == len(value.shape)


def _is_scaled_lookup(event: Event) -> bool:
    """Return True if an embedding of its own class looks rows up, and then scales them by a number."""
    first, *others = (child.function.short_name if child.function is not None else "" for child in event.children)
    return first == "embedding" and set(others) <= {"mul", "to"}


def _only_own_parameters(event: Event, module: nn.Module) -> bool:
    """Return True if a module calls functions alone and takes its own parameters: a norm written in Python."""
    parameters = {f"{event.fqn}.{name}" for name, parameter in module._parameters.items() if parameter is not None}
    if not parameters or any(child.is_module for child in event.children):
        return False
    if any(buffer.numel() != 1 for buffer in module.buffers()):  # a DTensor takes a plain tensor of one element only
        return False
    used = {attribute.fqn for child in event.children for attribute in attributes_in((child.args, child.kwargs))}
    return bool(used & parameters) and used <= parameters | {f"{event.fqn}.{name}" for name in module._buffers}
