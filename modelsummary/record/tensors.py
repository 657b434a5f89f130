"""The tensors of one run, distinguished by identity: tensors of the model, tensors that the run made, and others."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.containers import sizes_of
from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.capture.modules import named_modules, own_tensors
from modelsummary.capture.templates import Attribute, Marker, OwnDevice, Unknown, map_template
from modelsummary.operators.tensor_bytes import nbytes_of, storage_of

__all__ = ["CONSTANTS", "Foreign", "TensorsOfRun", "Token", "is_tainted"]

_PLAIN = frozenset({int, float, bool, str, type(None)})
CONSTANTS: tuple[type, ...] = (
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
CONSTANTS += (range, type(Ellipsis), FunctionType, BuiltinFunctionType, enum.Enum)


@dataclass(eq=False)
class Token(Marker):
    """A tensor that this run made or was given.

    Attributes:
        is_tainted: whether its values depend on values of the input or of parameters, or on random numbers.
        is_dynamic: whether its shape depends on such values.
        is_view: whether autograd knows it as a view of another tensor.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool
    storage: int
    is_tainted: bool = True
    is_dynamic: bool = False
    is_view: bool = False


@dataclass(eq=False)
class Foreign(Marker):
    """A tensor that does not belong to the model and was not made by the run: a global, an element of a list."""

    tensor: Tensor


class TensorsOfRun:
    """The names of a run's tensors. All tensors seen are kept alive, so that no other tensor gets the same id.

    Args:
        devices: devices that mean the model's own.

    Attributes:
        storages_of: FQN of each tensor of the model -> id of its memory.
    """

    def __init__(self, model: nn.Module, devices: Collection[torch.device]) -> None:
        self._devices = devices
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
            for _, name, tensor in own_tensors(module):
                if id(tensor) not in self._attributes:
                    self._attributes[id(tensor)] = Attribute(prefix + name)
                    self.storages_of[prefix + name] = storage_of(tensor)
                    self._kept_alive.append(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """Return True if the tensor belongs to the model or was made by the run."""
        return id(tensor) in self._tokens or id(tensor) in self._attributes

    def new(self, tensor: Tensor, *, tainted: bool, dynamic: bool = False) -> Token:
        """Return the token of a tensor that the run made or was given; make one if it has none."""
        token = self._tokens.get(id(tensor))
        if token is not None:
            return token
        with _torch.DisableTorchFunction():  # the tracer need not see these questions
            shape = () if tensor.is_nested else tuple(tensor.shape)
            is_plain = type(tensor) is ShapeTensor and tensor.layout is torch.strided  # most are
            nbytes = tensor.nbytes if is_plain else nbytes_of(tensor)
            facts = (shape, tensor.dtype, nbytes, tensor.requires_grad, storage_of(tensor))
            token = self._tokens[id(tensor)] = Token(len(self._tokens), *facts, tainted, dynamic, tensor._is_view())
            self._by_storage[token.storage].append(token)
            self._kept_alive.append(tensor)
            with suppress(RuntimeError, NotImplementedError):  # a tensor inside torch.vmap has no storage
                self._kept_alive.append(tensor.untyped_storage())
        return token

    def template(self, value: Any) -> Any:
        """Return ``value`` with a marker for every tensor."""
        return map_template(self.leaf, value)

    def leaf(self, leaf: Any) -> Any:
        """Return the marker for a leaf, or the leaf itself if it is a constant."""
        if type(leaf) in _PLAIN:
            return leaf
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
            return OwnDevice() if leaf in self._devices else leaf
        if isinstance(leaf, CONSTANTS) or not _holds_tensors(leaf):
            return leaf
        return Unknown(f"a {type(leaf).__name__} that holds tensors")

    def taint(self, written: set[int], tainted: bool) -> None:
        """Mark the tensors in written memory as tainted if the written values are."""
        if tainted:
            for storage in written:
                for token in self._by_storage[storage]:
                    token.is_tainted = True


def is_tainted(leaf: Any) -> bool:
    """Return True if values of a leaf depend on values of the input or of parameters, or on random numbers."""
    return leaf.is_tainted if isinstance(leaf, Token) else isinstance(leaf, (Attribute, Unknown, Foreign))


def _holds_tensors(value: Any) -> bool:
    """Return True if a tensor can be reached from an object, which then is not a constant."""
    tensors: dict[int, Any] = {}
    sizes_of(value, tensors)
    return bool(tensors)
