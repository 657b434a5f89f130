"""``Profiler``: timing of a model inside a script, while it works."""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelsummary._torch import tree_leaves
from modelsummary.capture import Recording, capture
from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.clock import Clock, CpuClock, clock_for
from modelsummary.capture.containers import argument_sizes
from modelsummary.capture.devices import device_of
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import ModelParts, modules_of, tensors_of_modules, unwrap
from modelsummary.capture.timer import TimedStep, Timer, cost_of_timing
from modelsummary.errors import InputError, ProfilerError, check_flags, check_integers
from modelsummary.latency.measure import LatencyOverhead
from modelsummary.latency.timings import IN_THREADS, Timings, latencies_of
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.units import number_of

__all__ = ["Profiler", "TIDSProfiler", "profile"]

_MAX_KINDS = 32  # largest number of kinds of steps; each has a tree


@dataclass
class _Alike:
    """Steps with inputs of the same sizes and modules in the same modes.

    Attributes:
        recording: recording captured before the first of these steps, or the exception that the capture raised.
        steps: the latest steps, each with the timer of its backward.
        count: number of all steps, dropped ones included.
    """

    recording: Recording | Exception
    steps: deque[tuple[TimedStep, BackwardTimer | None]] = field(default_factory=deque)
    count: int = 0

    def add(self, step: TimedStep, backward: BackwardTimer | None, max_steps: int) -> None:
        self.steps.append((step, backward))
        self.count += 1
        if len(self.steps) > max_steps:
            _drop(*self.steps.popleft())


def _drop(step: TimedStep, backward: BackwardTimer | None) -> None:
    if backward is not None:
        backward.detach()
    step.discard()


class Profiler:
    """Timer of every call of a model between ``start_profile`` and ``stop_profile``; several steps give medians.

    As a context manager, it starts and stops the timer. Calls run as usual: time is taken around
    ``nn.Module.__call__`` and, with ``backward=True``, at the autograd nodes of each step. The model gets no hooks and
    no attributes, and no arguments are kept. Before the first step of each input size the model's tree is captured as
    by ``Statistics``: on shapes, or by real execution if the forward depends on values.

    Args:
        model: the model; it may be compiled or wrapped for data parallelism.
        backward: also time backwards. Default: False.
        max_steps: number of latest steps of each input size that count. Default: 200.

    Raises:
        InputError: an argument is unusable.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> prof = Profiler(model)
    >>> prof.start_profile()
    >>> for _ in range(3):
    ...     _ = model(torch.ones(4, 2))
    >>> stats = prof.generate_profile()
    >>> stats.root.latency_ms > 0, stats.total_mult_adds
    (True, 24)
    >>> prof.end_profile()
    """

    def __init__(self, model: nn.Module, *, backward: bool = False, max_steps: int = 200) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
        check_flags(backward=backward)
        check_integers(max_steps=max_steps)
        self._model, self._backward, self._max_steps = model, backward, max_steps
        self._timer: Timer | None = None
        self._session = _Session(model, backward, max_steps)
        self._finalizer = weakref.finalize(self, int)

    def start_profile(self, ignore_list: Iterable[str | type | nn.Module] | None = None) -> None:
        """Drop the recorded steps and start timing.

        Args:
            ignore_list: modules that are not timed, as classes, FQNs or modules; their time counts for their caller.

        Raises:
            InputError: an entry of ``ignore_list`` is not in the model, or the model is on meta.
        """
        if ignore_list is not None and not isinstance(ignore_list, (list, tuple, set, frozenset)):
            raise InputError(f"ignore_list must be a list of classes, names or modules, got {ignore_list!r:.80}")
        ignored = self._ignored(list(ignore_list or ()))
        device = device_of(tensors_of_modules(modules_of(self._model)))
        if device.type == "meta":
            raise InputError("the model is on meta, where nothing runs; call estimate_latency(spec) instead")
        self.end_profile()
        clock = clock_for(device)
        session = self._session = _Session(self._model, self._backward, self._max_steps, clock)
        self._timer = Timer(
            self._model,
            clock,
            is_ignored=lambda module: id(module) in ignored,
            on_begin=session.begin,
            on_step=session.record,
        )
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._timer.stop)  # a profiler that is garbage-collected stops timing
        self._timer.start()

    def stop_profile(self) -> None:
        """Stop timing and keep the recorded steps."""
        if self._timer is not None:
            self._timer.stop()

    def reset_profile(self) -> None:
        """Drop the recorded steps; a running timer keeps running."""
        self._session.forget()

    def end_profile(self) -> None:
        """Stop timing and drop the recorded steps."""
        self.stop_profile()
        self.reset_profile()
        self._timer = None

    def __enter__(self) -> Profiler:
        self.start_profile()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop_profile()

    def generate_profile(self) -> ModelStatistics:
        """Return statistics of the steps since the start: shapes and counts of one step, median times of all steps.

        If steps differ in input sizes or modes, only the most frequent kind counts.

        Raises:
            ProfilerError: the profiler was not started, or the model was not called since.
        """
        if self._timer is None:
            raise ProfilerError("the profiler was not started; call start_profile() before the model runs")
        alike = self._session.most_frequent()
        recording = alike.recording
        if isinstance(recording, Recording):
            recording = recording.error or recording
        if isinstance(recording, Exception):
            raise ProfilerError(
                f"{type(self._model).__name__} ran in its step, but failed when its shapes were captured: "
                f"{type(recording).__name__}: {recording}"
            ) from recording
        root = copy.deepcopy(recording.root, {id(module): module for module in self._model.modules()})
        clock = self._timer.clock
        cost = cost_of_timing() if isinstance(clock, CpuClock) else (0.0, 0.0)
        timings = Timings(self._model, root, cost)
        latencies_of(root, [timings.run(step.settle(), backward) for step, backward in list(alike.steps)]).show(root)
        notes = [self._session.note(alike), IN_THREADS if self._timer.in_other_threads else ""]
        root.note = root.note or "; ".join(filter(None, notes))
        facts: dict[str, Any] = {"execution": recording.execution, "fallback_reason": recording.fallback_reason}
        stats = ModelStatistics(root, **facts)
        stats.latency_overhead = LatencyOverhead(
            forward=None,
            backward=None,
            per_call_us=1e3 * sum(cost),
            runs=len(alike.steps),
            device=str(device_of(tensors_of_modules(modules_of(self._model)))),
            waits=clock.waits,
        )
        return stats

    def _ignored(self, ignore_list: list[str | type | nn.Module]) -> set[int]:
        names = dict(unwrap(self._model).named_modules())
        ignored: set[int] = set()
        for entry in ignore_list:
            if isinstance(entry, type):
                modules = [module for module in self._model.modules() if type(module) is entry]
            elif isinstance(entry, nn.Module):
                modules = [module for module in self._model.modules() if module is entry]
            else:
                modules = [names[entry]] if isinstance(entry, str) and entry in names else []
            if not modules:
                raise InputError(f"ignore_list holds {entry!r:.80}, but the model has no such class, name or module")
            ignored.update(map(id, modules))
        return ignored


class _Session:
    """The steps recorded between a start and an end; recording never raises into the user's forward."""

    def __init__(self, model: nn.Module, backward: bool, max_steps: int, clock: Clock | None = None) -> None:
        self._model, self._backward, self._max_steps, self._clock = model, backward, max_steps, clock
        self._alike: dict[Any, _Alike] = {}
        self._uncaptured = 0
        self._error: Exception | None = None

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the key of a step's kind, after capturing the tree of the first step of this kind."""
        try:
            sizes, _ = argument_sizes(args, kwargs)
            constants = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (bool, int, float, str))]
            modes = tuple(module.training for module in self._model.modules())
            key = (str(sizes), str(constants), modes, torch.is_grad_enabled())
            if key not in self._alike and len(self._alike) < _MAX_KINDS:
                self._alike[key] = _Alike(self._captured(args, kwargs))
        except Exception as error:
            self._error = error
            return None
        return key

    @exclusive
    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording | Exception:
        try:
            return capture(ModelParts.of(unwrap(self._model)), CallArguments(args, kwargs, None), "auto")
        except Exception as error:
            return error

    def record(self, step: TimedStep) -> None:
        """Add a step that has ended."""
        try:
            alike = self._alike.get(step.about)
            if alike is None or self._clock is None:
                self._uncaptured += 1
                step.discard()
                return
            backward = BackwardTimer(step, self._clock) if self._backward else None
            step.output = None
            alike.add(step, backward, self._max_steps)
        except Exception as error:
            self._error = error

    def forget(self) -> None:
        """Drop all steps, and their marks on autograd graphs."""
        for alike in self._alike.values():
            for step, backward in alike.steps:
                _drop(step, backward)
        self._alike, self._uncaptured, self._error = {}, 0, None

    def most_frequent(self) -> _Alike:
        """Return the kind with most steps; raise ``ProfilerError`` without any step."""
        kinds = [alike for alike in self._alike.values() if alike.steps]
        if not kinds and self._error is not None:
            raise ProfilerError(f"no step could be recorded: {self._error}") from self._error
        if not kinds:
            raise ProfilerError(
                f"{type(self._model).__name__} was not called since start_profile(); call the profiled model itself: "
                "calls of submodules alone, and forwards that raised, do not count as steps"
            )
        return max(kinds, key=lambda kind: kind.count)

    def note(self, alike: _Alike) -> str:
        """Return a note on the steps that do not count, or an empty string."""
        others = sum(kind.count for kind in self._alike.values()) - alike.count + self._uncaptured
        return f"{number_of(others, 'more step')} had other inputs or another mode" if others else ""


TIDSProfiler = Profiler


def profile(model: nn.Module, *, backward: bool = False, max_steps: int = 200) -> Profiler:
    """Return a ``Profiler``, for use as a context manager that times the block.

    Args:
        model, backward, max_steps: see ``Profiler``.

    Raises:
        InputError: an argument is unusable.

    >>> import torch
    >>> model = nn.Linear(2, 3)
    >>> with profile(model) as prof:
    ...     _ = model(torch.ones(4, 2))
    >>> prof.generate_profile().root.latency_ms > 0
    True
    """
    return Profiler(model, backward=backward, max_steps=max_steps)
