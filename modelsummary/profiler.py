"""``Profiler``: time a model inside a script, while it does its work."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from modelsummary.capture import capture
from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.clock import CpuClock, clock_for
from modelsummary.capture.devices import device_of
from modelsummary.capture.facts import modules_of, tensors_of_modules, unwrap
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.latency import LatencyOverhead
from modelsummary.capture.structure import argument_sizes
from modelsummary.capture.timer import Step, Timer, cost_of_timing
from modelsummary.capture.timings import Timings, fill
from modelsummary.errors import InputError, ProfilerError
from modelsummary.model_statistics import ModelStatistics

__all__ = ["Profiler", "TIDSProfiler", "profile"]


@dataclass
class _Alike:
    """Steps with inputs of the same sizes, in the same mode.

    Attributes:
        call: the arguments of the first.
        training: modes of the modules in the first.
    """

    call: CallArguments
    training: list[bool]
    steps: deque[tuple[Step, BackwardTimer | None]] = field(default_factory=deque)
    count: int = 0


class Profiler:
    """Times every call of a model between ``start_profile`` and ``stop_profile``; several steps give medians.

    ::

        prof = Profiler(model)
        prof.start_profile()
        for x, y in batches:
            loss_fn(model(x), y).backward()
        print(prof.generate_profile())
        prof.end_profile()

    As a context manager it starts and stops. Calls run as they would without it: marks are made around
    ``nn.Module.__call__``, and with ``backward=True`` on the autograd nodes of each step. The model gets no hooks and
    no attributes. The arguments of the first call of each size are kept until ``reset_profile`` or ``end_profile``.

    Args:
        model: the model; it may be compiled or wrapped for data parallelism.
        backward: time backwards, too.
        max_steps: of each input size the latest so many steps count.

    Raises:
        InputError: an argument is unusable.
    """

    def __init__(self, model: nn.Module, *, backward: bool = False, max_steps: int = 200) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
        if type(max_steps) is not int or max_steps < 1:
            raise InputError(f"max_steps={max_steps!r}; expected an integer >= 1")
        self._model, self._backward, self._max_steps = model, backward, max_steps
        self._timer: Timer | None = None
        self._alike: dict[str, _Alike] = {}

    def start_profile(self, ignore_list: Iterable[str | type | nn.Module] | None = None) -> None:
        """Forget what was recorded, and time from now on.

        Args:
            ignore_list: modules that are not timed, by class, by FQN, or themselves; their time is their caller's.

        Raises:
            InputError: ``ignore_list`` names no module of the model.
        """
        ignored = self._ignored(list(ignore_list or ()))
        self.end_profile()
        clock = clock_for(device_of(tensors_of_modules(modules_of(self._model))))
        self._timer = Timer(self._model, clock, is_ignored=lambda module: id(module) in ignored, on_step=self._record)
        self._timer.start()

    def stop_profile(self) -> None:
        """Time no more; what was recorded stays."""
        if self._timer is not None:
            self._timer.stop()

    def reset_profile(self) -> None:
        """Forget what was recorded; go on timing if it does."""
        for alike in self._alike.values():
            for _, backward in alike.steps:
                if backward is not None:
                    backward.detach()
        self._alike = {}

    def end_profile(self) -> None:
        """Stop, and forget everything."""
        self.stop_profile()
        self.reset_profile()
        self._timer = None

    def __enter__(self) -> Profiler:
        self.start_profile()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop_profile()

    def generate_profile(self) -> ModelStatistics:
        """Statistics of what ran since the start: shapes and counts of one step, medians of the times of all.

        If steps had inputs of several sizes, those of the most frequent one count.

        Raises:
            ProfilerError: it was not started, or the model was not called since.
        """
        if self._timer is None:
            raise ProfilerError("the profiler was not started; call start_profile() before the model runs")
        if not self._alike:
            raise ProfilerError(
                f"{type(self._model).__name__} was not called since start_profile(); call the profiled model itself: "
                "calls of its submodules alone, and forwards that raised, are no steps"
            )
        alike = max(self._alike.values(), key=lambda each: each.count)
        stats = self._statistics(alike)
        clock = self._timer.clock
        cost = cost_of_timing() if isinstance(clock, CpuClock) else (0.0, 0.0)
        timings = Timings(self._model, stats.root, cost)
        fill(stats.root, [timings.run(step.settle(), backward) for step, backward in alike.steps])
        stats.latency_overhead = LatencyOverhead(
            forward=None,
            backward=None,
            per_call_us=1e3 * sum(cost),
            runs=len(alike.steps),
            device=str(device_of(tensors_of_modules(modules_of(self._model)))),
            waits=clock.waits,
        )
        others = sum(each.count for each in self._alike.values()) - alike.count
        if others:
            stats.root.note = stats.root.note or f"{others} more steps had inputs of other sizes, or another mode"
        return stats

    def _record(self, step: Step) -> None:
        args, kwargs = step.arguments
        modules = list(self._model.modules())
        sizes, _ = argument_sizes(args, kwargs)
        key = f"{self._model.training} {sizes}"
        if key not in self._alike:
            training = [module.training for module in modules]
            self._alike[key] = _Alike(CallArguments(args, kwargs, None), training, deque(maxlen=self._max_steps))
        alike = self._alike[key]
        assert self._timer is not None
        backward = BackwardTimer(step, self._timer.clock) if self._backward else None
        step.arguments, step.output = ((), {}), None
        alike.steps.append((step, backward))
        alike.count += 1

    def _statistics(self, alike: _Alike) -> ModelStatistics:
        """The tree of the step, captured on shapes where that works, in the modes that it had."""
        modules = list(self._model.modules())
        now = [module.training for module in modules]
        for module, training in zip(modules, alike.training, strict=True):
            module.training = training
        model = unwrap(self._model)
        try:
            recording = capture(model, alike.call, "auto")
        finally:
            for module, training in zip(modules, now, strict=True):
                module.training = training
        if recording.error is not None:
            raise ProfilerError(
                f"{type(model).__name__} ran, but not when it was run again for its shapes: "
                f"{type(recording.error).__name__}: {recording.error}"
            ) from recording.error
        facts: dict[str, Any] = {"execution": recording.execution, "fallback_reason": recording.fallback_reason}
        return ModelStatistics(recording.root, **facts, call=alike.call)

    def _ignored(self, ignore_list: list[str | type | nn.Module]) -> set[int]:
        names: defaultdict[str, list[nn.Module]] = defaultdict(list)
        for fqn, module in unwrap(self._model).named_modules():
            names[fqn].append(module)
        ignored: set[int] = set()
        for entry in ignore_list:
            if isinstance(entry, type):
                found = [module for module in self._model.modules() if type(module) is entry]
            elif isinstance(entry, nn.Module):
                found = [module for module in self._model.modules() if module is entry]
            else:
                found = names.get(entry, [])
            if not found:
                raise InputError(f"ignore_list holds {entry!r:.80}, which is no class, name or module of the model")
            ignored.update(map(id, found))
        return ignored


TIDSProfiler = Profiler


def profile(model: nn.Module, *, backward: bool = False, max_steps: int = 200) -> Profiler:
    """``with profile(model) as prof:``: a ``Profiler`` that times the block."""
    return Profiler(model, backward=backward, max_steps=max_steps)
