"""Cost of communication: bytes and seconds of collectives, and of tensors that move between devices.

Times follow the alpha-beta model: a message of n bytes takes ``latency + n / bandwidth``. For p devices, with
L = latency, B = bandwidth and n bytes (of the whole result for all-gather, of the whole input for reduce-scatter):

=============== ============================================ =======================================
collective      seconds                                      source
=============== ============================================ =======================================
p2p             L + n / B                                    Hockney 1994
ring all-gather (p - 1) L + (p - 1) / p * n / B              Thakur, Rabenseifner, Gropp 2005, 4.1
reduce-scatter  as all-gather                                the same, 4.3
ring all-reduce 2 (p - 1) L + 2 (p - 1) / p * n / B          Patarasuk, Yuan 2009
tree all-reduce 2 ceil(log2 p) (L + n / B)                   binomial reduce and broadcast; Thakur 4.4
all-to-all      (p - 1) L + (p - 1) / p * n / B              pairwise exchange; Thakur 4.2
broadcast       ceil(log2 p) (L + n / B)                     binomial tree; Thakur 4.1
=============== ============================================ =======================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.shape_prop import TensorMetadata

from modelsummary._torch import tree_leaves
from modelsummary.errors import InputError, TraceError, check_integers
from modelsummary.fx.meta_info import MetaInfo
from modelsummary.fx.shape_prop import checked

__all__ = ["CommunicationProfiler", "MeshSpec"]

# Part of a collective's name (functional form or operator) -> its kind; the first match counts.
_KINDS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "p2p",
    "recv": "p2p",
}
# Collective -> its backward; others keep their cost (the backward of a broadcast is a reduction over the same tree).
_BACKWARD = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
_MOVES = frozenset({"to", "cuda", "cpu"})


@dataclass(frozen=True)
class MeshSpec:
    """The devices of a collective, and the links between them.

    Attributes:
        devices: number of devices that take part in a collective.
        bandwidth: bytes per second of a link, in one direction.
        latency: seconds added to each message. Default: 0.0.
        algorithm: algorithm of all-reduce, ``"ring"`` (default) or ``"tree"``.

    Raises:
        InputError: a value is out of range.

    >>> mesh = MeshSpec(devices=4, bandwidth=100e9)
    >>> mesh.sent_bytes("all_reduce", 2**20)  # a ring sends 2 (p - 1) / p of the tensor
    1572864
    """

    devices: int
    bandwidth: float
    latency: float = 0.0
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        check_integers(devices=self.devices)
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise InputError(
                f"bandwidth must be > 0 bytes/s and latency >= 0 s, got {self.bandwidth!r} and {self.latency!r}"
            )
        if self.algorithm not in ("ring", "tree"):
            raise InputError(f"algorithm must be 'ring' or 'tree', got {self.algorithm!r}")

    def sent_bytes(self, kind: str, nbytes: int) -> int:
        """Return the bytes that each device sends.

        For p2p and broadcast these are the bytes over the busiest link, for a tree the bytes through its root.

        Args:
            kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"`` or
                ``"p2p"``.
            nbytes: bytes of the whole tensor: the result of an all-gather, the input of a reduce-scatter.

        Raises:
            InputError: the kind is unknown.
        """
        p = self.devices
        if kind == "p2p":
            return nbytes
        if kind == "broadcast":
            return nbytes * (p > 1)
        if kind == "all_reduce":
            return 2 * nbytes * self._rounds() if self.algorithm == "tree" else 2 * (p - 1) * nbytes // p
        if kind in ("all_gather", "reduce_scatter", "all_to_all"):
            return (p - 1) * nbytes // p
        raise InputError(f"kind must be one of {sorted({*_KINDS.values()})}, got {kind!r}")

    def seconds(self, kind: str, nbytes: int) -> float:
        """Return the seconds of a collective. Arguments are as for ``sent_bytes``.

        >>> MeshSpec(devices=8, bandwidth=1e9, latency=1e-5).seconds("all_gather", 1_000_000)  # 7 x 10 us + 875 us
        0.000945
        """
        sent = self.sent_bytes(kind, nbytes)
        p = self.devices
        messages = {"p2p": 1, "broadcast": self._rounds(), "all_reduce": 2 * (p - 1)}.get(kind, p - 1)
        if kind == "all_reduce" and self.algorithm == "tree":
            messages = 2 * self._rounds()
        if kind == "broadcast":
            sent = nbytes * self._rounds()
        return messages * self.latency + sent / self.bandwidth

    def _rounds(self) -> int:
        return math.ceil(math.log2(self.devices))


class CommunicationProfiler:
    """A profiler of ``fwd_comm``, ``bwd_comm`` (bytes) and ``fwd_time``, ``bwd_time`` (seconds) of a graph's nodes.

    It knows the collectives of ``torch.distributed`` and their functional forms. A move by ``.to(device)``, ``.cuda()``
    or ``.cpu()`` is a p2p message, and its gradient another. The nodes must have shapes: trace the graph, or run
    ``ShapeProp``.

    Args:
        module: the graph.
        mesh: the devices and links.

    Raises:
        InputError: ``module`` is not a graph module, or ``mesh`` is not a ``MeshSpec``.

    >>> from modelsummary.fx import symbolic_trace
    >>> gm = symbolic_trace(lambda x: x.cpu() + 1, meta_args={"x": torch.rand(256)})
    >>> CommunicationProfiler(gm, MeshSpec(devices=2, bandwidth=1e9)).propagate()  # 256 floats of 4 bytes
    (1024, 1.024e-06)
    """

    def __init__(self, module: GraphModule, mesh: MeshSpec) -> None:
        if not isinstance(mesh, MeshSpec):
            raise InputError(f"mesh must be a MeshSpec, got {type(mesh).__name__}: {mesh!r:.80}")
        self.module, self.mesh = checked(module), mesh

    def propagate(self) -> tuple[int, float]:
        """Fill the ``MetaInfo`` of every node. Return bytes and seconds of all nodes, forward and backward.

        Raises:
            TraceError: the shapes of a node are not known.
        """
        total, seconds = 0, 0.0
        for node in self.module.graph.nodes:
            kind = _kind(node)
            info = node.meta.setdefault("info", MetaInfo())
            if kind is None:
                continue
            nbytes, has_gradient = self._bytes(node, kind)
            back = _BACKWARD.get(kind, kind) if has_gradient else None
            info.fwd_comm, info.fwd_time = self.mesh.sent_bytes(kind, nbytes), self.mesh.seconds(kind, nbytes)
            info.bwd_comm = self.mesh.sent_bytes(back, nbytes) if back else 0
            info.bwd_time = self.mesh.seconds(back, nbytes) if back else 0.0
            total += info.fwd_comm + info.bwd_comm
            seconds += info.fwd_time + info.bwd_time
        return total, seconds

    def _bytes(self, node: Node, kind: str) -> tuple[int, bool]:
        """Return the bytes of the whole tensor, and True if it takes a gradient."""
        results = _metas(node)
        taken = [meta for source in node.all_input_nodes for meta in _metas(source)]
        if not results and not taken:
            raise TraceError(f"the shapes of node {node.name!r} are not known; run ShapeProp(gm).propagate(...) first")
        metas = taken if kind == "reduce_scatter" else results or taken
        nbytes = sum(meta.shape.numel() * meta.dtype.itemsize for meta in metas)
        return nbytes, any(meta.requires_grad for meta in taken)


def _metas(node: Node) -> list[TensorMetadata]:
    leaves = tree_leaves(node.meta.get("tensor_meta"), is_leaf=lambda leaf: isinstance(leaf, TensorMetadata))
    return [leaf for leaf in leaves if isinstance(leaf, TensorMetadata)]


def _kind(node: Node) -> str | None:
    """Return the kind of a node's communication; None if it does not communicate."""
    if node.op not in ("call_function", "call_method"):
        return None
    if _moves(node):
        return "p2p"
    target: Any = node.target
    home = str(getattr(target, "__module__", ""))
    name = str(target) if "c10d" in str(target) else getattr(target, "__name__", "") if "distributed" in home else ""
    return next((kind for part, kind in _KINDS.items() if part in name and "wait" not in name), None)


def _moves(node: Node) -> bool:
    if node.op != "call_method" or node.target not in _MOVES:
        return False
    if node.target != "to":
        return True
    named = [
        argument for argument in (*node.args[1:], *node.kwargs.values()) if isinstance(argument, (str, torch.device))
    ]
    return bool(named)
