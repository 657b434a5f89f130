"""Operator calls that run alone, with random arguments: their seconds, and the bytes of workspace that they allocate.

A round runs every call once, in the model's order. Before a call runs, its first argument is written, as the operator
before it does in a model: small arguments are then in the cores' own caches, large ones are not. Between two runs of a
call all other calls run, so its code, its parameters and its other arguments are as cold as in a model. The median of
the rounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from modelsummary import _torch
from modelsummary.latency.kept_memory import kept_memory
from modelsummary.operators.cpu_allocations import cpu_allocations
from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_rules import tensors_in
from modelsummary.operators.tensor_bytes import storage_of, stored_tensors
from modelsummary.progress import counted

__all__ = ["arguments_of", "seconds_of", "workspaces_of"]

_LEAST_ROUNDS, _MOST_ROUNDS, _SECONDS_OF_ROUNDS = 7, 60, 0.7
_HELD_BYTES, _HELD_SHARE = 2**31, 1 / 4  # arguments and results at the same time; of the free memory
_UNKNOWN_FREE = 2**31  # bytes of free memory where the system does not report it
_FAILURES = (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError)  # of calls with random arguments
_INDICES = {"embedding": (0, 1), "index_select": (0, 2), "gather": (0, 2), "embedding_dense_backward": (None, 1)}
_SLEEP_CYCLES = 1_000_000  # half a millisecond: longer than a call needs to queue its kernels
_PER_PROFILE = 64
_MARK = "modelsummary: call "


# ------------------------------------------------------------------------------------------------------- seconds


def seconds_of(calls: Sequence[OperatorCall], device: torch.device) -> list[float | None]:
    """Return the seconds of each call; None for a call that fails with random arguments.

    Args:
        calls: calls in the order in which a model runs them.
        device: the CPU, or a CUDA device.
    """
    on_cuda = device.type == "cuda"
    guard: AbstractContextManager[object] = torch.cuda.device(device) if on_cuda else kept_memory()
    all_seconds: list[float | None] = []
    with torch.no_grad(), guard, counted("kernels", "round") as done:
        timed = _timer_by_events() if on_cuda else _timer_by_clock()  # events belong to the current device
        for part in _parts(calls, min(_HELD_BYTES, int(_HELD_SHARE * _free_bytes(device)))):
            ready = [_ready(call, device) for call in part]
            runnable = [call for call in ready if call is not None]
            rounds: list[list[float]] = []
            begin = time.perf_counter()
            while len(rounds) < _LEAST_ROUNDS or (
                len(rounds) < _MOST_ROUNDS and time.perf_counter() - begin < _SECONDS_OF_ROUNDS
            ):
                rounds.append([call.seconds(timed) for call in runnable])
                done()
            medians = map(median, zip(*rounds, strict=True))
            all_seconds += [None if call is None else next(medians) for call in ready]
            del ready, runnable
    return all_seconds


_Timed = Callable[[Callable[[], object]], float]


class _Ready(NamedTuple):
    """A call with its arguments.

    Attributes:
        run: runs the call.
        produced: the argument that the operator before makes, with its least and largest value.
    """

    run: Callable[[], object]
    produced: tuple[Tensor, float, float] | None

    def seconds(self, timed: _Timed) -> float:
        """Write the first argument, and time the call. Values stay in their range, even if the call changes them."""
        if self.produced is not None:
            tensor, least, largest = self.produced
            tensor.clamp_(least, largest)
        return timed(self.run)


def _ready(call: OperatorCall, device: torch.device) -> _Ready | None:
    """Return a call that ran once; None if it fails."""
    try:
        args, kwargs, params = arguments_of(call, device)
        call.func(*args, **kwargs)
    except _FAILURES:
        return None
    param_ids = set(map(id, params))
    first = next((tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in param_ids), None)
    return _Ready(lambda: call.func(*args, **kwargs), None if first is None else _range_of(first))


def _range_of(tensor: Tensor) -> tuple[Tensor, float, float] | None:
    """Return the memory of a floating point tensor with its least and largest value; None if it cannot be clamped."""
    base = tensor if tensor._base is None else tensor._base
    if not base.is_floating_point() or not base.numel():
        return None
    try:
        least, largest = map(float, base.aminmax())
        base.clamp_(least, largest)
    except RuntimeError:  # a float of 8 bits
        return None
    return (base, least, largest) if least <= largest else None  # no range if an element is NaN


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    sizes = (int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:"))
    return next(sizes, _UNKNOWN_FREE)


def _parts(calls: Sequence[OperatorCall], most_bytes: int) -> Iterator[list[OperatorCall]]:
    """Yield successive calls whose arguments and results have at most ``most_bytes`` bytes, or one call."""
    part: list[OperatorCall] = []
    held = 0
    for call in calls:
        if part and held + call.nbytes > most_bytes:
            yield part
            part, held = [], 0
        part.append(call)
        held += call.nbytes
    if part:
        yield part


def _timer_by_clock() -> _Timed:
    """Return a timer of functions on the CPU. The work of one thread counts without what other processes took."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def timed(run: Callable[[], object]) -> float:
        begin = clock()
        output = run()  # freed after the end is read, as in a model
        seconds = clock() - begin
        del output
        return seconds

    return timed


def _timer_by_events() -> _Timed:
    """Return a timer of functions on the current CUDA device, without the time of the events themselves."""

    def elapsed(run: Callable[[], object]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _torch.sleep_cycles(_SLEEP_CYCLES)  # the device is busy until both events and the kernels are queued
        start.record()
        output = run()
        end.record()
        end.synchronize()
        del output
        return float(start.elapsed_time(end)) * 1e-3

    events = min(elapsed(lambda: None) for _ in range(10))
    return lambda run: max(elapsed(run) - events, 0.0)


# ----------------------------------------------------------------------------------------------------- arguments


def arguments_of(call: OperatorCall, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Return positional and keyword arguments with random values, and a list of the parameters among them.

    Raises:
        TypeError: an argument is an object whose value is not known, or a sparse layout.
    """
    base = call.name.partition(".")[2]
    table_position, indices_position = _INDICES.get(base, (None, -1))
    params: list[Tensor] = []

    def make(value: Any, limit: int = 1) -> Any:
        if isinstance(value, TensorSpec):
            tensor = _random(value, device, limit)
            if value.is_param:
                params.append(tensor)
            return tensor
        if type(value) in (tuple, list):
            return [make(item, limit) for item in value]
        if (isinstance(value, str) and value.startswith("<")) or str(value).startswith("torch.sparse"):
            raise TypeError(f"{call.name} takes {value}, of which no equal can be made")
        return device if isinstance(value, torch.device) else value

    args = []
    for position, value in enumerate(call.args):
        limit = 1
        if position == indices_position:
            dim = call.args[1] if indices_position == 2 else 0
            limit = call.args[table_position].shape[dim] if table_position is not None else call.args[2]
        if base == "index" and position == 1:
            limit = min((size for size in call.args[0].shape), default=1)
        args.append(make(value, limit))
    if "max_pool" in base and "backward" not in base:
        _look_like_features(args[0])
    return tuple(args), {name: make(value) for name, value in call.kwargs.items()}, params


def _random(spec: TensorSpec, device: torch.device, limit: int) -> Tensor:
    """Return a tensor with the sizes and strides of ``spec``; integers below ``limit``."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size)
    if not prod(spec.shape):
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        flat = torch.rand(extent, device=device).add_(0.1).to(spec.dtype)
    elif spec.dtype is torch.bool:
        flat = torch.zeros(extent, dtype=torch.bool, device=device)
    else:
        flat = torch.randint(0, max(limit, 1), (extent,), device=device).to(spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)


def _look_like_features(images: Tensor) -> None:
    """Fill images as a ReLU leaves them: zeros, and neighbours that are alike.

    The CPU's max pooling has a branch per element: on random numbers it takes up to twice as long.
    """
    base = images if images._base is None else images._base
    half = torch.randn(base.numel() // 2 + 1, device=base.device)
    base.copy_(half.repeat_interleave(2)[: base.numel()].clamp(min=0).view_as(base))


# ---------------------------------------------------------------------------------------------------- workspaces


def workspaces_of(calls: Sequence[OperatorCall], device: torch.device) -> list[int | None]:
    """Return the bytes that each call allocates, apart from its results, while it runs; None if it does not run alone.

    They are measured by events of torch's profiler on the CPU, by statistics of the allocator on CUDA.
    """
    if device.type == "cuda":
        return [_workspace_on_cuda(call, device) for call in calls]
    workspaces: list[int | None] = []
    for first in range(0, len(calls), _PER_PROFILE):
        workspaces += _workspaces_on_cpu(calls[first : first + _PER_PROFILE], device)
    return workspaces


def _workspaces_on_cpu(calls: Sequence[OperatorCall], device: torch.device) -> list[int | None]:
    result_bytes: dict[int, int] = {}
    with torch.no_grad(), cpu_allocations() as allocations:
        for index, call in enumerate(calls):
            try:
                args, kwargs, _ = arguments_of(call, device)
                argument_storages = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
                with record_function(f"{_MARK}{index}"):
                    out = call.func(*args, **kwargs)
            except _FAILURES:
                continue
            results = [stored for tensor in tensors_in(out) for stored in stored_tensors(tensor)]
            allocated = {storage_of(stored): stored.untyped_storage().nbytes() for stored in results}
            result_bytes[index] = sum(size for storage, size in allocated.items() if storage not in argument_storages)
            del out, args, kwargs
    return [
        max(allocations.held_and_peak(f"{_MARK}{index}")[1] - result_bytes[index], 0) if index in result_bytes else None
        for index in range(len(calls))
    ]


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
    except _FAILURES:
        return None
    held = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    del out
    return max(peak - held, 0)
