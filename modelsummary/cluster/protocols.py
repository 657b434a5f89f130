"""Protocols of NCCL for small messages, which its rings and trees use besides ``Simple``, and reductions in a switch.

``LL`` sends a flag with every 4 bytes, and ``LL128`` one with every 120 bytes, so that no rank waits for a signal that
data have arrived. They have low latencies and use a part of the links' bandwidth. NCCL's tuner estimates the time of
each algorithm with each protocol and takes the least estimate. The estimates here are its own (``ncclTopoTuneModel`` in
``src/graph/tuning.cc`` of https://github.com/NVIDIA/nccl, version 2.19), without its limits per channel and its
correction of trees for medium sizes, which changes the all-reduces of 8 A100 by 3 us at most.

The tuner takes ``Simple`` to be faster than it is: it estimates 15 us before the first byte between two ranks of a
node, where measured all-reduces take 40 us. So the choice follows its estimates, and the time of ``Simple`` is fitted
(``collectives``). ``LL128`` reaches a smaller part of the links inside a node than the tuner takes it to; this part is
fitted as well.

With NVLink Sharp (the algorithm NVLS), the switch of a node reduces. Each of ``n`` ranks reads one n-th of the sum from
the switch and writes it back for all ranks. So a rank's links carry its whole data to the switch and the whole result
back, and its own part once more: ``(n + 1) / n`` of the data in each direction. Each of 16 channels moves chunks of 16
to 128 KiB for each rank. Small chunks fill the pipeline sooner, and synchronise more often; NCCL chooses by the size of
the message, close to the fastest chunks, which are taken here. ``benchmarks/cluster_fit.py`` fits the time, and the
choice follows the tuner. All-gathers and reduce-scatters keep their rings, which the tuner prefers.
"""

from __future__ import annotations

from math import inf, log2
from typing import NamedTuple

__all__ = ["Links", "Switch", "seconds_in_switch", "seconds_of_protocols", "seconds_of_small_message"]

_US, _GB = 1e-6, 1e9
_TREE_SHARE = 0.92  # of the bandwidth of rings
_NETWORK_POST_US = 1.0  # least of a step of a ring that spans nodes; NCCL takes 2.0 with processors of AMD
_RING_PLATEAU = 1.4  # factor of the latency of all-reduces with Simple in a ring that spans nodes
# Inside a node of newer devices, as in version 2.28, in which LL takes half of a ring's bandwidth at most.
_MOST_LL_INSIDE = {"hopper": 141 * _GB, "blackwell": 282 * _GB}
_SWITCH_LATENCY_US = 25.0  # in the tuner's estimate, version 2.28
_SWITCH_SHARE, _SWITCH_FULL = 5 / 6, 6  # of the links' bandwidth in its estimate, version 2.19, and ranks that reach it
_SWITCH_CHANNELS, _SWITCH_CHUNKS = 16, (16384, 32768, 65536, 131072)  # NVLS_NCHANNELS; bytes of a chunk
_SMALL_MESSAGE = 16384  # bytes up to which a message to one rank is sent with LL (NCCL_P2P_LL_THRESHOLD)


class _Protocol(NamedTuple):
    """Latencies in microseconds: before the first step, and of a step of a ring and a tree by kind of link."""

    ring_base: float
    tree_base: float
    ring: dict[str, float]
    tree: dict[str, float]
    posts: int = 1  # to the network in a step of a ring


_LL = _Protocol(6.6, 6.8, {"nvlink": 0.6, "pcie": 1.0, "network": 2.7}, {"nvlink": 0.6, "pcie": 1.0, "network": 5.0})
_LL128 = _Protocol(14.0, 14.0, {"nvlink": 1.9, "network": 4.0}, {"nvlink": 1.25, "network": 8.5})
_SIMPLE = _Protocol(
    8.4, 0.0, {"nvlink": 3.4, "pcie": 5.7, "network": 14.0}, {"nvlink": 28.0, "pcie": 28.0, "network": 28.0}, 3
)
# In one node of A100 or newer; in two nodes; in more. Between nodes with Intel's processors, NCCL has 39.0 and 20.4.
_MOST_LL = (87.7 * _GB, 22.5 * _GB, 19.0 * _GB)


class Switch(NamedTuple):
    """The costs of all-reduces in a switch.

    Attributes:
        bandwidth: bytes per second that the links of a rank reach in each direction.
        base: seconds before the first chunk.
        fill: chunks in the pipeline before it is full.
        sync: seconds of each chunk of a rank and channel that is needed besides the fewest possible ones.
        links: bytes per second that the links of a rank reach in a large ring, as the tuner takes them.
    """

    bandwidth: float
    base: float
    fill: float
    sync: float
    links: float


class Links(NamedTuple):
    """The ranks of a collective, and the links between them.

    Attributes:
        size: number of ranks.
        nodes: nodes that they span.
        per_node: ranks in a full node.
        bandwidth: bytes per second that each rank of a ring passes on.
        most_ll128: bytes per second that each rank of a ring passes on inside a node with ``LL128``, at most.
        kind: of the links inside a node: ``"nvlink"`` or ``"pcie"``.
        generation: of the devices, such as ``"hopper"``.
        switch: the switch that reduces for these ranks; None: rings and trees only.
    """

    size: int
    nodes: int
    per_node: int
    bandwidth: float
    most_ll128: float
    kind: str
    generation: str = ""
    switch: Switch | None = None


def seconds_of_protocols(operation: str, nbytes: float, links: Links) -> float:
    """Return the seconds with ``LL``, ``LL128`` or the switch; infinity where NCCL chooses ``Simple`` without it.

    Args:
        operation: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        nbytes: bytes of the whole tensor.
        links: the ranks and their links.

    >>> eight = Links(8, 1, 8, 235e9, 155e9, "nvlink")
    >>> round(1e6 * seconds_of_protocols("all_reduce", 8, eight), 1)  # a ring with LL: 6.6 + 2 * 7 * 0.6
    15.0
    >>> seconds_of_protocols("all_reduce", 2**30, eight)
    inf
    """
    reduces = operation == "all_reduce"
    passes, most = 2 if reduces else 1, inf if links.per_node == 1 else links.most_ll128
    tree = _TREE_SHARE * links.bandwidth
    # the tuner's estimate, and the seconds that it takes
    candidates = [(_ring(_SIMPLE, links.bandwidth, nbytes, links, passes), inf)]
    candidates.append((_ring(_LL, _ll_ring(links, passes), nbytes, links, passes),) * 2)
    if reduces:
        candidates.append((_tree(_SIMPLE, tree, nbytes, links), inf))
        candidates.append((_tree(_LL, min(tree / 3.8, _most_ll(links)), nbytes, links),) * 2)
        if links.switch is not None:
            estimate = _estimate_of_switch(nbytes, links.size, links.switch)
            candidates.append((estimate, seconds_in_switch(nbytes, links.size, links.switch)))
    if links.kind == "nvlink":  # LL128 needs stores of 128 bytes that arrive as a whole, which NCCL expects of NVLink
        ring = (0.7 if links.per_node == 1 else 0.92) * links.bandwidth
        estimate = _ring(_LL128, ring, nbytes, links, passes)
        candidates.append((estimate, _ring(_LL128, min(ring, most), nbytes, links, passes)))
        if reduces:
            tree *= 7 / 9 if links.nodes == 1 else 120 / 128
            estimate = _tree(_LL128, tree, nbytes, links)
            candidates.append((estimate, _tree(_LL128, min(tree, most), nbytes, links)))
    return min(candidates)[1]


def seconds_of_small_message(nbytes: float, kind: str, bandwidth: float) -> float:
    """Return the seconds of a message to one rank with ``LL``; infinity where NCCL takes ``Simple``.

    Args:
        nbytes: bytes of the message.
        kind: of the link: ``"nvlink"``, ``"pcie"`` or ``"network"``.
        bandwidth: bytes per second that the link reaches with ``Simple``.

    >>> round(1e6 * seconds_of_small_message(8, "nvlink", 235e9), 1)
    7.2
    """
    if nbytes > _SMALL_MESSAGE:
        return inf
    return (_LL.ring_base + _LL.ring[kind]) * _US + nbytes / (bandwidth / 4)


def seconds_in_switch(nbytes: float, size: int, switch: Switch) -> float:
    """Return the seconds of an all-reduce in a switch.

    Args:
        nbytes: bytes of the whole tensor.
        size: number of ranks.
        switch: the switch.

    >>> ideal = Switch(450e9, 0.0, 0.0, 0.0, 450e9)
    >>> round(1e3 * seconds_in_switch(400e6, 8, ideal), 3)  # 9 / 8 of the data over the link
    1.0
    """
    bandwidth, parallel = switch.bandwidth * size / (size + 1), size * _SWITCH_CHANNELS
    largest = _SWITCH_CHUNKS[-1]
    return min(
        switch.base
        + (nbytes + switch.fill * parallel * chunk) / bandwidth
        + switch.sync * nbytes / parallel * (1 / chunk - 1 / largest)
        for chunk in _SWITCH_CHUNKS
    )


def _estimate_of_switch(nbytes: float, size: int, switch: Switch) -> float:
    """Return NCCL's estimate, in which the part that a rank reduces takes a sixth of the links at most."""
    bandwidth = _SWITCH_SHARE * min(1.0, size / _SWITCH_FULL) * switch.links
    return _SWITCH_LATENCY_US * _US + nbytes / bandwidth


def _most_ll(links: Links) -> float:
    newer = _MOST_LL_INSIDE.get(links.generation)
    return newer if newer is not None and links.nodes == 1 else _MOST_LL[min(links.nodes, 3) - 1]


def _ll_ring(links: Links, passes: int) -> float:
    share = 1 / 4 if passes == 2 or links.nodes > 1 else 1 / 3
    if links.nodes == 1 and links.generation in _MOST_LL_INSIDE:
        share = 1 / 2
    return min(share * links.bandwidth, _most_ll(links))


def _ring(protocol: _Protocol, bandwidth: float, nbytes: float, links: Links, passes: int) -> float:
    n, nodes = links.size, links.nodes
    steps, inside = passes * (n - 1), protocol.ring[links.kind]
    between, factor = 0, 1.0
    if nodes > 1:
        between = 2 * nodes if passes == 2 else nodes - 1
        inside = max(inside, protocol.posts * _NETWORK_POST_US)
        factor = _RING_PLATEAU if protocol is _SIMPLE and passes == 2 else 1.0
    latency = protocol.ring_base + (steps - between) * inside + between * protocol.ring["network"]
    return factor * latency * _US + passes * (n - 1) / n * nbytes / bandwidth


def _tree(protocol: _Protocol, bandwidth: float, nbytes: float, links: Links) -> float:
    """Return the seconds of chains inside the nodes, of which the longest counts, and a tree between them."""
    inside, between = links.per_node - 1, int(log2(links.nodes))
    latency = protocol.tree_base + 2 * (inside * protocol.tree[links.kind] + between * protocol.tree["network"])
    return latency * _US + 2 * nbytes / bandwidth
