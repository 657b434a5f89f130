"""Watch the module calls of a forward: caller, shapes, and which one runs.

A wrapper of ``nn.Module.__call__`` sees the calls. An operator belongs to the innermost running one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import nullcontext
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import nn

from modelsummary import _torch
from modelsummary.capture.containers import argument_sizes, result_sizes
from modelsummary.capture.module_calls import ModuleCall, calls_wrapped
from modelsummary.errors import InputError
from modelsummary.layer_info import CallKey, CallKeys, Sizes

__all__ = ["Call", "Watch", "keys_of"]

_next_node = _torch.next_node_number
C = TypeVar("C", bound=ModuleCall)


class Call(ModuleCall):
    """The facts of one call of one module; ``begin`` and ``end`` are numbers of operators."""

    __slots__ = (
        "begin",
        "children",
        "end",
        "finished",
        "input_bytes",
        "input_size",
        "module",
        "nodes",
        "output_bytes",
        "output_size",
        "parent",
        "training",
    )

    def __init__(self, module: nn.Module, parent: Call | None, begin: int = 0) -> None:
        self.module = module
        self.parent = parent
        self.children: list[Call] = []  # filled by ``Watch.tree``
        self.begin = self.end = begin
        first_node = _next_node()
        self.nodes = first_node, first_node
        self.training = getattr(module, "training", False)  # a frozen ScriptModule lacks the attribute
        self.input_size: Sizes = None
        self.output_size: Sizes = None
        self.input_bytes = self.output_bytes = 0
        self.finished = False

    def ends(self, end: int) -> None:
        """Note the operators and nodes after the call."""
        self.end, self.nodes = end, (self.nodes[0], _next_node())


def _is_foreign_autocast() -> bool:
    return _torch.is_any_autocast_enabled() and not torch.is_autocast_enabled("cpu")


_LATER = {
    Generator: ("a generator, which runs", "iterates over it", "list(model(...))"),
    Coroutine: ("a coroutine, which runs", "awaits it", "asyncio.run(model(...))"),
    AsyncGenerator: ("an asynchronous generator, which runs", "iterates over it", "a list of its items"),
}


def _check_ran(output: Any) -> None:
    """Raise ``InputError`` if the forward only returned an object that runs later."""
    for kind, (what, how, remedy) in _LATER.items():
        if isinstance(output, kind):
            if isinstance(output, Coroutine):
                output.close()  # Python warns of one that nobody awaits
            raise InputError(
                f"the forward returns {what} only while somebody {how}, so nothing ran; pass a module around the model "
                f"whose forward returns {remedy}"
            )


def keys_of(calls: Iterable[C], names: Mapping[int, str]) -> dict[C, CallKey]:
    """Return the key of each call, in the order in which they began; a module without a name has its caller's.

    Args:
        names: id of a module -> its FQN. A first call without a name is the model's.
    """
    numbers = CallKeys()
    keys: dict[C, CallKey] = {}
    for call in calls:
        fqn = names.get(id(call.module), None if call.parent is not None else "")
        keys[call] = keys[call.parent] if fqn is None else numbers.next_of(fqn)
    return keys


class Watch:
    """A run in which every module call of this thread becomes a ``Call``.

    Args:
        model: the model.
        position: returns the number of operators so far.
        began: called with each call before it runs, and with its arguments.
        ended: called with each call that returned, and with its result.
        must_run: raise ``InputError`` if the result of the model runs later, as a generator does.
        within: whether calls inside the call of the model are seen; a compiled model has none.

    Attributes:
        calls: all calls in the order in which they began; the first is the call of the model.
        innermost: the innermost call that runs now; None before and after the run.
        under_foreign_autocast: whether a call began while autocast was on, but not for the CPU.
        failed: the innermost call that raised, followed by the calls around it, innermost first.
        n_in_other_threads: calls of modules of the model in other threads, which are not watched.
    """

    def __init__(
        self,
        model: nn.Module,
        position: Callable[[], int] = lambda: 0,
        *,
        began: Callable[[Call, Any], object] | None = None,
        ended: Callable[[Call, Any], object] | None = None,
        must_run: bool = True,
        within: bool = True,
    ) -> None:
        self._began, self._ended, self._must_run, self._within = began, ended, must_run, within
        self.root = Call(model, None)
        self.calls = [self.root]
        self.failed: list[Call] = []
        self.n_in_other_threads = 0
        self.innermost: Call | None = None
        self.under_foreign_autocast = _is_foreign_autocast()
        self._root_began = False
        self._position = position

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], call_module: Callable[..., Any] | None = None) -> Any:
        """Call the model, record its calls and return its result. Exceptions of its forward propagate.

        Args:
            call_module: calls the model instead of ``nn.Module.__call__``, for a wrapper that has been called already.
        """
        root = self.root
        root.input_size, root.input_bytes = argument_sizes(args, kwargs)
        root.begin, root.nodes = self._position(), (_next_node(),) * 2
        try:
            if self._began is not None:
                self._began(root, (args, kwargs))
            with calls_wrapped(self._wrapper) if self._within else nullcontext():
                self.innermost = root
                self._root_began = call_module is not None
                if call_module is None:
                    output = root.module(*args, **kwargs)
                else:
                    output = call_module(root.module, *args, **kwargs)
            if self._must_run:
                _check_ran(output)
        except Exception:
            self._note_failure(root)
            raise
        finally:
            self.innermost = None
        root.ends(self._position())
        root.output_size, root.output_bytes = result_sizes(output)
        root.finished = True
        if self._ended is not None:
            self._ended(root, output)
        return output

    def tree(self) -> Call:
        """Return the call of the model with the calls inside each call; they then refer to each other in cycles."""
        for call in self.calls:
            call.children = []
        for call in self.calls[1:]:
            if call.parent is not None:
                call.parent.children.append(call)
        return self.root

    def _wrapper(self, call_module: Callable[..., Any]) -> Callable[..., Any]:
        thread, calls, is_foreign, position = get_ident(), self.calls, _is_foreign_autocast, self._position
        began, ended = self._began, self._ended

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if get_ident() != thread:
                self._note_other_thread(module)
                return call_module(module, *args, **kwargs)
            if module is self.root.module and not self._root_began:
                self._root_began = True  # ``call`` ends the root, so that the user's hooks count as its work
                return call_module(module, *args, **kwargs)
            if not self.under_foreign_autocast and is_foreign():
                self.under_foreign_autocast = True
            parent = self.innermost
            self.innermost = call = Call(module, parent, position())
            calls.append(call)
            try:
                if began is not None:
                    began(call, (args, kwargs))
                output = call_module(module, *args, **kwargs)
            except Exception:
                self._note_failure(call)
                raise
            else:
                call.output_size, call.output_bytes = result_sizes(output)
                call.finished = True
                if ended is not None:
                    ended(call, output)
                return output
            finally:
                call.ends(position())
                call.input_size, call.input_bytes = argument_sizes(args, kwargs)
                self.innermost = parent

        return watched

    def _note_other_thread(self, module: nn.Module) -> None:
        self.n_in_other_threads += any(module is watched for watched in self.root.module.modules())

    def _note_failure(self, call: Call) -> None:
        if not self.failed or self.failed[-1].parent is not call:
            self.failed = []  # an earlier exception was caught inside the model
        self.failed.append(call)
