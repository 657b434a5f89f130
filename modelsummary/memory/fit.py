"""What fits: the modules to recompute for a budget of memory, and the largest batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import (
    Block,
    CheckpointPlan,
    blocks_of,
    bytes_by_block,
    least_recomputation,
    recomputed_macs,
)
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.plan import StepPlan
from modelsummary.memory.predict import check_initialized, simulate_step
from modelsummary.units import parse_bytes

__all__ = ["largest", "max_batch_size", "suggest_checkpoint"]


def suggest_checkpoint(
    live: LiveModel, root: LayerInfo, budget_bytes: int | str, plan: StepPlan, by: str = "macs"
) -> CheckpointPlan:
    """Return which repeated blocks to recompute so that the peak of a step is at most ``budget_bytes``.

    What each block saves is simulated, blocks that are alike once; the choice is exact for these figures, and the step
    with it is simulated at the end.

    Raises:
        InputError: ``budget_bytes`` is unusable, or recomputing all blocks does not suffice.
    """
    budget_bytes = parse_bytes(budget_bytes, "budget_bytes")
    check_initialized(live)
    if plan.checkpoint:
        raise InputError("suggest_checkpoint chooses the modules itself; leave checkpoint= out")
    if by not in ("macs", "latency") or (by == "latency" and root.estimated_latency_ms is None):
        raise InputError(f"by={by!r}; expected 'macs', or 'latency' once estimate_latency() predicted it")
    rows = blocks_of(root)
    fqns = [row.fqn for row in rows]

    def simulate(chosen: Sequence[str]) -> MemoryEstimate:
        return simulate_step(live.model, live.call, replace(plan, checkpoint=tuple(chosen)))[0]

    plain = simulate([])
    alike: dict[Any, Block] = {}
    for row in rows:
        key = _looks(row)
        if key not in alike:
            alike[key] = Block(plain.activations - simulate([row.fqn]).activations, _work_of(row, by))
    blocks = [alike[_looks(row)] for row in rows]
    needed = [most - budget_bytes for most in bytes_by_block(plain, fqns)]
    while True:
        numbers = least_recomputation(blocks, needed)
        chosen = fqns if numbers is None else [fqns[number] for number in numbers]
        peak = simulate(chosen).peak
        if peak <= budget_bytes:
            return CheckpointPlan(tuple(chosen), peak, plain.peak, recomputed_macs(root, chosen))
        if numbers is None:
            raise InputError(
                f"budget_bytes={budget_bytes:,} is too little: with all {len(rows)} blocks recomputed a step takes "
                f"{peak:,} bytes; take a smaller batch"
            )
        needed = [each + max(peak - budget_bytes, 1) for each in needed]  # the figures were too hopeful


def max_batch_size(live: LiveModel, memory_bytes: int | str, plan: StepPlan) -> int:
    """Return the largest batch whose peak is at most ``memory_bytes``; 0 if there is none.

    The peak is nearly linear in the batch: two estimates give a guess, which estimates around it then settle.

    Raises:
        InputError: ``memory_bytes`` is unusable, no input has a batch dimension, or the forward needs values.
    """
    memory_bytes = parse_bytes(memory_bytes, "memory_bytes")
    check_initialized(live)
    dim = live.batch_dim or 0
    args, kwargs = live.call.on_meta(lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
    call = replace(live.call, args=args, kwargs=kwargs)  # larger batches must not be allocated
    recorded = call.size_along(dim)
    if not recorded:
        raise InputError(f"no input has a dimension {dim} that could be the batch: sizes {call.shapes()}")

    def peak(batch: int) -> int:
        return simulate_step(live.model, call.with_batch(dim, recorded, batch), plan)[0].peak

    def peak_from_two(batch: int) -> int:  # batch normalisation in training takes no batch of one
        try:
            return peak(batch)
        except ValueError:
            if batch > 1:
                raise
        return peak(2)

    return largest(peak_from_two, memory_bytes)


def _work_of(row: LayerInfo, by: str) -> int:
    """Return what recomputing a block takes: multiply-adds, or predicted nanoseconds."""
    return row.macs if by == "macs" else round(1e6 * (row.estimated_latency_ms or 0.0))


def _looks(row: LayerInfo) -> tuple[Any, ...]:
    """Blocks that are equal in this save the same."""
    inside = tuple((each.class_name, str(each.input_size), each.macs) for each in row.walk())
    return row.num_params, inside


def largest(peak: Callable[[int], int], limit: int) -> int:
    """The largest n >= 1 with ``peak(n) <= limit``, for a peak that grows with n; 0 if there is none."""
    known: dict[int, int] = {}

    def fits(number: int) -> bool:
        if number not in known:
            known[number] = peak(number)
        return known[number] <= limit

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):  # by the line through the last two, at least twice as far
        slope = max((known[high] - known[low]) / (high - low), 1)
        low, high = high, min(max(2 * high, int(high + (limit - known[high]) / slope) + 1), 64 * high)
    while high - low > 1:
        slope = max((known[high] - known[low]) / (high - low), 1)
        guess = int(low + (limit - known[low]) / slope)
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
