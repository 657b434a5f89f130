"""The largest batch that fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import check_initialized, observe
from modelsummary.capture.step_error import NeedsValuesError
from modelsummary.capture.step_plan import StepPlan
from modelsummary.errors import InputError, StepError
from modelsummary.memory.predict import memory_of, reserve_of
from modelsummary.memory.reserve import allocator_settings
from modelsummary.progress import counted
from modelsummary.units import parse_bytes

__all__ = ["largest", "max_batch_size"]


def max_batch_size(
    live: LiveModel, memory_bytes: int | str, plan: StepPlan, *, expandable_segments: bool = False
) -> int:
    """Return the largest batch size that fits into ``memory_bytes``; 0 if there is none.

    On CUDA, the allocator must find room for the first steps, also by releasing its cached segments; elsewhere, the
    peak must not be larger. Both are nearly linear in the batch size, so two estimates give a guess and estimates
    around it confirm it.

    Raises:
        InputError: ``memory_bytes`` is unusable, no input has a batch dimension, the forward needs values, or
            ``expandable_segments`` is asked for on another device than CUDA.
        StepError: the step raised, for instance because its loss holds labels of one batch size.
    """
    memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
    settings = allocator_settings(memory_bytes, expandable_segments=expandable_segments)
    assert settings is not None
    check_initialized(live)
    dim = live.batch_dim or 0
    args, kwargs = live.call.on_meta(lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
    call = replace(live.call, args=args, kwargs=kwargs)  # larger batches must not be allocated
    recorded_batch = call.size_along(dim)
    if not recorded_batch:
        raise InputError(f"no input has elements along dimension {dim}, the batch: sizes {call.shapes()}")

    with counted("max batch size", "estimate") as done:

        def needed(batch: int) -> int:
            try:
                trace = observe(live.model, call.with_batch(dim, recorded_batch, batch), plan, storages=True)
            except NeedsValuesError as error:
                raise InputError(
                    f"max_batch_size runs steps of other batch sizes on shapes, but {error.reason}; compare memory() "
                    "of inputs with several batch sizes instead"
                ) from error
            except StepError as error:
                if error.phase != "loss" or batch == recorded_batch:
                    raise
                remedy = (
                    f"this is a batch of {batch}, but what the loss holds has the batch that was passed: make labels "
                    "from the result, or pass them to the model"
                )
                raise StepError(error.message, error.phase, error.line, remedy) from error
            done()
            if torch.device(trace.device).type != "cuda" and not expandable_segments:
                return memory_of(trace, plan).peak
            reserve = reserve_of(trace, plan, settings)
            return (reserve if reserve.fits else reserve_of(trace, plan, settings._replace(limit=None))).reserved

        def needed_from_two(batch: int) -> int:  # batch normalisation in training rejects a batch of one
            try:
                return needed(batch)
            except StepError:
                if batch > 1:
                    raise
            return needed(2)

        return largest(needed_from_two, memory_bytes)


def largest(needed: Callable[[int], int], limit: int) -> int:
    """Return the largest n >= 1 with ``needed(n) <= limit``, for bytes that grow with n; 0 if there is none.

    >>> largest(lambda n: 100 + 7 * n, limit=1000)
    128
    """
    bytes_of: dict[int, int] = {}

    def fits(n: int) -> bool:
        if n not in bytes_of:
            bytes_of[n] = needed(n)
        return bytes_of[n] <= limit

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):  # extrapolate the line through the last two, at least doubling
        slope = max((bytes_of[high] - bytes_of[low]) / (high - low), 1)
        low, high = high, min(max(2 * high, int(high + (limit - bytes_of[high]) / slope) + 1), 64 * high)

    def narrow(n: int) -> None:
        nonlocal low, high
        if low < n < high:
            low, high = (n, high) if fits(n) else (low, n)

    while high - low > 1:
        width = high - low
        slope = max((bytes_of[high] - bytes_of[low]) / width, 1)
        guess = min(max(int(low + (limit - bytes_of[low]) / slope), low + 1), high - 1)
        narrow(guess)
        narrow(guess + 1 if low == guess else guess - 1)
        if high - low > width // 2:  # not a line: an allocator that reached the limit releases what it cached
            narrow((low + high) // 2)
    return low
