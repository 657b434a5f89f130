"""The tensors of one run, told apart by identity: those of the model, those that it made, and all others."""

from __future__ import annotations

import enum
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.modules import named_modules
from modelsummary.capture.templates import Attribute, Marker, OwnDevice, Unknown, map_template
from modelsummary.capture.values import sizes_of
from modelsummary.costs.stored import nbytes_of, storage_of

__all__ = ["Foreign", "TensorsOfRun", "Token", "is_tainted"]

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


class TensorsOfRun:
    """Names for tensors. What it has seen is kept alive, so that no other tensor gets the same identity.

    Args:
        device: of the model.

    Attributes:
        storages_of: FQN of each tensor of the model -> id of its memory.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._attributes: dict[int, Attribute] = {}
        self.storages_of: dict[str, int] = {}
        self._tokens: dict[int, Token] = {}
        self._by_storage: defaultdict[int, list[Token]] = defaultdict(list)
        self._kept_alive: list[Any] = []
        self._name_tensors(model)

    def _name_tensors(self, model: nn.Module) -> None:
        for fqn, module in named_modules(model):
            prefix = f"{fqn}." if fqn else ""
            if isinstance(module, torch.jit.ScriptModule):
                continue
            for tensors in (module._parameters, module._buffers, vars(module)):
                for name, tensor in tensors.items():
                    if isinstance(tensor, Tensor) and id(tensor) not in self._attributes:
                        self._attributes[id(tensor)] = Attribute(prefix + name)
                        self.storages_of[prefix + name] = storage_of(tensor)
                        self._kept_alive.append(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """It is the model's, or was made by the run."""
        return id(tensor) in self._tokens or id(tensor) in self._attributes

    def new(self, tensor: Tensor, *, tainted: bool, dynamic: bool = False) -> Token:
        """The token of a tensor that the run made or was given; a new one where it has none."""
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

    def template(self, value: Any) -> Any:
        """``value`` with a marker in the place of every tensor."""
        return map_template(self.leaf, value)

    def leaf(self, leaf: Any) -> Any:
        """The marker for something that is no container; a constant stands for itself."""
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
            return OwnDevice() if leaf == self._device else leaf
        if isinstance(leaf, _CONSTANTS) or not _holds_tensors(leaf):
            return leaf
        return Unknown(f"a {type(leaf).__name__} that holds tensors")

    def taint(self, written: set[int], tainted: bool) -> None:
        """What lies in written memory is tainted, if what was written is."""
        if tainted:
            for storage in written:
                for token in self._by_storage[storage]:
                    token.is_tainted = True


def is_tainted(leaf: Any) -> bool:
    """A leaf has values that depend on those of the input, of parameters, or on random numbers."""
    return leaf.is_tainted if isinstance(leaf, Token) else isinstance(leaf, (Attribute, Unknown, Foreign))


def _holds_tensors(value: Any) -> bool:
    """A tensor can be reached from an object; then the object is no constant."""
    found: dict[int, Any] = {}
    sizes_of(value, found)
    return bool(found)
