"""``Statistics``: run a model once, keep the facts about its layers, cut it into stages, plan its training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from modelsummary import memory as _memory
from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.input_data import Dtypes
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import cycle_in, modules_of, tensors_of_modules
from modelsummary.capture.run import no_collection
from modelsummary.errors import InputError, ModelSummaryError, NotLiveError, SplitError
from modelsummary.keywords import dtype_named, methods_take_keywords
from modelsummary.latency.measure import measure_latency
from modelsummary.memory.checkpointing import CheckpointPlan, MemoryCurve
from modelsummary.memory.estimate import MemoryEstimate, MemoryMeasurement
from modelsummary.memory.reserve import allocator_settings
from modelsummary.memory.step_options import OptimizerLike, StepOptions, step_plan
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.statistics.recording import Recorded, live_model, record_model, statistics_of_file
from modelsummary.units import parse_bytes
from modelsummary.views.cells import TableOptions

if TYPE_CHECKING:  # imported on first use
    from typing import Self

    from torch.fx import GraphModule, Node
    from typing_extensions import Unpack

    from modelsummary.cluster import Cluster, Plan, Plans, Recipe, StepEstimate
    from modelsummary.devices.device_spec import DeviceSpec
    from modelsummary.findings import Findings
    from modelsummary.formulas import DimensionNames, FiguresAt, FlopsPerToken, Scaling
    from modelsummary.latency import Calibration, Kernels, TimeOptions
    from modelsummary.latency.fits import Fits
    from modelsummary.parallel import ParallelPlan
    from modelsummary.serving import ServingEstimate
    from modelsummary.serving.cache import MakeCache
    from modelsummary.split import By, Stages
    from modelsummary.split.splitter import Splitter
    from modelsummary.values import Values, Watching
    from modelsummary.views.flow import Dataflow
    from modelsummary.views.graph import Graph

__all__ = ["Statistics", "as_live", "measure_memory"]


def _in_bytes(amounts: Any) -> Any:
    """Return bytes, or a sequence of bytes, with texts such as ``"24GB"`` as integers."""
    if isinstance(amounts, str):
        return parse_bytes(amounts, "max_memory")
    return [_in_bytes(amount) for amount in amounts] if isinstance(amounts, (list, tuple)) else amounts


@methods_take_keywords
class Statistics(ModelStatistics):
    """The facts about every layer of a model, from one run that by default works on shapes only.

    Shape-only execution computes nothing: a model of any size takes the time of its Python code. The model stays
    untouched, also after an exception.

    Args:
        model: the model; of a model inside ``torch.compile``, ``DataParallel`` or ``DistributedDataParallel``, the
            wrapped model is summarised. The path of a file returns ``modelsummary.load(path, input_data)``; of
            the options, only ``branching`` and ``depth`` apply.
        input_data: a tensor; a tuple or list of the forward's positional arguments; a dict of its keyword arguments; a
            size such as ``(1, 3, 224, 224)``, a list of sizes or a dict of sizes by argument name; numpy arrays instead
            of tensors. A list is one argument if the forward annotates its first parameter as a list. None without
            further arguments: the ``example_input_array`` of a LightningModule; if there is none, no forward runs, and
            the statistics have names and parameters only. ``input_size`` is another name, unless the forward has an
            argument called so.
        *args: further positional arguments of the forward.
        **kwargs: further keyword arguments of the forward. Pass one with the name of an option, such as ``depth``, in
            an ``input_data`` dict.
        batch_dim: position at which a batch of one is inserted into each size; views print this dimension as -1, and
            the numbers are for the batch that ran. Default: sizes include the batch.
        branching: print the tree; False prints FQNs.
        depth: deepest level that is printed; None: all; ``"auto"``: as many as ``table`` describes. All levels are
            recorded.
        device: device for the inputs of a real execution; default: the model's device.
        dtypes: dtype of all sizes, a list with one per size, or a dict by argument name; ``"long"`` stands for
            ``torch.long``. Default: the dtype of the first floating point parameter.
        execution: ``"shape"``: on shapes only; ``"real"``: compute; ``"auto"``: on shapes, with a fallback to real
            execution. ``stats.execution`` is the one that ran, ``stats.fallback_reason`` the reason of a fallback.
        latency: also run the model for real and time every call: ``measure_latency()`` with its defaults.

    Raises:
        InputError: an argument is unusable.
        ForwardError: the forward raised; ``error.partial`` holds the statistics up to that call.

    >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), (1, 2))
    >>> stats["0"].macs, stats.total_macs, stats.execution
    (16, 48, 'shape')
    """

    _live: LiveModel | None = None
    _scalings: dict[str, Scaling]

    def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
        """Return the statistics of a file for a path, else a new ``Statistics``."""
        if isinstance(model, (str, PathLike)):
            return statistics_of_file(model, *args, **options)
        return super().__new__(cls)

    @exclusive
    def __init__(
        self,
        model: nn.Module | str | PathLike[str],
        input_data: Any = None,
        *args: Any,
        batch_dim: int | None = None,
        branching: bool = True,
        depth: int | Literal["auto"] | None = "auto",
        device: torch.device | str | None = None,
        dtypes: Dtypes = None,
        execution: str = "auto",
        latency: bool = False,
        **kwargs: Any,
    ) -> None:
        options = TableOptions(branching=branching, depth=depth)
        described: dict[str, Any] = {"batch_dim": batch_dim, "device": device, "dtypes": dtypes}
        recorded = record_model(model, input_data, args, kwargs, execution=execution, **described)
        with no_collection():
            self._fill(model, recorded, batch_dim, options)
        if latency:
            self.measure_latency()

    # The signature that help() and editors show; ``__new__`` would hide it.
    __signature__ = inspect.Signature(list(inspect.signature(__init__).parameters.values())[1:])

    def _fill(
        self, called: Any, recorded: Recorded, batch_dim: int | None, options: TableOptions | None = None
    ) -> None:
        """Fill in the recorded facts. Raise ``ForwardError`` if the forward raised."""
        _, recording = recorded
        ran: dict[str, Any] = {"execution": recording.execution, "fallback_reason": recording.fallback_reason}
        super().__init__(recording.root, **ran, batch_dim=batch_dim, options=options)
        self._scalings = {}
        self._predicted_on: DeviceSpec | torch.device | str | None = None
        self._live = live_model(called, recorded, self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None, "_scalings": {}}

    def _live_for(self, name: str) -> LiveModel:
        """Return the live model. Raise ``NotLiveError`` if there is none: after pickling, or without an input."""
        if self._live is None:
            raise NotLiveError(self._not_live(name))
        return self._live

    def _tree_for(self, name: str, error: type[ModelSummaryError] = InputError) -> LiveModel:
        """Return the live model. Raise ``error`` if a first forward makes a part of it, or a module contains itself."""
        live = self._live_for(name)
        if live.uninitialized is not None:
            raise error(f"{name}: {live.uninitialized}; run the model once")
        if (cycle := cycle_in(live.model)) is not None:
            raise error(
                f"{name} needs a tree of modules, but {cycle!r} is a module around it, so torch's state_dict(), to() "
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
        measurement = measure_latency(self._live_for("measuring"), self.root, x, **options)
        measurement.rows.show(self.root)
        self.latency_overhead = measurement.overhead
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

        live = self._live_for("listing kernels")
        plan = latency.time_plan(backward, optimizer, options, self.root, device)
        return latency.kernels(live, self.root, device, mode, plan, options)

    @exclusive
    def calibrate(
        self,
        device: torch.device | str | None = None,
        backward: bool = False,
        optimizer: OptimizerLike | None = None,
        *,
        grid: bool = False,
        again: bool = False,
        forget: bool = False,
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
            forget: first delete all that was measured on this device, number of threads and version of torch, also for
                other models, such as times from a busy machine.

        Returns:
            Counts, and ``cpu_share``: below 0.9, the times are too long; measure again on a quiet machine.

        Raises:
            InputError: an argument is unusable.
        """
        from modelsummary import latency

        live = self._live_for("calibrating")
        plan = latency.time_plan(backward, optimizer, options, self.root, device)
        return latency.calibrate(live, device, plan, grid=grid, again=again, forget=forget)

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
        ``split(by="latency")`` uses them if nothing was measured. The result has them, too:
        ``split(by=estimate)`` uses it whatever was estimated later.

        Args:
            device: a ``DeviceSpec``; the name of an accelerator, such as ``"A100"``; or this machine, as measured by
                ``calibrate``: ``"cpu"`` (default) or ``"cuda"``.
            mode: ``"eager"``, or ``"compiled"`` as by ``torch.compile``.
            backward: include the backward of the loss.
            optimizer: name, class or instance of an optimizer whose step is included, as for ``memory``. Default: no
                optimizer.
            **options: see ``modelsummary.latency.TimeOptions``: ``dtype``, ``autocast``, ``loss``, ``checkpoint``,
                ``attention``.

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
            dtype = latency.bound_dtype(device, mode, backward, optimizer, options)
            return super().estimate_latency(device, dtype=dtype)  # type: ignore[arg-type]
        estimate = latency.predicted(self._live, self.root, device, mode, backward, optimizer, options)
        latency.show(self.root, estimate.columns)
        self._predicted_on = device
        return estimate

    # ----------------------------------------------------------------------------------------- findings

    @exclusive
    def check(
        self,
        device: DeviceSpec | torch.device | str = "A100",
        *,
        select: Sequence[str] | str | None = None,
        ignore: Sequence[str] | str | None = None,
        **options: Unpack[TimeOptions],
    ) -> Findings:
        """Return what is wrong with the model: where, what it costs, and what to do.

        One step is observed on shapes: forward and backward, or the forward alone if no parameter is trained. Modules
        keep their training mode. Rules about time leave out what costs less than a thousandth of the step. The column
        ``"findings"`` of the rows has the codes.

        Args:
            device: device of the predicted times, as for ``estimate_latency``.
            select, ignore: rules, by code (``"G101"``), beginning of a code (``"G"``) or name. Default: all, except
                ``"B"``, which compile the model and run it for real, or plan with it.
            **options: see ``modelsummary.latency.TimeOptions``; ``loss`` is what the parameters are trained on.

        Returns:
            Findings that print as a table; ``to_json()``, ``to_sarif()`` and ``to_pandas()`` write them.

        Raises:
            InputError: an argument is unusable.
            StepError: the loss raised, or the forward also without gradients.

        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> model.spare = nn.Parameter(torch.ones(4))
        >>> [(finding.rule, finding.what) for finding in Statistics(model, (2, 8)).check(select="G")]
        [('parameter-never-used', 'spare: trained, but never used')]
        """
        from modelsummary.findings import check_model

        live = self._tree_for("a check")
        asked = device, options, select, ignore, self.fallback_reason
        return check_model(live, self.root, *asked, split=self.split, make_plan=self.parallel_plan)

    # ------------------------------------------------------------------------------------------- memory

    @exclusive
    def memory(
        self,
        mode: str = "train",
        optimizer: OptimizerLike | None = None,
        dtype: torch.dtype | None = None,
        device: DeviceSpec | torch.device | str | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        checkpoint: Mapping[str, Sequence[str]] | Sequence[str] | str | None = None,
        *,
        offload: Mapping[str, Sequence[int]] | None = None,
        autocast: torch.dtype | None = None,
        accumulates: bool = False,
        block_bytes: int | None = None,
        workspaces: bool = True,
        reserve: bool | int | str = False,
        expandable_segments: bool = False,
    ) -> MemoryEstimate:
        """Predict the memory of one step in bytes without running it: nothing is computed or allocated.

        The forward, the backward and the optimizer's step run on tensors without data, and every storage is followed
        until it is freed. A training step that is not compiled fills ``activation_bytes``, ``self_activation_bytes``
        and ``peak_bytes`` of every row. The estimate counts the storages of tensors, and the workspaces of operators if
        ``calibrate`` measured them on this machine. Modules keep their training mode.

        Args:
            mode: ``"train"``; ``"compiled"``: a training step of ``torch.compile(model)``; or ``"inference"``: a
                forward without gradients.
            optimizer, dtype, device, loss, checkpoint, offload, autocast, accumulates, block_bytes, workspaces: see
                ``modelsummary.memory.step_options.StepOptions``.
            reserve: True: also predict what torch's allocator takes from a CUDA device during the first three steps
                (``estimate.reserve``). Bytes, or text such as ``"24GB"``: the device has no more for it.
            expandable_segments: the allocator runs with ``PYTORCH_ALLOC_CONF=expandable_segments:True``.

        Raises:
            InputError: an argument is unusable, no result requires a gradient, or the reserve of a device is asked for
                that is not a CUDA device.
            StepError: the step raised; its ``phase`` says where, and the message what to do.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> estimate = Statistics(nn.Linear(2, 8), (1, 2)).memory(optimizer="sgd")
        >>> estimate.params, estimate.grads, estimate.inputs
        (96, 96, 8)
        """
        options = StepOptions(optimizer=optimizer, dtype=dtype, device=device, loss=loss, checkpoint=checkpoint)
        options |= {"offload": offload, "autocast": autocast, "accumulates": accumulates, "block_bytes": block_bytes}
        options |= {"workspaces": workspaces}
        allocator = allocator_settings(reserve, expandable_segments=expandable_segments)
        plan = step_plan(mode, options, self.root)
        return _memory.predict(self._live_for("predicting memory"), self.root, plan, allocator)

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
        return _memory.measure(self._live_for("measuring memory"), step_plan(mode, options, self.root))

    @exclusive
    def memory_plan(
        self,
        budget_bytes: int | str,
        *,
        granularity: str = "operator",
        by: str | None = None,
        **options: Unpack[StepOptions],
    ) -> CheckpointPlan:
        """Choose what a training step runs again instead of keeping it, so that it fits a budget at the least cost.

        Candidates are the repeated blocks of the model, and in each the operators whose results it keeps nevertheless.
        The peak of the plan is simulated. Predicted seconds are what an eager step takes longer: torch's selective
        checkpoints run Python code at each operator, so whole blocks are better where a step waits for its host.

        Args:
            budget_bytes: largest allowed peak: an integer, or text such as ``"24GB"``.
            granularity: ``"operator"``, or ``"block"``: blocks run again as a whole.
            by: what recomputation costs: ``"latency"``, predicted seconds on ``device``, else on the one of the last
                ``estimate_latency``; or ``"macs"``. Default: ``"latency"`` if ``device`` names an accelerator.
            **options: as for ``memory``, without ``checkpoint``; ``device`` may also name an accelerator, such as
                ``"A100"``, whose seconds count. ``offload=True``: what a block keeps may move to the host, which takes
                the time of the link.

        Returns:
            The plan, with ``apply(model)`` and ``to_code()``; ``memory(checkpoint=plan.checkpoint)`` predicts its step.

        Raises:
            InputError: an argument is unusable, or recomputing all blocks is not enough.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> layers = (nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4))
        >>> stats = Statistics(nn.Sequential(*layers).to("meta"), torch.empty(32, 1024, 512, device="meta"))
        >>> plans = [stats.memory_plan("4GB", device="A100", granularity=name) for name in ("operator", "block")]
        >>> plans[0].seconds < plans[1].seconds
        True
        """
        live, options = self._live_for("predicting memory"), self._timed_on(by, options)
        return _memory.memory_plan(live, self.root, budget_bytes, granularity, by, options)

    def _timed_on(self, by: str | None, options: StepOptions) -> StepOptions:
        """Return options with the device of the last prediction, if seconds count and no other is named."""
        last = by == "latency" and options.get("device") is None and self._predicted_on is not None
        return {**options, "device": self._predicted_on} if last else options

    @exclusive
    def memory_curve(
        self, points: int = 20, *, granularity: str = "operator", by: str | None = None, **options: Unpack[StepOptions]
    ) -> MemoryCurve:
        """Return the plans of a training step from the one without checkpoints down to the least peak.

        Plans that another one beats in both peak and cost are left out. Peaks follow from simulated steps with a
        checkpoint around one of each kind of block. The plan in the middle and the one with the least peak are
        simulated; if either differs from its prediction, all plans are simulated.

        Args:
            points: number of plans to choose, with predicted peaks that are evenly spread.
            granularity, by: as for ``memory_plan``.
            **options: as for ``memory_plan``.

        Returns:
            The plans, which print as a table and can be drawn by ``plot()``.

        Raises:
            InputError: an argument is unusable.
        """
        live, options = self._live_for("predicting memory"), self._timed_on(by, options)
        return _memory.memory_curve(live, self.root, points, granularity, by, options)

    def suggest_checkpoint(
        self, budget_bytes: int | str, *, by: str = "macs", **options: Unpack[StepOptions]
    ) -> CheckpointPlan:
        """Choose whole modules to checkpoint: ``memory_plan`` with ``granularity="block"``.

        Args:
            budget_bytes, by: as for ``memory_plan``.
            **options: as for ``memory``, without ``checkpoint``; ``device`` as for ``memory_plan``.

        Returns:
            The plan, for ``apply_checkpoint(model, plan.fqns)``.

        Raises:
            InputError: an argument is unusable, or recomputing all blocks is not enough.
        """
        return self.memory_plan(budget_bytes, granularity="block", by=by, **options)

    @exclusive
    def max_batch_size(
        self,
        memory_bytes: int | str,
        mode: str = "train",
        *,
        expandable_segments: bool = False,
        **options: Unpack[StepOptions],
    ) -> int:
        """Find the largest batch size that fits; 0 if the smallest one does not.

        On CUDA a batch fits if torch's allocator finds room for the first three steps, as ``memory(reserve=...)``
        predicts it; elsewhere if the peak does.

        Args:
            memory_bytes: memory of the device: an integer, or text such as ``"24GB"``. On CUDA: what is left for the
                allocator, without the context and other processes.
            mode, expandable_segments: as for ``memory``.
            **options: as for ``memory``.

        Raises:
            InputError: an argument is unusable, no input has a batch dimension, or the forward needs values.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Linear(2, 8), (1, 2)).max_batch_size(1_000_000, "inference")
        24997
        """
        live = self._live_for("predicting memory")
        plan = step_plan(mode, options, self.root)
        return _memory.max_batch_size(live, memory_bytes, plan, expandable_segments=expandable_segments)

    @exclusive
    def fits_on(
        self,
        devices: Sequence[DeviceSpec | str] | None = None,
        *,
        backward: bool = True,
        optimizer: OptimizerLike | None = None,
        **options: Unpack[TimeOptions],
    ) -> Fits:
        """Return which devices have the memory for a step, and how long it takes on each of them.

        What a step needs is what torch's CUDA allocator reserves, as ``memory(reserve=True)`` predicts it, and 0.5 GiB
        for CUDA's context; ``estimate_latency`` predicts the times, in eager mode.

        Args:
            devices: names of accelerators, or ``DeviceSpec``. Default: all GPUs of the table.
            backward: True: a training step; False: a forward.
            optimizer: as for ``memory``.
            **options: as for ``estimate_latency``.

        Returns:
            One ``DeviceFit`` per device, the smallest memory first, which print as a table.

        Raises:
            InputError: an argument is unusable.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(16))), (64, 8192))
        >>> fits = stats.fits_on(["RTX 4080", "RTX 4090", "A100"], optimizer="adamw")  # 16 bytes for each parameter
        >>> [(fit.device, fit.fits) for fit in fits]
        [('RTX 4080', False), ('RTX 4090', True), ('A100 80GB', True)]
        """
        from modelsummary.latency.fits import fits_of

        return fits_of(self._live_for("fits_on"), self.root, devices, backward, optimizer, options)

    # ------------------------------------------------------------------------------------------- values

    def watch(self) -> Watching:
        """Return a context in which the values that flow through the model are watched, whatever code runs it.

        ``with`` returns ``Values``: statistics of the results of all calls, of their gradients, and of parameters at
        the steps of optimizers; and ``first_bad()``, the operator that made the first NaN or Inf. No tensor is kept,
        and a compiled model runs eagerly. An accelerator is waited for once per step.

        Raises:
            NotLiveError: the statistics have no live model.
            InputError: the model is on meta, where nothing is computed.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> class Root(nn.Module):
        ...     def forward(self, x):
        ...         return torch.sqrt(x * 0)
        >>> model = nn.Sequential(nn.Linear(2, 4), Root())
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> with Statistics(model, (1, 2)).watch() as values:
        ...     for _ in range(2):
        ...         model(torch.ones(8, 2)).sum().backward()
        ...         optimizer.step()
        >>> bad = values.first_bad()
        >>> bad.operator, bad.node, bad.key
        ('aten.div', 'SqrtBackward0', ('1', 0))
        """
        from modelsummary.values import Watching

        live = self._live_for("watching values")
        if any(tensor.is_meta for tensor in tensors_of_modules(modules_of(live.model))):
            raise InputError("watching values needs values, but the model has tensors on meta; load its weights first")
        return Watching(live.model)

    @exclusive
    def values(
        self, batch: Any = None, *args: Any, backward: bool = True, loss: Callable[[Any], Tensor] | None = None
    ) -> Values:
        """Run a forward and its backward for real and return the values that flowed; the model stays untouched.

        Fills the columns ``"output_mean"``, ``"gradient_norm"`` ... of the rows.

        Args:
            batch: input with values, such as a batch that was saved; default: the recorded input, with random values
                for sizes.
            args: further positional arguments of the forward.
            backward: also run the backward, if a result requires a gradient.
            loss: function from the model's result to the scalar that the backward begins with; default: as for
                ``memory``.

        Raises:
            InputError: an argument is unusable, or the model has no values.
            StepError: the step raised.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> values = Statistics(nn.Linear(2, 3), (1, 2)).values(torch.zeros(4, 2))
        >>> values.calls[0].gradient.mean, values.parameters[0].gradient.zeros
        (1.0, 1.0)
        """
        from modelsummary.values import step_values

        values = step_values(self._live_for("reading values"), batch, args, backward=backward, loss=loss)
        values.show(self)
        return values

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
        cluster: Cluster | None = None,
        weights: str | None = None,
        cache_dtype: torch.dtype | None = None,
        expert: int = 1,
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
            cluster: the nodes and links of ``tensor`` devices, with their device and its memory, instead of ``device``.
                Default: nodes of eight devices, with the network of ``Cluster``.
            weights: how a server keeps the weights of products: ``"fp8"``, whose products compute in 8-bit floats;
                ``"int8"``, ``"int4"`` (AWQ, GPTQ), ``"mxfp4"`` or ``"nvfp4"``, which are dequantised. Tables of
                embeddings, and heads of their shape, stay in ``dtype``. Default: ``dtype``.
            cache_dtype: dtype in which a server keeps what attention reads of the cache, such as
                ``torch.float8_e4m3fn``. Default: as the forward makes it.
            expert: number of devices over which ``parallel_plan`` divides the experts of a mixture. Each has ``batch``
                requests of its own, and the rest of the model whole; tokens are sent to the experts of other devices,
                evenly to all. Figures are for one of these devices. Not together with ``tensor``.

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
        options = ServingOptions(
            *(context, batch, tensor, dtype, cache, mode, memory_bytes, batches, calibrate, cluster),
            *(weights, cache_dtype, expert),
        )
        return estimate_serving(live, self.root, device, options)

    # ------------------------------------------------------------------------------------------------------ formulas

    @exclusive
    def formula(self, figure: str = "macs", layer: str = "", *, dimensions: DimensionNames | None = None) -> Any:
        """Return a figure as a sympy expression of the sizes of the inputs, such as ``32*batch*sequence``.

        The formula is found by runs on shapes, up to some 320 times the recorded size, and checked at six other sizes.
        Beyond the largest size that the model ran with, it is an extrapolation: ``at`` knows that size. It is a
        polynomial of the sizes, of rounded sizes (``floor((height + 1)/2)``), or ``Piecewise`` of these. The first
        formula takes some tens of runs; others share them. ``activation_bytes`` runs training steps as ``memory()``.

        Args:
            figure: a name in ``modelsummary.formulas.FIGURES``: ``"macs"``, ``"output_bytes"``, ``"params"`` ...
            layer: FQN of a layer, whose first call counts, as in ``stats[layer]``; ``""`` is the model.
            dimensions: input -> position in its shape -> name, as ``dynamic_axes`` of ``torch.onnx.export``; positions
                of the same name change together. Default: ``batch`` is the first; ``sequence``, ``length``, ``height``,
                ``width`` or ``frames`` the others that the model accepts at other sizes; equal sizes change together.

        Raises:
            InputError: an argument is unusable.
            LayerNotFoundError: the model has no such layer.
            FormulaError: no polynomial fits, or values decide what the forward does; says why.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Linear(4, 8), (2, 16, 4))
        >>> stats.formula("macs"), stats.formula("output_bytes", dimensions={"input": {0: "n"}})
        (32*batch*sequence, 512*n)
        """
        return self._scaling(dimensions).formula(figure, layer)

    @exclusive
    def at(self, *, layer: str = "", dimensions: DimensionNames | None = None, **sizes: int) -> FiguresAt:
        """Return the figures for other sizes of the inputs, such as ``at(batch=8, sequence=4096)``.

        One run on shapes with these sizes has all of them. Where a size is more than 320 times the recorded one, or the
        model does not run with it, figures are evaluated by their formulas; a size that is beyond the largest that was
        run is named when the result is printed, and by ``beyond()``.

        Args:
            layer, dimensions: as for ``formula``.
            **sizes: name of a dimension -> size; default: as recorded.

        Raises:
            InputError: a dimension is unknown, or a size is unusable.
            FormulaError: as for ``formula``, when a figure is read.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Linear(4, 8), (2, 16, 4)).at(batch=1000).macs
        512000
        """
        return self._scaling(dimensions).at(sizes, layer)

    @exclusive
    def flops_per_token(
        self,
        tokens: int | None = None,
        *,
        loss: Callable[[Any], Tensor] | None = None,
        dimensions: DimensionNames | None = None,
        **sizes: int,
    ) -> FlopsPerToken:
        """Count the model FLOPs per token of a forward, and of a forward with its backward, without recomputation.

        They are given dense, and without the attention scores that causal masks, windows and padding hide; with the
        active and the total parameters of a mixture of experts.

        Args:
            tokens: number of tokens in a call. Default: the elements of the first two-dimensional integer input; for a
                model without one, the samples of the batch.
            loss: as for ``memory``.
            dimensions: as for ``formula``.
            **sizes: other sizes of the inputs, as for ``at``.

        Raises:
            InputError: an argument is unusable, or no result requires a gradient.
            StepError: the model's own forward, the loss or the backward raised.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> Statistics(nn.Linear(4, 8), (2, 4)).flops_per_token().training  # the input requires no gradient
        128.0
        """
        from modelsummary.formulas.tokens import flops_per_token

        live = self._live_for("counting FLOPs per token")
        call = live.call if not sizes else self._scaling(dimensions).call_at(sizes)
        return flops_per_token(live, self.root, call, tokens, loss)

    def _scaling(self, names: DimensionNames | None) -> Scaling:
        """Return the formulas for these names of dimensions, with the runs that they made so far."""
        from modelsummary.formulas import Scaling

        live = self._live_for("a formula")
        if repr(names) not in self._scalings:
            self._scalings[repr(names)] = Scaling(live, self.root, names, self.fallback_reason)
        return self._scalings[repr(names)]

    # -------------------------------------------------------------------------------------------------------- graphs

    @exclusive
    def graph(
        self, depth: int | EllipsisType | None = ..., *, stages: Stages | None = None, fold: bool | None = None
    ) -> Graph:
        """Return the dataflow graph: the modules and functions that pass tensors to each other.

        The forward is recorded again, as for ``split``. Edges have the shapes of the tensors; nodes have parameters and
        multiply-adds. A module whose calls are shown one by one is a group.

        Args:
            depth: levels of nested calls that are shown: 1 shows the modules that the model calls; None: all. Default:
                as many as give at most 60 nodes. Containers that are never called, such as ``nn.ModuleList``, do not
                count as a level.
            stages: result of ``split`` on this model; nodes get the colours of their stages, and modules that are cut
                are shown as groups.
            fold: draw equal consecutive modules as one, with their number. None: if the graph has more than 60 nodes.

        Raises:
            InputError: an argument is unusable, or the statistics have no live model with an input.
            SplitError: a parameter is not initialised yet, or the stages were pickled.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), (1, 2))
        >>> [node.name for node in stats.graph().nodes]
        ['input', '0', '1', '2', 'output']
        """
        from modelsummary.statistics.live_dataflow import dataflow

        return dataflow(self._live_for("a graph of the dataflow"), self.root, depth, stages, fold)

    @exclusive
    def _dataflow(self, stages: Stages | None = None) -> Dataflow:
        from modelsummary.statistics.live_dataflow import explored_dataflow

        return super()._dataflow(stages) if self._live is None else explored_dataflow(self._live, self.root, stages)

    def graph_module(
        self,
        *,
        trace_act_ckpt: bool = False,
        bias_addition_split: bool = False,
        device: torch.device | str | None = None,
    ) -> GraphModule:
        """Return the model as a ``torch.fx`` graph, traced and profiled with the recorded input.

        ``node.meta["info"]`` holds the facts about a node, ``node.meta["layer_info"]`` the row of the call that it is
        or belongs to. ``nodes_of`` returns the nodes of a module.

        Args:
            trace_act_ckpt, bias_addition_split: as for ``symbolic_trace``.
            device: device whose kernels are assumed, as for ``symbolic_profile``.

        Raises:
            InputError: the statistics have no live model with an input.
            TraceError: the forward cannot be written as a graph; the message gives the reason.
        """
        from modelsummary.fx.layer_nodes import graph_module

        options: dict[str, Any] = {"trace_act_ckpt": trace_act_ckpt, "bias_addition_split": bias_addition_split}
        return graph_module(self._live_for("a graph module"), self.calls, **options, device=device)

    def nodes_of(self, graph: GraphModule, fqn: str) -> list[Node]:
        """Return the nodes of a graph of this model that belong to a module or to modules in it.

        Args:
            graph: result of ``graph_module``.
            fqn: name of the module.

        Raises:
            LayerNotFoundError: the model has no such module.
        """
        from modelsummary.fx.layer_nodes import nodes_of

        self.calls(fqn)
        return nodes_of(graph, fqn)

    # -------------------------------------------------------------------------------------------- stages

    @exclusive
    def split(
        self,
        n_stages: int,
        by: By = "macs",
        *,
        max_memory: int | str | Sequence[int | str] | None = None,
        boundaries: Sequence[str] | None = None,
        max_crossing_bytes: int | None = None,
        single_tensor_cuts: bool = False,
    ) -> Stages:
        """Cut the model into stages that run one after the other and together compute exactly the model.

        Each stage is an ``nn.Sequential`` that holds the model's own modules, parameters and buffers under their own
        names; the model is not changed. The cuts minimise the cost of the most expensive stage. Among equal maxima,
        they prefer the shorter simulated step, then the fewest bytes crossing.

        Args:
            n_stages: number of stages.
            by: the cost to balance: ``"macs"``, ``"flops"``, ``"params"``, ``"param_bytes"``, ``"activation_bytes"``,
                ``"latency"`` (in seconds, once measured or estimated); a result of ``estimate_latency``; a dict FQN ->
                cost of the module with everything in it; or a function that returns the cost of a leaf from its
                ``LayerInfo``.
            max_memory: bytes that a stage may hold in parameters, buffers and results of its calls: one number, text
                such as ``"24GB"``, or one of these per stage.
            boundaries: FQNs of modules with which a stage begins.
            max_crossing_bytes: most bytes that may cross a cut, for the recorded batch.
            single_tensor_cuts: cut only where a single tensor crosses.

        Raises:
            InputError: an argument is unusable.
            SplitError: the model cannot be split like that; the message gives the reason and the possible numbers of
                stages.

        >>> stats = Statistics(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)), (1, 2))
        >>> [[name for name, _ in stage.named_parameters()] for stage in stats.split(2)]
        [['0.weight', '0.bias'], ['2.weight', '2.bias']]
        """
        from modelsummary.split import Wishes

        wishes = Wishes(n_stages, _in_bytes(max_memory), boundaries, max_crossing_bytes, single_tensor_cuts)
        with self._splitting() as splitter:
            return splitter.split(by, wishes)

    @exclusive
    def simulate(
        self,
        plan: Plan,
        cluster: Cluster,
        global_batch: int,
        *,
        sequence_length: int | None = None,
        recipe: Recipe | None = None,
    ) -> StepEstimate:
        """Simulate a training step that is spread over a cluster: its time by cause, and the memory of each rank.

        One rank's share of the model runs on shapes, equal blocks once; its kernels, collectives and bytes make the
        stages of the pipeline, whose schedule is simulated.

        Args:
            plan: how the step is spread over devices.
            cluster: the devices.
            global_batch: samples in a step.
            sequence_length: tokens in a sample. Default: the second dimension of the recorded input.
            recipe: dtypes, optimizer, loss and engine. Default: ``Recipe()``: bfloat16, AdamW.

        Raises:
            InputError: model, plan, batch and cluster do not fit together.
            StepError: the forward, the loss or the backward raised.

        >>> from modelsummary.cluster import Cluster, Plan
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> plan = Plan(pipeline=2, micro_batch=4)
        >>> step = Statistics(model, (1, 64)).simulate(plan, Cluster("A100"), global_batch=16)
        >>> step.microbatches, step.memory[0].parameters  # two layers in bfloat16
        (4, 16640)
        """
        from modelsummary.cluster.plan import check_plan
        from modelsummary.cluster.step import simulator_of

        check_plan(plan)
        live, make = self._tree_for("simulating a step"), self.parallel_plan
        return simulator_of(live, self.root, cluster, global_batch, sequence_length, recipe, make).simulate(plan)

    @exclusive
    def plan(
        self,
        cluster: Cluster,
        global_batch: int,
        *,
        sequence_length: int | None = None,
        recipe: Recipe | None = None,
        **options: Any,
    ) -> Plans:
        """Search for the best plans to train the model on a cluster.

        Plans that do not fit into memory are left out. The others are ranked by the time of their step. A plan is
        simulated only if a bound of its time lets it be among the best.

        Args:
            cluster: the devices.
            global_batch: samples in a step.
            sequence_length: tokens in a sample. Default: the second dimension of the recorded input.
            recipe: dtypes, optimizer, loss and engine. Default: ``Recipe()``: bfloat16, AdamW.
            **options: what is searched, and how many plans are returned; see ``modelsummary.cluster.SearchOptions``.

        Returns:
            The plans, fastest first; each is a ``StepEstimate``.

        Raises:
            InputError: an argument is unusable, or nothing fits.

        >>> from modelsummary.cluster import Cluster
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        >>> plans = Statistics(model, (1, 64)).plan(Cluster("A100", devices_per_node=2), global_batch=8)
        >>> plans[0].fits, plans[0].plan.devices <= 2
        (True, True)
        """
        from modelsummary.cluster.search import checked_options, find_plans
        from modelsummary.cluster.step import simulator_of

        searched = checked_options(options)
        live, make = self._tree_for("planning"), self.parallel_plan
        simulator = simulator_of(live, self.root, cluster, global_batch, sequence_length, recipe, make)
        return find_plans(simulator, searched)

    @exclusive
    def parallel_plan(
        self,
        tensor: int = 1,
        data: int = 1,
        shard: int = 1,
        pipeline: int = 1,
        expert: int = 1,
        *,
        sequence: bool = False,
        loss_parallel: bool = False,
        checkpoint: CheckpointPlan | Mapping[str, Sequence[str]] | Sequence[str] | str | int | None = None,
        precision: torch.dtype | None = None,
        sharded: str | int | None = None,
        offload: bool = False,
        context: int = 1,
        dispatch: str = "all_reduce",
    ) -> ParallelPlan:
        """Derive from what the forward does how to spread the model over the ranks of a device mesh.

        A ``Linear`` whose results reach another one only through element-wise work, head reshapes and attention is
        split by columns, that last one by rows; embeddings of tokens and output heads by the vocabulary. Repeated
        blocks are the units of FSDP, and stages begin with one. ``print(plan)`` shows it, ``plan.to_code()`` writes
        it, ``plan.apply(model, mesh)`` does it, ``plan.memory(rank)`` predicts the memory of a rank.

        Args:
            tensor: ranks over which layers are split.
            data: copies of the model.
            shard: ranks of FSDP over which parameters, gradients and optimizer state of each copy are sharded.
            pipeline: stages, balanced by multiply-adds.
            expert: ranks over which the experts of mixtures are divided by their number; each runs its own experts.
            sequence: between layers that are split, shard activations along the sequence over the ``tensor`` ranks.
            loss_parallel: keep the logits sharded by the vocabulary, for ``loss_parallel()`` of torch.
            checkpoint: FQNs of modules to run under activation checkpointing; ``"every"``: all repeated blocks; an
                integer: that many blocks of each stage; or a memory plan of the whole model without ``offload``, or
                its ``checkpoint``, whose names of results hold where a rank calls the same operators.
            precision: dtype of parameters in FSDP's forward and backward; gradients are reduced in float32.
            sharded: what the ranks of ``shard`` hold parts of, each with those before it: ``"optimizer"`` states,
                ``"gradients"``, ``"parameters"``; 1, 2 and 3, as in ZeRO, are accepted. Default: parameters: gathered
                units are freed after their forward, and gathered again in the backward. With the others they stay
                gathered until their backward; torch shards the gradients with the states.
            offload: keep parameters, gradients and optimizer state on the CPU.
            context: ranks that have the same batch, and each a part of its tokens; attention is torch's ring over
                them, inside of ``plan.context_parallel``.
            dispatch: how tokens meet the experts of other ranks, for ``expert > 1``. ``"all_reduce"``: all ranks of
                ``expert`` have the same tokens, and sum what their experts return. ``"all_to_all"``, the default of
                ``cluster.Plan``: they have different tokens, which they send to their experts and back; they are
                ranks of ``shard``, or of ``data`` without shards.

        >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        >>> plan = Statistics(mlp, (1, 8)).parallel_plan(tensor=2)
        >>> [layer.style for layer in plan.layers]
        ['ColwiseParallel', 'RowwiseParallel']

        Raises:
            InputError: an argument is unusable, or does not divide heads, widths or experts; says what does.
            SplitError: the model cannot be cut into as many stages.
        """
        from modelsummary.parallel.make import make_plan

        return make_plan(
            self._tree_for("a parallel plan"),
            self.root,
            tensor=tensor,
            data=data,
            shard=shard,
            pipeline=pipeline,
            expert=expert,
            sequence=sequence,
            loss_parallel=loss_parallel,
            split=self._split_around,
            checkpoint=checkpoint,
            precision=None if precision is None else dtype_named(precision, "precision", end=" or None"),
            sharded=sharded,
            offload=offload,
            context=context,
            dispatch=dispatch,
        )

    def _split_around(self, n_stages: int, whole: frozenset[str]) -> Stages:
        with self._splitting() as splitter:
            return splitter.split_around(n_stages, whole)

    @contextmanager
    def _splitting(self) -> Iterator[Splitter]:
        """Return a context with the splitter of the model, which keeps its records while the model is unchanged."""
        from modelsummary.split.splitter import Splitter

        if self._live is None:
            raise SplitError(
                "splitting needs the live model and an input: Statistics(model, input_data) that was not pickled"
            )
        live = self._tree_for("a split", SplitError)
        splitter = live.kept("splitter").get("splitter") or Splitter(live, list(self.root.walk()))
        try:
            yield splitter
        finally:  # its own runs may count as changes: they restore tensors by writing
            live.kept("splitter")["splitter"] = splitter


def measure_memory(
    model: nn.Module, input_data: Any, mode: str = "train", **options: Unpack[StepOptions]
) -> MemoryMeasurement:
    """Measure the memory of a real step of ``model`` beside its prediction: ``Statistics(...).measure_memory(...)``.

    Args:
        model, input_data: as for ``Statistics``.
        mode: as for ``Statistics.memory``.
        **options: as for ``Statistics.memory``.

    Raises:
        InputError: an argument is unusable, or the model has no values.
    """
    return Statistics(model, input_data).measure_memory(mode, **options)


ModelStatistics._of_live = frozenset(name for name in dir(Statistics) if name[0] != "_") - set(dir(ModelStatistics))


def as_live(stats: ModelStatistics, name: str) -> Statistics:
    """Return ``stats`` if they have a live model. Raise ``NotLiveError`` if they are data only."""
    if not isinstance(stats, Statistics):
        raise NotLiveError(stats._not_live(name))
    return stats
