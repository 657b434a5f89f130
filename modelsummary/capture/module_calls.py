"""The one wrapper of ``nn.Module.__call__``, shared by all code that watches module calls.

Wrapping ``__call__`` has three advantages over hooks. With hooks, global ones included, torch takes the slow path of
``_call_impl``: 1.6 times the time of a small MLP, against 1.15. Hooks on a module switch off the fused kernels of
``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention``. A wrapper sees the original arguments and the final
result, whatever hooks the module has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from torch import nn

__all__ = ["ModuleCall", "Wrapper", "calls_wrapped", "unwrap_calls", "wrap_calls"]

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

_lock = RLock()
_wrappers: dict[object, Wrapper] = {}  # by owner
_original: Any = None
_installed: Any = None


def wrap_calls(owner: object, wrapper: Wrapper) -> None:
    """Replace ``nn.Module.__call__`` by ``wrapper(nn.Module.__call__)`` until ``unwrap_calls(owner)``.

    The wrappers of several owners nest; the latest is the outermost. If the owner has a wrapper already, it is kept.
    """
    with _lock:
        if owner not in _wrappers:
            _wrappers[owner] = wrapper
            _install()


def unwrap_calls(owner: object) -> None:
    """Remove the wrapper of ``owner``. Removing the last wrapper restores the original ``nn.Module.__call__``."""
    with _lock:
        if _wrappers.pop(owner, None) is not None:
            _install()


class ModuleCall:
    """One call of one module within a run, which kinds of calls inherit.

    Attributes:
        module: the module.
        parent: the call around it; None for the call of the model.
        children: the calls inside it, in the order in which they began.
        begin, end: when it began and ended: marks of a clock, or numbers of operators.
        nodes: number of the first autograd node that the call made, and of the first node after the call.
    """

    __slots__ = ()
    module: nn.Module
    parent: Any
    children: list[Any]
    begin: Any
    end: Any
    nodes: tuple[int, int]

    def walk(self) -> Iterator[Any]:
        """Yield this call and the calls inside it, in the order in which they began."""
        pending = [self]
        while pending:
            call = pending.pop()
            yield call
            pending.extend(reversed(call.children))


@contextmanager
def calls_wrapped(wrapper: Wrapper) -> Iterator[None]:
    """Return a context in which ``nn.Module.__call__`` is wrapped; Ctrl-C removes the wrapper, too."""
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
    if nn.Module.__call__ is not _installed:  # the first wrapper, or other code has wrapped it since
        _original = nn.Module.__call__
    call = _original
    for wrapper in _wrappers.values():
        call = wrapper(call)
    nn.Module.__call__ = call  # type: ignore[method-assign]
    dynamo = sys.modules.get("torch._dynamo.utils")  # it compares with the ``__call__`` found when it was imported
    if dynamo is not None and not _wrappers and getattr(dynamo, "unpatched_nn_module_call", None) is _installed:
        dynamo.unpatched_nn_module_call = _original  # type: ignore[attr-defined]
    _installed = call if _wrappers else None
