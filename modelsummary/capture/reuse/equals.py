"""Which modules and values are equal: nothing that pure code can see on shapes tells one from the other."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.reuse.purity import is_of_library

__all__ = ["Likeness", "NoKeyError", "StandIn", "key_of_modules", "key_of_value", "likenesses"]

# The first of a kind shows that there may be more, the second is recorded, the others are spared: with fewer of them
# telling that they are equal takes longer than running them.
_FEWEST = 6

Likeness = tuple[type, int, torch.Size | None]

_ATOMS = frozenset({int, float, bool, type(None), str, bytes, torch.Size})
_ATOMS |= {torch.dtype, torch.layout, torch.memory_format, torch.device}
_TENSORS = frozenset({ShapeTensor, Tensor, nn.Parameter, nn.Buffer})
_OF_PARAMETERS = frozenset({"_is_param"})  # the attribute of a twin of a parameter
_TENSOR_DICTS = frozenset({"_parameters", "_buffers"})
_RUN_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
# Of no consequence for a forward: what concerns state dicts, and what accompanies the hooks above.
_IGNORED = frozenset(
    "_load_state_dict_pre_hooks _load_state_dict_post_hooks _state_dict_hooks _state_dict_pre_hooks"
    " _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks_with_kwargs"
    " _non_persistent_buffers_set".split()
)


class StandIn(functools.partial[Any]):
    """What stands in the place of a module's forward during a run, and is no difference between modules."""


class NoKeyError(Exception):
    """Something was met whose equals cannot be told: an object, a tensor of a subclass, a hook."""


def key_of_value(value: Any) -> tuple[Any, ...]:
    """Equal for equal values: nested containers of constants, plain tensors without data and functions of torch.

    Raises:
        NoKeyError: there is something else.
    """
    key: list[Any] = []
    _add(key, value, {})
    return tuple(key)


def key_of_modules(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Equal for equal modules with equal attributes, parameters, buffers and submodules.

    Args:
        modules: all of them, as ``modules_of`` gives them.

    Raises:
        NoKeyError: one has hooks, or holds what has no key.
    """
    positions = {id(module): position for position, module in enumerate(modules)}
    seen: dict[int, int] = {}
    key: list[Any] = []
    for module in modules:
        attributes = vars(module)
        key.append(type(module))
        key += attributes
        for name, value in attributes.items():
            kind = type(value)
            if kind in _ATOMS:
                key += (kind, value)  # 1, 1.0 and True are equal
            elif name in _IGNORED or kind is StandIn:
                continue
            elif name in _TENSOR_DICTS:
                for tensor_name, tensor in value.items():
                    key.append(tensor_name)
                    _add(key, tensor, seen)
            elif name == "_modules":
                for child_name, child in value.items():
                    key += (child_name, None if child is None else positions[id(child)])
            elif name not in _RUN_HOOKS:
                _add(key, value, seen)
            elif value:
                raise NoKeyError
    return tuple(key)


def _add(key: list[Any], value: Any, seen: dict[int, int]) -> None:
    """Append what tells a value; ``seen``: ids of tensors -> in which order they came, as tensors may be tied."""
    kind = type(value)
    if kind in _ATOMS:
        key += (kind, value)
    elif kind in _TENSORS:
        if kind is not ShapeTensor or not value.__dict__.keys() <= _OF_PARAMETERS or value.is_conj() or value.is_neg():
            raise NoKeyError
        position = seen.setdefault(id(value), len(seen))
        key += (position, len(value.__dict__), value.shape, value.stride(), value.storage_offset(), value.dtype)
        key += (value.device, value.requires_grad)
    elif kind in (tuple, list):
        key += (kind, len(value))
        for inner in value:
            _add(key, inner, seen)
    elif kind is dict:
        key += (kind, len(value))
        for name, inner in value.items():
            _add(key, name, seen)
            _add(key, inner, seen)
    elif is_of_library(value):
        key.append(value)
    else:
        raise NoKeyError


def likenesses(modules: Sequence[nn.Module]) -> dict[int, Likeness]:
    """What modules are from afar, by id, of those with submodules of which there are many alike.

    Args:
        modules: all modules of a model, as ``modules_of`` gives them.
    """
    found: dict[int, Likeness] = {}
    for module in reversed(modules):
        first = next((each for each in module._parameters.values() if type(each) in _TENSORS), None)
        shape = None if first is None else first.shape
        size = 1
        for child in module._modules.values():
            if child is not None and id(child) in found:  # a shared one may come later
                _, below, shape_below = found[id(child)]
                shape, size = shape or shape_below, size + below
        found[id(module)] = (type(module), size, shape)
    counts = Counter(found[id(module)] for module in modules if module._modules)
    return {key: likeness for key, likeness in found.items() if counts[likeness] >= _FEWEST}
