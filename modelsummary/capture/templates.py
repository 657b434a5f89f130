"""Templates: the containers and constants of a call, with markers for everything that is not constant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from modelsummary._torch import SUPPORTED_NODES, tree_leaves, tree_map, tree_structure

__all__ = [
    "Attribute",
    "BatchSize",
    "Marker",
    "ModeChoice",
    "ObjectState",
    "OwnDevice",
    "Unknown",
    "holds_objects",
    "leaves_of",
    "make_object",
    "map_template",
    "objects_in",
    "same_constant",
    "same_structure",
    "structure_of",
    "taken_apart",
    "tells_dtype",
    "with_leaves",
]


class Marker:
    """Base class of the markers in a template, which replace values that are not constant."""


class Attribute(NamedTuple):
    """A tensor of the model: a parameter, a buffer, or a plain attribute."""

    fqn: str


class BatchSize(NamedTuple):
    """An integer that is ``(factor * batch size + offset) // divisor``.

    >>> BatchSize(factor=2, offset=1).at(8)
    17
    """

    factor: int
    offset: int
    divisor: int = 1

    def at(self, batch_size: int) -> int:
        """Return the integer for a batch size."""
        return (self.factor * batch_size + self.offset) // self.divisor


class ModeChoice(NamedTuple):
    """A constant that depends on ``training`` of the module that made the call."""

    in_train: Any
    in_eval: Any


class OwnDevice(NamedTuple):
    """The device of the values that a call gets."""


class Unknown(NamedTuple):
    """A value that only the model's own code can make again; ``reason`` is the end of a sentence about it."""

    reason: str


_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype})
_MARKERS = (Marker, Attribute, BatchSize, ModeChoice, OwnDevice, Unknown)
_LEAVES = (torch.Tensor, *_MARKERS)
_WHOLE = (torch.Tensor, torch.nn.Module, type, Marker, Attribute, BatchSize, ModeChoice, OwnDevice, Unknown)


class ObjectState(NamedTuple):
    """An object in a result, taken apart into its class and a template of its attributes."""

    kind: type
    attributes: dict[str, Any]


def make_object(kind: type, attributes: dict[str, Any]) -> Any:
    """Return an object of a class with these attributes, made without ``__init__`` as by ``copy.copy``."""
    instance: Any = object.__new__(kind)
    vars(instance).update(attributes)
    return instance


def taken_apart(value: Any, *, around: frozenset[int] = frozenset()) -> Any:
    """Return ``value`` with an ``ObjectState`` for every plain object in it that holds tensors.

    A cache of keys and values is such an object. Objects that ``make_object`` could not make again are kept.

    Args:
        around: ids of the objects that are being taken apart, so that an object that holds itself is kept.
    """

    def apart(leaf: Any) -> Any:
        if isinstance(leaf, _WHOLE) or callable(leaf) or type(leaf) in _ATOMS or id(leaf) in around:
            return leaf
        attributes = getattr(leaf, "__dict__", None)
        makes: Any = type(leaf).__new__
        if not attributes or makes is not object.__new__:
            return leaf
        inner = taken_apart(dict(attributes), around=around | {id(leaf)})
        holds = any(isinstance(inner_leaf, torch.Tensor) for inner_leaf in leaves_of(inner))
        return ObjectState(type(leaf), inner) if holds else leaf

    return map_template(apart, value)


def objects_in(value: Any) -> list[Any]:
    """Return the objects in ``value`` that ``taken_apart`` takes apart, without objects inside them."""
    return [leaf for leaf in leaves_of(value) if type(taken_apart(leaf)) is ObjectState]


def holds_objects(template: Any) -> bool:
    """Return True if a template contains an ``ObjectState``."""
    leaves = tree_leaves(template, is_leaf=lambda inner: type(inner) is ObjectState)
    return any(type(leaf) is ObjectState for leaf in leaves)


def map_template(function: Callable[[Any], Any], template: Any, *, makes_objects: bool = False) -> Any:
    """Return ``template`` with ``function`` applied to every leaf.

    Args:
        makes_objects: whether to make an object from every ``ObjectState``.

    >>> map_template(str, {"size": (2, 3), "dim": 1})
    {'size': ('2', '3'), 'dim': '1'}
    """
    kind = type(template)
    if kind in _ATOMS:
        return function(template)
    if kind is tuple or kind is torch.Size:
        return tuple([map_template(function, inner, makes_objects=makes_objects) for inner in template])
    if kind is list:
        return [map_template(function, inner, makes_objects=makes_objects) for inner in template]
    if kind is dict:
        items = template.items()
        return {name: map_template(function, inner, makes_objects=makes_objects) for name, inner in items}
    if kind is slice:
        return slice(*map_template(function, (template.start, template.stop, template.step)))
    if isinstance(template, _LEAVES):
        return function(template)

    def inside(inner: Any) -> Any:
        return map_template(function, inner, makes_objects=makes_objects)

    if kind is ObjectState:
        attributes = inside(template.attributes)
        return make_object(template.kind, attributes) if makes_objects else ObjectState(template.kind, attributes)
    if isinstance(template, tuple) and hasattr(kind, "_fields"):  # PackedSequence.__new__ would ask for devices
        return tuple.__new__(kind, [inside(inner) for inner in template])
    if kind in SUPPORTED_NODES:  # a container registered with torch's pytree: map one level
        return tree_map(inside, template, is_leaf=lambda inner: inner is not template)
    if _is_dataclass(template):
        return dataclasses.replace(
            template, **{field.name: inside(getattr(template, field.name)) for field in _fields(template)}
        )
    return function(template)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*_MARKERS, torch.Size))


def _is_dataclass(value: Any) -> bool:
    """Return True for a dataclass, which is not a container to torch's pytree but can be made from its fields."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, torch.nn.Module, *_MARKERS))


def _fields(value: Any) -> Iterator[Any]:
    return (field for field in dataclasses.fields(value) if field.init)


def leaves_of(template: Any) -> list[Any]:
    """Return the leaves of ``template``: everything in it except containers.

    >>> leaves_of({"size": (2, 3), "dim": 1})
    [2, 3, 1]
    """
    leaves: list[Any] = []
    pending = [template]
    while pending:
        inner = pending.pop()
        kind = type(inner)
        if kind is tuple or kind is list or kind is torch.Size:
            pending.extend(reversed(inner))
        elif kind is dict:
            pending.extend(reversed(inner.values()))
        elif kind is slice:
            pending += (inner.step, inner.stop, inner.start)
        elif kind in _ATOMS or isinstance(inner, _LEAVES):
            leaves.append(inner)
        else:
            map_template(leaves.append, inner)
    return leaves


def with_leaves(template: Any, leaves: Iterable[Any]) -> Any:
    """Return ``template`` with ``leaves`` instead of its own, in order.

    >>> with_leaves((0, [0]), "ab")
    ('a', ['b'])
    """
    remaining = iter(leaves)
    return map_template(lambda _: next(remaining), template)


def structure_of(template: Any) -> Any:
    """Return the container structure of ``template``, for comparison."""
    return tree_structure(template, is_leaf=_is_leaf)


def same_structure(one: Any, other: Any) -> bool:
    """Return True if both have the same containers. Common cases avoid torch's pytree, which takes ten times as long.

    >>> same_structure((1, [2]), (3, [4])), same_structure((1, [2]), (3, 4))
    (True, False)
    """
    kind, other_kind = type(one), type(other)
    if kind is other_kind and (kind is tuple or kind is list):
        return len(one) == len(other) and all(map(same_structure, one, other))
    if kind is other_kind is dict:
        return list(one) == list(other) and all(map(same_structure, one.values(), other.values()))
    if (kind in _ATOMS or isinstance(one, _MARKERS)) and (other_kind in _ATOMS or isinstance(other, _MARKERS)):
        return True
    return bool(structure_of(one) == structure_of(other))


def same_constant(one: Any, other: Any) -> bool:
    """Return True if two constants of a call are equal and of the same type.

    >>> same_constant(1, 1), same_constant(1, 1.0), same_constant(1, True)
    (True, False, False)
    """
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # an object that cannot be compared equals only itself
        return False


def tells_dtype(leaf: Any, dtype: torch.dtype) -> bool:
    """Return True if a constant is ``dtype`` or one of its limits."""
    if isinstance(leaf, float):
        limits = torch.finfo(dtype)
        return leaf in (limits.min, limits.max, limits.eps, limits.tiny)
    return leaf is dtype
