"""Leave no trace: save what a forward run may change besides values of tensors, and put it back.

A forward can assign attributes (caches, counters, lazily made parameters), flip ``requires_grad`` or modes,
and draw random numbers. All of it is put back, whether the run returned or raised. Shape-only execution
cannot write values; for real execution ``real.RealExecution`` puts them back.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

__all__ = ["unchanged"]

Undo = Callable[[], object]


@contextmanager
def unchanged(modules: Sequence[nn.Module], *, lazy_device: torch.device | None) -> Iterator[None]:
    """Context in which a model may run, after which its modules and torch's global state are as before.

    Args:
        lazy_device: where a lazy module initialises its parameters meanwhile; None: on their own device.
    """
    undo = [_attributes(modules), _flags(modules), *_global_state()]
    try:
        _replace_uninitialized(modules, lazy_device)
        yield
    finally:
        for step in reversed(undo):
            step()


# ------------------------------------------------------------------------------------------ attributes

_PLAIN = {bool, int, float, str, complex, Tensor, nn.Parameter, torch.dtype, torch.device, FunctionType, MethodType}
_CONTAINERS = (dict, OrderedDict, list, set, deque)


class _Saved:
    """Class and attributes of objects, the contents of the containers and the state of the generators they hold."""

    def __init__(self) -> None:
        self._objects: list[tuple[Any, type, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._empty: list[Any] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._visited: set[int] = set()

    def save(self, owner: Any) -> None:
        attributes = owner.__dict__.copy()
        self._objects.append((owner, type(owner), attributes))
        for value in attributes.values():
            if value is not None and type(value) not in _PLAIN:
                self._save_value(value)

    def _save_value(self, value: Any) -> None:
        if type(value) in _CONTAINERS:
            if not value:
                self._empty.append(value)
            elif id(value) not in self._visited:
                self._visited.add(id(value))
                self._containers.append((value, value.copy()))
                for inner in value.values() if isinstance(value, dict) else value:
                    if inner is not None and type(inner) not in _PLAIN:
                        self._save_value(inner)
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif id(value) not in self._visited and _is_plain_object(value):
            self._visited.add(id(value))
            self.save(value)

    def put_back(self) -> None:
        for container in self._empty:
            if container:
                container.clear()
        for container, contents in self._containers:
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(contents)
        for owner, owner_class, attributes in self._objects:
            if type(owner) is not owner_class:  # a lazy module becomes its eager class
                owner.__class__ = owner_class
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
        for generator, state in self._generators:
            generator.set_state(state)


def _is_plain_object(value: Any) -> bool:
    """An object whose attributes a forward may assign: a config, a cache; no module, class or callable."""
    if isinstance(value, (nn.Module, Tensor, type, ModuleType)) or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _attributes(modules: Sequence[nn.Module]) -> Undo:
    saved = _Saved()
    for module in modules:
        saved.save(module)
    return saved.put_back


def _flags(modules: Sequence[nn.Module]) -> Undo:
    parameters = (each for module in modules for each in module._parameters.values() if each is not None)
    saved = [(each, each.requires_grad, each.grad) for each in parameters]

    def put_back() -> None:
        for parameter, requires_grad, grad in saved:
            if parameter.requires_grad is not requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not grad:
                parameter.grad = grad

    return put_back


def _replace_uninitialized(modules: Sequence[nn.Module], device: torch.device | None) -> None:
    """Give lazy modules other parameters to initialise; their own could not be made uninitialised again."""
    for module in modules:
        own: tuple[Any, Any] = (module._parameters, module._buffers)
        for tensors in own:
            for name, tensor in tensors.items():
                if is_lazy(tensor):
                    tensors[name] = _uninitialized_like(tensor, device or tensor.device)


def _uninitialized_like(tensor: Any, device: torch.device) -> Tensor:
    kind: Any = UninitializedParameter if isinstance(tensor, UninitializedParameter) else UninitializedBuffer
    copy: Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
    return copy


# ---------------------------------------------------------------------------------------- global state


def _global_state() -> list[Undo]:
    """Random number generators, default dtype and default device."""
    undo: list[Undo] = [
        _later(_set_default_device, torch.get_default_device()),
        _later(torch.set_default_dtype, torch.get_default_dtype()),
        _later(torch.set_rng_state, torch.get_rng_state()),
        _later(random.setstate, random.getstate()),
    ]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            undo.append(_later(accelerator.set_rng_state_all, accelerator.get_rng_state_all()))
    if torch.backends.mps.is_available():
        undo.append(_later(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    if (numpy := sys.modules.get("numpy")) is not None:
        undo.append(_later(numpy.random.set_state, numpy.random.get_state()))
    return undo


def _set_default_device(device: torch.device) -> None:
    if torch.get_default_device() != device:
        torch.set_default_device(device)


def _later(function: Callable[..., object], *args: Any) -> Undo:
    return lambda: function(*args)
