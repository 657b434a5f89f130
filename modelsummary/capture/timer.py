"""Time the module calls of a forward. While it runs, marks are only appended; they are evaluated afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn

from modelsummary import _torch
from modelsummary.capture.clock import Clock, CpuClock
from modelsummary.capture.module_calls import ModuleCall, Wrapper, unwrap_calls, wrap_calls

__all__ = ["TimedCall", "TimedStep", "Timer", "cost_of_timing", "suspended"]

_next_node = _torch.next_node_number


class TimedCall(ModuleCall):
    """One call of one module; ``begin`` and ``end`` are marks of the clock, milliseconds after ``TimedStep.settle``."""

    __slots__ = ("begin", "children", "end", "module", "nodes", "parent")

    def __init__(self, module: nn.Module, parent: TimedCall | None, begin: Any, first_node: int) -> None:
        self.module, self.parent = module, parent
        self.begin = self.end = begin
        self.nodes = (first_node, first_node)
        self.children: list[TimedCall] = []

    @property
    def milliseconds(self) -> float:
        """Time of the call in milliseconds, after ``TimedStep.settle``."""
        return float(self.end - self.begin)


class TimedStep:
    """One call of the model: the log of the run, and the tree of calls made from it.

    Attributes:
        log: three items per begin (module, mark, number of the next autograd node) and per end (None, mark, number).
        about: result of ``Timer(on_begin=...)``.
        output: result of the model; set it to None to free it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.log: list[Any] = []
        self.about: Any = None
        self.output: Any = None
        self._root: TimedCall | None = None

    def root(self) -> TimedCall:
        """Return the call of the model with all calls inside it; their times are still marks."""
        if self._root is None:
            self._root = _tree(self.log)
        return self._root

    def settle(self) -> TimedCall:
        """Return the call of the model with times in milliseconds; wait for the device the first time."""
        root = self.root()
        if self.log:
            marks = self.log[1::3]
            times = dict(zip(map(id, marks), self._clock.milliseconds(marks), strict=True))
            for call in root.walk():
                call.begin, call.end = times[id(call.begin)], times[id(call.end)]
            self._clock.release(marks)
            self.log = []
        return root

    def discard(self) -> None:
        """Release the marks, and break the reference cycles between calls."""
        self._clock.release(self.log[1::3])
        for call in list(self.root().walk()):
            call.parent, call.children = None, []
        self.log = []


def _tree(log: list[Any]) -> TimedCall:
    root = call = TimedCall(log[0], None, log[1], log[2])
    for module, mark, node in zip(log[3::3], log[4::3], log[5::3], strict=True):
        if module is None:
            call.end, call.nodes = mark, (call.nodes[0], node)
            call = call.parent or root
        else:
            call = TimedCall(module, call, mark, node)
            call.parent.children.append(call)
    return root


class _State:
    """The state that a timer's wrapper reads; emptied by ``stop``, so that copies of the wrapper hold nothing."""

    __slots__ = ("logs", "model", "now", "timed_ids", "timer")

    def __init__(self, timer: Timer, timed_ids: set[int]) -> None:
        self.timer: Timer | None = timer
        self.model: nn.Module | None = timer.model
        self.now, self.timed_ids = timer.clock.now, timed_ids
        self.logs: dict[int, list[Any]] = {}  # by thread

    def end(self) -> None:
        """Stop timing new steps; a step that is running is still logged."""
        self.timer = self.model = None


class Timer:
    """Timer of every call of ``model`` between ``start`` and ``stop``, and of the modules called inside it.

    Threads that call the model at the same time have separate steps. Modules that a forward calls in another thread
    are not timed.

    Args:
        is_ignored: returns True for modules that are not timed; their time is counted for their caller.
        on_begin: called with the arguments of each call of the model before it begins; its result becomes
            ``TimedStep.about``.
        on_step: called with each finished step, instead of appending it to ``steps``.

    Attributes:
        steps: finished calls of the model.
        in_other_threads: number of calls of the model's modules in threads that do not run the model.
    """

    def __init__(
        self,
        model: nn.Module,
        clock: Clock,
        *,
        is_ignored: Callable[[nn.Module], bool] | None = None,
        on_begin: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = None,
        on_step: Callable[[TimedStep], object] | None = None,
    ) -> None:
        self.model, self.clock = model, clock
        self.steps: list[TimedStep] = []
        self.in_other_threads = 0
        self._timed_ids = {id(module) for module in model.modules() if is_ignored is None or not is_ignored(module)}
        self._on_begin = on_begin
        self._on_step = on_step or self.steps.append
        self._state: _State | None = None

    def start(self) -> None:
        """Start timing."""
        if self not in _active:
            _active.append(self)
            self._state = _State(self, self._timed_ids)
            wrap_calls(self, _wrapper(self._state))

    def stop(self) -> None:
        """Stop timing and remove the wrapper of ``nn.Module.__call__``."""
        if self in _active:
            _active.remove(self)
            if self._state is not None:
                self._state.end()
            unwrap_calls(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which the timer runs."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def step(
        self, state: _State, call_module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the model and log the step; a step that raises is dropped."""
        step = TimedStep(self.clock)
        step.about = self._on_begin(args, kwargs) if self._on_begin is not None else None
        state.logs[get_ident()] = log = step.log
        try:
            log += (self.model, self.clock.now(), _next_node())
            output = call_module(self.model, *args, **kwargs)
            log += (None, self.clock.now(), _next_node())
        finally:
            del state.logs[get_ident()]
        step.output = output
        self._on_step(step)
        return output


_active: list[Timer] = []
_suspended: dict[int, list[Timer]] = {}  # by thread


def _wrapper(state: _State) -> Wrapper:
    """Return a wrapper that makes marks before and after ``nn.Module.__call__``."""
    logs, now, timed_ids, is_compiling = state.logs, state.now, state.timed_ids, torch.compiler.is_compiling

    def wrap(call_module: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call_module)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return call_module(module, *args, **kwargs)
            log = logs.get(get_ident())
            if log is None:
                timer = state.timer
                if timer is not None and timer not in _suspended.get(get_ident(), ()):
                    if module is state.model:
                        return timer.step(state, call_module, args, kwargs)
                    if logs and id(module) in timed_ids:
                        timer.in_other_threads += 1
                return call_module(module, *args, **kwargs)
            if id(module) not in timed_ids:
                return call_module(module, *args, **kwargs)
            log += (module, now(), _next_node())
            try:
                return call_module(module, *args, **kwargs)
            finally:
                log += (None, now(), _next_node())

        return call

    return wrap


@contextmanager
def suspended() -> Iterator[None]:
    """Return a context in which the timers that are running now do not time this thread."""
    before = _suspended.get(get_ident())
    _suspended[get_ident()] = list(_active)
    try:
        yield
    finally:
        if before is None:
            del _suspended[get_ident()]
        else:
            _suspended[get_ident()] = before


# ------------------------------------------------------------------------------------------------- its cost


class _Empty(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class _Calls(nn.Module):
    """A module that calls an empty module ``calls`` times."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.empty = calls, _Empty()

    def forward(self, x: Any) -> Any:
        for _ in range(self.calls):
            self.empty(x)


def cost_of_timing(calls: int = 500, repetitions: int = 9) -> tuple[float, float]:
    """Return the overhead of timing one call on the CPU in milliseconds: between its two marks, and outside them.

    Both are the minimum over ``repetitions``, each of which calls an empty module with and without marks.
    """
    model, clock = _Calls(calls), CpuClock()
    timer = Timer(model, clock)
    plain: list[float] = []
    with_marks: list[float] = []
    between_marks: list[float] = []
    for _ in range(repetitions):
        with suspended():
            begin = clock.now()
            model(None)
        plain.append((clock.now() - begin) / 1e6 / calls)
        with suspended(), timer.running():
            model(None)
        root = timer.steps.pop().settle()
        with_marks.append(root.milliseconds / calls)
        between_marks.append(sum(call.milliseconds for call in root.children) / calls)
    total = max(0.0, min(with_marks) - min(plain))
    within = min(total, max(0.0, min(between_marks) - min(plain)))
    return within, total - within
