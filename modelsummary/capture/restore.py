"""Leave no trace: save what a forward run may change besides values of tensors, and put it back.

A forward can assign attributes (caches, counters, lazily made parameters), fill containers and objects, flip
``requires_grad`` or modes, and draw random numbers. What can be reached from the model and the arguments is put back,
whether the run returned or raised, and only what changed is written. Shape-only execution cannot write values; for real
execution ``real.RealExecution`` puts them back, for the tensors that ``unchanged`` met on its way.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from modelsummary.capture.structure import is_array

__all__ = ["Held", "unchanged"]

Undo = Callable[[], object]


@contextmanager
def unchanged(modules: Sequence[nn.Module], arguments: Any, *, lazy_device: torch.device | None) -> Iterator[Held]:
    """Context in which a model may run, after which it, its arguments and torch's global state are as before.

    Args:
        modules: all modules of the model.
        arguments: what its forward gets; objects in there may be changed by it, too.
        lazy_device: where a lazy module initialises its parameters meanwhile; None: on their own device.

    Yields:
        What the modules and the arguments hold: tensors, and modules that are not registered.
    """
    held = Held()
    held.save([*modules, arguments])
    undo = [held.put_back, *_flags(held.tensors), *_global_state()]
    try:
        _replace_uninitialized(modules, lazy_device)
        yield held
    finally:
        for step in reversed(undo):
            step()


# ------------------------------------------------------------------------------ attributes and containers

_MISSING = object()
_PLAIN = {bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
_PLAIN |= {BuiltinFunctionType, ModuleType}
# Objects are followed this many steps from a module or an argument, and not into machinery that lives on its own:
# a worker thread may change it meanwhile, and putting it back would undo that.
_OBJECT_STEPS = 3
_MACHINERY = frozenset("threading queue multiprocessing concurrent asyncio logging lightning pytorch_lightning".split())
_MAX_ARRAY_BYTES = 2**20
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)


class Held:
    """What can be reached from some objects: attributes, contents of containers, states of generators.

    Attributes:
        tensors: the tensors met, gradients of parameters included.
        modules: the modules met, registered or not.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self._objects: list[tuple[Any, type, dict[str, Any]]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any, Any]] = []  # base class, container, copy
        self._empty: list[Any] = []
        self._states: list[tuple[Callable[[Any], object], Any]] = []
        self._visited: set[int] = set()

    def save(self, values: Sequence[Any]) -> None:
        """Save what is reachable from ``values``."""
        classes: dict[type, None] = {}
        pending = [(value, _OBJECT_STEPS) for value in values]
        while pending:
            value, steps = pending.pop()
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind in _BASES and not value:
                self._empty.append(value)
                continue
            if id(value) in self._visited:
                continue
            self._visited.add(id(value))
            if isinstance(value, Tensor):
                self.tensors.append(value)
                if not is_lazy(value) and value.is_leaf and value.grad is not None:
                    self.tensors.append(value.grad)
            elif isinstance(value, _BASES):
                self._save_container(value)
                inner = [
                    *(value.values() if isinstance(value, dict) else value),
                    *getattr(value, "__dict__", {}).values(),
                ]
                pending.extend((each, steps) for each in inner)
            elif isinstance(value, (tuple, frozenset)):
                pending.extend((each, steps) for each in value)
            elif isinstance(value, (FunctionType, MethodType, functools.partial)):
                pending.extend((each, steps - 1) for each in self._save_function(value) if steps)
            elif isinstance(value, nn.Module) or (steps and self._is_followed(value)):
                classes[kind] = None
                left = _OBJECT_STEPS if isinstance(value, nn.Module) else steps - 1
                pending.extend((each, left) for each in self._save_object(value))
        for kind in classes:
            self._save_class(kind)

    def _save_container(self, value: Any) -> None:
        base = next(base for base in _BASES if isinstance(value, base))
        contents = dict(base.items(value)) if issubclass(base, dict) else list(base.__iter__(value))
        self._containers.append((base, value, contents))

    def _save_function(self, value: Any) -> list[Any]:
        """What a function carries along (an activation, a hook): its object, closure, defaults, and globals to fill."""
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, MethodType):
            return [value.__self__, value.__func__]
        carried = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                carried.append(cell.cell_contents)
        for name in value.__code__.co_names:
            known = value.__globals__.get(name)
            if type(known) in _BASES:
                self._save_container(known)
            self._save_memory(known)
        return carried

    def _is_followed(self, value: Any) -> bool:
        """An object whose attributes a forward may assign."""
        if isinstance(value, type) or self._save_state(value):
            return False
        return type(value).__module__.partition(".")[0] not in _MACHINERY

    def _save_object(self, value: Any) -> list[Any]:
        """Save attributes and slots; returns their values."""
        values: list[Any] = []
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            saved = attributes.copy()
            self._objects.append((value, type(value), saved))
            values.extend(saved.values())
        if isinstance(value, nn.Module):
            self.modules.append(value)
        for name in _slots_of(type(value)):
            inner = getattr(value, name, _MISSING)
            self._slots.append((value, name, inner))
            values.append(inner)
        if isinstance(value, torch.jit.ScriptModule) and "_c" in vars(value):
            self._save_script_module(value)
        return values

    def _save_script_module(self, module: Any) -> None:
        """A ScriptModule keeps its attributes in C++, where an assignment in its forward goes."""
        names = [*module._parameters.keys(), *module._buffers.keys()]
        concrete = vars(module).get("_concrete_type")
        if concrete is not None:
            names += list(concrete.get_attributes())
        for name in dict.fromkeys(names):
            if module._c.hasattr(name):
                saved = module._c.getattr(name)
                self._states.append((functools.partial(module._c.setattr, name), saved))
                self.save([saved])

    def _save_state(self, value: Any) -> bool:
        """Generators of random numbers tell their state and take it back."""
        if isinstance(value, torch.Generator):
            self._states.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._states.append((value.setstate, value.getstate()))
        elif type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
            generator = value.bit_generator
            self._states.append((functools.partial(setattr, generator, "state"), generator.state))
        elif is_array(value):
            if value.nbytes <= _MAX_ARRAY_BYTES and value.flags.writeable:
                self._states.append((functools.partial(value.__setitem__, ...), value.copy()))
        else:
            return False
        return True

    def _save_class(self, kind: type) -> None:
        """Attributes of the class, and what its methods reach in the globals of their module."""
        for owner in kind.__mro__:
            if (
                owner.__module__.partition(".")[0] in ("builtins", "torch", "abc", "typing")
                or id(owner) in self._visited
            ):
                continue
            self._visited.add(id(owner))
            attributes = dict(vars(owner))
            self._classes.append((owner, attributes))
            for value in attributes.values():
                if type(value) in _BASES:
                    self._save_container(value)
                function = getattr(value, "__func__", value)  # of a static or class method
                if isinstance(function, FunctionType):
                    self._save_function(function)
                self._save_memory(function)

    def _save_memory(self, function: Any) -> None:
        """A memoised function must not remember the tensors of this run."""
        if isinstance(function, functools._lru_cache_wrapper):
            misses = function.cache_info().misses

            def forget(_: object) -> None:
                if function.cache_info().misses != misses:
                    function.cache_clear()

            self._states.append((forget, None))

    def put_back(self) -> None:
        """Write back what differs from what was saved."""
        for put, state in self._states:
            put(state)
        for container in self._empty:
            if container:
                container.clear()
        for base, container, contents in self._containers:
            if not _same_contents(container, contents):
                base.clear(container)
                (base.update if hasattr(base, "update") else base.extend)(container, contents)
        for owner, name, value in self._slots:
            if getattr(owner, name, _MISSING) is not value:
                object.__delattr__(owner, name) if value is _MISSING else object.__setattr__(owner, name, value)
        for kind, attributes in self._classes:
            _put_back_class(kind, attributes)
        for owner, owner_class, attributes in self._objects:
            if type(owner) is not owner_class:  # a lazy module becomes its eager class
                owner.__class__ = owner_class
            _put_back_attributes(owner.__dict__, attributes)


def _slots_of(kind: type) -> Iterator[str]:
    for owner in kind.__mro__:
        names = vars(owner).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and not name.startswith("__"):
                yield name


def _same_contents(container: Any, contents: Any) -> bool:
    """The same objects in the same order."""
    if len(container) != len(contents):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), contents.items(), strict=True)
        return all(key is saved_key and value is saved for (key, value), (saved_key, saved) in pairs)
    if isinstance(container, set):
        return {id(each) for each in container} == {id(each) for each in contents}
    return all(value is saved for value, saved in zip(container, contents, strict=True))


def _put_back_class(kind: type, saved: dict[str, Any]) -> None:
    attributes = vars(kind)
    for name in attributes.keys() - saved.keys():
        if not name.startswith("__"):  # Python adds some of those itself when it likes
            type.__delattr__(kind, name)
    for name, value in saved.items():
        if attributes.get(name, _MISSING) is not value and not name.startswith("__"):
            type.__setattr__(kind, name, value)


def _put_back_attributes(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    for name in attributes.keys() - saved.keys():
        del attributes[name]
    in_order = list(attributes) == list(saved)
    for name, value in saved.items():
        if attributes.get(name, _MISSING) is not value:
            attributes[name] = value
    if not in_order:
        attributes.clear()
        attributes.update(saved)


# ------------------------------------------------------------------------------------- flags, lazy tensors


def _flags(tensors: Sequence[Tensor]) -> list[Undo]:
    """Lazy tensors are left out: others take their place during the run."""
    leaves = (each for each in tensors if not is_lazy(each) and each.is_leaf and not each.is_inference())
    saved = [(each, each.requires_grad, each.grad) for each in leaves]

    def put_back() -> None:
        for tensor, requires_grad, grad in saved:
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad

    return [put_back]


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


# -------------------------------------------------------------------------------------------- global state


def _global_state() -> list[Undo]:
    """Random number generators and the switches of torch that a forward may turn."""
    undo: list[Undo] = [
        _later(_set_default_device, _default_device()),
        _later(torch.set_default_dtype, torch.get_default_dtype()),
        _later(torch.set_rng_state, torch.get_rng_state()),
        _later(random.setstate, random.getstate()),
        _later(_set_switches, _switches()),
    ]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            undo.append(_later(accelerator.set_rng_state_all, accelerator.get_rng_state_all()))
    if torch.backends.mps.is_available():
        undo.append(_later(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    if (numpy := sys.modules.get("numpy")) is not None:
        undo.append(_later(numpy.random.set_state, numpy.random.get_state()))
    return undo


def _later(function: Callable[..., object], *args: Any) -> Undo:
    return lambda: function(*args)


def _default_device() -> torch.device | None:
    """The default device; None where none was set, which is not the same as the CPU: no mode is active then."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_default_device(device: torch.device | None) -> None:
    if _default_device() != device:
        torch.set_default_device(device)
        if device is None:  # before torch 2.7, get_default_device() fails on what this leaves
            del torch._GLOBAL_DEVICE_CONTEXT.device_context


def _switches() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        torch.is_anomaly_enabled(),
    )


def _set_switches(saved: tuple[Any, ...]) -> None:
    if _switches() == saved:
        return
    deterministic, warn_only, precision, cudnn, anomaly = saved
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    torch.autograd.set_detect_anomaly(anomaly)
