"""``LiveStatistics``: the time and memory of a live model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelsummary import memory as _memory
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.live import LiveModel
from modelsummary.errors import NotLiveError
from modelsummary.latency.measure import measure_latency
from modelsummary.memory.checkpointing import CheckpointPlan
from modelsummary.memory.estimate import MemoryEstimate, MemoryMeasurement
from modelsummary.memory.plan import OptimizerLike, StepOptions, step_plan
from modelsummary.statistics.model_statistics import ModelStatistics

if TYPE_CHECKING:  # what few ask for is imported for them only
    from typing_extensions import Self, Unpack

    from modelsummary.costs.devices import DeviceSpec
    from modelsummary.latency import Calibration, Kernels, TimeOptions

__all__ = ["LiveStatistics"]


class LiveStatistics(ModelStatistics):
    """Statistics that can run their model again, to measure and to predict; ``Statistics`` adds stages and graphs."""

    _live: LiveModel | None = None

    def _live_for(self, what: str) -> LiveModel:
        """Return the live model. Raises ``NotLiveError`` where there is none, after pickling or without an input."""
        if self._live is None:
            raise NotLiveError(self._not_live(what))
        return self._live

    @property
    def live(self) -> LiveModel:
        """The model and its input, for what runs it again."""
        return self._live_for("live")

    # --------------------------------------------------------------------------------------------- time

    @exclusive
    def measure_latency(
        self,
        x: Any = None,
        warmup: int = 3,
        runs: int = 10,
        backward: bool = False,
        device: torch.device | str | None = None,
    ) -> Self:
        """Run the model for real and time every call; the model and its state are afterwards as before.

        Fills ``latency_ms``, ``self_latency_ms``, ``latency_share`` and ``latency_iqr_ms`` of every row (medians over
        runs, in milliseconds), ``backward_*`` with ``backward=True``, and ``latency_overhead``. Without a backward the
        model runs without gradients. Marks lie around every call of a module; forwards with and without them take
        turns, and what a mark costs on the CPU is taken off.

        Args:
            x: input with values, of the sizes that were recorded; default: the recorded input, sizes as random values.
            warmup: runs that do not count.
            runs: runs that count.
            backward: time the backward of the output, started with ones.
            device: run a copy there; default: the model, where it is.

        Returns:
            These statistics.

        Raises:
            InputError: an argument is unusable, or the model has no values.
        """
        options: dict[str, Any] = {"warmup": warmup, "runs": runs, "backward": backward, "device": device}
        self.latency_overhead = measure_latency(self._live_for("measuring"), self.root, x, **options)
        return self

    @exclusive
    def kernels(
        self,
        device: DeviceSpec | torch.device | str | None = None,
        mode: str = "eager",
        backward: bool = False,
        optimizer: OptimizerLike | None = None,
        **options: Unpack[TimeOptions],
    ) -> Kernels:
        """Return the kernels that a device runs for a forward or a step, in order, each with its predicted time.

        They print as a table; ``to_pandas()`` gives a dataframe.

        Args:
            device, mode, backward, optimizer: as for ``estimate_latency``.
            **options: likewise.

        Raises:
            InputError: an argument is unusable, or this machine was not calibrated.
        """
        from modelsummary import latency

        live = self._live_for("the kernels of a step")
        plan = latency.time_plan(backward, optimizer, options, self.root)
        return latency.Kernels(latency.predict_kernels(live, latency.target(device, options), mode, plan))

    @exclusive
    def calibrate(
        self,
        device: torch.device | str | None = None,
        backward: bool = False,
        optimizer: OptimizerLike | None = None,
        *,
        grid: bool = False,
        again: bool = False,
        **options: Unpack[TimeOptions],
    ) -> Calibration:
        """Measure the distinct operator calls of the model on this machine, each alone; what is known is not repeated.

        The model itself is not run. Results are kept in the user's cache directory, by device, threads and version of
        torch; ``estimate_latency()`` and ``memory()`` use them, of any model.

        Args:
            device: the CPU (default), or CUDA.
            backward, optimizer: the step whose calls are measured, as for ``estimate_latency``.
            **options: likewise.
            grid: measure the standard grid of some 300 common calls as well.
            again: measure what is known once more.

        Raises:
            InputError: an argument is unusable.

        The result says which part of a core was free: below 0.9, times are too long; measure again on a quiet machine.
        """
        from modelsummary import latency

        live = self._live_for("calibrating")
        plan = latency.time_plan(backward, optimizer, options, self.root)
        return latency.calibrate(live, device, plan, grid=grid, again=again)

    @exclusive
    def estimate_latency(
        self,
        device: DeviceSpec | torch.device | str | None = None,
        mode: str = "eager",
        backward: bool = False,
        optimizer: OptimizerLike | None = None,
        **options: Unpack[TimeOptions],
    ) -> float:
        """Predict the milliseconds of a forward, or of a training step, from its kernels; nothing is run.

        Fills ``estimated_latency_ms`` of every row, and with a backward ``estimated_backward_latency_ms``;
        ``split(by="latency")`` and ``plan(by="latency")`` use them where nothing was measured.

        Args:
            device: a ``DeviceSpec``; the name of an accelerator, such as ``"A100"``; or this machine: ``"cpu"``
                (default) or ``"cuda"``, by what ``calibrate`` measured.
            mode: ``"eager"``, or ``"compiled"`` by ``torch.compile``.
            backward: with the backward of the loss.
            optimizer: with its step: a name, class or instance, as for ``memory``; None: without.
            **options: see ``modelsummary.latency.TimeOptions``: ``dtype``, ``autocast``, ``loss``, ``checkpoint``.

        Returns:
            A ``LatencyEstimate``: a number that says where it is from and how far it may be off. Statistics without a
            live model return the roofline's bound.

        Raises:
            InputError: an argument is unusable, the device lacks the dtype, or this machine was not calibrated.
        """
        from modelsummary import latency

        if self._live is None:
            return latency.bound_of_data(self, device, mode, backward, optimizer, options)
        plan = latency.time_plan(backward, optimizer, options, self.root)
        return latency.estimate(self._live, self.root, latency.target(device, options), mode, plan)

    # ------------------------------------------------------------------------------------------- memory

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
        workspaces: bool = True,
    ) -> MemoryEstimate:
        """Predict the memory of one step without running it: nothing is computed or allocated.

        The forward, the backward and the optimizer's step run on tensors without data, and every storage is followed
        until it is gone. A training step fills ``activation_bytes``, ``self_activation_bytes`` and ``peak_bytes`` of
        every row. Counted are the storages of tensors, and what an operator needs for itself while it runs as far as
        ``calibrate`` measured it on this machine; not what an allocator keeps in reserve. The model is taken in the
        modes that its modules have.

        Args:
            mode: ``"train"``, or ``"inference"``: a forward without gradients.
            optimizer, dtype, device, loss, checkpoint, autocast, accumulates, block_bytes, workspaces: see
                ``modelsummary.memory.plan.StepOptions``.

        Raises:
            InputError: an argument is unusable, or there is nothing to differentiate.
        """
        options = StepOptions(optimizer=optimizer, dtype=dtype, device=device, loss=loss, checkpoint=checkpoint)
        options |= {"autocast": autocast, "accumulates": accumulates, "block_bytes": block_bytes}
        options |= {"workspaces": workspaces}
        return _memory.predict(self._live_for("predicting memory"), self.root, step_plan(mode, options, self.root))

    @exclusive
    def measure_memory(self, mode: str = "train", **options: Unpack[StepOptions]) -> MemoryMeasurement:
        """Run two steps for real and measure the second; the model is afterwards as before.

        On the CPU the events of torch's profiler count, on CUDA the statistics of the allocator.

        Args:
            mode: as for ``memory``.
            **options: as for ``memory``, which predicts the same step; without ``device`` and ``dtype``.

        Raises:
            InputError: an argument is unusable, or the model has no values.
        """
        return _memory.measure(self._live_for("measuring memory"), self.root, step_plan(mode, options, self.root))

    @exclusive
    def suggest_checkpoint(
        self, budget_bytes: int | str, *, by: str = "macs", **options: Unpack[StepOptions]
    ) -> CheckpointPlan:
        """Choose modules to recompute in the backward so that a training step fits, with the least work done again.

        Candidates are the repeated blocks of the model.

        Args:
            budget_bytes: that the peak may reach.
            by: what is done again is counted in: ``"macs"``, or ``"latency"``: predicted time (``estimate_latency``).
            **options: as for ``memory``, without ``checkpoint``.

        Returns:
            The plan, for ``apply_checkpoint(model, plan.fqns)``.

        Raises:
            InputError: an argument is unusable, or recomputing all blocks does not suffice.
        """
        live = self._live_for("predicting memory")
        plan = step_plan("train", options, self.root)
        return _memory.suggest_checkpoint(live, self.root, budget_bytes, plan, by)

    @exclusive
    def max_batch_size(self, memory_bytes: int | str, mode: str = "train", **options: Unpack[StepOptions]) -> int:
        """Find the largest batch whose peak fits; 0 if the smallest one does not.

        Args:
            memory_bytes: what the device has: an integer, or text such as ``"24GB"``.
            mode: as for ``memory``.
            **options: as for ``memory``.

        Raises:
            InputError: an argument is unusable, no input has a batch dimension, or the forward needs values.
        """
        live = self._live_for("predicting memory")
        return _memory.max_batch_size(live, memory_bytes, step_plan(mode, options, self.root))
