"""Operator calls that run alone: their arguments, with random values, and the bytes of workspace that they allocate."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from modelsummary.operators.operator_calls import OperatorCall, TensorSpec
from modelsummary.operators.operator_facts import tensors_in
from modelsummary.operators.tensor_bytes import storage_of

__all__ = ["arguments_of", "is_measurable", "workspaces_of"]

_INDICES = {"embedding": (0, 1), "index_select": (0, 2), "gather": (0, 2), "embedding_dense_backward": (None, 1)}


def is_measurable(call: OperatorCall) -> bool:
    """Return True if the arguments of a call can be made from its specs."""
    return not any(_is_opaque(arguments) for arguments in (call.args, tuple(call.kwargs.values())))


def _is_opaque(value: Any) -> bool:
    if type(value) in (tuple, list):
        return any(map(_is_opaque, value))
    return (isinstance(value, str) and value.startswith("<")) or str(value).startswith("torch.sparse")


def arguments_of(call: OperatorCall, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
    """Return positional and keyword arguments with random values, and a list of the parameters among them."""
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


_PER_PROFILE = 64
_MARK = "modelsummary: call "


def _workspaces_on_cpu(calls: Sequence[OperatorCall], device: torch.device) -> list[int | None]:
    failed: set[int] = set()
    result_bytes: dict[int, int] = {}
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
        for index, call in enumerate(calls):
            try:
                args, kwargs, _ = arguments_of(call, device)
                argument_storages = {storage_of(tensor) for tensor in tensors_in((args, kwargs))}
                with record_function(f"{_MARK}{index}"):
                    out = call.func(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
                failed.add(index)
                continue
            allocated = {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(out)}
            result_bytes[index] = sum(size for storage, size in allocated.items() if storage not in argument_storages)
            del out, args, kwargs
    events = traced.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    spans = {event.name(): event for event in events if event.name().startswith(_MARK)}
    workspaces: list[int | None] = []
    for index in range(len(calls)):
        span = spans.get(f"{_MARK}{index}")
        if index in failed or span is None:
            workspaces.append(None)
            continue
        held = peak = 0
        for moment, change in changes:
            if span.start_ns() <= moment <= span.end_ns():
                held += change
                peak = max(peak, held)
        workspaces.append(max(peak - result_bytes[index], 0))
    return workspaces


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
