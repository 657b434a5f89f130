"""Whether modules compute from nothing but themselves and their arguments; told by reading their code.

A forward that is pure in this sense does for an equal module with equal arguments what it did before. What cannot be
followed (a global that may change, an object with methods of its own, an import, an assigned attribute) counts as
impure: the answer is never yes by guess. Code of torch counts as pure.
"""

from __future__ import annotations

import builtins
import dis
import functools
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Purity", "is_of_library"]

_ABSENT = object()
_PURE_BUILTINS = frozenset(
    "len range int float bool str tuple list dict set frozenset slice min max sum abs round pow divmod zip enumerate"
    " map filter reversed sorted isinstance all any iter next super hasattr NotImplemented Ellipsis".split()
)
_PURE_MODULES = frozenset({"torch", "math", "operator", "typing", "collections"})
_LIBRARIES = frozenset({"torch", "builtins", "abc", "typing"})
_CONSTANTS = frozenset({int, float, bool, complex, str, bytes, type(None), type(...)})
_CONSTANTS |= {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
# Other special methods run at the bidding of syntax (len, iteration, indexing), and are read, too.
_NOT_OF_A_RUN = frozenset(
    "__init__ __new__ __init_subclass__ __class_getitem__ __repr__ __str__ __dir__ __reduce__ __reduce_ex__ __del__"
    " __getstate__ __setstate__ __deepcopy__ __copy__ __delattr__ __setattr__".split()
)
_WRITES_OUTSIDE = frozenset("STORE_GLOBAL DELETE_GLOBAL STORE_ATTR DELETE_ATTR IMPORT_NAME".split())
_WRITES_ENCLOSING = frozenset({"STORE_DEREF", "DELETE_DEREF"})


class _Uses(NamedTuple):
    """What a function and those written inside it name."""

    names: frozenset[str]
    global_names: frozenset[str]
    writes: bool


class Purity:
    """Answers for one run of a model, as long as ``still_holds``."""

    def __init__(self) -> None:
        self._kinds: dict[frozenset[type], bool] = {}
        self._functions: dict[FunctionType, frozenset[str] | None] = {}  # -> names it uses; None: impure
        self._read: dict[tuple[Any, str], tuple[Mapping[str, Any], str, Any]] = {}  # namespace, name, value
        self._cells: dict[int, tuple[CellType, Any]] = {}
        self._owners: dict[type, int] = {}  # classes -> how many attributes they have

    def of_modules(self, kinds: frozenset[type]) -> bool:
        """Modules of these classes, which may call each other and each other's methods."""
        found = self._kinds.get(kinds)
        if found is None:
            found = self._kinds[kinds] = all(map(_calls_plainly, kinds)) and self._methods_are_pure(kinds)
        return found

    def of_value(self, value: Any) -> bool:
        """Something that a function reaches by a global name, in a closure or as a default."""
        if _is_constant(value) or is_of_library(value):
            return True
        if isinstance(value, ModuleType):
            return _package(value.__name__) in _PURE_MODULES
        return isinstance(value, FunctionType) and self._names_used(value) is not None

    def still_holds(self) -> bool:
        """Globals, attributes of classes and closures that the answers rest on are what they were."""
        return (
            all(space.get(name, _ABSENT) is value for space, name, value in self._read.values())
            and all(cell.cell_contents is value for cell, value in self._cells.values())
            and all(len(vars(owner)) == count for owner, count in self._owners.items())
        )

    def _methods_are_pure(self, kinds: Iterable[type]) -> bool:
        """The methods that a run may come to: those named by others that it comes to."""
        owners = [owner for kind in kinds for owner in kind.__mro__ if _package(owner.__module__) not in _LIBRARIES]
        names = {"forward"} | {
            name for owner in owners for name, value in vars(owner).items() if _is_special(name, value)
        }
        if not all(self.of_value(getattr(kind, "forward", None)) for kind in kinds):  # one of torch may be exchanged
            return False
        self._owners.update((owner, len(vars(owner))) for owner in owners)
        read: set[str] = set()
        while unread := names - read:
            read |= unread
            for owner in owners:
                for name in unread & vars(owner).keys():
                    attribute = vars(owner)[name]
                    self._read[owner, name] = (vars(owner), name, attribute)
                    used = self._names_used_by(attribute)
                    if used is None:
                        return False
                    names |= used
        return True

    def _names_used_by(self, attribute: Any) -> frozenset[str] | None:
        """Names that an attribute of a class uses; None if it is impure."""
        if isinstance(attribute, property):
            attribute = attribute.fget
        elif isinstance(attribute, (staticmethod, classmethod)):
            attribute = attribute.__func__
        if isinstance(attribute, FunctionType) and not is_of_library(attribute):
            return self._names_used(attribute)
        return frozenset() if self.of_value(attribute) else None

    def _names_used(self, function: FunctionType) -> frozenset[str] | None:
        if function not in self._functions:
            self._functions[function] = None  # while it is read: recursion is not followed
            self._functions[function] = self._names_in(function)
        return self._functions[function]

    def _names_in(self, function: FunctionType) -> frozenset[str] | None:
        uses = _uses(function.__code__)
        if uses.writes or "ops" in uses.names or any(name.startswith("__") for name in uses.names):
            return None
        reached = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":  # of super()
                try:
                    reached.append(cell.cell_contents)
                except ValueError:  # empty as yet
                    return None
                self._cells[id(cell)] = (cell, cell.cell_contents)
        for name in uses.global_names:
            value = function.__globals__.get(name, _ABSENT)
            self._read[id(function.__globals__), name] = (function.__globals__, name, value)
            if value is not _ABSENT:
                reached.append(value)
            elif not (name in _PURE_BUILTINS or _is_exception(name)):
                return None
        names = uses.names
        for value in reached:
            if not self.of_value(value):
                return None
            if isinstance(value, FunctionType):
                names |= self._functions.get(value) or frozenset()
        return names


@functools.lru_cache(maxsize=4096)
def _uses(code: CodeType) -> _Uses:
    """What the code names; it keeps nothing alive but code."""
    names: set[str] = set()
    global_names, enclosing, writes = set(), set(), False
    pending = [code]
    while pending:
        inner = pending.pop()
        names |= set(inner.co_names)
        pending += [each for each in inner.co_consts if isinstance(each, CodeType)]
        for instruction in dis.get_instructions(inner):
            writes |= instruction.opname in _WRITES_OUTSIDE
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                global_names.add(instruction.argval)
            elif instruction.opname in _WRITES_ENCLOSING:
                enclosing.add(instruction.argval)
    return _Uses(frozenset(names), frozenset(global_names), writes or not enclosing.isdisjoint(code.co_freevars))


def _calls_plainly(kind: type) -> bool:
    """Calls and attributes of its modules are those of ``nn.Module``."""
    return (
        issubclass(kind, nn.Module)
        and not issubclass(kind, torch.jit.ScriptModule)
        and kind.__call__ is nn.Module.__call__
        and kind.__getattr__ is nn.Module.__getattr__
        and kind.__getattribute__ is object.__getattribute__
        and not any(vars(owner).get("__slots__") for owner in kind.__mro__)
    )


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def is_of_library(value: Any) -> bool:
    """A function or class of torch, of Python itself, or of a module of its library that keeps no state."""
    if isinstance(value, FunctionType):  # a wrapper may claim to be another's, so its code is asked
        return _package(value.__globals__.get("__name__")) in _PURE_MODULES
    if isinstance(value, type):
        return value in _PURE_CLASSES or _package(value.__module__) in _PURE_MODULES
    return isinstance(value, BuiltinFunctionType) and _package(value.__module__) in _PURE_MODULES


def _is_constant(value: Any) -> bool:
    return type(value) in _CONSTANTS or (type(value) is tuple and all(map(_is_constant, value)))


_PURE_CLASSES = frozenset(
    getattr(builtins, name) for name in _PURE_BUILTINS if isinstance(getattr(builtins, name), type)
)


def _is_special(name: str, value: Any) -> bool:
    return isinstance(value, FunctionType) and name.startswith("__") and name not in _NOT_OF_A_RUN


def _is_exception(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)
