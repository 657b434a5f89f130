"""Predict training steps of processes on this machine from what ``cluster_gloo.py`` measured there."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cluster_gloo_host import HostCosts

from modelsummary.cluster import Cluster, Plan, StepModel, StepSimulator
from modelsummary.cluster.collectives import Network, RankGroup
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.operators.operator_work import Work
from modelsummary.split.event_engine import Resource

__all__ = ["BATCH", "LENGTH", "Rows", "cluster_of", "predicted"]

BATCH, LENGTH = 16, 64
Rows = Sequence[tuple[str, int, int, float]]  # of collectives: operation, ranks, bytes, seconds


def cluster_of(bandwidth: float, latency: float, memory: float, devices: int) -> Cluster:
    """Return the processes as a cluster of one node."""
    spec = DeviceSpec("one process", {torch.float32: 1e11}, memory, memory_bytes=2**34)
    return Cluster(spec, devices_per_node=devices, link_bandwidth=bandwidth, link_latency=latency, link_efficiency=1.0)


@dataclass
class MeasuredDevice:
    """The times of kernels in one process, as the model of a device: measured ones, and copies for the rest.

    Attributes:
        kernels: as ``kernel_seconds`` returns it.
        slowdown: processes per core that compute at the same time.
        spec: peaks of the device.
        host: seconds to dispatch an operator, which measured times hold.
    """

    kernels: dict[str, Any]
    slowdown: float
    spec: DeviceSpec
    host: float = 0.0

    def seconds(self, work: Work) -> float:
        """Return the seconds of a kernel."""
        known = self.kernels["seconds"].get(work)
        return self.slowdown * (work.nbytes / self.kernels["bandwidth"] if known is None else known)


class GlooNetwork(Network):
    """The network of processes that communicate by gloo: measured collectives, and a line between two sizes.

    Args:
        cluster: the processes.
        rows: measured collectives.
    """

    def __init__(self, cluster: Cluster, rows: Rows) -> None:
        super().__init__(cluster)
        curves: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        for operation, ranks, nbytes, seconds in rows:
            curves[operation, ranks][nbytes] = seconds
        object.__setattr__(self, "_curves", curves)

    def seconds(self, operation: str, nbytes: float, group: RankGroup) -> float:
        """Return the seconds of a collective."""
        return 0.0 if group.size == 1 or not nbytes else self._between(operation, nbytes, group.size)

    def send(self, nbytes: float, *, is_inside: bool) -> float:  # noqa: ARG002
        """Return the seconds of a message, to whichever process."""
        return self._between("send", nbytes, 2) if nbytes else 0.0

    def _between(self, operation: str, nbytes: float, ranks: int) -> float:
        curve: Mapping[int, float] = self._curves[operation, ranks]  # type: ignore[attr-defined]
        sizes = sorted(curve)
        if nbytes > sizes[-1]:
            return nbytes / sizes[-1] * curve[sizes[-1]]
        return float(np.interp(nbytes, sizes, [curve[each] for each in sizes]))


def host_seconds(plan: Plan, model: StepModel, costs: HostCosts) -> float:
    """Return the CPU seconds that the busiest process has beside operators and collectives."""
    microbatches = plan.microbatches(BATCH)
    parts = model.parts(plan)
    times = {name: model.counts.get(name, 1) for name in parts}
    operators = sum(
        times[name]
        * ((2 if plan.checkpoint == "every" else 1) * part.operators["forward"] + part.operators["backward"])
        for name, part in parts.items()
    )
    split = {layer.fqn for layer in model.parallel_plan(plan.tensor).layers} if plan.tensor > 1 else set()
    layers = sum(next((count for fqn, count in times.items() if name.startswith(f"{fqn}.")), 1) for name in split)
    seconds = microbatches * (operators * costs.operator + layers * costs.layer) / plan.pipeline
    if plan.is_fsdp:
        units = len(model.blocks) + 1
        parameters = sum(
            times[name] * sum(weight.kind != "buffer" for weight in part.weights.values())
            for name, part in parts.items()
        )
        seconds += microbatches * units * costs.unit + parameters * costs.parameter
    if plan.pipeline > 1:
        waits = (microbatches + plan.pipeline - 1) / microbatches  # the others wait for it as for its operators
        seconds = waits * (seconds + 2 * microbatches * costs.action)
    return seconds


def predicted(plan: Plan, model: StepModel, rows: Rows, kernels: dict[str, Any], host: HostCosts, world: int) -> float:
    """Return the predicted seconds of a step."""
    cores = len(os.sched_getaffinity(0))
    cluster = cluster_of(1e9, 1e-4, 1e10, world)
    simulator = StepSimulator(model, cluster, BATCH, LENGTH)
    crowded = max(world / cores, 1.0)
    shares = plan.pipeline > 1  # processes that wait leave their core to others
    simulator.time_model.device = MeasuredDevice(kernels, 1.0 if shares else crowded, cluster.device)
    simulator.time_model.network = GlooNetwork(cluster, rows)
    extra = crowded * host_seconds(plan, model, host)
    items = simulator.items(plan)
    if not shares:
        return items.seconds() + extra

    def speed(running: Sequence[Resource]) -> list[float]:
        computing = plan.tensor * sum(resource.kind == "device" for resource in running)
        share = min(1.0, cores / computing) if computing else 1.0
        return [share if resource.kind == "device" else 1.0 for resource in running]

    return items.seconds(speed) + extra
