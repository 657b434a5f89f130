"""Keep what a run of a model gave, for the same call of the unchanged model."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from modelsummary.capture import Recording
from modelsummary.capture.inputs import CallArguments, InputSize
from modelsummary.layer_info import LayerInfo

__all__ = ["RunCache"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_REGISTERED = frozenset(name for name in vars(nn.Module()) if name != "training")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass
class _Entry:
    key: Hashable
    recording: Recording
    modules: list[weakref.ref[nn.Module] | None]  # of the rows, which hold none here: the model must stay free to go
    tensors: list[weakref.ref[Tensor]]


class RunCache:
    """The last recording of each model that is alive.

    It is found again for the same arguments (sizes, or the very tensors, unwritten since) while modules, their
    attributes and hooks, parameters and buffers are what they were. Models and arguments that hold something which
    cannot be compared are never found.
    """

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[nn.Module, _Entry] = weakref.WeakKeyDictionary()

    def get(self, model: nn.Module, call: CallArguments, mode: str) -> Recording | None:
        """A recording of such a call, with rows of its own; None if there is none."""
        entry = self._entries.get(model)
        if entry is None or entry.key != _key(model, call, mode) or any(ref() is None for ref in entry.tensors):
            return None
        modules = [None if ref is None else ref() for ref in entry.modules]
        return replace(entry.recording, root=_copied(entry.recording.root, modules))

    def put(self, model: nn.Module, call: CallArguments, mode: str, recording: Recording) -> None:
        """Keep this recording in place of the model's last one."""
        key = _key(model, call, mode)
        if key is None or recording.error is not None:
            return
        modules = [None if row.module is None else weakref.ref(row.module) for row in recording.root.walk()]
        bare = replace(recording, root=_copied(recording.root, [None] * len(modules)))
        self._entries[model] = _Entry(key, bare, modules, [weakref.ref(tensor) for tensor in call.tensors()])

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def _copied(root: LayerInfo, modules: Iterable[nn.Module | None]) -> LayerInfo:
    """Copies of all rows, with these modules."""
    copies: dict[int, LayerInfo] = {}
    for row, module in zip(root.walk(), modules, strict=True):
        above = copies.get(id(row.parent_info))
        copies[id(row)] = copy = replace(row, module=module, parent_info=above, children=[])
        if above is not None:
            above.children.append(copy)
    return copies[id(root)]


def _key(model: nn.Module, call: CallArguments, mode: str) -> Hashable:
    """Equal for what would run in the same way; None if that cannot be told."""
    leaves, structure = tree_flatten((call.args, call.kwargs))
    arguments = [_identity(leaf) for leaf in leaves]
    if None in arguments:
        return None
    return (mode, str(structure), tuple(arguments), tuple(_state(model)))


def _identity(leaf: Any) -> Hashable:
    """What tells an argument from others; None where nothing does."""
    if isinstance(leaf, Tensor):
        return _tensor_identity(leaf)
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    return leaf if isinstance(leaf, InputSize) else None


def _tensor_identity(tensor: Tensor) -> Hashable:
    if tensor.is_inference():  # has no version
        return None
    return id(tensor), tensor._version, tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def _state(model: nn.Module) -> Iterator[Hashable]:
    for name, module in model.named_modules():
        yield name, id(module)
        yield tuple((key, _frozen(value)) for key, value in vars(module).items() if key not in _REGISTERED)
        yield tuple((key, tuple(map(id, hooks.values()))) for key, hooks in vars(module).items() if key in _HOOKS)
        for tensors in (module._parameters, module._buffers):
            yield tuple(
                (key, None if each is None else _tensor_identity(each) or object()) for key, each in tensors.items()
            )


def _frozen(value: Any) -> Hashable:
    """Equal for equal values; what cannot be compared equals nothing."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, dict):
        return dict, tuple((key, _frozen(inner)) for key, inner in value.items())
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, torch.dtype, torch.device)):
        return value
    return object()
