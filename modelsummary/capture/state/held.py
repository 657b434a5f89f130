"""The state that a forward can reach and change: attributes, containers, objects, closures, classes, globals.

``Held.save`` walks from the modules and the arguments and saves everything that it meets. ``Held.put_back`` writes back
only the parts that changed.
"""

from __future__ import annotations

import dis
import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import is_
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.containers import is_array

__all__ = ["Held"]

_MISSING = object()
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_PLAIN = {bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
_PLAIN |= {BuiltinFunctionType, ModuleType}
# Objects are followed this many steps from a module or an argument, but not into machinery with threads of its own:
# a worker may change its state during the run, and restoring it would undo that change.
_OBJECT_STEPS = 3
_MACHINERY = frozenset("threading queue multiprocessing concurrent asyncio logging lightning pytorch_lightning".split())
_LIBRARIES = frozenset("builtins torch abc typing collections contextlib functools dataclasses enum".split())
_MAX_ARRAY_BYTES = 2**20
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
_BASE_KINDS = frozenset(_BASES)


class Held:
    """The state reachable from some objects: attributes, contents of containers, states of generators.

    Attributes:
        tensors: the tensors found, including gradients of parameters.
        modules: the modules found, registered or not.

    >>> cache, held = {"length": 0}, Held()
    >>> held.save([cache])
    >>> cache["length"] = 8
    >>> held.put_back()
    >>> cache
    {'length': 0}
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self._objects: list[tuple[Any, type, dict[str, Any]]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._containers: list[tuple[Any, Any, Any]] = []  # base class, container, copy
        self._empty: list[Any] = []
        self._states: list[tuple[Callable[[Any], object], Any]] = []
        self._visited: set[int] = set()
        self._slot_names: dict[type, tuple[str, ...]] = {}

    def save(self, values: Sequence[Any]) -> None:
        """Save everything reachable from ``values``."""
        pending: list[tuple[Any, int]] = []
        self._reach(values, _OBJECT_STEPS, pending)
        while pending:
            value, steps = pending.pop()
            if id(value) in self._visited:
                continue
            self._visited.add(id(value))
            if isinstance(value, nn.Module):
                self._reach_object(value, _OBJECT_STEPS, pending)
            elif isinstance(value, Tensor):
                self.tensors.append(value)
                if not is_lazy(value) and value.is_leaf and value.grad is not None:
                    self.tensors.append(value.grad)
            elif isinstance(value, _BASES):
                self._save_container(value)
                self._reach(value.values() if isinstance(value, dict) else value, steps, pending)
                self._reach(getattr(value, "__dict__", {}).values(), steps, pending)
            elif isinstance(value, (tuple, frozenset)):
                self._reach(value, steps, pending)
            elif isinstance(value, (FunctionType, MethodType, functools.partial)):
                if steps:
                    self._reach(self._save_function(value), steps - 1, pending)
            elif steps and self._is_followed(value):
                self._reach_object(value, steps - 1, pending)

    def _reach(self, values: Iterable[Any], steps: int, pending: list[tuple[Any, int]]) -> None:
        """Add the values that hold others to ``pending``; most attributes of a module are plain or empty."""
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                continue
            if kind in _BASE_KINDS and not value:
                self._empty.append(value)
            else:
                pending.append((value, steps))

    def _reach_object(self, value: Any, steps: int, pending: list[tuple[Any, int]]) -> None:
        kind = type(value)
        if kind not in self._slot_names:
            self._slot_names[kind] = tuple(_slots_of(kind))
            self._reach(self._save_class(kind), _OBJECT_STEPS, pending)
        self._reach(self._save_object(value), steps, pending)

    def _save_container(self, value: Any) -> None:
        kind = type(value)
        base: Any = kind if kind in _BASE_KINDS else next(base for base in _BASES if isinstance(value, base))
        contents = dict(base.items(value)) if issubclass(base, dict) else list(base.__iter__(value))
        self._containers.append((base, value, contents))

    def _save_function(self, value: Any) -> list[Any]:
        """Return the values that a function holds: object, closure and defaults. Save the globals that it may fill."""
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, MethodType):
            return [value.__self__, value.__func__]
        carried = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                carried.append(cell.cell_contents)
        outer = value.__globals__
        for name in _names_in(value.__code__):
            global_value = outer.get(name)
            if global_value is None:  # most names are attributes
                continue
            if type(global_value) in _BASE_KINDS:
                self._save_container(global_value)
            elif isinstance(global_value, FunctionType) and not _is_library(global_value):
                carried.append(global_value)
            self._save_memory(global_value)
        return carried

    def _is_followed(self, value: Any) -> bool:
        """Return True for an object whose attributes a forward may assign; save the state of generators and arrays."""
        if isinstance(value, type) or self._save_state(value):
            return False
        return type(value).__module__.partition(".")[0] not in _MACHINERY

    def _save_object(self, value: Any) -> list[Any]:
        """Save attributes and slots, and return their values."""
        values: list[Any] = []
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            saved = attributes.copy()
            self._objects.append((value, type(value), saved))
            values.extend(saved.values())
        if isinstance(value, nn.Module):
            self.modules.append(value)
        for name in self._slot_names[type(value)]:
            inner = getattr(value, name, _MISSING)
            self._slots.append((value, name, inner))
            values.append(inner)
        if isinstance(value, torch.jit.ScriptModule) and "_c" in vars(value):
            self._save_script_module(value)
        return values

    def _save_script_module(self, module: Any) -> None:
        """Save the attributes that a ScriptModule keeps in C++, where its forward assigns them."""
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
        """Save the state of a random number generator or an array; return False for other objects."""
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
            elif value.flags.writeable:  # saved when an operator writes its memory, as for a tensor
                with suppress(TypeError, ValueError):  # a dtype or strides that torch does not support
                    self.tensors.append(torch.from_numpy(value))
        else:
            return False
        return True

    def _save_class(self, kind: type) -> list[Any]:
        """Save the attributes of the class; return the values that its methods reach in closures and globals."""
        reached: list[Any] = []
        for owner in kind.__mro__:
            if _is_library(owner) or id(owner) in self._visited:
                continue
            self._visited.add(id(owner))
            attributes = dict(vars(owner))
            self._classes.append((owner, attributes))
            for value in attributes.values():
                if type(value) in _BASES:
                    self._save_container(value)
                function = getattr(value, "__func__", value)  # of a static or class method
                if isinstance(function, FunctionType):
                    reached += self._save_function(function)
                    self._save_names(function)
                self._save_memory(function)
        return reached

    def _save_names(self, method: FunctionType) -> None:
        """Save the outer variables and globals that a method may assign. Those that hooks assign are not restored."""
        for cell in method.__closure__ or ():
            with suppress(ValueError):
                self._cells.append((cell, cell.cell_contents))
                self._save_memory(cell.cell_contents)
        for name in _globals_set_in(method.__code__):
            self._globals.append((method.__globals__, name, method.__globals__.get(name, _MISSING)))

    def _save_memory(self, function: Any) -> None:
        """Arrange that a memoised function that ran forgets its results, as they may be tensors of this run."""
        if isinstance(function, functools._lru_cache_wrapper):
            misses = function.cache_info().misses

            def forget(_: object) -> None:
                if function.cache_info().misses != misses:
                    function.cache_clear()

            self._states.append((forget, None))

    def put_back(self) -> None:
        """Write back all state that differs from the saved one."""
        for put, state in self._states:
            put(state)
        for namespace, name, value in self._globals:
            _put_global(namespace, name, value)
        for cell, value in self._cells:
            cell.cell_contents = value
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


def _is_library(value: Any) -> bool:
    """Return True for a class or function of torch or the standard library, which holds no state of the model."""
    return str(value.__module__).partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType) -> tuple[str, ...]:
    """Return the global names and attributes that a function and the functions inside it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(dict.fromkeys([*code.co_names, *(name for inner_code in inner for name in _names_in(inner_code))]))


@functools.lru_cache(maxsize=4096)
def _globals_set_in(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a function and the functions inside it assign."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    names = [name for inner_code in inner for name in _globals_set_in(inner_code)]
    if _STORE_GLOBAL in code.co_code[::2]:  # decoding the instructions takes longer, and is rarely needed
        instructions = dis.get_instructions(code)
        names += [instruction.argval for instruction in instructions if instruction.opcode == _STORE_GLOBAL]
    return tuple(dict.fromkeys(names))


def _put_global(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _slots_of(kind: type) -> Iterator[str]:
    for owner in kind.__mro__:
        names = vars(owner).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and not name.startswith("__"):
                yield name


def _same_contents(container: Any, contents: Any) -> bool:
    """Return True if a container holds the same objects in the same order."""
    if len(container) != len(contents):
        return False
    if isinstance(container, dict):
        return all(map(is_, container, contents)) and all(map(is_, container.values(), contents.values()))
    if isinstance(container, set):
        return {id(item) for item in container} == {id(item) for item in contents}
    return all(map(is_, container, contents))


def _put_back_class(kind: type, saved: dict[str, Any]) -> None:
    """Write back the attributes that differ, apart from dunder attributes: Python itself adds some, at any time."""
    now = vars(kind)
    for name in [name for name in {**saved, **now} if not name.startswith("__")]:
        if name not in saved:
            type.__delattr__(kind, name)
        elif now.get(name, _MISSING) is not saved[name]:
            type.__setattr__(kind, name, saved[name])


def _put_back_attributes(attributes: dict[str, Any], saved: dict[str, Any]) -> None:
    if _same_contents(attributes, saved):
        return
    for name in attributes.keys() - saved.keys():
        del attributes[name]
    in_order = list(attributes) == list(saved)
    for name, value in saved.items():
        if attributes.get(name, _MISSING) is not value:
            attributes[name] = value
    if not in_order:
        attributes.clear()
        attributes.update(saved)
