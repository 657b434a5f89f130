"""The record of a forward as plain data: calls of modules and functions, and the values that they pass on.

A ``Record`` is a tree of ``Event``; the arguments and the result of an event are templates
(``modelsummary.capture.templates``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch.overrides import resolve_name

from modelsummary._torch import OpOverload, OpOverloadPacket
from modelsummary.capture.templates import Attribute, BatchSize, Marker, ModeChoice, leaves_of
from modelsummary.layer_info import CallKey
from modelsummary.record.fingerprint import Fingerprint

__all__ = [
    "Event",
    "ObservedRun",
    "Record",
    "TorchFunction",
    "Value",
    "attributes_in",
    "torch_function",
    "values_in",
]


@dataclass(eq=False)
class Value(Marker):
    """A tensor that the forward made or was given.

    Attributes:
        index: running number.
        shape, dtype, nbytes, requires_grad: properties of the tensor in the first run.
        sizes: the shape with ``BatchSize`` for sizes that depend on the batch size; None for sizes that vary otherwise.
        storages: id of its memory in each run.
        is_dynamic: whether its shape depends on the values of the input.
        is_view: whether autograd knows it as a view of another tensor.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool
    storages: tuple[int, ...]
    sizes: tuple[int | BatchSize | None, ...] = ()
    is_dynamic: bool = False
    is_view: bool = False

    @property
    def batch(self) -> tuple[int, int] | None:
        """``(dim, factor)`` where ``shape[dim] == factor * batch size``; None if no dimension is proportional to it."""
        for dim, size in enumerate(self.sizes):
            if isinstance(size, BatchSize) and size.factor and size[1:] == (0, 1):
                return dim, size.factor
        return None

    def __repr__(self) -> str:
        return f"%{self.index}"


def values_in(template: Any) -> list[Value]:
    """Return the values in ``template``, each once."""
    return list(dict.fromkeys([leaf for leaf in leaves_of(template) if isinstance(leaf, Value)]))


def attributes_in(template: Any) -> list[Attribute]:
    """Return the tensors of the model in ``template``, each once."""
    return list(dict.fromkeys([leaf for leaf in leaves_of(template) if isinstance(leaf, Attribute)]))


# ------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True)
class TorchFunction:
    """A function of torch, pickled by its public name.

    Attributes:
        kind: ``"function"``; ``"method"`` of a tensor; ``"get"`` for the getter of a property; ``"list"`` for a
            function that returns an iterator.
        name: ``"torch.nn.functional.relu"``, or the name of the property.
        function: the function to call.

    >>> relu = torch_function(torch.nn.functional.relu)
    >>> relu.kind, relu.name, relu.short_name
    ('function', 'torch.nn.functional.relu', 'relu')
    """

    kind: str
    name: str
    function: Any = None

    @cached_property
    def short_name(self) -> str:
        """The last part of the name without underscores, such as ``"relu"`` or ``"add"``."""
        return self.name.rpartition(".")[2].strip("_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or get the property."""
        if self.kind == "get":
            return getattr(args[0], self.name)
        if self.kind == "method":  # torch.compile (2.11) cannot call a method that an object holds
            return getattr(args[0], self.name.rpartition(".")[2])(*args[1:], **kwargs)
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        is_public = self.kind in ("function", "method") and _by_name(self.name) is self.function
        return (_named, (self.kind, self.name)) if is_public else (TorchFunction, (self.kind, self.name, self.function))


_STANDINS = frozenset({"ShapeTensor.tolist", "ShapeTensor.numpy"})


@lru_cache(maxsize=4096)  # finding the public name takes as long as the rest of the trace of a call
def torch_function(function: Any) -> TorchFunction:
    """Return the ``TorchFunction`` of a function that ``__torch_function__`` got."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return TorchFunction("get", function.__self__.__name__)
    if getattr(function, "__qualname__", "") in _STANDINS:  # a method that shape tensors override
        function = getattr(torch.Tensor, name)
    public = resolve_name(function) or name or "function"
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        public = f"torch.ops.{public}"
    is_method = public.startswith("torch.Tensor.") and _by_name(public) is function
    return TorchFunction("method" if is_method else "function", public, function)


def _named(kind: str, name: str) -> TorchFunction:
    return TorchFunction(kind, name, _by_name(name))


@cache
def _by_name(name: str) -> Any:
    """Return the object with a dotted name; None if it does not exist."""
    parts = name.split(".")
    try:
        function: Any = importlib.import_module(parts[0])
        for position, part in enumerate(parts[1:], 2):
            if not hasattr(function, part):
                importlib.import_module(".".join(parts[:position]))
            function = getattr(function, part)
    except (AttributeError, ImportError):
        return None
    return function


# ---------------------------------------------------------------------------------------------- events


@dataclass(eq=False)
class Event:
    """One call of a module or of a torch function.

    Attributes:
        fqn: FQN of the module; for a function, of the module whose forward called it.
        function: the function; None for a call of a module.
        call_index: running number among the calls of the same module.
        args, kwargs, result: templates.
        children: calls that a module's forward made, in order.
        grad: whether gradients were enabled.
        macs: multiply-adds, including the children.
        writes: ids of the memory written in place in each run, including the children.
        obstacle: why the call of this module cannot be replaced by its children; empty if it can.
        checkpointed: whether the caller runs it under ``torch.utils.checkpoint``; a bool, or ``ModeChoice``.
        regions: numbers of the regions of activation checkpointing around it, outermost first, if these are opened.
        assigned: FQNs of the attributes that the module assigned or changed during the call.
        prepared: name of an attribute of the module that the calling code has changed since its last call; empty: none.
        unknown: what the call depends on besides its arguments, which no record tells: it cannot be called as a whole.
        reads_sizes: whether the module's own forward read the size of a tensor.
        dtype_bound: whether an argument is a dtype (or a limit of it) that the calling code read from a tensor.
        training: mode of the module in the first run.
        is_decision: whether it is a function that returned values of tensors to the forward, given as ``result``.
        kept: of the call of the model, the tensors that objects hold behind it, if these are followed.
    """

    fqn: str
    function: TorchFunction | None
    args: Any
    kwargs: Any
    parent: Event | None = None
    call_index: int = 0
    result: Any = None
    children: list[Event] = field(default_factory=list)
    grad: bool = True
    macs: int = 0
    writes: tuple[frozenset[int], ...] = ()
    obstacle: str = ""
    checkpointed: Any = False
    regions: tuple[int, ...] = ()
    assigned: frozenset[str] = frozenset()
    prepared: str = ""
    unknown: tuple[Any, ...] = ()
    reads_sizes: bool = False
    dtype_bound: bool = False
    training: bool = False
    is_decision: bool = False
    kept: Any = ()

    @property
    def is_module(self) -> bool:
        """Whether this is a call of a module."""
        return self.function is None

    @property
    def name(self) -> str:
        """The FQN of the module, or the name of the function."""
        return self.fqn if self.function is None else self.function.short_name

    @property
    def key(self) -> CallKey:
        """FQN and call index; of a call of a module, the key of its row."""
        return self.fqn, self.call_index

    def block(self, reason: str) -> None:
        """Note why the call cannot be replaced by its children. The first reason is kept; an empty one is ignored."""
        self.obstacle = self.obstacle or reason

    def walk(self) -> Iterator[Event]:
        """Yield this event and everything below it, in order."""
        pending = [self]
        while pending:
            event = pending.pop()
            yield event
            pending.extend(reversed(event.children))


class ObservedRun(NamedTuple):
    """The operators of one of the runs of a record, with gradients.

    Attributes:
        batch: batch size; None if no input has one.
        other_mode: whether every module was in its other mode, train or eval.
        fingerprint: the operators.
    """

    batch: int | None
    other_mode: bool
    fingerprint: Fingerprint


@dataclass(eq=False)
class Record:
    """The calls and values of a forward.

    Attributes:
        root: the call of the model; its arguments are the inputs, its result is the output.
        batch_size: batch size of the first run; None if the record holds for its sizes only.
        batch_dim: batch dimension of the inputs.
        no_other_mode: whether the record holds for its mode (train or eval) only.
        smallest_batch: the smallest batch size that the record holds for; many forwards treat a batch of 1 differently.
        unread: FQNs of the attributes that the forward assigns and does not depend on.
        storages_of: FQN of each parameter, buffer and plain tensor -> id of its memory in each run.
        observed: operators of some of the runs, to compare stages with.
        asks_gradients: whether the forward's own code asks whether gradients are computed.
        first_run: weak reference to the first run, which the iterator of records holds.
    """

    root: Event
    batch_size: int | None
    batch_dim: int
    no_other_mode: bool
    smallest_batch: int
    unread: frozenset[str]
    storages_of: dict[str, tuple[int, ...]]
    observed: list[ObservedRun] = field(default_factory=list)
    asks_gradients: bool = False
    first_run: Callable[[], Any] = field(default=lambda: None, repr=False)

    def mode_choices(self) -> list[ModeChoice]:
        """Return the constants that depend on the mode."""
        templates = ((event.args, event.kwargs, event.result, event.checkpointed) for event in self.root.walk())
        return [leaf for template in templates for leaf in leaves_of(template) if isinstance(leaf, ModeChoice)]
