"""Find the state that a forward changes besides values of tensors, by comparing snapshots."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import get_overridable_functions

from modelsummary import _torch
from modelsummary.capture.containers import is_array

__all__ = [
    "Generators",
    "Unreadable",
    "autograd_functions_wrapped",
    "check_kept",
    "first_difference",
    "imports_question",
    "noticed",
    "numbers_in",
    "saved_tensor_hooks",
    "state_of",
]

_PLAIN = (int, float, bool, str, bytes, complex, type(None))
_PLAIN_TYPES = frozenset(_PLAIN)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MAY_COUNT = (int, float, list, dict, set, deque)
_SNAPSHOT_DEPTH = 3
_SNAPSHOT_LENGTH = 1000
_SNAPSHOT_BYTES = 2**16


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
        """Return True if a number was drawn since the last call of this method."""
        before, self._states = self._states, self._now()
        return before != self._states


class _Identity:
    """A reference to a value, equal only to references to the same object. It keeps the object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return a snapshot of the attributes of a module, of its objects and containers.

    >>> state_of(nn.Linear(2, 2))["in_features"]
    2
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    state: dict[str, Any] = {}
    for name, value in vars(module).items():
        if type(value) in _PLAIN_TYPES:
            state[name] = value
        elif name in _OF_EVERY_MODULE and not value:  # a dozen empty dicts of hooks
            continue
        elif name in ("_parameters", "_buffers"):
            state.update((tensor_name, _Identity(tensor)) for tensor_name, tensor in value.items())
        elif name != "_modules":
            state[name] = _snapshot(value, _SNAPSHOT_DEPTH)
    for name, value in _of_classes(type(module)):
        state[f"{type(module).__name__}.{name}"] = _snapshot(value, _SNAPSHOT_DEPTH)
    return state


def first_difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the name of the first attribute in which two states of a module differ.

    >>> first_difference({"a": 1, "b": 2}, {"a": 1, "b": 3})
    'b'
    """
    return next(name for name in {**before, **after} if before.get(name, before) != after.get(name, after))


def _of_classes(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield plain attributes of the model's own classes, which a forward may use as counters."""
    for owner in kind.__mro__:
        if not owner.__module__.startswith(("torch.", "builtins")):
            for name, value in vars(owner).items():
                if isinstance(value, _MAY_COUNT) and not name.startswith("__"):
                    yield name, value


def numbers_in(snapshot: Any) -> list[Any]:
    """Return the plain values in a snapshot, on which code may branch."""
    if isinstance(snapshot, dict):
        return [value for inner in snapshot.values() for value in numbers_in(inner)]
    if isinstance(snapshot, (list, tuple)):
        return [value for inner in snapshot for value in numbers_in(inner)]
    return [] if isinstance(snapshot, _Identity) or snapshot is None else [snapshot]


def _snapshot(value: Any, depth: int) -> Any:
    """Return an object that compares unequal after ``value`` was changed, down to some depth."""
    if isinstance(value, _PLAIN):
        return value
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType)):
        return _Identity(value)
    if isinstance(value, set) or (isinstance(value, (dict, list, tuple, deque)) and len(value) > _SNAPSHOT_LENGTH):
        return _Identity(value), len(value)
    if isinstance(value, dict):
        return _Identity(value), {key: _snapshot(inner, depth - 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return _Identity(value), [_snapshot(inner, depth - 1) for inner in value]
    if isinstance(value, random.Random):
        return _Identity(value), value.getstate()
    if is_array(value):
        return _Identity(value), value.tobytes() if value.nbytes <= _SNAPSHOT_BYTES else value.shape
    if type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return _Identity(value), str(value.bit_generator.state)
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return _Identity(value), {name: _snapshot(inner, depth - 1) for name, inner in attributes.items()}
    return _Identity(value)


def saved_tensor_hooks() -> Any:
    """Return the innermost active hooks for saved tensors; None if there are none, and on torch 2.6."""
    top = _torch.top_saved_tensors_hooks
    return None if top is None else top(True)


_GRADIENTS = ("is_grad_enabled", "is_inference_mode_enabled")
# Functions that read or change state which the record does not hold. Calls from modules in ``_OWN_ENDS`` are allowed.
# Whether gradients are computed may be asked: stages are then compared with the model without them.
_QUESTIONS = (
    *((owner, name, "") for owner in (torch, _torch.bound_functions) for name in _GRADIENTS),
    (torch, "is_autocast_enabled", "switches autocast, or asks whether it is on"),
    (torch, "manual_seed", "seeds the random numbers"),
    (torch.random, "manual_seed", "seeds the random numbers"),
    (torch, "set_rng_state", "sets the state of the random numbers"),
    (torch.random, "set_rng_state", "sets the state of the random numbers"),
)
_OWN_ENDS = ("torch.nn.", "torch.utils.checkpoint", "torch.autograd.grad_mode", __name__)


@contextmanager
def noticed(note: Callable[[str], None]) -> Iterator[None]:
    """Return a context in which ``note`` is called with the reason when code calls a function in ``_QUESTIONS``.

    The reason is empty for a question about gradients, which a list of calls may repeat.
    """
    get_overridable_functions()  # torch caches its functions; fill the cache before they are replaced here

    def noticing(original: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if not str(sys._getframe(1).f_globals.get("__name__")).startswith(_OWN_ENDS):
                note(reason)
            return original(*args, **kwargs)

        return ask

    with ExitStack() as stack:
        for owner, name, reason in _QUESTIONS:
            stack.enter_context(_torch.swapped(owner, name, noticing(getattr(owner, name), reason)))
        yield


def imports_question(modules: Sequence[nn.Module]) -> bool:
    """Return True if code of the modules may ask about gradients by a name of its own, which ``noticed`` cannot see."""
    questions = [getattr(torch, name) for name in _GRADIENTS]
    files = {base.__module__ for kind in {type(module) for module in modules} for base in kind.__mro__}
    values = (
        value
        for file in files
        if file in sys.modules and not file.startswith("torch.")
        for value in vars(sys.modules[file]).values()
    )
    return any(value is question for value in values for question in questions)


@contextmanager
def autograd_functions_wrapped(call: Callable[[Any, Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """Return a context in which ``call(cls, apply, args, kwargs)`` replaces ``cls.apply(*args, **kwargs)``."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return call(cls, original.__get__(None, cls), args, kwargs)

    with _torch.swapped(torch.autograd.Function, "apply", classmethod(apply)):
        yield


class Unreadable:
    """A replacement for an attribute that a forward must not depend on: any use of it raises."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the forward reads an attribute that it must not depend on")

    __bool__ = __len__ = __iter__ = __call__ = __getitem__ = __contains__ = __getattr__ = _fail
    __eq__ = _fail
    __torch_function__: Any = classmethod(_fail)  # type: ignore[arg-type]
    __hash__ = object.__hash__


def check_kept(model: nn.Module, unreadable: frozenset[str]) -> None:
    """Raise ``RuntimeError`` if an unreadable value was moved to another attribute, where a forward may read it."""
    for owner, module in model.named_modules() if unreadable else ():
        for name, value in vars(module).items():
            if f"{owner}.{name}".lstrip(".") not in unreadable and _has_unreadable(value, steps=3):
                raise RuntimeError(f"the forward moves the value of another attribute to {name!r}")


def _has_unreadable(value: Any, steps: int) -> bool:
    if isinstance(value, Unreadable):
        return True
    if not steps or isinstance(value, (nn.Module, Tensor)):
        return False
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return any(_has_unreadable(part, steps - 1) for part in (*inner, *getattr(value, "__dict__", {}).values()))
