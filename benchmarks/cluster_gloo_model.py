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
from modelsummary.cluster.pipeline import simulation_of
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.operators.operator_work import Work
from modelsummary.split.schedule import Action

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


def shared_seconds(orders: Sequence[Sequence[Action]], copies: int, cores: int) -> float:
    """Return the seconds of a schedule whose ranks share cores, without the time of messages between stages.

    Args:
        orders: timed actions of each rank of the pipeline, as they are with a core for each process.
        copies: processes that run each action at the same time.
        cores: cores of the machine.
    """
    last = max(action.stage for order in orders for action in order)
    left = [[action.end - action.begin for action in order] for order in orders]
    done: set[tuple[str, int, int]] = set()
    place, now = [0] * len(orders), 0.0
    while any(at < len(order) for at, order in zip(place, orders, strict=True)):
        ready = []
        for rank, order in enumerate(orders):
            if place[rank] < len(order):
                action = order[place[rank]]
                step = -1 if action.kind == "F" else 1
                ends = action.stage == (0 if action.kind == "F" else last)
                if ends or (action.kind, action.stage + step, action.microbatch) in done:
                    ready.append(rank)
        speed = min(1.0, cores / (copies * len(ready)))
        span = min(left[rank][place[rank]] for rank in ready)
        now += span / speed
        for rank in ready:
            left[rank][place[rank]] -= span
            if left[rank][place[rank]] <= 1e-12:
                action = orders[rank][place[rank]]
                done.add((action.kind, action.stage, action.microbatch))
                place[rank] += 1
    return now


def host_seconds(plan: Plan, model: StepModel, simulator: StepSimulator, costs: HostCosts) -> float:
    """Return the CPU seconds that the busiest process has beside operators and collectives."""
    microbatches = plan.microbatches(BATCH)
    parts = model.parts(simulator.share(plan))
    times = {name: model.counts.get(name, 1) for name in parts}
    operators = sum(
        times[name] * ((2 if plan.recompute == "full" else 1) * part.operators["forward"] + part.operators["backward"])
        for name, part in parts.items()
    )
    split = {layer.fqn for layer in model.parallel_plan(plan.tensor).layers} if plan.tensor > 1 else set()
    layers = sum(next((count for fqn, count in times.items() if name.startswith(f"{fqn}.")), 1) for name in split)
    seconds = microbatches * (operators * costs.operator + layers * costs.layer) / plan.pipeline
    if plan.zero == 3:
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
    extra = crowded * host_seconds(plan, model, simulator, host)
    if not shares:
        return simulator.seconds(plan) + extra
    ready = simulator.prepare(plan)
    simulation = simulation_of(ready.times, plan, ready.microbatches)
    assert simulation.n_microbatches == ready.microbatches
    messages = 2 * ready.microbatches * max(each.transfer for each in ready.times)
    return shared_seconds(simulation.actions, plan.tensor, cores) + messages + sum(ready.once) * crowded + extra
