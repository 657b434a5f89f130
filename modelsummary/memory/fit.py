"""The largest batch that fits into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import check_initialized
from modelsummary.capture.step_error import NeedsValuesError
from modelsummary.capture.step_plan import StepPlan
from modelsummary.errors import InputError, StepError
from modelsummary.memory.predict import simulate_step
from modelsummary.progress import counted
from modelsummary.units import parse_bytes

__all__ = ["largest", "max_batch_size"]


def max_batch_size(live: LiveModel, memory_bytes: int | str, plan: StepPlan) -> int:
    """Return the largest batch size whose peak is at most ``memory_bytes``; 0 if there is none.

    The peak is nearly linear in the batch size, so two estimates give a guess and estimates around it confirm it.

    Raises:
        InputError: ``memory_bytes`` is unusable, no input has a batch dimension, or the forward needs values.
    """
    memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
    check_initialized(live)
    dim = live.batch_dim or 0
    args, kwargs = live.call.on_meta(lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
    call = replace(live.call, args=args, kwargs=kwargs)  # larger batches must not be allocated
    recorded_batch = call.size_along(dim)
    if not recorded_batch:
        raise InputError(f"no input has elements along dimension {dim}, the batch: sizes {call.shapes()}")

    with counted("max batch size", "estimate") as done:

        def peak(batch: int) -> int:
            try:
                estimate, _ = simulate_step(live.model, call.with_batch(dim, recorded_batch, batch), plan)
            except NeedsValuesError as error:
                raise InputError(
                    f"max_batch_size runs steps of other batch sizes on shapes, but {error.reason}; compare memory() "
                    "of inputs with several batch sizes instead"
                ) from error
            done()
            return estimate.peak

        def peak_from_two(batch: int) -> int:  # batch normalisation in training rejects a batch of one
            try:
                return peak(batch)
            except StepError:
                if batch > 1:
                    raise
            return peak(2)

        return largest(peak_from_two, memory_bytes)


def largest(peak: Callable[[int], int], limit: int) -> int:
    """Return the largest n >= 1 with ``peak(n) <= limit``, for a peak that grows with n; 0 if there is none.

    >>> largest(lambda n: 100 + 7 * n, limit=1000)
    128
    """
    peaks: dict[int, int] = {}

    def fits(n: int) -> bool:
        if n not in peaks:
            peaks[n] = peak(n)
        return peaks[n] <= limit

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):  # extrapolate the line through the last two, at least doubling
        slope = max((peaks[high] - peaks[low]) / (high - low), 1)
        low, high = high, min(max(2 * high, int(high + (limit - peaks[high]) / slope) + 1), 64 * high)
    while high - low > 1:
        slope = max((peaks[high] - peaks[low]) / (high - low), 1)
        guess = int(low + (limit - peaks[low]) / slope)
        middle = min(max(guess, low + 1), high - 1)
        if fits(middle):
            low = middle
            if middle + 1 < high and not fits(middle + 1):
                high = middle + 1
        else:
            high = middle
            if middle - 1 > low and fits(middle - 1):
                low = middle - 1
    return low
