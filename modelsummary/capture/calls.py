"""Watch a forward run: which module called which, with what shapes, and what its operators cost.

Forward pre-hooks and hooks tell the calls, a dispatch mode the operators; an operator belongs to the
innermost running module. While the model runs, facts are only appended; ``tree`` makes sense of them.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from modelsummary import _torch
from modelsummary.capture.operators import Execution, Operators
from modelsummary.capture.values import argument_sizes, result_sizes
from modelsummary.layer_info import Sizes, total

__all__ = ["Call", "Costs", "Watch"]


class Costs(NamedTuple):
    """Counters of a call; ``uncounted``: operators without a formula -> how often."""

    macs: int
    elementwise_ops: int
    bytes_read: int
    bytes_written: int
    uncounted: dict[str, int]
    skipped_macs: int | None


class Call:
    """One call of one module; facts only."""

    __slots__ = (
        "bytes_read",
        "bytes_written",
        "elementwise_ops",
        "finished",
        "input_bytes",
        "input_size",
        "macs",
        "module",
        "output_bytes",
        "output_size",
        "parent",
        "skipped_macs",
        "training",
        "uncounted",
    )

    def __init__(self, module: nn.Module, parent: Call | None) -> None:
        self.module = module
        self.parent = parent
        self.training = getattr(module, "training", False)  # a frozen ScriptModule has no mode
        self.input_size: Sizes = None
        self.output_size: Sizes = None
        self.input_bytes = self.output_bytes = 0
        self.macs = self.elementwise_ops = self.bytes_read = self.bytes_written = 0
        self.skipped_macs: int | None = 0
        self.uncounted: dict[str, int] = {}
        self.finished = False

    def again(self, module: nn.Module, parent: Call) -> Call:
        """The like call of an equal module."""
        call = Call(module, parent)
        call.input_size, call.input_bytes = self.input_size, self.input_bytes
        call.output_size, call.output_bytes = self.output_size, self.output_bytes
        call.add_costs(self.costs())
        call.finished = self.finished
        return call

    def costs(self) -> Costs:
        """The counters as they are now."""
        return Costs(
            self.macs,
            self.elementwise_ops,
            self.bytes_read,
            self.bytes_written,
            self.uncounted.copy(),
            self.skipped_macs,
        )

    def costs_since(self, before: Costs) -> Costs:
        """What was counted after ``before``."""
        skipped, skipped_before = self.skipped_macs, before.skipped_macs
        uncounted = {name: count - before.uncounted.get(name, 0) for name, count in self.uncounted.items()}
        return Costs(
            self.macs - before.macs,
            self.elementwise_ops - before.elementwise_ops,
            self.bytes_read - before.bytes_read,
            self.bytes_written - before.bytes_written,
            {name: count for name, count in uncounted.items() if count},
            None if skipped is None or skipped_before is None else skipped - skipped_before,
        )

    def add_costs(self, costs: Costs) -> None:
        """Count what was counted elsewhere."""
        self.macs += costs.macs
        self.elementwise_ops += costs.elementwise_ops
        self.bytes_read += costs.bytes_read
        self.bytes_written += costs.bytes_written
        self.skipped_macs = total(self.skipped_macs, costs.skipped_macs)
        for name, count in costs.uncounted.items():
            self.uncounted[name] = self.uncounted.get(name, 0) + count


_OTHER_THREAD = "calls in another thread"


class Watch:
    """Context in which every module call of this thread becomes a ``Call`` and every operator is counted.

    Module hooks are registered once for all modules, so a ScriptModule, which refuses hooks of its own, is seen too.
    A module that has forward hooks of the user gets one more behind them until the end: its output is what they return.

    Attributes:
        calls: all calls in the order in which they began; the first is that of the model.
        running: the innermost running call.
        under_autocast: a call began while autocast was on.
        failed: the innermost call that raised and everything that was running around it, innermost first.
    """

    def __init__(self, model: nn.Module, execution: Execution) -> None:
        self.root = Call(model, None)
        self.calls = [self.root]
        self.failed: list[Call] = []
        self.running: Call = self.root
        self.under_autocast = _torch.is_any_autocast_enabled()
        self._root_began = False
        self._hooked: set[int] = set()
        self._in_own_hooks: dict[Call, BaseException | None] = {}  # -> the exception that was being handled
        self._handles: list[RemovableHandle] = []
        self._operators = Operators(self, execution)
        self._thread = get_ident()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the model under watch; raises what its forward raises."""
        root = self.root
        root.input_size, root.input_bytes = argument_sizes(args, kwargs)
        try:
            with self:
                output = root.module(*args, **kwargs)
        except Exception:
            if not self.failed or self.failed[-1].parent is not root:
                self.failed = []
            self.failed.append(root)
            raise
        root.output_size, root.output_bytes = result_sizes(output)
        root.finished = True

    def __enter__(self) -> Watch:
        try:
            self._handles.append(register_module_forward_pre_hook(self._before))
            self._handles.append(register_module_forward_hook(self._after, with_kwargs=True, always_call=True))
            self._operators.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:  # Ctrl-C
            self._remove_hooks()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            self._operators.__exit__(*exception)  # type: ignore[no-untyped-call]
        finally:
            try:
                self._remove_hooks()
            except KeyboardInterrupt:
                self._remove_hooks()
                raise

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
            _global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch 2.15 leaves this entry behind

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if get_ident() != self._thread:
            if any(module is own for own in self.root.module.modules()):
                self.root.uncounted[_OTHER_THREAD] = self.root.uncounted.get(_OTHER_THREAD, 0) + 1
            return
        if module is self.root.module and not self._root_began:
            self._root_began = True  # the root runs until the model returns: hooks of the user are its work
            return
        self.under_autocast = self.under_autocast or _torch.is_any_autocast_enabled()
        self.running = call = Call(module, self.running)
        self.calls.append(call)
        if module._forward_hooks and id(module) not in self._hooked:
            self._hooked.add(id(module))
            hook = module.register_forward_hook(self._after_own_hooks, with_kwargs=True, always_call=True)
            self._handles.append(hook)

    def _after(self, module: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
        """Torch passes ``(kwargs, output)`` after a forward, ``(output,)`` alone after an exception."""
        call = self._ending(module)
        if call is None:
            return
        if len(kwargs_and_output) == 1:
            self._fail(call, args)
        elif id(module) in self._hooked:
            self._in_own_hooks[call] = sys.exc_info()[1]
        else:
            self._finish(call, args, *kwargs_and_output)

    def _after_own_hooks(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Torch calls this after an exception, too: of a hook (the call failed), or of the forward (it has ended)."""
        call = self._ending(module)
        if call is not None and call in self._in_own_hooks:
            if self._in_own_hooks.pop(call) is sys.exc_info()[1]:
                self._finish(call, args, kwargs, output)
            else:
                self._fail(call, args)

    def _ending(self, module: nn.Module) -> Call | None:
        """The running call of ``module``; calls above it ended without notice (a hook of theirs raised)."""
        if get_ident() != self._thread:
            return None
        call: Call | None = self.running
        while call is not None and call.module is not module:
            call = call.parent
        return None if call is self.root else call

    def _finish(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call.input_size, call.input_bytes = argument_sizes(args, kwargs)
        call.output_size, call.output_bytes = result_sizes(output)
        call.finished = True
        self._end(call)

    def _fail(self, call: Call, args: tuple[Any, ...]) -> None:
        call.input_size, call.input_bytes = argument_sizes(args, {})
        if not self.failed or self.failed[-1].parent is not call:
            self.failed = []  # an earlier exception was caught inside the model
        self.failed.append(call)
        self._end(call)

    def _end(self, call: Call) -> None:
        assert call.parent is not None  # only the root has none, and it ends with the run
        self.running = call.parent
