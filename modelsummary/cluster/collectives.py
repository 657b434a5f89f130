"""Time of collectives, by the algorithms that NCCL uses.

A ring moves ``(n - 1) / n`` of the data per pass over each link: one pass for an all-gather or a reduce-scatter, two
for an all-reduce. Each of its ``n - 1`` steps per pass adds the latency of a message. A tree halves the number of steps
again and again, and serves all-reduces of small messages over many nodes. Where a group has several ranks in a node,
the rings of a node leave it through as many network interfaces as these ranks have. Otherwise a group may work in three
phases: reduce-scatter inside the nodes, all-reduce between them, all-gather inside. Small messages use protocols with
lower latencies, and a switch with NVLink Sharp reduces (``protocols``). The fastest of these ways counts.

What is reached of a link inside a node is fitted to measured all-reduces (``benchmarks/cluster_fit.py``), for each
protocol to those for which NCCL chooses it, and kept in ``collective_fits.json``. Between nodes nothing was measured
for the fit: the efficiency is the share that InfiniBand leaves after its headers, and the latency is the value of rings
and trees in NCCL's tuner (``hwLat`` in ``src/graph/tuning.cc``, protocol Simple). ``benchmarks/CLUSTER.md`` compares
both with published tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Any, NamedTuple

from modelsummary.cluster.protocols import (
    Links,
    Switch,
    seconds_in_switch,
    seconds_of_protocols,
    seconds_of_small_message,
)
from modelsummary.cluster.topology import PCIE_BANDWIDTH, Cluster
from modelsummary.errors import InputError
from modelsummary.file_contents import packaged
from modelsummary.operators.collective_calls import OPERATIONS

__all__ = ["Network", "RankGroup", "collective_fits"]

_UNIT_BANDWIDTH, _MOST_UNITS = 12e9, 24  # bytes per second that one unit moves, and the most units of a collective
_SWITCHED = (3, 32)  # least and most ranks that NCCL reduces in a switch (NCCL_MAX_NVLS_ARITY)
_SWITCH_LOSS = {"blackwell": 0.74 / 0.85}  # of the share of links, against Hopper: nvlsEfficiency in NCCL's tuner


class RankGroup(NamedTuple):
    """The ranks that communicate.

    Attributes:
        size: number of ranks.
        per_node: how many of them are in one node.
    """

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """The number of nodes that the group spans."""
        return ceil(self.size / self.per_node)


@lru_cache(maxsize=1)
def collective_fits() -> dict[str, Any]:
    """Return the fitted coefficients with their source and error.

    >>> sorted(collective_fits())[:2]
    ['date', 'error']
    """
    return packaged("modelsummary.cluster", "collective_fits.json")


@dataclass(frozen=True)
class Network:
    """The times of collectives on a cluster.

    Args:
        cluster: the cluster.

    >>> network = Network(Cluster("A100", nodes=4))
    >>> half = network.seconds("all_gather", 2**30, RankGroup(8, 8))
    >>> 1.9 < network.seconds("all_reduce", 2**30, RankGroup(8, 8)) / half < 2.1
    True
    """

    cluster: Cluster

    def group(self, size: int, stride: int = 1) -> RankGroup:
        """Return the group of ``size`` ranks that are ``stride`` ranks apart."""
        per_node = max(1, min(size, self.cluster.devices_per_node // stride)) if stride else 1
        return RankGroup(size, per_node)

    def seconds(self, operation: str, nbytes: float, group: RankGroup) -> float:
        """Return the seconds of a collective.

        Args:
            operation: one of ``OPERATIONS`` of ``operators.collective_calls``.
            nbytes: bytes of the whole tensor: what each rank gives to an all-reduce, reduce-scatter or all-to-all, and
                gets from an all-gather.
            group: the ranks.

        Raises:
            InputError: the operation is unknown.
        """
        if operation not in OPERATIONS:
            raise InputError(f"operation must be one of {', '.join(map(repr, OPERATIONS))}, got {operation!r}")
        if group.size == 1 or not nbytes:
            return 0.0
        alone = self._all_to_all(nbytes, group) if operation == "all_to_all" else self._in(operation, nbytes, group)
        return self.cluster.factors.communication * alone

    def _in(self, operation: str, nbytes: float, group: RankGroup) -> float:
        """Return the seconds of a collective other than an all-to-all, by the fastest of its ways."""
        n, passes = group.size, 2 if operation == "all_reduce" else 1
        times = [self._ring(passes, nbytes, group)]
        if self._has_protocols:
            times.append(seconds_of_protocols(operation, nbytes, self._links(group)))
        elif operation == "all_reduce" and (switch := self._switch(group)) is not None:
            to_and_from = self._base + 2 * self._link_step
            times.append(seconds_in_switch(nbytes, n, switch._replace(base=to_and_from)))
        if group.nodes > 1:
            if group.per_node > 1:
                times.append(self._in_phases(passes, nbytes, group))
            if operation == "all_reduce":
                times.append(self._tree(nbytes, group))
        return min(times)

    def in_one_node(self, sender: int, receiver: int, ranks: int = 1) -> bool:
        """Return True if each of ``ranks`` consecutive ranks from ``sender`` on has its receiver in its own node."""
        size = self.cluster.devices_per_node
        return all((sender + rank) // size == (receiver + rank) // size for rank in range(min(ranks, size)))

    def send(self, nbytes: float, *, is_inside: bool) -> float:
        """Return the seconds of a message to another rank, inside of a node or between nodes."""
        if not nbytes:
            return 0.0
        step, bandwidth = (self._link_step, self._link) if is_inside else (self._network_step, self._network)
        seconds = self._base + step + nbytes / bandwidth
        if self._has_protocols:
            kind = self._kind if is_inside else "network"
            seconds = min(seconds, seconds_of_small_message(nbytes, kind, bandwidth))
        return self.cluster.factors.communication * seconds

    @property
    def _has_protocols(self) -> bool:
        """Whether small messages take NCCL's own latencies; latencies of the user replace them."""
        return self.cluster.link_latency is None and self.cluster.network_latency is None

    @property
    def _kind(self) -> str:
        return "nvlink" if self.cluster.link_bandwidth > PCIE_BANDWIDTH else "pcie"

    def _links(self, group: RankGroup) -> Links:
        share = float(collective_fits()["link"]["ll128"])
        most = share * self._inside(group)
        generation, bandwidth = self.cluster.device.generation, self._bandwidth(group)
        nodes, per_node, switch = group.nodes, group.per_node, self._switch(group)
        return Links(group.size, nodes, per_node, bandwidth, most, self._kind, generation, switch)

    def _switch(self, group: RankGroup) -> Switch | None:
        """Return the switch that reduces for a group; None if none does."""
        least, most = _SWITCHED
        if group.nodes > 1 or not least <= group.size <= most or not self.cluster.reduces_in_switch:
            return None
        fit = collective_fits()["switch"]
        share = float(fit["share"]) * _SWITCH_LOSS.get(self.cluster.device.generation, 1.0)
        base, sync = 1e-6 * float(fit["base_us"]), 1e-6 * float(fit["sync_us"])
        return Switch(share * self._link, base, float(fit["fill"]), sync, self._link)

    def units_taken(self, group: RankGroup) -> float:
        """Return the fraction of a device's units that a collective takes from kernels that run at the same time.

        Blocks of NCCL share their unit with no other kernel. They take one per 12 GB/s, as its authors say: 2 for a
        network interface of 24 GB/s, 16 for eight (https://github.com/NVIDIA/nccl/issues/689), and 24 on the NVLinks of
        an H100 (https://forums.developer.nvidia.com/t/337991).
        """
        units = self.cluster.device.units
        if units is None or group.size == 1:
            return 0.0
        return min(_MOST_UNITS, ceil(self._bandwidth(group) / _UNIT_BANDWIDTH)) / units

    def bandwidth_taken(self, group: RankGroup) -> float:
        """Return the fraction of a device's memory bandwidth that a collective takes from kernels beside it.

        Each byte that passes over a link is written to the memory and read from it.
        """
        if self.cluster.device.units is None or group.size == 1:
            return 0.0
        return 2 * self._bandwidth(group) / self.cluster.device.bandwidth

    def _ring(self, passes: int, nbytes: float, group: RankGroup) -> float:
        n, crossings = group.size, group.nodes if group.nodes > 1 else 0
        steps = passes * (
            (n - 1 - max(crossings - 1, 0)) * self._link_step + max(crossings - 1, 0) * self._network_step
        )
        return self._base + steps + passes * (n - 1) / n * nbytes / self._bandwidth(group)

    def _tree(self, nbytes: float, group: RankGroup) -> float:
        """Return the seconds of NCCL's double binary tree: chains inside the nodes, a tree between them."""
        inside = 2 * (group.per_node - 1) * self._link_step
        between = 2 * ceil(log2(group.nodes)) * self._network_step
        return self._base + inside + between + 2 * nbytes / self._bandwidth(group)

    def _in_phases(self, passes: int, nbytes: float, group: RankGroup) -> float:
        inside, across = RankGroup(group.per_node, group.per_node), RankGroup(group.nodes, 1)
        return self._ring(passes, nbytes, inside) + self._ring(passes, nbytes / group.per_node, across)

    def _all_to_all(self, nbytes: float, group: RankGroup) -> float:
        n, in_last = group.size, group.size - (group.nodes - 1) * group.per_node
        away = n - in_last  # for a rank of the node that is not full, if one is not
        inside = (group.per_node - 1) / n * nbytes / self._link
        between = away / n * nbytes / self._network if away > 0 else 0.0
        steps = (group.per_node - 1) * self._link_step + (self._network_step if away > 0 else 0.0)
        return self._base + steps + max(inside, between)

    def _bandwidth(self, group: RankGroup) -> float:
        """Return the bytes per second that each rank of a ring passes on."""
        if group.nodes == 1:
            return self._inside(group)
        outside = group.per_node * self._network
        return min(self._inside(group), outside) if group.per_node > 1 else outside

    def _inside(self, group: RankGroup) -> float:
        """Return the bytes per second that each rank of a ring passes on inside a node."""
        if self.cluster.link_efficiency is not None:
            return self._link
        return self._link * (1 - float(collective_fits()["link"]["loss"]) / group.per_node)

    @property
    def _base(self) -> float:
        return float(collective_fits()["link"]["base_us"]) * 1e-6

    @property
    def _link(self) -> float:
        """Bytes per second inside a node."""
        return self.cluster.link_bandwidth * _fitted("link", "efficiency", self.cluster.link_efficiency)

    @property
    def _link_step(self) -> float:
        return _fitted("link", "step_us", self.cluster.link_latency)

    @property
    def _network(self) -> float:
        """Bytes per second between nodes for one device."""
        cluster, efficiency = self.cluster, _fitted("network", "efficiency", self.cluster.network_efficiency)
        return cluster.network_bandwidth * efficiency * min(1.0, cluster.interfaces_per_node / cluster.devices_per_node)

    @property
    def _network_step(self) -> float:
        return _fitted("network", "step_us", self.cluster.network_latency)


def _fitted(kind: str, name: str, override: float | None) -> float:
    """Return a figure of links, in seconds if it is a time: the cluster's own, or as fitted."""
    if override is not None:
        return override
    return float(collective_fits()[kind][name]) * (1e-6 if name.endswith("_us") else 1.0)
