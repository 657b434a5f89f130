"""Plans of pipeline x data parallelism with one speed and one bandwidth: the arguments of ``plan`` in version 0.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from modelsummary.errors import InputError, SplitError
from modelsummary.layer_info import LayerInfo
from modelsummary.split.schedule import SCHEDULES, simulate
from modelsummary.split.stage_facts import StageFacts, loads_of
from modelsummary.tables import Printed, Report
from modelsummary.units import format_number, percent

__all__ = ["PipelineCluster", "PipelinePlan", "PipelinePlans", "cluster_of", "make_plans"]

_PER_DEVICE = 2  # stages per device in the interleaved schedule


@dataclass(frozen=True)
class PipelineCluster:
    """The devices to train on, and the links between them.

    Attributes:
        devices: number of devices.
        memory_bytes: memory of each device in bytes.
        seconds_per_flop: seconds that a device takes for one FLOP. Default: 1e-14. None: the costs of the stages are
            seconds.
        bandwidth: bytes per second between two devices. Default: 25e9.
        optimizer_states: copies of the parameters that the optimizer keeps: 2 for Adam, 1 for SGD with momentum.
            Default: 2.
        backward: time of a backward as a multiple of its forward. Default: 2.0.

    Raises:
        InputError: a value is out of range.

    >>> PipelineCluster(devices=8, memory_bytes=80 * 2**30, seconds_per_flop=1 / 400e12).bandwidth
    25000000000.0
    """

    devices: int
    memory_bytes: int
    seconds_per_flop: float | None = 1e-14
    bandwidth: float = 25e9
    optimizer_states: float = 2
    backward: float = 2.0

    def __post_init__(self) -> None:
        for name in ("devices", "memory_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name} must be an integer >= 1, got {value!r}")
        for name in ("bandwidth", "backward"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be a number > 0, got {getattr(self, name)!r}")
        if not self.optimizer_states >= 0:
            raise InputError(f"optimizer_states must be a number >= 0, got {self.optimizer_states!r}")


@dataclass(frozen=True)
class PipelinePlan:
    """One way to train on a cluster, made by ``Statistics.plan``.

    Attributes:
        pipeline: devices that each copy of the model is cut over.
        data_parallel: number of copies.
        schedule: name of the schedule; the interleaved one has two stages per device.
        n_microbatches: micro-batches per copy in a step; a micro-batch is the recorded batch.
        samples_per_second: throughput of all copies together.
        step_seconds: seconds of a step: the pipeline, then the all-reduce of the gradients over the copies.
        bubble: fraction of the pipeline's time that devices wait, 0 to 1.
        memory_bytes: bytes on the fullest device: parameters, gradients, optimizer states, buffers, activations.
    """

    pipeline: int
    data_parallel: int
    schedule: str
    n_microbatches: int
    samples_per_second: float
    step_seconds: float
    bubble: float
    memory_bytes: int


class PipelinePlans(Printed, Sequence[PipelinePlan]):
    """The plans that fit into memory, best throughput first; ``print`` shows a table with one row per plan."""

    def __init__(self, plans: Sequence[PipelinePlan]) -> None:
        self._plans = list(plans)

    def __len__(self) -> int:
        return len(self._plans)

    @overload
    def __getitem__(self, index: int) -> PipelinePlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[PipelinePlan]: ...
    def __getitem__(self, index: int | slice) -> PipelinePlan | list[PipelinePlan]:
        return self._plans[index]

    def __iter__(self) -> Iterator[PipelinePlan]:
        return iter(self._plans)

    def _report(self) -> Report:
        headers = [
            "Pipeline",
            "Data parallel",
            "Schedule",
            "Micro-batches",
            "Samples/s",
            "Step (s)",
            "Bubble",
            "Memory (GiB)",
        ]
        rows = [
            [
                plan.pipeline,
                plan.data_parallel,
                plan.schedule,
                plan.n_microbatches,
                f"{plan.samples_per_second:,.4g}",
                f"{plan.step_seconds:.4g}",
                percent(plan.bubble),
                format_number(plan.memory_bytes, "Gi", 3),
            ]
            for plan in self._plans
        ]
        return Report(rows, headers, "rrlrrrrr")


def cluster_of(
    root: LayerInfo,
    by: str,
    flops_per_second: float,
    devices: int,
    memory_bytes: int,
    bandwidth: float,
    optimizer_states: float,
) -> PipelineCluster:
    """Return the cluster of ``Statistics.plan``: timed by multiply-adds, or by the latencies in the tree.

    Raises:
        InputError: an argument is out of range.
    """
    if by not in ("macs", "latency"):
        raise InputError(f"by must be 'macs' or 'latency', got {by!r}")
    if by == "macs":
        if not isinstance(flops_per_second, (int, float)) or not flops_per_second > 0:
            raise InputError(f"flops_per_second must be a number > 0, got {flops_per_second!r}")
        return PipelineCluster(devices, memory_bytes, 1 / flops_per_second, bandwidth, optimizer_states)
    forward_ms, backward_ms = root.latency_ms, root.backward_latency_ms
    if forward_ms is None:  # predicted times serve where none were measured
        forward_ms, backward_ms = root.estimated_latency_ms, root.estimated_backward_latency_ms
    backward = backward_ms / forward_ms if forward_ms and backward_ms else PipelineCluster.backward
    return PipelineCluster(devices, memory_bytes, None, bandwidth, optimizer_states, backward)


def make_plans(
    facts_of: Callable[[int], Sequence[StageFacts] | None],
    batch_size: int,
    cluster: PipelineCluster,
    n_microbatches: int | Sequence[int],
    schedules: Sequence[str],
) -> PipelinePlans:
    """Return plans for every pipeline depth that divides the devices, every schedule and number of micro-batches.

    Args:
        facts_of: function from a number of stages to their facts; None if the model cannot be cut into that many.
        batch_size: samples in a micro-batch.
        cluster: the devices.
        n_microbatches: one number of micro-batches per copy and step, or several to try.
        schedules: names of the schedules to try.

    Returns:
        The plans that fit into memory, best throughput first.

    Raises:
        InputError: an argument is out of range.
        SplitError: no plan fits into memory; the message names the one that needs the least.
    """
    unknown = [schedule for schedule in schedules if schedule not in SCHEDULES]
    if unknown or isinstance(schedules, str) or not schedules:
        raise InputError(f"schedules must be a list of {', '.join(map(repr, SCHEDULES))}, got {schedules!r}")
    counts = [n_microbatches] if isinstance(n_microbatches, int) else list(n_microbatches)
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise InputError(f"n_microbatches must be an integer >= 1 or a list of them, got {n_microbatches!r}")
    plans = []
    for depth in (depth for depth in range(1, cluster.devices + 1) if cluster.devices % depth == 0):
        for schedule in schedules:
            facts = facts_of(depth * (_PER_DEVICE if schedule == "interleaved1f1b" else 1))
            for count in counts if facts is not None else ():
                if schedule == "interleaved1f1b" and count % max(1, count // depth):
                    continue
                assert facts is not None
                plans.append(_plan(facts, batch_size, cluster, depth, schedule, count))
    if not plans:
        raise SplitError(
            f"the model cannot be split into enough stages for schedules={list(schedules)}; add 'gpipe' or '1f1b'",
            possible=1,
        )
    fitting = [plan for plan in plans if plan.memory_bytes <= cluster.memory_bytes]
    if not fitting:
        leanest = min(plans, key=lambda plan: plan.memory_bytes)
        raise SplitError(
            f"no plan fits into {cluster.memory_bytes:,} bytes per device: the smallest, a pipeline over "
            f"{leanest.pipeline} devices with {leanest.schedule}, needs {leanest.memory_bytes:,}; record a smaller "
            "batch, or use more devices"
        )
    return PipelinePlans(sorted(fitting, key=lambda plan: (-plan.samples_per_second, plan.memory_bytes)))


def _plan(
    facts: Sequence[StageFacts], batch_size: int, cluster: PipelineCluster, depth: int, schedule: str, count: int
) -> PipelinePlan:
    per_flop = cluster.seconds_per_flop
    loads = loads_of(
        facts, lambda stage: stage.cost if per_flop is None else 2 * stage.macs * per_flop, cluster.backward
    )
    simulation = simulate(loads, count, schedule, bandwidth=cluster.bandwidth)
    copies = cluster.devices // depth
    on_device = [facts[device::depth] for device in range(depth)]
    gradient_bytes = max(sum(stage.param_bytes for stage in held) for held in on_device)
    reduction = 2 * (copies - 1) / copies * gradient_bytes / cluster.bandwidth
    step = simulation.makespan + reduction
    return PipelinePlan(
        pipeline=depth,
        data_parallel=copies,
        schedule=schedule,
        n_microbatches=count,
        samples_per_second=batch_size * count * copies / step,
        step_seconds=step,
        bubble=simulation.bubble,
        memory_bytes=max(map(_memory, on_device, simulation.peak_activation_bytes, [cluster] * depth)),
    )


def _memory(held: Sequence[StageFacts], activations: float, cluster: PipelineCluster) -> int:
    copies_of_params = 2 + cluster.optimizer_states  # 2: parameters and gradients
    return int(activations + sum(copies_of_params * stage.param_bytes + stage.buffer_bytes for stage in held))
