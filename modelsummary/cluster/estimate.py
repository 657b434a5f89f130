"""``StepEstimate``: what a simulated training step takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from modelsummary.cluster.applying import Applier
from modelsummary.cluster.memory import RankMemory, RankMoments, blocks_of
from modelsummary.cluster.pictures import stacked_bars, write_trace
from modelsummary.cluster.pipeline import StepItems
from modelsummary.cluster.plan import Plan
from modelsummary.cluster.published_errors import Case, PublishedErrors, error_of
from modelsummary.cluster.topology import Cluster, check_cluster
from modelsummary.errors import InputError, is_number
from modelsummary.memory.memory_snapshot import write_snapshot
from modelsummary.memory.replay import MemoryBlock, replayed
from modelsummary.parallel.plan import with_estimate
from modelsummary.split.schedule import Simulation
from modelsummary.tables import Printed, Report
from modelsummary.units import duration, number_of, percent, scaled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch.distributed.device_mesh import DeviceMesh

    from modelsummary.cluster.step import StepSimulator
    from modelsummary.parallel import ParallelPlan

__all__ = ["CAUSES", "NOT_ALLOCATED", "StepEstimate"]

NOT_ALLOCATED = "CUDA's context and what the allocator reserves in addition"
_LOADED = "the estimate was loaded without its model; call plan or simulate in this process"
CAUSES = (
    "compute",
    "recomputation",
    "accumulation",
    "host",
    "tensor",
    "context",
    "expert",
    "fsdp",
    "pipeline",
    "bubble",
    "gradients",
    "optimizer",
)


@dataclass(frozen=True, repr=False)
class StepEstimate(Printed):
    """The time and memory of a training step; ``print`` shows it as a table.

    Attributes:
        plan: how the step is spread over devices.
        cluster: the devices.
        global_batch: samples in a step.
        sequence_length: tokens in a sample; 0 if samples are not sequences.
        microbatches: micro-batches of one copy.
        seconds_by_cause: seconds by cause, on the rank that computes longest: kernels (``compute``,
            ``recomputation``, ``accumulation`` of gradients over micro-batches), waiting for the ``host`` that
            dispatches them, for collectives, or slowed down by them and by FSDP's copies (``tensor``, ``context``,
            ``expert``, ``fsdp``), waiting for messages between stages (``pipeline``), for other stages (``bubble``),
            for the reduction of gradients, and the optimizer. They add up to the step.
        moments: bytes on each rank of the pipeline by category, at the moments at which it may be fullest.
        model_flops: floating point operations of products in forward and backward, dense.
        hardware_flops: the same with what is recomputed.
        peak_flops: peak of one device in the dtype of the products.
        items: what the step consists of: seconds of each stage of the pipeline for one micro-batch, and of each rank
            after its last backward.
        uncounted_ops: operators whose work is not known -> their calls in one micro-batch. They take the time of their
            bytes, and the FLOPs, with them MFU, lack them.
        case: what decides which published runs it is compared with.
        simulator: simulates it on other clusters and applies its plan; None: it was loaded without its model.
        subject: the model, its dtype, and what it is trained with.
    """

    plan: Plan
    cluster: Cluster
    global_batch: int
    sequence_length: int
    microbatches: int
    seconds_by_cause: Mapping[str, float]
    moments: tuple[RankMoments, ...]
    model_flops: float
    hardware_flops: float
    peak_flops: float
    items: StepItems = field(repr=False, compare=False)
    uncounted_ops: Mapping[str, int] = field(default_factory=dict)
    case: Case = field(default_factory=Case)
    simulator: StepSimulator | None = field(default=None, repr=False, compare=False)
    subject: str = field(default="a model", compare=False)

    @cached_property
    def simulation(self) -> Simulation:
        """The schedule, simulated for one step, or for a part of it if it repeats itself; times in seconds."""
        return self.items.simulation

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "simulator": None}  # it holds the model

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Bytes on each rank of the pipeline by category, at its fullest moment."""
        return tuple(moments.fullest for moments in self.moments)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds_by_cause.values())

    @property
    def error(self) -> PublishedErrors:
        """The errors of such predictions on published runs that are nearest to this step."""
        return error_of(self.case, steps=self.cluster.factors.steps)

    @property
    def memory_error(self) -> PublishedErrors:
        """The errors of predicted peaks on published runs that are nearest to this step."""
        return error_of(self.case, of_peaks=True)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all devices together."""
        return self.global_batch / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices together; samples per second if samples are not sequences."""
        return self.samples_per_second * (self.sequence_length or 1)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: ``model_flops`` / (step x devices x peak)."""
        return self.model_flops / (self.step_seconds * self.plan.devices * self.peak_flops)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: with what is recomputed."""
        return self.hardware_flops / (self.step_seconds * self.plan.devices * self.peak_flops)

    @property
    def memory_bytes(self) -> int:
        """Bytes on the fullest rank."""
        return max(rank.total for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits into the memory of a device."""
        return self.memory_bytes <= self.cluster.memory_bytes

    def on(self, cluster: Cluster) -> StepEstimate:
        """Return the estimate of the same step on another cluster, such as a calibrated one.

        Raises:
            InputError: the plan does not fit the cluster, or the estimate was loaded without its model.
        """
        if self.simulator is None:
            raise InputError(_LOADED)
        check_cluster(cluster)
        return self.simulator.on(cluster).simulate(self.plan)

    def device_hours(self, tokens: float) -> float:
        """Return the hours that all devices together need for a number of tokens (samples without sequences).

        Raises:
            InputError: ``tokens`` is not a number >= 0.
        """
        if not is_number(tokens) or tokens < 0:
            raise InputError(f"tokens must be a number >= 0, got {tokens!r:.80}")
        return tokens / self.tokens_per_second * self.plan.devices / 3600

    @property
    def applier(self) -> Applier | None:
        """Makes parallel plans of the model; None if the estimate was loaded without it."""
        return None if self.simulator is None else self.simulator.applier

    @property
    def obstacle(self) -> str:
        """Why the plan cannot be applied, or the step not be run then; an empty string if it can."""
        return _LOADED if self.applier is None else self.applier.obstacle(self.plan, self.microbatches)

    @property
    def noted_obstacle(self) -> str | None:
        """The ``obstacle`` as far as it is noted already; None if the model has to be planned to tell."""
        return _LOADED if self.applier is None else self.applier.noted_obstacle(self.plan, self.microbatches)

    @property
    def applicable(self) -> bool:
        """Whether ``apply`` and ``to_code`` can train by the plan."""
        return not self.obstacle

    def parallel_plan(self) -> ParallelPlan:
        """Return what ``Statistics.parallel_plan`` returns for the same ranks, with this estimate as its ``estimate``.

        Sharded gradients, and optimizer states, are FSDP that keeps what it gathered until the backward. A precision
        that the recipe's master weights do not have is FSDP's mixed precision, over one rank where nothing is sharded.

        Raises:
            InputError: the plan has several stages per rank, sends tokens to experts, or has sequence or context
                parallelism with stages, which ``parallel_plan`` does not apply; or the recipe has products of 8 bits,
                Megatron's sequence parallelism, or gradients of another dtype than its stored weights; or the estimate
                was loaded without its model.
        """
        return with_estimate(self._applier().parallel_plan(self.plan), self)

    def to_code(self) -> str:
        """Return Python code that trains by this plan: with torch alone, or with stages of this library."""
        return self._applier().to_code(self.plan)

    def apply(self, model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
        """Shard a model in place; see ``ParallelPlan.apply``.

        Before that, trained parameters are cast to float32 if the recipe has master weights, and else to its precision;
        frozen ones to its precision.

        Raises:
            InputError: as for ``parallel_plan``; or the model or the mesh do not fit the plan.
        """
        return self.parallel_plan().apply(model, mesh, **options)

    def _applier(self) -> Applier:
        if self.applier is None:
            raise InputError(_LOADED)
        return self.applier

    def write_trace(self, path: str | PathLike[str]) -> Path:
        """Write the items of the step for Perfetto or ``chrome://tracing``: rows for ranks of the pipeline, and links.

        Counters have the bytes of each rank by category, as in ``write_memory_snapshot``. If the schedule repeats
        itself, the trace has fewer micro-batches.

        Raises:
            InputError: the file cannot be written.
        """
        return write_trace(self.items.spans(), self._blocks(), path)

    def write_memory_snapshot(self, path: str | PathLike[str]) -> Path:
        """Write the memory of the ranks over the step for pytorch.org/memory_viz, as torch's snapshots of memory.

        The devices of the snapshot are the ranks of the pipeline. Their peaks are ``memory``: what exists only while
        an action runs, such as what is gathered, is there in each action as in the fullest one. If the schedule
        repeats itself, the snapshot has fewer micro-batches. Segments are the ones that torch's allocator takes for
        these blocks; ranks allocate tensor by tensor, so theirs are more and smaller.

        Raises:
            InputError: the file cannot be written.

        >>> import pickle, tempfile
        >>> import torch
        >>> from modelsummary import Statistics
        >>> from modelsummary.cluster import Cluster, Plan
        >>> stats = Statistics(torch.nn.Linear(64, 64), (8, 64))
        >>> step = stats.simulate(Plan(micro_batch=8), Cluster("A100"), 16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     snapshot = pickle.loads(step.write_memory_snapshot(f"{folder}/step.pickle").read_bytes())
        >>> sum(segment["requested_size"] for segment in snapshot["segments"])  # weights and optimizer states stay
        58240
        """
        return write_snapshot(replayed(self._blocks()), path)

    def _blocks(self) -> Iterator[MemoryBlock]:
        """Yield what the ranks of the pipeline hold over the step."""
        end = max((span.end for span in self.items.spans()), default=0.0)
        factor = self.cluster.factors.activations
        kept_bytes = [int(factor * load.activation_bytes) for load in self.items.loads]
        for rank, (moments, actions) in enumerate(zip(self.moments, self.simulation.actions, strict=True)):
            yield from blocks_of(rank, moments, actions, kept_bytes, end)

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draw the step as one stacked bar of seconds by cause.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        return stacked_bars({self.plan.describe(): self.seconds_by_cause}, axes)

    def to_record(self) -> dict[str, Any]:
        """Return the plan and the figures as one flat dict."""
        fullest = max(self.memory, key=lambda rank: rank.total)
        plan = {name: getattr(self.plan, name) for name in self.plan.__dataclass_fields__}
        causes = {f"{name}_seconds": self.seconds_by_cause.get(name, 0.0) for name in CAUSES}
        return {
            **plan,
            "devices": self.plan.devices,
            "microbatches": self.microbatches,
            "step_seconds": self.step_seconds,
            "typical_error": self.error.typical,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            **causes,
            **{f"{name}_bytes": value for name, value in fullest.to_dict().items()},
        }

    @property
    def step(self) -> str:
        """What is trained, with what, and the samples of a step."""
        samples = number_of(self.global_batch, "sample")
        tokens = f" of {number_of(self.sequence_length, 'token')}" if self.sequence_length else ""
        return f"{self.subject}, {samples}{tokens}"

    def in_short(self) -> str:
        """Return the step, its use of the devices and the memory of the fullest rank as one line."""
        devices = f"{self.plan.devices} x {self.cluster.device.name}"
        memory = scaled(self.memory_bytes, "B")
        return (
            f"{duration(1e3 * self.step_seconds)} on {devices}, MFU {percent(self.mfu)}, {memory} on the fullest rank"
        )

    def _sureness(self) -> list[str]:
        """Return the lines of the report that say how sure it is."""
        error, of_peaks = self.error, self.memory_error
        slow, fast = (duration(1e3 * seconds) for seconds in reversed(error.range(self.step_seconds)))
        least, most = (scaled(int(nbytes), "B") for nbytes in of_peaks.range(self.memory_bytes))
        return [
            f"Four of five such steps take {fast} to {slow}{error.why_outside('too fast', 'too slow')}: "
            f"{error.describe()}",
            f"Four of five fullest ranks hold {least} to {most}{of_peaks.why_outside('too small', 'too large')}: "
            f"{of_peaks.describe()}",
        ]

    def _report(self) -> Report:
        step = self.step_seconds
        causes = [(name, self.seconds_by_cause.get(name, 0.0)) for name in CAUSES]
        rows = [[name, duration(1e3 * seconds), percent(seconds / step)] for name, seconds in causes if seconds]
        held = max(self.memory, key=lambda rank: rank.total).to_dict()
        total = scaled(held.pop("total"), "B")
        parts = ", ".join(f"{name} {scaled(nbytes, 'B')}" for name, nbytes in held.items() if nbytes)
        unit = "tokens" if self.sequence_length else "samples"
        free = self.cluster.memory_bytes - self.memory_bytes
        has = f"{'it fits into' if self.fits else 'more than'} {scaled(self.cluster.memory_bytes, 'B')}"
        above = [
            f"Training step of {self.step} on {self.plan.devices} x {self.cluster.device.name}",
            f"Plan: {self.plan.describe()}",
        ]
        below = [
            f"{self.tokens_per_second:,.0f} {unit}/s, MFU {percent(self.mfu)}, HFU {percent(self.hfu)}",
            f"Fullest rank: {total}, {has}: {parts}",
            *([f"Free: {scaled(free, 'B')}, which have to hold {NOT_ALLOCATED}"] if self.fits else []),
            *self._sureness(),
        ]
        if 1 < self.plan.pipeline > self.microbatches:
            few = number_of(self.microbatches, "micro-batch").replace("batchs", "batches")
            below.append(f"The pipeline is never full: {few} for {self.plan.pipeline} ranks; raise global_batch")
        if self.uncounted_ops:
            below.append(f"Not counted: {', '.join(sorted(self.uncounted_ops))}")
        rows.append(["step", duration(1e3 * step), "100.0%"])
        return Report(rows, ["Cause", "Time", "Share"], "lrr", above=above, below=below)
