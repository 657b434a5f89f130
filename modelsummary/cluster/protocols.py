"""Protocols of NCCL for small messages, which its rings and trees use besides ``Simple``.

``LL`` sends a flag with every 4 bytes, and ``LL128`` one with every 120 bytes, so that no rank waits for a signal that
data have arrived. They have low latencies and use a part of the links' bandwidth. NCCL's tuner predicts the time of
each algorithm with each protocol and takes the fastest. Its latencies and bandwidths are the ones here
(``ncclTopoTuneModel`` in ``src/graph/tuning.cc`` of https://github.com/NVIDIA/nccl, version 2.19), without its limits
per channel and its correction of trees for medium sizes, which changes the all-reduces of 8 A100 by 3 us at most.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

__all__ = ["Links", "least_seconds_of_protocols"]

_US, _GB = 1e-6, 1e9
_TREE_SHARE = 0.92  # of the bandwidth of rings
_NETWORK_POST_US = 1.0  # least of a step of a ring that spans nodes; NCCL takes 2.0 with processors of AMD


class _Protocol(NamedTuple):
    """Latencies in microseconds: before the first step, and of a step of a ring and a tree by kind of link."""

    ring_base: float
    tree_base: float
    ring: dict[str, float]
    tree: dict[str, float]


_LL = _Protocol(6.6, 6.8, {"nvlink": 0.6, "pcie": 1.0, "network": 2.7}, {"nvlink": 0.6, "pcie": 1.0, "network": 5.0})
_LL128 = _Protocol(14.0, 14.0, {"nvlink": 1.9, "network": 4.0}, {"nvlink": 1.25, "network": 8.5})
# In one node of A100 or newer; in two nodes; in more. Between nodes with Intel's processors, NCCL has 39.0 and 20.4.
_MOST_LL = (87.7 * _GB, 22.5 * _GB, 19.0 * _GB)


class Links(NamedTuple):
    """The ranks of a collective, and the links between them.

    Attributes:
        size: number of ranks.
        nodes: nodes that they span.
        bandwidth: bytes per second that each rank of a ring passes on.
        kind: of the links inside a node: ``"nvlink"`` or ``"pcie"``.
    """

    size: int
    nodes: int
    bandwidth: float
    kind: str


def least_seconds_of_protocols(operation: str, nbytes: float, links: Links) -> float:
    """Return the least seconds of an all-reduce, all-gather or reduce-scatter with ``LL`` and ``LL128``.

    Args:
        operation: ``"all_reduce"``, ``"all_gather"`` or ``"reduce_scatter"``.
        nbytes: bytes of the whole tensor.
        links: the ranks and their links.

    >>> eight = Links(8, 1, 235e9, "nvlink")
    >>> round(1e6 * least_seconds_of_protocols("all_reduce", 8, eight), 1)  # a ring with LL: 6.6 + 2 * 7 * 0.6
    15.0
    """
    reduces = operation == "all_reduce"
    found = [_ring(_LL, _ll_ring(links, reduces=reduces), nbytes, links, reduces=reduces)]
    if reduces:
        tree_ll = min(_TREE_SHARE * links.bandwidth / 3.8, _MOST_LL[min(links.nodes, 3) - 1])
        found.append(_tree(_LL, tree_ll, nbytes, links))
    if links.kind == "nvlink":  # LL128 needs stores of 128 bytes that arrive as a whole, which NCCL expects of NVLink
        share = 0.7 if links.size < 2 * links.nodes else 0.92
        found.append(_ring(_LL128, share * links.bandwidth, nbytes, links, reduces=reduces))
        if reduces:
            share = _TREE_SHARE * (7 / 9 if links.nodes == 1 else 120 / 128)
            found.append(_tree(_LL128, share * links.bandwidth, nbytes, links))
    return min(found)


def _ll_ring(links: Links, *, reduces: bool) -> float:
    share = 1 / 4 if reduces or links.nodes > 1 else 1 / 3
    return min(share * links.bandwidth, _MOST_LL[min(links.nodes, 3) - 1])


def _ring(protocol: _Protocol, bandwidth: float, nbytes: float, links: Links, *, reduces: bool) -> float:
    n, nodes, passes = links.size, links.nodes, 2 if reduces else 1
    steps, inside = passes * (n - 1), protocol.ring[links.kind]
    between = 0
    if nodes > 1:
        between = 2 * nodes if reduces else nodes - 1
        inside = max(inside, _NETWORK_POST_US)
    latency = protocol.ring_base + (steps - between) * inside + between * protocol.ring["network"]
    return latency * _US + passes * (n - 1) / n * nbytes / bandwidth


def _tree(protocol: _Protocol, bandwidth: float, nbytes: float, links: Links) -> float:
    """Return the seconds of chains inside the nodes, and a tree between them."""
    inside, between = links.size / links.nodes - 1, int(log2(links.nodes))
    latency = protocol.tree_base + 2 * (inside * protocol.tree[links.kind] + between * protocol.tree["network"])
    return latency * _US + 2 * nbytes / bandwidth
