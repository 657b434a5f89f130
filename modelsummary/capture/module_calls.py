"""One wrapper of ``nn.Module.__call__``, which everything that watches calls of modules shares.

Wrapping ``__call__`` beats hooks in three ways. With hooks, global ones included, torch takes the slow path of
``_call_impl``: 1.6 times the time of a small MLP, against 1.15. Hooks on a module switch off the fused kernels of
``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention``. And a wrapper sees the call as it was made and what the
caller gets back, whatever hooks of its own the module has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from torch import nn

__all__ = ["Wrapper", "calls_wrapped", "unwrap_calls", "wrap_calls"]

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_lock = RLock()
_wrappers: dict[object, Wrapper] = {}  # by who asked for it
_original: Any = None
_installed: Any = None


def wrap_calls(owner: object, wrapper: Wrapper) -> None:
    """Replace ``nn.Module.__call__`` by ``wrapper(nn.Module.__call__)`` until ``unwrap_calls(owner)``.

    The wrappers of several owners nest; the latest is the outermost. An owner that is there already stays as it is.
    """
    with _lock:
        if owner not in _wrappers:
            _wrappers[owner] = wrapper
            _install()


def unwrap_calls(owner: object) -> None:
    """Take the wrapper of ``owner`` away; with the last one, ``nn.Module.__call__`` is what it was before the first."""
    with _lock:
        if _wrappers.pop(owner, None) is not None:
            _install()


@contextmanager
def calls_wrapped(wrapper: Wrapper) -> Iterator[None]:
    """Return a context in which ``nn.Module.__call__`` is wrapped; Ctrl-C leaves no wrapper behind."""
    owner = object()
    try:
        wrap_calls(owner, wrapper)
        yield
    finally:
        try:
            unwrap_calls(owner)
        except KeyboardInterrupt:
            _wrappers.pop(owner, None)
            _install()
            raise


def _install() -> None:
    """Put all wrappers around the original."""
    global _original, _installed  # noqa: PLW0603
    if nn.Module.__call__ is not _installed:  # somebody else wraps it meanwhile, or nobody does
        _original = nn.Module.__call__
    call = _original
    for wrapper in _wrappers.values():
        call = wrapper(call)
    nn.Module.__call__ = call  # type: ignore[method-assign]
    dynamo = sys.modules.get("torch._dynamo.utils")  # keeps what it finds when it is imported, to compare with
    if dynamo is not None and not _wrappers and getattr(dynamo, "unpatched_nn_module_call", None) is _installed:
        dynamo.unpatched_nn_module_call = _original  # type: ignore[attr-defined]
    _installed = call if _wrappers else None
