"""Measure operator calls one by one, with the caches as a model leaves them: seconds and workspace bytes.

In a model, other operators run between the making of a tensor and its use. Its data is then no longer in a core's own
cache, but in the last level, which the cores share; before a measurement, writing 4 MB recreates this state. The code
of the operator has left the caches as well, with its entries in the tables of pages and branches: small operators take
two to three times as long as when they are repeated, so thirty others run before each measurement. The parameters of a
model larger than the last level come from memory: in that case everything is pushed out, and all arguments but the
parameters are touched again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from modelsummary.costs.operator_calls import OperatorCall, TensorSpec
from modelsummary.costs.tensor_bytes import storage_of

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["Caches", "arguments_of", "is_measurable", "preemptions", "seconds_of", "workspaces_of"]

_OWN_CACHE_BYTES = 2**22
_LEAST_RUNS, _MOST_RUNS, _SECONDS_PER_CALL = 5, 40, 0.12
_UNDISTURBED = 0.95  # least share of a core in a run that counts
_INDICES = {"embedding": (0, 1), "index_select": (0, 2), "gather": (0, 2), "embedding_dense_backward": (None, 1)}


class Caches:
    """Buffers that push data out of the caches of a device before a measurement.

    Args:
        device: the device that is measured.
        shared_bytes: size of the last level of its cache.
    """

    def __init__(self, device: torch.device, shared_bytes: int) -> None:
        self._is_cpu = device.type == "cpu"
        size = max(_OWN_CACHE_BYTES, 2 * shared_bytes) if self._is_cpu else 2 * shared_bytes
        self._buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
        self._own = self._buffer[: _OWN_CACHE_BYTES // 4]
        with torch.device("cpu"):
            self._others = _other_operators() if self._is_cpu else []

    def leave_own(self) -> None:
        """Push everything out of the cores' own caches into the shared one, code included."""
        if self._is_cpu:
            self._own.add_(1.0)
        for run in self._others:
            run()

    def leave_all(self, touched: Sequence[Tensor]) -> None:
        """Push everything into memory, and bring ``touched`` back into the shared cache."""
        self._buffer.add_(1.0)
        for tensor in touched:
            with suppress(RuntimeError):
                tensor.sum() if tensor.is_floating_point() else tensor.any()
        self.leave_own()


def _other_operators() -> list[Callable[[], object]]:
    """Return small calls of operators that run different code, as the operators of a model do."""
    images, tokens, channels = torch.rand(2, 16, 12, 12), torch.rand(2, 24, 32), torch.rand(16)
    kernel, single, depthwise = torch.rand(16, 16, 3, 3), torch.rand(32, 16, 1, 1), torch.rand(16, 1, 3, 3)
    weight, heads, words = torch.rand(48, 32), torch.rand(2, 4, 24, 8), torch.zeros(2, 24, dtype=torch.long)
    return [
        lambda: F.conv2d(images, kernel, padding=1),
        lambda: F.conv2d(images, single),
        lambda: F.conv2d(images, depthwise, padding=1, groups=16),
        lambda: F.batch_norm(images, channels, channels, channels, channels),
        lambda: F.max_pool2d(images, 2),
        lambda: F.avg_pool2d(images, 2),
        lambda: F.interpolate(images, scale_factor=2),
        lambda: F.pad(images, (1, 1)),
        lambda: torch.cat([images, images], 1),
        lambda: torch.roll(images, 1, 2),
        lambda: images.mean((2, 3)),
        lambda: images + images,
        lambda: images * images,
        lambda: F.relu(images),
        lambda: F.hardswish(images),
        lambda: F.silu(images),
        lambda: F.linear(tokens, weight),
        lambda: torch.bmm(tokens, tokens.transpose(1, 2)),
        lambda: F.scaled_dot_product_attention(heads, heads, heads),
        lambda: F.layer_norm(tokens, (32,)),
        lambda: F.softmax(tokens, -1),
        lambda: F.gelu(tokens),
        lambda: torch.sigmoid(tokens),
        lambda: torch.tanh(tokens),
        lambda: tokens.sum(-1),
        lambda: tokens.pow(2),
        lambda: tokens.clamp(0, 1),
        lambda: tokens.transpose(1, 2).contiguous(),
        lambda: F.embedding(words, weight),
        tokens.nonzero,
    ]


def is_measurable(call: OperatorCall) -> bool:
    """Return True if the arguments of a call can be made from its specs."""
    return not any(_is_opaque(each) for each in (call.args, tuple(call.kwargs.values())))


def _is_opaque(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(map(_is_opaque, value))
    return (isinstance(value, str) and value.startswith("<")) or str(value).startswith("torch.sparse")


def arguments_of(call: OperatorCall, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Return positional and keyword arguments with random values, and a list of the parameters among them."""
    base = call.name.partition(".")[2]
    table, place = _INDICES.get(base, (None, -1))
    params: list[Tensor] = []

    def make(value: Any, limit: int = 1) -> Any:
        if isinstance(value, TensorSpec):
            tensor = _random(value, device, limit)
            if value.is_param:
                params.append(tensor)
            return tensor
        if type(value) in (tuple, list):
            return [make(each, limit) for each in value]
        return device if isinstance(value, torch.device) else value

    args = []
    for number, value in enumerate(call.args):
        limit = 1
        if number == place:
            dim = call.args[1] if place == 2 else 0
            limit = call.args[table].shape[dim] if table is not None else call.args[2]
        if base == "index" and number == 1:
            limit = min((size for size in call.args[0].shape), default=1)
        args.append(make(value, limit))
    return tuple(args), {name: make(value) for name, value in call.kwargs.items()}, params


def _random(spec: TensorSpec, device: torch.device, limit: int) -> Tensor:
    """Return a tensor with the sizes and strides of ``spec``; integers below ``limit``."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size)
    if not prod(spec.shape):
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        whole = torch.rand(extent, device=device).add_(0.1).to(spec.dtype)
    elif spec.dtype is torch.bool:
        whole = torch.zeros(extent, dtype=torch.bool, device=device)
    else:
        whole = torch.randint(0, max(limit, 1), (extent,), device=device).to(spec.dtype)
    return whole.as_strided(spec.shape, spec.stride)


def seconds_of(call: OperatorCall, device: torch.device, caches: Caches, *, cold: bool) -> float:
    """Return the seconds of a call: the median of the faster half of several runs, which are less disturbed.

    Runs during which a thread of this process lost its core do not count, unless this happened in almost all runs.

    Raises:
        Exception: the call's own error, if it fails with random arguments.
    """
    args, kwargs, params = arguments_of(call, device)
    own = set(map(id, params))
    touched = [each for each in _tensors((args, kwargs)) if id(each) not in own]
    timed = _timer(device)
    times: list[float] = []
    disturbed: list[float] = []
    begin = time.perf_counter()
    with torch.no_grad():
        call.func(*args, **kwargs)
        while len(times) < _MOST_RUNS:
            spent = time.perf_counter() - begin
            enough = len(times) >= _LEAST_RUNS and spent > _SECONDS_PER_CALL
            if enough or (spent > 3 * _SECONDS_PER_CALL and len(times) + len(disturbed) >= _LEAST_RUNS):
                break
            caches.leave_all(touched) if cold else caches.leave_own()
            seconds, share = timed(lambda: call.func(*args, **kwargs))
            (times if share > _UNDISTURBED else disturbed).append(seconds)
    times = times if len(times) > 1 else times + disturbed
    times.sort()
    return times[len(times) // 4]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [each for inner in value for each in _tensors(inner)]
    return [each for inner in value.values() for each in _tensors(inner)] if isinstance(value, dict) else []


_Timed = Callable[[Callable[[], object]], tuple[float, float]]


def _timer(device: torch.device) -> _Timed:
    """Return a timer of functions on a device, which returns seconds and this thread's share of a core."""
    return _timed_by_events if device.type == "cuda" else _timed_by_clock


def preemptions() -> int:
    """Return how often another process took a core from a thread of this process; 0 where the system does not tell."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _timed_by_clock(run: Callable[[], object]) -> tuple[float, float]:
    lost = preemptions()
    cpu, begin = time.thread_time(), time.perf_counter()
    kept = run()  # freed after the end is read, as in a model
    end, used = time.perf_counter(), time.thread_time() - cpu
    del kept
    share = (used + _CLOCK_SECONDS) / (end - begin)
    if torch.get_num_threads() > 1:  # the other threads wait for the one that lost its core
        return end - begin, 0.0 if preemptions() > lost else share
    if share < _UNDISTURBED:
        return used, 1.0  # all work was done by this thread, and other processes ran in between
    return end - begin, share


_CLOCK_SECONDS = 2e-6  # between the readings of the two clocks


def _timed_by_events(run: Callable[[], object]) -> tuple[float, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(200_000)  # the device is busy until both events and the kernel are queued
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3, 1.0


# -------------------------------------------------------------------------------------------------- workspace


def workspaces_of(calls: Sequence[OperatorCall], device: torch.device) -> list[int | None]:
    """Return the bytes that each call allocates beside its results while it runs; None if it does not run alone.

    They are measured by events of torch's profiler on the CPU, by statistics of the allocator on CUDA.
    """
    if device.type == "cuda":
        return [_workspace_on_cuda(call, device) for call in calls]
    found: list[int | None] = []
    for first in range(0, len(calls), _PER_PROFILE):
        found += _workspaces_on_cpu(calls[first : first + _PER_PROFILE], device)
    return found


_PER_PROFILE = 64
_MARK = "modelsummary: call "


def _workspaces_on_cpu(calls: Sequence[OperatorCall], device: torch.device) -> list[int | None]:
    failed: set[int] = set()
    results: dict[int, int] = {}
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
        for number, call in enumerate(calls):
            try:
                args, kwargs, _ = arguments_of(call, device)
                given = {storage_of(each) for each in _tensors((args, kwargs))}
                with record_function(f"{_MARK}{number}"):
                    out = call.func(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
                failed.add(number)
                continue
            made = {storage_of(each): each.untyped_storage().nbytes() for each in _tensors(out)}
            results[number] = sum(size for key, size in made.items() if key not in given)
            del out, args, kwargs
    events = traced.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    spans = {event.name(): event for event in events if event.name().startswith(_MARK)}
    found: list[int | None] = []
    for number in range(len(calls)):
        span = spans.get(f"{_MARK}{number}")
        if number in failed or span is None:
            found.append(None)
            continue
        held = peak = 0
        for moment, change in changes:
            if span.start_ns() <= moment <= span.end_ns():
                held += change
                peak = max(peak, held)
        found.append(max(peak - results[number], 0))
    return found


def _workspace_on_cuda(call: OperatorCall, device: torch.device) -> int | None:
    try:
        args, kwargs, _ = arguments_of(call, device)
        with torch.no_grad():
            call.func(*args, **kwargs)
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            out = call.func(*args, **kwargs)
            torch.cuda.synchronize(device)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return None
    held = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    del out
    return max(peak - held, 0)
