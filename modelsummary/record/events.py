"""What a forward did, as plain data: calls of modules and functions, and the values that they hand to one another.

A ``Record`` is a tree of ``Event``; the arguments and the result of an event are *templates*: the containers and
constants of the call, with a marker in the place of everything that is not constant.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import resolve_name
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map, tree_structure

__all__ = [
    "Attribute",
    "BatchSize",
    "Event",
    "Marker",
    "ModeChoice",
    "ObjectState",
    "OwnDevice",
    "Record",
    "TorchFunction",
    "Unknown",
    "Value",
    "attributes_in",
    "holds_objects",
    "leaves_of",
    "make_object",
    "map_template",
    "objects_in",
    "same_constant",
    "same_structure",
    "structure_of",
    "taken_apart",
    "torch_function",
    "values_in",
    "with_leaves",
]


# --------------------------------------------------------------------------------------------- markers


class Marker:
    """Stands in a template for something that is no constant."""


class Attribute(NamedTuple):
    """A tensor of the model: a parameter, a buffer, or a plain attribute."""

    fqn: str


class BatchSize(NamedTuple):
    """An integer that is ``(factor * batch size + offset) // divisor``."""

    factor: int
    offset: int
    divisor: int = 1

    def at(self, batch_size: int) -> int:
        """Return the integer for a batch size."""
        return (self.factor * batch_size + self.offset) // self.divisor


@dataclass(eq=False)
class Value(Marker):
    """A tensor that the forward made or was given.

    Attributes:
        index: running number.
        shape, dtype, nbytes, requires_grad: of the tensor in the first run.
        sizes: the shape with ``BatchSize`` in the place of what moves with the batch; None where it moves otherwise.
        storages: id of the memory behind it, for each run.
        is_dynamic: its shape depends on the values of the input.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool
    storages: tuple[int, ...]
    sizes: tuple[int | BatchSize | None, ...] = ()
    is_dynamic: bool = False

    @property
    def batch(self) -> tuple[int, int] | None:
        """``(dim, factor)`` where ``shape[dim] == factor * batch size``; None if no dimension shows it."""
        for dim, size in enumerate(self.sizes):
            if isinstance(size, BatchSize) and size.factor and size[1:] == (0, 1):
                return dim, size.factor
        return None

    def __repr__(self) -> str:
        return f"%{self.index}"


class ModeChoice(NamedTuple):
    """A constant that depends on ``training`` of the module that made the call."""

    in_train: Any
    in_eval: Any


class OwnDevice(NamedTuple):
    """The device of the values at hand."""


class Unknown(NamedTuple):
    """Something that cannot be had again without the model's own code; ``reason`` ends a sentence."""

    reason: str


_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype})
_MARKERS = (Marker, Attribute, BatchSize, ModeChoice, OwnDevice, Unknown)
_WHOLE = (torch.Tensor, torch.nn.Module, type, Marker, Attribute, BatchSize, ModeChoice, OwnDevice, Unknown)


class ObjectState(NamedTuple):
    """An object in a result, taken apart: its class, and a template of its attributes."""

    kind: type
    attributes: dict[str, Any]


def make_object(kind: type, attributes: dict[str, Any]) -> Any:
    """Return an object of a class with these attributes, as ``copy.copy`` makes one."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


def taken_apart(value: Any, *, around: frozenset[int] = frozenset()) -> Any:
    """Return ``value`` with an ``ObjectState`` in the place of every plain object in it that holds tensors.

    A cache of keys and values is one. Objects that ``make_object`` could not make again stay as they are.

    Args:
        around: ids of the objects that are being taken apart: one that holds itself stays as it is.
    """

    def apart(leaf: Any) -> Any:
        if isinstance(leaf, _WHOLE) or callable(leaf) or type(leaf) in _ATOMS or id(leaf) in around:
            return leaf
        attributes = getattr(leaf, "__dict__", None)
        makes: Any = type(leaf).__new__
        if not attributes or makes is not object.__new__:
            return leaf
        inner = taken_apart(dict(attributes), around=around | {id(leaf)})
        holds = any(isinstance(each, torch.Tensor) for each in leaves_of(inner))
        return ObjectState(type(leaf), inner) if holds else leaf

    return map_template(apart, value)


def objects_in(value: Any) -> list[Any]:
    """Return the objects in ``value`` that ``taken_apart`` takes apart, without those inside of them."""
    return [leaf for leaf in leaves_of(value) if type(taken_apart(leaf)) is ObjectState]


def holds_objects(template: Any) -> bool:
    """Return True if there is an ``ObjectState`` in a template."""
    leaves = tree_leaves(template, is_leaf=lambda inner: type(inner) is ObjectState)
    return any(type(leaf) is ObjectState for leaf in leaves)


def map_template(function: Callable[[Any], Any], template: Any, *, makes_objects: bool = False) -> Any:
    """Return ``template`` with ``function`` applied to everything in it that is not a container.

    Args:
        makes_objects: make the objects of every ``ObjectState``.
    """
    kind = type(template)
    if kind in _ATOMS or isinstance(template, (torch.Tensor, *_MARKERS)):
        return function(template)

    def inside(inner: Any) -> Any:
        return map_template(function, inner, makes_objects=makes_objects)

    if kind is tuple or kind is torch.Size:
        return tuple([inside(inner) for inner in template])
    if kind is list:
        return [inside(inner) for inner in template]
    if kind is dict:
        return {name: inside(inner) for name, inner in template.items()}
    if kind is slice:
        return slice(*(inside(each) for each in (template.start, template.stop, template.step)))
    if kind is ObjectState:
        attributes = inside(template.attributes)
        return make_object(template.kind, attributes) if makes_objects else ObjectState(template.kind, attributes)
    if isinstance(template, tuple) and hasattr(kind, "_fields"):  # PackedSequence asks what it is made of for devices
        return tuple.__new__(kind, [inside(inner) for inner in template])
    if kind in SUPPORTED_NODES:  # one level of what torch's tree walk knows
        return tree_map(inside, template, is_leaf=lambda inner: inner is not template)
    if _is_dataclass(template):
        return dataclasses.replace(
            template, **{each.name: inside(getattr(template, each.name)) for each in _fields(template)}
        )
    return function(template)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*_MARKERS, torch.Size))


def _is_dataclass(value: Any) -> bool:
    """A dataclass that can be made again from its fields (torch's tree walk does not know it)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module, *_MARKERS))


def _fields(value: Any) -> Iterator[Any]:
    return (each for each in dataclasses.fields(value) if each.init)


def leaves_of(template: Any) -> list[Any]:
    """Everything in ``template`` that is no container."""
    leaves: list[Any] = []
    map_template(leaves.append, template)
    return leaves


def with_leaves(template: Any, leaves: Iterable[Any]) -> Any:
    """``template`` with these in the place of its leaves, in order."""
    remaining = iter(leaves)
    return map_template(lambda _: next(remaining), template)


def structure_of(template: Any) -> Any:
    """The containers of ``template``, to be compared."""
    return tree_structure(template, is_leaf=_is_leaf)


def same_structure(one: Any, other: Any) -> bool:
    """The two have the same containers; mostly told without torch's tree walk, which takes ten times as long."""
    kind, other_kind = type(one), type(other)
    if (kind in _ATOMS or isinstance(one, _MARKERS)) and (other_kind in _ATOMS or isinstance(other, _MARKERS)):
        return True
    if kind is other_kind and (kind is tuple or kind is list):
        return len(one) == len(other) and all(map(same_structure, one, other))
    if kind is other_kind is dict:
        return list(one) == list(other) and all(map(same_structure, one.values(), other.values()))
    return bool(structure_of(one) == structure_of(other))


def same_constant(one: Any, other: Any) -> bool:
    """Return True if two constants of a call are equal: 1, 1.0 and True differ."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # an object that cannot be compared is equal to itself alone
        return False


def values_in(template: Any) -> list[Value]:
    """The values in ``template``, each once."""
    return list(dict.fromkeys(leaf for leaf in leaves_of(template) if isinstance(leaf, Value)))


def attributes_in(template: Any) -> list[Attribute]:
    """The tensors of the model in ``template``, each once."""
    return list(dict.fromkeys(leaf for leaf in leaves_of(template) if isinstance(leaf, Attribute)))


# ------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True)
class TorchFunction:
    """A function of torch; it pickles by its public name.

    Attributes:
        kind: ``"function"``; ``"method"`` of tensors; ``"get"`` for the getter of a property of theirs; ``"list"``
            for a function that gives an iterator.
        name: ``"torch.nn.functional.relu"``, or the name of the property.
        function: what to call.
    """

    kind: str
    name: str
    function: Any = None

    @property
    def short_name(self) -> str:
        """``"relu"``, ``"add"``."""
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


def torch_function(function: Any) -> TorchFunction:
    """``function`` as ``__torch_function__`` got it."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return TorchFunction("get", function.__self__.__name__)
    if getattr(function, "__qualname__", "") in _STANDINS:  # a shape tensor answers in the place of torch
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
    """What a dotted name means; None if nothing."""
    parts = name.split(".")
    try:
        found: Any = importlib.import_module(parts[0])
        for position, part in enumerate(parts[1:], 2):
            if not hasattr(found, part):
                importlib.import_module(".".join(parts[:position]))
            found = getattr(found, part)
    except (AttributeError, ImportError):
        return None
    return found


# ---------------------------------------------------------------------------------------------- events


@dataclass(eq=False)
class Event:
    """One call of a module or of a torch function.

    Attributes:
        fqn: of the module; for a function, of the module whose forward called it.
        function: None for a module.
        call_index: running number among the calls of the same module.
        args, kwargs, result: templates.
        children: what a module's forward called, in order.
        grad: gradients were enabled.
        macs: multiply-adds, with those of the children; ``output_bytes`` of all that it made itself.
        writes: memory that was written in place, for each run, with what the children wrote.
        obstacle: why the call of this module cannot be replaced by its children; empty if it can.
        checkpointed: the caller has it run under ``torch.utils.checkpoint``; a bool, or ``ModeChoice``.
        regions: numbers of the regions of activation checkpointing around it, outermost first, where these are opened.
        assigned: FQNs of the attributes that the module assigned or changed during the call.
        reads_sizes: the module's own forward read the size of a tensor.
        dtype_bound: an argument is a dtype (or a limit of it) that the calling code read from a tensor.
        training: mode of the module in the first run.
        is_decision: a function that told the forward values of tensors; ``result`` is what it told.
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
    reads_sizes: bool = False
    dtype_bound: bool = False
    training: bool = False
    is_decision: bool = False

    @property
    def is_module(self) -> bool:
        """A call of a module."""
        return self.function is None

    @property
    def name(self) -> str:
        """FQN of the module, or the name of the function."""
        return self.fqn if self.function is None else self.function.short_name

    def walk(self) -> Iterator[Event]:
        """This event and everything below it, in order."""
        pending = [self]
        while pending:
            event = pending.pop()
            yield event
            pending.extend(reversed(event.children))


@dataclass(eq=False)
class Record:
    """What a forward did.

    Attributes:
        root: the call of the model; its arguments are the inputs, its result is the output.
        batch_size: of the first run; None if the record holds for its sizes only, ``no_batch`` then says why.
        batch_dim: dimension of the inputs that is the batch.
        no_other_mode: why the record holds for its mode (train or eval) only; empty if it holds for both.
        smallest_batch: the smallest batch size that the record holds for; many forwards do other things with one.
        unread: FQNs of the attributes that the forward assigns for somebody else: a second forward would do the same.
        storages_of: FQN of each parameter, buffer and plain tensor -> id of its memory, for each run.
    """

    root: Event
    batch_size: int | None
    batch_dim: int
    no_batch: str
    no_other_mode: str
    smallest_batch: int
    unread: frozenset[str]
    storages_of: dict[str, tuple[int, ...]]
