"""What ``ModelStatistics`` says of memory: of a training step or an inference, and the batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import CallArguments
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import (
    Block,
    CheckpointPlan,
    blocks_of,
    bytes_by_block,
    least_recomputation,
    recomputed_macs,
    square_root,
)
from modelsummary.memory.estimate import MemoryEstimate, MemoryMeasurement
from modelsummary.memory.measure import measure_step
from modelsummary.memory.predict import RowMemory, StepPlan, simulate_step
from modelsummary.statistics.live import Live

__all__ = ["OPTIMIZERS", "OptimizerLike", "Sizing"]

OptimizerLike = str | type[torch.optim.Optimizer] | torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "sgd-momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


class Sizing(Live):
    """The part of ``ModelStatistics`` that is about memory."""

    @exclusive
    def memory(
        self,
        mode: str = "train",
        optimizer: OptimizerLike | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        checkpoint: Sequence[str] | str | None = None,
        *,
        autocast: torch.dtype | None = None,
        accumulates: bool = False,
        block_bytes: int | None = None,
    ) -> MemoryEstimate:
        """Predict the memory of one step without running it: nothing is computed or allocated.

        The forward, the backward and the optimizer's step run on tensors without data, and every storage is followed
        until it is gone. A training step fills ``activation_bytes``, ``self_activation_bytes`` and ``peak_bytes`` of
        every row. Counted are the storages of tensors, not what an operator needs for itself while it runs, nor what an
        allocator keeps in reserve. The model is taken in the modes that its modules have.

        Args:
            mode: ``"train"``, or ``"inference"``: a forward without gradients.
            optimizer: ``"sgd"``, ``"sgd-momentum"``, ``"adam"``, ``"adamw"``, ``"adafactor"``, a class of
                ``torch.optim``, or an instance, whose settings are taken; None: no step.
            dtype: floating point dtype of parameters, buffers and inputs; default: as they are.
            device: whose kernels to choose; default: the model's, the CPU for a model on meta.
            loss: of the model's result, a scalar; default: its ``loss`` if it has one, else the sum of its tensors.
            checkpoint: FQNs of modules to run under activation checkpointing, or segments of an ``nn.Sequential``, as
                ``apply_checkpoint`` takes them; ``"every"``: all repeated blocks; ``"sqrt"``: of n repeated blocks in
                an ``nn.Sequential`` about sqrt(n) segments.
            autocast: floating point dtype of ``torch.autocast`` around the forward and the loss; None: none.
            accumulates: gradients of earlier micro-batches are there already.
            block_bytes: the allocator rounds sizes up to a multiple of this; default: 512 on CUDA, else 1.

        Raises:
            InputError: an argument is unusable, or there is nothing to differentiate.
        """
        model, call = self._live("predicting memory")
        options: dict[str, Any] = {"loss": loss, "checkpoint": checkpoint, "accumulates": accumulates}
        options |= {"optimizer": optimizer, "dtype": dtype, "device": device, "block_bytes": block_bytes}
        plan = self._plan(mode, autocast=autocast, **options)
        estimate, by_call = self._simulate(model, call, plan)
        rows = list(self.root.walk()) if plan.train else []
        for row in rows:
            found = by_call.get((row.fqn, row.call_index)) if row.executed else None
            row.self_activation_bytes = found.activation_bytes if found is not None else 0
            row.activation_bytes = row.self_activation_bytes
            row.peak_bytes = found.peak_bytes if found is not None else None
        for row in reversed(rows):
            if row.parent_info is not None:
                row.parent_info.activation_bytes += row.activation_bytes  # type: ignore[operator]
        return estimate

    def _live(self, what: str) -> tuple[nn.Module, CallArguments]:
        model, call = super()._live(what)
        lazy = next((fqn for fqn, parameter in model.named_parameters() if is_lazy(parameter)), None)
        if lazy is not None and what.endswith("memory"):
            raise InputError(f"{what}: parameter {lazy!r} is not initialised; run the model once")
        return model, call

    def _simulate(
        self, model: nn.Module, call: CallArguments, plan: StepPlan
    ) -> tuple[MemoryEstimate, dict[tuple[str, int], RowMemory]]:
        estimate, by_call = simulate_step(model, call, plan)
        again = recomputed_macs(self.root, plan.checkpoint) if plan.train else 0
        return replace(estimate, recomputed_macs=again), by_call

    def _plan(self, mode: str, *, checkpoint: Sequence[str] | str | None = None, **options: Any) -> StepPlan:
        if checkpoint in ("every", "sqrt"):
            blocks = blocks_of(self.root)
            checkpoint = [row.fqn for row in blocks] if checkpoint == "every" else square_root(blocks)
        return _plan(mode, checkpoint=checkpoint, **options)

    @exclusive
    def measure_memory(self, mode: str = "train", **options: Any) -> MemoryMeasurement:
        """Run two steps for real and measure the second; the model is afterwards as before.

        On the CPU the events of torch's profiler count, on CUDA the statistics of the allocator.

        Args:
            mode: as for ``memory``.
            **options: as for ``memory``, which predicts the same step; without ``device`` and ``dtype``.

        Raises:
            InputError: an argument is unusable, or the model has no values.
        """
        model, call = self._live("measuring memory")
        if any(options.get(name) is not None for name in ("device", "dtype")):
            raise InputError("memory is measured as the model is: device and dtype cannot be chosen")
        plan = self._plan(mode, **options)
        measured = measure_step(model, call, plan)
        predicted, _ = self._simulate(model, call, plan)
        return MemoryMeasurement(measured.held_after_forward, measured.peak, predicted)

    @exclusive
    def suggest_checkpoint(self, budget_bytes: int, **options: Any) -> CheckpointPlan:
        """Which modules to recompute in the backward so that a training step fits, with the fewest MACs done again.

        Candidates are the repeated blocks of the model. What each saves is simulated, blocks that are alike once; the
        choice is exact for these figures, and the step with it is simulated at the end.

        Args:
            budget_bytes: that the peak may reach.
            **options: as for ``memory``.

        Returns:
            The plan, for ``apply_checkpoint(model, plan.fqns)``.

        Raises:
            InputError: an argument is unusable, or recomputing all blocks does not suffice.
        """
        if type(budget_bytes) is not int or budget_bytes < 1:
            raise InputError(f"budget_bytes={budget_bytes!r}; expected an integer >= 1")
        model, call = self._live("predicting memory")
        rows = blocks_of(self.root)

        fqns = [row.fqn for row in rows]

        def simulate(chosen: Sequence[str]) -> MemoryEstimate:
            return simulate_step(model, call, _plan("train", checkpoint=chosen, **options))[0]

        plain = simulate([])
        alike: dict[Any, Block] = {}
        for row in rows:
            key = _looks(row)
            if key not in alike:
                alike[key] = Block(plain.activations - simulate([row.fqn]).activations, row.macs)
        blocks = [alike[_looks(row)] for row in rows]
        needed = [most - budget_bytes for most in bytes_by_block(plain, fqns)]
        while True:
            numbers = least_recomputation(blocks, needed)
            chosen = fqns if numbers is None else [fqns[number] for number in numbers]
            peak = simulate(chosen).peak
            if peak <= budget_bytes:
                return CheckpointPlan(tuple(chosen), peak, plain.peak, recomputed_macs(self.root, chosen))
            if numbers is None:
                raise InputError(
                    f"budget_bytes={budget_bytes:,} is too little: with all {len(rows)} blocks recomputed a step takes "
                    f"{peak:,} bytes; take a smaller batch"
                )
            needed = [each + max(peak - budget_bytes, 1) for each in needed]  # the figures were too hopeful

    @exclusive
    def max_batch_size(self, memory_bytes: int, mode: str = "train", **options: Any) -> int:
        """The largest batch whose peak fits.

        The peak is nearly linear in the batch: two estimates give a guess, which estimates around it then settle.

        Args:
            memory_bytes: that there are.
            mode: as for ``memory``.
            **options: as for ``memory``.

        Returns:
            The batch size; 0 if the smallest one does not fit.

        Raises:
            InputError: an argument is unusable, no input has a batch dimension, or the forward needs values.
        """
        if type(memory_bytes) is not int or memory_bytes < 1:
            raise InputError(f"memory_bytes={memory_bytes!r}; expected an integer >= 1")
        model, call = self._live("predicting memory")
        plan = self._plan(mode, **options)
        dim = self.batch_dim or 0
        args, kwargs = call.on_meta(lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
        call = replace(call, args=args, kwargs=kwargs)  # larger batches must not be allocated
        recorded = call.size_along(dim)
        if not recorded:
            raise InputError(f"no input has a dimension {dim} that could be the batch: sizes {call.shapes()}")

        def peak(batch: int) -> int:
            return simulate_step(model, call.with_batch(dim, recorded, batch), plan)[0].peak

        def peak_from_two(batch: int) -> int:  # batch normalisation in training takes no batch of one
            try:
                return peak(batch)
            except ValueError:
                if batch > 1:
                    raise
            return peak(2)

        return largest(peak_from_two, memory_bytes)


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


def _plan(
    mode: str,
    *,
    optimizer: OptimizerLike | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    checkpoint: Sequence[str] | str | None = None,
    autocast: torch.dtype | None = None,
    accumulates: bool = False,
    block_bytes: int | None = None,
) -> StepPlan:
    if mode not in ("train", "inference"):
        raise InputError(f"mode={mode!r}; expected 'train' or 'inference'")
    if isinstance(checkpoint, str):
        raise InputError(f"checkpoint={checkpoint!r} is one name; pass a list: [{checkpoint!r}], 'every', or 'sqrt'")
    if checkpoint is not None and not isinstance(checkpoint, (list, tuple)):
        raise InputError(f"checkpoint={checkpoint!r}; expected a list of names, 'every', 'sqrt', or None")
    for name, kind in (("dtype", dtype), ("autocast", autocast)):
        if kind is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise InputError(f"{name}={kind!r}; expected a floating point torch.dtype")
    if block_bytes is not None and (type(block_bytes) is not int or block_bytes < 1):
        raise InputError(f"block_bytes={block_bytes!r}; expected an integer >= 1")
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} is no device: {str(error).splitlines()[0]}") from None
    return StepPlan(
        train=mode == "train",
        make_optimizer=_optimizer(optimizer) if mode == "train" else None,
        device=place,
        dtype=dtype,
        loss=loss,
        checkpoint=tuple(checkpoint or ()),
        autocast=autocast,
        accumulates=accumulates,
        block_bytes=block_bytes,
    )


def _optimizer(optimizer: OptimizerLike | None) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, torch.optim.Optimizer):
        return partial(type(optimizer), **optimizer.defaults)
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer
    raise InputError(
        f"optimizer={optimizer!r:.80}; expected one of {', '.join(map(repr, OPTIMIZERS))}, a class of torch.optim, or "
        "an instance"
    )
