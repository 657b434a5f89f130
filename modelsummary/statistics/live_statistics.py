"""``LiveStatistics``: time and memory of a live model, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelsummary import memory as _memory
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import cycle_in
from modelsummary.errors import InputError, ModelSummaryError, NotLiveError
from modelsummary.latency.measure import measure_latency
from modelsummary.memory.checkpointing import CheckpointPlan
from modelsummary.memory.estimate import MemoryEstimate, MemoryMeasurement
from modelsummary.memory.step_plan import OptimizerLike, StepOptions, step_plan
from modelsummary.statistics.model_statistics import ModelStatistics

if TYPE_CHECKING:  # imported on first use
    from typing_extensions import Self, Unpack

    from modelsummary.devices.device_spec import DeviceSpec
    from modelsummary.latency import Calibration, Kernels, TimeOptions
    from modelsummary.serving import ServingEstimate
    from modelsummary.serving.cache import MakeCache

__all__ = ["LiveStatistics"]


class LiveStatistics(ModelStatistics):
    """Statistics with a live model, which measure and predict; ``Statistics`` adds stages and graphs."""

    _live: LiveModel | None = None

    def _live_for(self, what: str) -> LiveModel:
        """Return the live model. Raise ``NotLiveError`` if there is none: after pickling, or without an input."""
        if self._live is None:
            raise NotLiveError(self._not_live(what))
        return self._live

    def _tree_for(self, what: str, error: type[ModelSummaryError] = InputError) -> LiveModel:
        """Return the live model. Raise ``error`` if a first forward makes a part of it, or a module contains itself."""
        live = self._live_for(what)
        if live.uninitialized is not None:
            raise error(f"{what}: {live.uninitialized}; run the model once")
        if (cycle := cycle_in(live.model)) is not None:
            raise error(
                f"{what} needs a tree of modules, but {cycle!r} is a module around it, so torch's state_dict(), to() "
                "and train() do not end either; keep such a reference in a list: self.parent = [parent]"
            )
        return live

    @property
    def live(self) -> LiveModel:
        """The model and its input, for functions that run it again."""
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
        """Run the model for real and time every call; the model and its state stay untouched.

        Fills ``latency_ms``, ``self_latency_ms``, ``latency_share`` and ``latency_iqr_ms`` of every row (medians over
        runs, in milliseconds), ``backward_*`` with ``backward=True``, and ``latency_overhead``. Without a backward, the
        model runs without gradients. Every call of a module has a mark before and after it. Runs with and without marks
        alternate, and the cost of a mark on the CPU is subtracted.

        Args:
            x: input with values, of the recorded sizes; default: the recorded input, with random values for sizes.
            warmup: number of runs that do not count.
            runs: number of runs that count.
            backward: also time the backward of the output, started with ones.
            device: device to run a copy on; default: the model runs where it is.

        Returns:
            These statistics.

        Raises:
            InputError: an argument is unusable, or the model has no values.
            StepError: the forward or the backward raised.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Linear(2, 8), (1, 2)).measure_latency(warmup=0, runs=1)
        >>> stats[""].latency_ms > 0, stats.latency_overhead.runs
        (True, 1)
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
        """Return the kernels that a device runs for a forward or a step, in order, with their predicted times.

        They print as a table; ``to_pandas()`` returns a dataframe.

        Args:
            device, mode, backward, optimizer: as for ``estimate_latency``.
            **options: as for ``estimate_latency``.

        Raises:
            InputError: an argument is unusable, or this machine was not calibrated.
        """
        from modelsummary import latency

        live = self._live_for("the kernels of a step")
        plan = latency.time_plan(backward, optimizer, options, self.root, device)
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
        """Measure the distinct operator calls of the model on this machine, one by one, unless they are known.

        The model itself does not run. Results are kept in the user's cache directory by device, number of threads and
        version of torch; ``estimate_latency()`` and ``memory()`` of any model use them.

        Args:
            device: the CPU (default), or CUDA.
            backward, optimizer: the step whose calls are measured, as for ``estimate_latency``.
            **options: as for ``estimate_latency``.
            grid: also measure the standard grid of some 650 common calls.
            again: measure known calls again, minutes or hours later: the median of all visits counts, so that slow
                periods of the machine matter less.

        Returns:
            Counts, and ``cpu_share``: below 0.9, the times are too long; measure again on a quiet machine.

        Raises:
            InputError: an argument is unusable.
        """
        from modelsummary import latency

        live = self._live_for("calibrating")
        plan = latency.time_plan(backward, optimizer, options, self.root, device)
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
        """Predict the milliseconds of a forward, or of a training step, from its kernels, without running it.

        Fills ``estimated_latency_ms`` of every row, and with a backward ``estimated_backward_latency_ms``.
        ``split(by="latency")`` and ``plan(by="latency")`` use them if nothing was measured.

        Args:
            device: a ``DeviceSpec``; the name of an accelerator, such as ``"A100"``; or this machine, as measured by
                ``calibrate``: ``"cpu"`` (default) or ``"cuda"``.
            mode: ``"eager"``, or ``"compiled"`` as by ``torch.compile``.
            backward: include the backward of the loss.
            optimizer: name, class or instance of an optimizer whose step is included, as for ``memory``. Default: no
                optimizer.
            **options: see ``modelsummary.latency.TimeOptions``: ``dtype``, ``autocast``, ``loss``, ``checkpoint``.

        Returns:
            A ``LatencyEstimate``: a float with its source and its typical error. Statistics without a live model return
            the roofline's bound.

        Raises:
            InputError: an argument is unusable, the device lacks the dtype, or this machine was not calibrated.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> estimate = Statistics(nn.Linear(64, 32), (8, 64)).estimate_latency("A100", backward=True)
        >>> estimate.device, estimate.backward_ms > 0, estimate.optimizer_ms, estimate.limited_by
        ('A100 80GB', True, 0.0, 'host')
        """
        from modelsummary import latency

        if self._live is None:
            return latency.bound_of_data(self, device, mode, backward, optimizer, options)
        plan = latency.time_plan(backward, optimizer, options, self.root, device)
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
        """Predict the memory of one step in bytes without running it: nothing is computed or allocated.

        The forward, the backward and the optimizer's step run on tensors without data, and every storage is followed
        until it is freed. A training step fills ``activation_bytes``, ``self_activation_bytes`` and ``peak_bytes`` of
        every row. The estimate counts the storages of tensors, and the workspaces of operators if ``calibrate``
        measured them on this machine. It does not count reserves of an allocator. Modules keep their training mode.

        Args:
            mode: ``"train"``, or ``"inference"``: a forward without gradients.
            optimizer, dtype, device, loss, checkpoint, autocast, accumulates, block_bytes, workspaces: see
                ``modelsummary.memory.step_plan.StepOptions``.

        Raises:
            InputError: an argument is unusable, or no result requires a gradient.
            StepError: the step raised; its ``phase`` says where, and the message what to do.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> estimate = Statistics(nn.Linear(2, 8), (1, 2)).memory(optimizer="sgd")
        >>> estimate.params, estimate.grads, estimate.inputs
        (96, 96, 8)
        """
        options = StepOptions(optimizer=optimizer, dtype=dtype, device=device, loss=loss, checkpoint=checkpoint)
        options |= {"autocast": autocast, "accumulates": accumulates, "block_bytes": block_bytes}
        options |= {"workspaces": workspaces}
        return _memory.predict(self._live_for("predicting memory"), self.root, step_plan(mode, options, self.root))

    @exclusive
    def measure_memory(self, mode: str = "train", **options: Unpack[StepOptions]) -> MemoryMeasurement:
        """Run two steps for real and measure the memory of the second; the model stays untouched.

        The figures are from events of torch's profiler on the CPU, from statistics of the allocator on CUDA.

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
        """Choose modules to checkpoint so that a training step fits a budget with the least recomputation.

        Candidates are the repeated blocks of the model.

        Args:
            budget_bytes: largest allowed peak: an integer, or text such as ``"24GB"``.
            by: measure of recomputation: ``"macs"``, or ``"latency"``, predicted by ``estimate_latency``.
            **options: as for ``memory``, without ``checkpoint``.

        Returns:
            The plan, for ``apply_checkpoint(model, plan.fqns)``.

        Raises:
            InputError: an argument is unusable, or recomputing all blocks is not enough.
        """
        live = self._live_for("predicting memory")
        plan = step_plan("train", options, self.root)
        return _memory.suggest_checkpoint(live, self.root, budget_bytes, plan, by)

    @exclusive
    def max_batch_size(self, memory_bytes: int | str, mode: str = "train", **options: Unpack[StepOptions]) -> int:
        """Find the largest batch size whose peak fits; 0 if the smallest one does not.

        Args:
            memory_bytes: memory of the device: an integer, or text such as ``"24GB"``.
            mode: as for ``memory``.
            **options: as for ``memory``.

        Raises:
            InputError: an argument is unusable, no input has a batch dimension, or the forward needs values.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Linear(2, 8), (1, 2)).max_batch_size(1_000_000, "inference")
        24997
        """
        live = self._live_for("predicting memory")
        return _memory.max_batch_size(live, memory_bytes, step_plan(mode, options, self.root))

    # ------------------------------------------------------------------------------------------ serving

    @exclusive
    def serving(
        self,
        context: int,
        batch: int = 1,
        device: DeviceSpec | torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tensor: int = 1,
        cache: str | MakeCache | None = None,
        mode: str | None = None,
        memory_bytes: int | str | None = None,
        batches: Sequence[int] | None = None,
        calibrate: bool = False,
    ) -> ServingEstimate:
        """Predict memory and time of serving the model with a cache, without computing anything.

        A request runs on shapes: the forward of its prompt, then the forward of one further token with the cache that
        the first one returned. The bytes are the bytes of the cache's own tensors, and the times are the times of the
        operators that ran. The model runs in evaluation mode.

        Args:
            context: tokens of each request that the cache holds at the end, at least 2.
            batch: number of requests that are decoded together.
            device: a ``DeviceSpec``, the name of an accelerator, or this machine, as for ``estimate_latency``.
            dtype: floating point dtype of weights and cache; default: their own.
            tensor: number of devices over which ``parallel_plan`` splits the layers; bytes and times are then for one
                of them, with the collectives between them.
            cache: ``"dynamic"``, ``"static"``, ``"fp8"`` or ``"quanto"``, caches of transformers; or a
                function from the model and a number of tokens to a cache. Default: the cache that the model makes.
            mode: ``"eager"`` or ``"compiled"``. Default: compiled on a named device, eager on this machine.
            memory_bytes: memory of the device: an integer, or text such as ``"24GB"``. Default: the device's.
            batches: batch sizes of the table of throughput. Default: powers of four that fit, up to 256.
            calibrate: measure the operator calls of the requests that the table of this machine lacks.

        Raises:
            InputError: an argument is unusable, the forward returns no cache that it takes back, or the weights alone
                do not fit.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> class Sums(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.table, self.head = nn.Embedding(100, 8), nn.Linear(8, 100)
        ...     def forward(self, ids, cache=None):
        ...         x = self.table(ids)
        ...         cache = [x if cache is None else torch.cat([cache[0], x], dim=1)]
        ...         return self.head(x + cache[0].mean(1, keepdim=True)), cache
        >>> estimate = Statistics(Sums(), torch.zeros(1, 4, dtype=torch.long)).serving(1024, device="A100")
        >>> estimate.cache_bytes_per_token, estimate.cache_bytes, estimate.weight_bytes  # 8 float32 per token
        (32.0, 32768, 6800)
        """
        from modelsummary.serving import ServingOptions, estimate_serving

        live = self._live_for("serving")
        options = ServingOptions(context, batch, tensor, dtype, cache, mode, memory_bytes, batches, calibrate)
        return estimate_serving(live, self.root, device, options)
