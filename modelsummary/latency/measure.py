"""Measure the latency of every module: alternate runs with and without marks, and take medians."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from modelsummary.capture.backward import BackwardTimer, gradients_of
from modelsummary.capture.clock import Clock, CpuClock, clock_for
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.devices import available_device, device_of
from modelsummary.capture.input_data import call_like
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import no_collection, nothing_hidden, running
from modelsummary.capture.step_error import as_step_error
from modelsummary.capture.timer import Timer, cost_of_timing
from modelsummary.errors import InputError, check_flags
from modelsummary.latency.timings import IN_THREADS, RowLatencies, TimedRun, Timings, latencies_of
from modelsummary.layer_info import LayerInfo
from modelsummary.progress import counted
from modelsummary.units import number_of

__all__ = ["LatencyMeasurement", "LatencyOverhead", "MarkedRuns", "measure_latency"]


_REMEDIES = {
    "forward": "; if the random values of the input are why, pass real ones as x",
    "backward": "; leave out backward=True to time the forward alone",
}


class MarkedRuns(NamedTuple):
    """Median milliseconds of runs without and with marks, and the median of the ratios of neighbouring runs."""

    plain_ms: float
    instrumented_ms: float
    ratio: float


class LatencyOverhead(NamedTuple):
    """Cost and circumstances of a latency measurement.

    Attributes:
        forward: times of the forward with and without marks; None if every run had marks.
        backward: times of the backward with and without marks; None if no backward was timed.
        per_call_us: calibrated cost of timing one call in microseconds, subtracted from the figures; 0 if events of the
            device keep the time.
        runs: number of pairs of runs.
        device: device that the model ran on.
        waits: True if the device has no timing events: every mark waited for it, and nothing overlapped.
    """

    forward: MarkedRuns | None
    backward: MarkedRuns | None
    per_call_us: float
    runs: int
    device: str
    waits: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, which ``from_dict`` reads."""
        both = {name: value._asdict() for name in ("forward", "backward") if (value := getattr(self, name)) is not None}
        return {**self._asdict(), **both}

    @classmethod
    def from_dict(cls, figures: Mapping[str, Any]) -> LatencyOverhead:
        """Return the figures that ``to_dict`` returned. Raise ``TypeError`` for anything else.

        >>> overhead = LatencyOverhead(MarkedRuns(2.0, 2.1, 1.05), None, 0.4, 10, "cpu", False)
        >>> LatencyOverhead.from_dict(overhead.to_dict()) == overhead
        True
        """
        both = {name: MarkedRuns(**figures[name]) for name in ("forward", "backward") if figures.get(name)}
        return cls(**{**figures, **both})

    def __str__(self) -> str:
        text = f"Latency: median of {number_of(self.runs, 'run')} on {self.device}"
        if self.forward is not None:
            text += f"; a forward took {self.forward.plain_ms:,.3f} ms, with marks {self.forward.ratio:.3f} times that"
        if self.backward is not None:
            text += f", a backward {self.backward.plain_ms:,.3f} ms, with marks {self.backward.ratio:.3f} times"
        cost = f"; {self.per_call_us:.2f} us taken off for each call" if self.per_call_us else ""
        return f"{text}{cost}{'; every mark waited for the device' if self.waits else ''}"


class LatencyMeasurement(NamedTuple):
    """The result of a measurement: the latencies of the rows, and what measuring them cost."""

    rows: RowLatencies
    overhead: LatencyOverhead


def measure_latency(
    live: LiveModel,
    root: LayerInfo,
    x: Any = None,
    *,
    warmup: int = 3,
    runs: int = 10,
    backward: bool = False,
    device: torch.device | str | None = None,
) -> LatencyMeasurement:
    """Run a model for real and return the latencies of its calls.

    The model, the arguments, global state and the rows below ``root`` stay untouched.

    Args:
        live: the model and its recorded input.
        root: row of the model.
        x: input with values, of the recorded sizes; None: the recorded input, with random values for sizes.
        warmup, runs: number of runs that do not count, and that count.
        backward: also time the backward of the output, started with ones.
        device: device to run on, with a copy of the model if it is on another one; None: the device of the model.

    Raises:
        InputError: an argument is unusable, a tensor is on meta, or nothing in the output has a gradient.
        StepError: the forward or the backward raised.
    """
    if type(warmup) is not int or type(runs) is not int or warmup < 0 or runs < 1:
        raise InputError(f"warmup must be an integer >= 0 and runs an integer >= 1, got {warmup!r} and {runs!r}")
    requested = None if device is None else available_device(device)
    check_flags(backward=backward)
    call = live.call if x is None else call_like(live.call, live.model, x)
    model = live.model if live.compiled is None else live.compiled
    model_device = device_of((*tensors_of_modules(modules_of(model)), *call.tensors()))
    run_device = requested or call.device or model_device
    _check_values(model, call, run_device)
    if run_device != model_device:
        model, call = copy.deepcopy(model).to(run_device), replace(call, device=run_device)
    return _measured(model, call, root, run_device, warmup, runs, backward=backward)


def _check_values(model: nn.Module, call: CallArguments, device: torch.device) -> None:
    if device.type == "meta" or any(
        tensor.is_meta for tensor in (*tensors_of_modules(modules_of(model)), *call.tensors())
    ):
        raise InputError(
            "measuring latency needs values, but a tensor is on meta; "
            "use estimate_latency('A100'), or a model and an input on a device"
        )


def _measured(
    model: nn.Module,
    call: CallArguments,
    root: LayerInfo,
    device: torch.device,
    warmup: int,
    runs: int,
    *,
    backward: bool,
) -> LatencyMeasurement:
    with running(modules_of(model), call, on_shapes=False, grad=backward, as_is=True) as (execution, args, kwargs):
        measurement = _Measurement(model, args, kwargs, device, root, backward=backward)
        with as_step_error(lambda: measurement.doing, _REMEDIES):
            with nothing_hidden(), Operators(execution):
                measurement.run_once()  # not timed: it records the state to restore
            gc.collect()
            with no_collection(), counted("latency", "run", warmup + runs) as done:
                for index in range(warmup + runs):
                    measurement.pair(index, counts=index >= warmup)
                    done()
    return measurement.finish()


class _Measurement:
    """Pairs of runs of a model, with and without marks."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        root: LayerInfo,
        *,
        backward: bool,
    ) -> None:
        self._model, self._args, self._kwargs, self._device = model, args, kwargs, device
        self._root, self._backward = root, backward
        tensors = (*tensors_of_modules(modules_of(model)), *tensors_of((args, kwargs)))
        self._leaves = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
        self._clock: Clock = clock_for(device)
        self._timer = Timer(model, self._clock)
        self._cost = cost_of_timing() if type(self._clock) is CpuClock else (0.0, 0.0)
        self._timings = Timings(model, root, self._cost)
        self._plain: list[tuple[float, float]] = []  # forward and backward, in milliseconds
        self._marked: list[tuple[float, float]] = []
        self._runs: list[TimedRun] = []
        self.doing = "forward"

    def run_once(self) -> None:
        """Run a forward, and a backward if backwards are timed."""
        self._timed_backward(self._model(*self._args, **self._kwargs))

    def pair(self, index: int, *, counts: bool) -> None:
        """Run the model with and without marks; pairs of even index start with marks."""
        if index % 2:
            plain = self._plain_run()
            marked, run = self._marked_run()
        else:
            marked, run = self._marked_run()
            plain = self._plain_run()
        if counts:
            self._plain.append(plain)
            self._marked.append(marked)
            self._runs.append(run)

    def _plain_run(self) -> tuple[float, float]:
        output, milliseconds = self._timed_forward()
        return milliseconds, self._timed_backward(output)

    def _marked_run(self) -> tuple[tuple[float, float], TimedRun]:
        with self._timer.running():
            output, milliseconds = self._timed_forward()
        step = self._timer.steps.pop()
        backward = BackwardTimer(step, self._clock) if self._backward else None
        times = milliseconds, self._timed_backward(output)
        run = self._timings.run(step.settle(), backward)
        if backward is not None:
            backward.detach()
        step.discard()
        return times, run

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        begin = self._clock.now()
        output = run()
        marks = [begin, self._clock.now()]
        milliseconds = self._clock.milliseconds(marks)[1]
        self._clock.release(marks)
        return output, milliseconds

    def _timed_forward(self) -> tuple[Any, float]:
        self.doing = "forward"
        return self._timed(lambda: self._model(*self._args, **self._kwargs))

    def _timed_backward(self, output: Any) -> float:
        if not self._backward:
            return 0.0
        tensors, ones = gradients_of(output)
        if not tensors:
            raise InputError("backward=True, but nothing in the output requires a gradient; are all parameters frozen?")
        self.doing = "backward"
        for tensor in self._leaves:
            tensor.grad = None
        return self._timed(lambda: torch.autograd.backward(tensors, ones))[1]

    def finish(self) -> LatencyMeasurement:
        """Return the medians and the cost of measuring."""
        rows = latencies_of(self._root, self._runs)
        if self._timer.in_other_threads:
            rows = rows._replace(notes={("", 0): IN_THREADS, **rows.notes})
        overhead = LatencyOverhead(
            forward=_compared([times[0] for times in self._plain], [times[0] for times in self._marked]),
            backward=_compared([times[1] for times in self._plain], [times[1] for times in self._marked])
            if self._backward
            else None,
            per_call_us=1e3 * sum(self._cost),
            runs=len(self._runs),
            device=str(self._device),
            waits=self._clock.waits,
        )
        return LatencyMeasurement(rows, overhead)


def _compared(plain: Sequence[float], marked: Sequence[float]) -> MarkedRuns:
    ratios = [marked_ms / plain_ms for plain_ms, marked_ms in zip(plain, marked, strict=True) if plain_ms]
    return MarkedRuns(median(plain), median(marked), median(ratios) if ratios else 1.0)
