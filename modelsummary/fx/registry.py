"""Registries of user code for modules and functions that tracing or profiling does not know.

Each is filled by a decorator and refuses a second registration. Keys are the functions that a model calls: a function
of torch, an operator ``torch.ops.mylib.my_op``, or ``MyFunction.apply`` of a ``torch.autograd.Function``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from modelsummary._torch import swapped
from modelsummary.errors import RegistrationError
from modelsummary.record.trace_rules import TraceRules

__all__ = [
    "find_impl",
    "flop_impls",
    "is_leaf",
    "leaf_impls",
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
_leaves: dict[type, bool] = {}
leaf_impls: Impls = {}
shape_impls: Impls = {}
flop_impls: Impls = {}
profile_impls: Impls = {}

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def register_tracer_impl(func: Callable[..., Any]) -> Callable[[_F], _F]:
    """Register a function that ``symbolic_trace`` calls instead of another one. The graph has the calls it makes.

    Args:
        func: function to replace. A plain Python function is replaced where the model's modules import it by name.

    Raises:
        RegistrationError: ``func`` already has an implementation, or one of the two is not callable.

    >>> import torch
    >>> def area(x):  # NumPy cannot be traced
    ...     return torch.from_numpy(x.numpy() ** 2)
    >>> @register_tracer_impl(area)
    ... def traced_area(x):
    ...     return x * x
    """
    return _registering("register_tracer_impl", _tracer_impls, func)


def register_leaf_module(cls: _M) -> _M:
    """Register a module class whose calls stay ``call_module`` nodes. Usable as a decorator.

    Raises:
        RegistrationError: ``cls`` is already registered, or is not a module class.

    >>> from modelsummary.fx import symbolic_trace
    >>> import torch
    >>> @register_leaf_module
    ... class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(x) + 1
    >>> print(symbolic_trace(nn.Sequential(Block()), meta_args={"input": torch.rand(2)}).code.strip())
    def forward(self, input):
        input_1 = input
        _0 = getattr(self, "0")(input_1);  input_1 = None
        return _0
    """
    return _register_leaf("register_leaf_module", cls, is_leaf=True)


def register_non_leaf_module(cls: _M) -> _M:
    """Register a module class that is opened, such as ``nn.MultiheadAttention``. Usable as a decorator.

    Raises:
        RegistrationError: ``cls`` is already registered, or is not a module class.
    """
    return _register_leaf("register_non_leaf_module", cls, is_leaf=False)


def register_leaf_module_impl(cls: type[nn.Module]) -> Callable[[_F], _F]:
    """Register a function that returns the result of a module on tensors without data. The module is not opened.

    It is for layers whose operators have no kernel for such tensors. The function gets the module and the arguments of
    its forward, and returns empty tensors of the right shapes, dtypes and devices.

    Raises:
        RegistrationError: ``cls`` already has an implementation, is registered to be opened, or is not a module class.
    """
    _check_class("register_leaf_module_impl", cls)
    if _leaves.get(cls) is False:
        raise RegistrationError(f"register_leaf_module_impl: {cls.__name__} is already registered as opened")
    return _registering("register_leaf_module_impl", leaf_impls, cls)


def register_shape_impl(func: Any) -> Callable[[_F], _F]:
    """Register a function that returns the result of another one on tensors without data.

    It gets the same arguments, and returns empty tensors of the right shapes, dtypes and devices.

    Raises:
        RegistrationError: ``func`` already has an implementation, or one of the two is not callable.
    """
    return _registering("register_shape_impl", shape_impls, func)


def register_flop_count_impl(func: Any) -> Callable[[_F], _F]:
    """Register a function that returns the FLOPs of a function or module class: ``(fwd_flop, bwd_flop)``.

    A multiply-add is 2 FLOPs. The function gets the arguments of the call as tensors without data; for a module class,
    the module comes first.

    Raises:
        RegistrationError: ``func`` already has an implementation, or one of the two is not callable.

    >>> class Doubling(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x
    >>> @register_flop_count_impl(Doubling)
    ... def flops_of_doubling(module, x):
    ...     return x.numel(), x.numel()
    """
    return _registering("register_flop_count_impl", flop_impls, func)


def register_profile_impl(func: Any) -> Callable[[_F], _F]:
    """Register a function that returns all costs of a function or module class.

    It returns ``(fwd_flop, bwd_flop, fwd_comm, bwd_comm)``: FLOPs, 2 per multiply-add, and bytes communicated. It gets
    the same arguments as for ``register_flop_count_impl``, and takes precedence over it.

    Raises:
        RegistrationError: ``func`` already has an implementation, or one of the two is not callable.
    """
    return _registering("register_profile_impl", profile_impls, func)


def _registering(name: str, impls: Impls, key: Any) -> Callable[[_F], _F]:
    if not callable(key):
        raise RegistrationError(f"{name}: expected a function, got {type(key).__name__}: {key!r:.80}")

    def register(impl: _F) -> _F:
        if not callable(impl):
            raise RegistrationError(f"{name}: expected a function for {key}, got {type(impl).__name__}: {impl!r:.80}")
        if key in impls:
            raise RegistrationError(f"{name}: {key} already has an implementation: {impls[key]}")
        impls[key] = impl
        return impl

    return register


def _register_leaf(name: str, cls: _M, *, is_leaf: bool) -> _M:
    _check_class(name, cls)
    if cls in _leaves or cls in leaf_impls:
        kind = "opened" if _leaves.get(cls) is False else "a leaf"
        raise RegistrationError(f"{name}: {cls.__name__} is already registered as {kind}")
    _leaves[cls] = is_leaf
    return cls


def _check_class(name: str, cls: Any) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise RegistrationError(f"{name}: expected a module class, got {type(cls).__name__}: {cls!r:.80}")


def is_leaf(module: nn.Module) -> bool:
    """Return True if a module stays one node: as registered, else a layer of torch that is not a container."""
    kind = type(module)
    registered = True if kind in leaf_impls else _leaves.get(kind)
    if registered is not None:
        return registered
    return kind.__module__.startswith(("torch.nn.", "torch.ao.nn.")) and not isinstance(module, _CONTAINERS)


def rules(model: nn.Module, used: set[Any]) -> TraceRules:
    """Return the rules of a trace from the current registrations.

    Args:
        model: the traced model; it is always opened.
        used: set that gets the functions and classes whose implementations are called.
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
        layer_shapes=noting(leaf_impls),
        opens_checkpoints=True,
    )


@contextmanager
def replaced(model: nn.Module, rules: TraceRules) -> Iterator[None]:
    """Run the body with plain Python functions replaced in the Python modules that define the model's classes."""
    functions = {key: impl for key, impl in rules.substitutes.items() if isinstance(key, FunctionType)}
    names = dict.fromkeys(type(module).__module__ for module in model.modules())
    with ExitStack() as stack:
        for home in [sys.modules[name] for name in names if functions and name in sys.modules]:
            for name, value in list(vars(home).items()):
                if isinstance(value, FunctionType) and value in functions:
                    stack.enter_context(swapped(home, name, functions[value]))
        yield


def find_impl(impls: Impls, target: Any) -> Callable[..., Any] | None:
    """Return the implementation registered for a function, or for the class of a module; None if not registered."""
    key = type(target) if isinstance(target, nn.Module) else target
    try:
        return impls.get(key)
    except TypeError:  # the key is not hashable
        return None
