"""Trace one run: every call of a module and of a torch function, with the tensors that it was given and made.

Tensors are known by identity; there are no proxies, so Python control flow is simply what happened. What the calls of
a module do that no list of calls could do again (read values, assign attributes, draw from Python's generator) is noted
as an obstacle of that module.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import get_ident
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelsummary.capture.changes import Generators, state_of, surroundings
from modelsummary.capture.devices import DeviceAnswers
from modelsummary.capture.effects import Effects, Noted, storage_of
from modelsummary.capture.facts import named_modules
from modelsummary.capture.shape_only import ShapeOnly
from modelsummary.capture.structure import nbytes_of, sizes_of, tensors_of
from modelsummary.capture.torch_functions import READS_FACTS, READS_SIZE, TAKES_APART, TAKES_SHAPE, keeps_first
from modelsummary.capture.watch import Execution, Operators
from modelsummary.dataflow import (
    Attribute,
    Event,
    Marker,
    OwnDevice,
    TorchFunction,
    Unknown,
    leaves_of,
    map_template,
    torch_function,
)

__all__ = ["Foreign", "Token", "Tracer"]

_CONSTANTS: tuple[type, ...] = (
    int,
    float,
    bool,
    str,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.layout,
    torch.memory_format,
    type,
)
_CONSTANTS += (range, type(Ellipsis), FunctionType, BuiltinFunctionType, enum.Enum)
# Opened where a cut falls inside. (nn.TransformerEncoderLayer is not: in evaluation it is one kernel of its own.)
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


@dataclass(eq=False)
class Token(Marker):
    """A tensor that this run made or was given.

    Attributes:
        is_tainted: its values depend on those of the input, of parameters, or on random numbers.
        is_dynamic: its shape depends on such values.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool
    storage: int
    is_tainted: bool = True
    is_dynamic: bool = False


@dataclass(eq=False)
class Foreign(Marker):
    """A tensor that is neither the model's nor made by the run: a global, an element of a list."""

    tensor: Tensor


class Tracer(TorchFunctionMode):
    """Traces one run of ``model``.

    Args:
        device: where the model is when it does not run on shapes.

    Attributes:
        root: the call of the model.
        storages_of: FQN of each tensor of the model -> id of its memory.
    """

    def __init__(self, model: nn.Module, execution: Execution, device: torch.device) -> None:
        super().__init__()
        self._model = model
        self._names = {id(module): fqn for fqn, module in named_modules(model)}
        self._attributes: dict[int, Attribute] = {}
        self.storages_of: dict[str, int] = {}
        self._tokens: dict[int, Token] = {}
        self._by_storage: defaultdict[int, list[Token]] = defaultdict(list)
        self._kept_alive: list[Any] = []
        self._calls: Counter[str] = Counter()
        self._own_device = device
        self._devices = DeviceAnswers(device) if isinstance(execution, ShapeOnly) else None
        self._operators = Operators(self, Noted(execution, self))
        self.root: Event | None = None
        self._stack: list[Event] = []
        self.running = Effects()
        self._is_open = False  # what runs now is the code of a module that could be replaced by what it calls
        self._surroundings = surroundings()
        self._generators = Generators()
        self._thread = get_ident()
        self._name_tensors()

    def _name_tensors(self) -> None:
        for fqn, module in named_modules(self._model):
            prefix = f"{fqn}." if fqn else ""
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for tensors in (module._parameters, module._buffers, vars(module)):
                for name, tensor in tensors.items():
                    if isinstance(tensor, Tensor) and id(tensor) not in self._attributes:
                        self._attributes[id(tensor)] = Attribute(prefix + name)
                        self.storages_of[prefix + name] = storage_of(tensor)
                        self._kept_alive.append(tensor)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, other_mode: bool = False) -> None:
        """Call the model, or the model with every module in the other mode; raises what its forward raises."""
        for module in self._model.modules() if other_mode else ():
            module.training = not module.training
        with self._every_call(), self._operators, self:
            self._model(*args, **kwargs)

    @contextmanager
    def _every_call(self) -> Iterator[None]:
        """Hooks come after a module's own; only around ``__call__`` a call is seen as it was made."""
        original = nn.Module.__call__
        apply = vars(torch.autograd.Function)["apply"]

        def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_open and get_ident() == self._thread:
                parent = self._stack[-1]  # what runs inside is not what its backward does
                parent.obstacle = parent.obstacle or f"applies the autograd function {cls.__name__}"
            return apply.__get__(None, cls)(*args, **kwargs)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._module_call(original, module, args, kwargs)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply_function)
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]
            torch.autograd.Function.apply = apply

    # ----------------------------------------------------------------------------------------- modules

    def _module_call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        fqn = self._names.get(id(module))
        begins = self.root is None and module is self._model
        if get_ident() != self._thread or fqn is None or not (begins or self._is_open):
            return original(module, *args, **kwargs)
        self._is_open = False  # what follows is no code of the model
        self._at_boundary()
        event = Event(fqn, None, None, None, self._stack[-1] if self._stack else None, training=module.training)
        event.call_index = self._calls[fqn]
        self._calls[fqn] += 1
        if begins:
            self.root = event
            for tensor in tensors_of((args, kwargs)):
                self._new_token(tensor, tainted=True)
        event.args, event.kwargs = self._template(args), self._template(kwargs)
        if not self._has_own_tensors(module):  # torch.func.functional_call: calling the module again is not the same
            event.args = (*event.args, Unknown("weights that are not its own"))
        event.grad = torch.is_grad_enabled()
        event.obstacle = _obstacle(module, kwargs)
        if event.parent is not None:
            event.parent.children.append(event)
            self._note_surroundings(event.parent)
        before = state_of(module)
        around, self.running = self.running, Effects()
        self._stack.append(event)
        try:
            self._is_open = not _is_whole(module)
            out = original(module, *args, **kwargs)
            self._is_open = False
            self._at_boundary()
        finally:
            self._stack.pop()
            own, self.running = self.running, around
            self._is_open = not begins
        self._is_open = False
        self._note_state(event, before, state_of(module))
        event.macs = own.macs + sum(child.macs for child in event.children)
        event.writes = (frozenset(own.writes.union(*(child.writes[0] for child in event.children))),)
        event.result = self._result_of_module(event, module, out)
        self._is_open = not begins
        return out

    def _has_own_tensors(self, module: nn.Module) -> bool:
        """Parameters and buffers of a module are those that it had before the run."""
        if isinstance(module, torch.jit.ScriptModule):
            return True
        own = (*module._parameters.values(), *module._buffers.values())
        return all(tensor is None or id(tensor) in self._attributes for tensor in own)

    def _result_of_module(self, event: Event, module: nn.Module, out: Any) -> Any:
        inputs = [leaf for leaf in leaves_of((event.args, event.kwargs)) if isinstance(leaf, Token)]
        is_dynamic = any(token.is_dynamic for token in inputs)

        def known(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return self._leaf(leaf)
            if id(leaf) in self._tokens or id(leaf) in self._attributes:
                return self._leaf(leaf)
            if not _is_whole(module):
                event.obstacle = event.obstacle or "makes its result with something that is no torch function"
            return self._new_token(leaf, tainted=True, dynamic=is_dynamic)

        return map_template(known, out)

    def _note_state(self, event: Event, before: dict[str, Any], after: dict[str, Any]) -> None:
        if before == after:
            return
        changed = [name for name in {**before, **after} if before.get(name, before) != after.get(name, after)]
        event.is_stateful = True
        if any(isinstance(after.get(name), (int, float, str)) for name in changed):
            for around in self._stack:  # a number that another module may have read, and made a constant of
                around.obstacle = around.obstacle or f"calls {event.fqn!r}, which assigns its attribute {changed[0]!r}"
        event.obstacle = event.obstacle or f"assigns its attribute {changed[0]!r}"

    def _at_boundary(self) -> None:
        """Between two calls: what was drawn from generators that torch does not know, the running module drew."""
        if self._generators.moved() and self._stack:
            event = self._stack[-1]
            event.obstacle = event.obstacle or "draws from Python's or numpy's random numbers"

    # --------------------------------------------------------------------------------------- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._devices is not None and self._devices.answers(func):
            return self._devices.answer(func)
        if not self._is_open or get_ident() != self._thread:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__iter__":
            func = torch.unbind
        function = torch_function(func)
        parent = self._stack[-1]
        templates = self._template(args), self._template(kwargs)
        inputs = leaves_of(templates)
        around, self.running = self.running, Effects()
        self._is_open = False
        if self._devices is not None:
            args, kwargs = self._devices.on_meta(args), self._devices.on_meta(kwargs)
        try:
            out = func(*args, **kwargs)
        finally:
            self._is_open = True
            own, self.running = self.running, around
        if isinstance(out, Iterator):
            out = list(out)
            function = TorchFunction("list", function.name)
        made = list(tensors_of(out))
        if not made and not own.writes:
            self._note_reading(function.name if function.kind == "get" else name, inputs, parent)
            self.running.macs += own.macs
            return out
        event = Event(parent.fqn, function, *templates, parent, grad=torch.is_grad_enabled(), macs=own.macs)
        event.training = parent.training
        event.writes = (frozenset(own.writes),)
        parent.children.append(event)
        self._note_function(event, inputs, parent)
        tainted = own.is_random or (function.short_name not in TAKES_SHAPE and any(map(_is_tainted, inputs)))
        shaping = inputs[:1] if keeps_first(name) else inputs
        dynamic = any(isinstance(each, Token) and each.is_dynamic for each in shaping)
        self._taint(own.writes, tainted)
        event.result = self._result_of_function(out, tainted, dynamic or (tainted and own.is_dynamic))
        return iter(out) if name == "__iter__" else out

    def _note_reading(self, name: str, inputs: list[Any], parent: Event) -> None:
        """A function that returned no tensor: a size, a fact, or values."""
        if name == "__set__":
            parent.obstacle = parent.obstacle or "assigns an attribute of a tensor"
        elif name in READS_FACTS:
            if name in READS_SIZE and any(isinstance(each, (Token, Unknown)) for each in inputs):
                parent.reads_sizes = True
                if any(isinstance(each, Token) and each.is_dynamic for each in inputs):
                    parent.obstacle = parent.obstacle or "reads a size that depends on values"
        elif any(map(_is_tainted, inputs)):
            parent.obstacle = parent.obstacle or f"decides by values of tensors: it calls {name.strip('_')}()"

    def _note_function(self, event: Event, inputs: list[Any], parent: Event) -> None:
        assert event.function is not None
        name = event.function.short_name
        unknown = next((each.reason for each in inputs if isinstance(each, Unknown)), None)
        if unknown is not None:
            parent.obstacle = parent.obstacle or f"passes {unknown} to {name}()"
        if name in TAKES_APART and any(isinstance(each, Token) and each.is_dynamic for each in inputs):
            parent.obstacle = parent.obstacle or "takes apart a tensor whose size depends on values"
        if event.function.kind == "list":
            parent.obstacle = parent.obstacle or f"iterates over {name}()"
        self._note_surroundings(parent)

    def _note_surroundings(self, parent: Event) -> None:
        if surroundings() != self._surroundings:
            parent.obstacle = parent.obstacle or "switches autocast, inference mode or the attention backend"

    def _taint(self, written: set[int], tainted: bool) -> None:
        if tainted:
            for storage in written:
                for token in self._by_storage[storage]:
                    token.is_tainted = True

    def _result_of_function(self, out: Any, tainted: bool, dynamic: bool) -> Any:
        def known(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return None
            token = self._tokens.get(id(leaf))
            if token is None and id(leaf) not in self._attributes:
                return self._new_token(leaf, tainted=tainted, dynamic=dynamic and leaf.dim() > 0)
            if token is not None:
                token.is_tainted = token.is_tainted or tainted
            return token or self._attributes[id(leaf)]

        return map_template(known, out)

    # ---------------------------------------------------------------------------------------- templates

    def _new_token(self, tensor: Tensor, *, tainted: bool, dynamic: bool = False) -> Token:
        token = self._tokens.get(id(tensor))
        if token is None:
            shape = () if tensor.is_nested else tuple(tensor.shape)
            facts = (shape, tensor.dtype, nbytes_of(tensor), tensor.requires_grad, storage_of(tensor))
            token = self._tokens[id(tensor)] = Token(len(self._tokens), *facts, tainted, dynamic)
            self._by_storage[token.storage].append(token)
            self._kept_alive.append(tensor)
            with suppress(RuntimeError, NotImplementedError):  # inside of torch.vmap there is none
                self._kept_alive.append(tensor.untyped_storage())
        return token

    def _template(self, value: Any) -> Any:
        return map_template(self._leaf, value)

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            token = self._tokens.get(id(leaf))
            if token is not None:
                return token
            attribute = self._attributes.get(id(leaf))
            if attribute is not None:
                return attribute
            self._kept_alive.append(leaf)
            return Foreign(leaf)
        if isinstance(leaf, torch.device):
            return OwnDevice() if leaf == self._own_device else leaf
        if isinstance(leaf, _CONSTANTS) or not _holds_tensors(leaf):
            return leaf
        return Unknown(f"a {type(leaf).__name__} that holds tensors")


# ----------------------------------------------------------------------------------------------- helpers


def _is_tainted(leaf: Any) -> bool:
    return leaf.is_tainted if isinstance(leaf, Token) else isinstance(leaf, (Attribute, Unknown, Foreign))


def _holds_tensors(value: Any) -> bool:
    """A tensor can be reached from an object; then the object is no constant."""
    found: dict[int, Any] = {}
    sizes_of(value, found)
    return bool(found)


def _is_whole(module: nn.Module) -> bool:
    """A layer of torch: its forward is one operator, and nothing is won by looking inside."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)


def _obstacle(module: nn.Module, kwargs: dict[str, Any]) -> str:
    """What about a module stands in the way of replacing it by what it calls."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript"
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "has hooks, which run only if it is called"
    if isinstance(module, nn.TransformerEncoder) and kwargs.get("src_key_padding_mask") is not None:
        return "may run on nested tensors in evaluation"
    return ""
