"""What a forward changes besides values of tensors, told by comparing before and after."""

from __future__ import annotations

import random
import sys
from collections import deque
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Generators", "state_of", "surroundings"]

_PLAIN = (int, float, bool, str, bytes, complex, type(None))
_SNAPSHOT_DEPTH = 3
_SNAPSHOT_LENGTH = 1000


class Generators:
    """The random number generators of Python and numpy."""

    def __init__(self) -> None:
        self._states = self._now()

    @staticmethod
    def _now() -> tuple[Any, ...]:
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy is not None else None
        return random.getstate(), None if state is None else (state[1].tobytes(), *state[2:])

    def moved(self) -> bool:
        """Something was drawn since the last call."""
        before, self._states = self._states, self._now()
        return before != self._states


class _Identity:
    """Equal to itself alone, and keeps it alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def state_of(module: nn.Module) -> dict[str, Any]:
    """What a forward may change besides values of tensors: attributes, also of objects, and contents of containers."""
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    state: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            state.update((own, _Identity(tensor)) for own, tensor in value.items())
        elif name not in ("training", "_modules"):
            state[name] = _snapshot(value, _SNAPSHOT_DEPTH)
    return state


def _snapshot(value: Any, depth: int) -> Any:
    """Something that differs as soon as ``value`` was changed, down to some depth."""
    if isinstance(value, _PLAIN):
        return value
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType)):
        return _Identity(value)
    if isinstance(value, dict):
        if len(value) > _SNAPSHOT_LENGTH:
            return _Identity(value), len(value)
        return _Identity(value), {key: _snapshot(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, deque)):
        if len(value) > _SNAPSHOT_LENGTH:
            return _Identity(value), len(value)
        return _Identity(value), [_snapshot(inner, depth - 1) for inner in value]
    if isinstance(value, set):
        return _Identity(value), len(value)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return _Identity(value), {name: _snapshot(inner, depth - 1) for name, inner in attributes.items()}
    return _Identity(value)


def surroundings() -> tuple[Any, ...]:
    """Modes that change what functions compute."""
    autocast = torch._C._is_any_autocast_enabled()
    cuda = torch.backends.cuda
    return (
        torch.is_inference_mode_enabled(),
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")] * autocast,
        (cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()),
        torch.get_default_dtype(),
    )
