"""One run of a model at a time: a run exchanges the model's tensors, and switches of the whole process."""

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
    """``function``, which waits while another thread is in one that is exclusive, too."""

    @wraps(function)
    def alone(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        with _lock:
            return function(*args, **kwargs)

    return alone
