"""Registries: what the user tells about modules and functions that tracing or profiling does not know.

Each is filled by a decorator and refuses a second registration. Functions are those that a model calls: a function of
torch, an operator ``torch.ops.mylib.my_op``, or ``MyFunction.apply`` of a ``torch.autograd.Function``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from modelsummary.errors import RegistrationError
from modelsummary.record.rules import TraceRules

__all__ = [
    "find_impl",
    "flop_impls",
    "is_leaf",
    "leaf_impl",
    "profile_impls",
    "register_flop_count_impl",
    "register_leaf_module",
    "register_leaf_module_impl",
    "register_non_leaf_module",
    "register_profile_impl",
    "register_shape_impl",
    "register_tracer_impl",
    "replaced",
    "rules",
    "shape_impls",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_M = TypeVar("_M", bound=type[nn.Module])
Impls = dict[Any, Callable[..., Any]]

_tracer_impls: Impls = {}
_leaf_impls: Impls = {}
_leaves: dict[type, bool] = {}
shape_impls: Impls = {}
flop_impls: Impls = {}
profile_impls: Impls = {}

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def register_tracer_impl(func: Callable[..., Any]) -> Callable[[_F], _F]:
    """Register what ``symbolic_trace`` calls in the place of a function: the graph then has what this calls.

    Args:
        func: the function; a plain Python function is replaced where the modules of the model import it by name.

    Raises:
        RegistrationError: it has one already, or one of them is no function.
    """
    return _registering("register_tracer_impl", _tracer_impls, func)


def register_leaf_module(cls: _M) -> _M:
    """Register that a class of modules is not opened: its calls stay ``call_module`` nodes. Usable as a decorator.

    Raises:
        RegistrationError: it is registered already, or no class of modules.
    """
    return _register_leaf("register_leaf_module", cls, is_leaf=True)


def register_non_leaf_module(cls: _M) -> _M:
    """Register that a class of modules is opened, such as ``nn.MultiheadAttention``. Usable as a decorator.

    Raises:
        RegistrationError: it is registered already, or no class of modules.
    """
    return _register_leaf("register_non_leaf_module", cls, is_leaf=False)


def register_leaf_module_impl(cls: type[nn.Module]) -> Callable[[_F], _F]:
    """Register what gives the result of a module where no values are computed, and that it is not opened.

    For layers whose operators have no kernel for tensors without values. The function gets the module and the arguments
    of its forward, and returns empty tensors of the right shapes, dtypes and devices.

    Raises:
        RegistrationError: the class has one already, is registered as to be opened, or is no class of modules.
    """
    _check_class("register_leaf_module_impl", cls)
    if _leaves.get(cls) is False:
        raise RegistrationError(f"register_leaf_module_impl: {cls.__name__} is registered as a module to be opened")
    return _registering("register_leaf_module_impl", _leaf_impls, cls)


def register_shape_impl(func: Any) -> Callable[[_F], _F]:
    """Register what gives the result of a function where no values are computed.

    The implementation gets the arguments of the function, and returns empty tensors of the right shapes, dtypes and
    devices.

    Raises:
        RegistrationError: the function has one already, or is no function.
    """
    return _registering("register_shape_impl", shape_impls, func)


def register_flop_count_impl(func: Any) -> Callable[[_F], _F]:
    """Register the FLOPs of a function, or of a class of modules: ``(fwd_flop, bwd_flop)``, 2 a multiply-add.

    The implementation gets the arguments of the function (of the module's forward, after the module), as tensors
    without values.

    Raises:
        RegistrationError: it has one already, or one of them is no function.
    """
    return _registering("register_flop_count_impl", flop_impls, func)


def register_profile_impl(func: Any) -> Callable[[_F], _F]:
    """Register all costs of a function or class of modules: ``(fwd_flop, bwd_flop, fwd_comm, bwd_comm)``.

    FLOPs, 2 a multiply-add, and bytes that are communicated. Arguments as for ``register_flop_count_impl``, over which
    it takes precedence.

    Raises:
        RegistrationError: it has one already, or one of them is no function.
    """
    return _registering("register_profile_impl", profile_impls, func)


def _registering(name: str, impls: Impls, key: Any) -> Callable[[_F], _F]:
    if not callable(key):
        raise RegistrationError(f"{name}: expected a function, got {type(key).__name__}: {key!r:.80}")

    def register(impl: _F) -> _F:
        if not callable(impl):
            raise RegistrationError(f"{name}: expected a function for {key}, got {type(impl).__name__}: {impl!r:.80}")
        if key in impls:
            raise RegistrationError(f"{name}: {key} has an implementation already: {impls[key]}")
        impls[key] = impl
        return impl

    return register


def _register_leaf(name: str, cls: _M, *, is_leaf: bool) -> _M:
    _check_class(name, cls)
    if cls in _leaves or cls in _leaf_impls:
        kind = "opened" if _leaves.get(cls) is False else "a leaf"
        raise RegistrationError(f"{name}: {cls.__name__} is registered already, as {kind}")
    _leaves[cls] = is_leaf
    return cls


def _check_class(name: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise RegistrationError(f"{name}: expected a class of modules, got {type(cls).__name__}: {cls!r:.80}")


def is_leaf(module: nn.Module) -> bool:
    """A module stays one node: as registered, else a layer of torch that is no container, as for ``torch.fx``."""
    kind = type(module)
    registered = True if kind in _leaf_impls else _leaves.get(kind)
    if registered is not None:
        return registered
    return kind.__module__.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, _CONTAINERS)


def rules(model: nn.Module, used: set[Any]) -> TraceRules:
    """What a tracer does, by the registrations of now.

    Args:
        model: what is traced; it is opened, whatever it is.
        used: gets the functions and classes whose implementations were called.
    """

    def noting(impls: Impls) -> Impls:
        def note(key: Any, impl: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                used.add(key)
                return impl(*args, **kwargs)

            return call

        return {key: note(key, impl) for key, impl in impls.items()}

    return TraceRules(
        is_whole=lambda module: module is not model and is_leaf(module),
        substitutes=noting(_tracer_impls),
        shapes=noting(shape_impls),
        layer_shapes=noting(_leaf_impls),
        opens_checkpoints=True,
    )


@contextmanager
def replaced(model: nn.Module, rules: TraceRules) -> Iterator[None]:
    """Context in which plain Python functions are replaced where the modules of a model know them by name."""
    functions = {key: impl for key, impl in rules.substitutes.items() if isinstance(key, FunctionType)}
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    homes = [vars(sys.modules[name]) for name in names if name in sys.modules]
    found = [
        (home, name, value)
        for home in homes
        if functions
        for name, value in home.items()
        if isinstance(value, FunctionType) and value in functions
    ]
    for home, name, value in found:
        home[name] = functions[value]
    try:
        yield
    finally:
        for home, name, value in found:
            home[name] = value


def find_impl(impls: Impls, target: Any) -> Callable[..., Any] | None:
    """What is registered for a function, or for the class of a module."""
    key = type(target) if isinstance(target, nn.Module) else target
    try:
        return impls.get(key)
    except TypeError:  # it has no hash
        return None


def leaf_impl(module: nn.Module) -> Callable[..., Any] | None:
    """What gives the result of a module where no values are computed."""
    return _leaf_impls.get(type(module))
