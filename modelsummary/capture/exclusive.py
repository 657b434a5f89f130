"""One run of a model at a time: a run replaces the model's tensors and sets process-wide switches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["exclusive"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_lock = threading.RLock()


def exclusive(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Return ``function`` under a lock shared by all exclusive functions: only one thread at a time runs one.

    >>> exclusive(abs)(-1)
    1
    """

    @wraps(function)
    def alone(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with _lock:
            return function(*args, **kwargs)

    return alone
