"""What communication costs: bytes and seconds of collectives, and of tensors that change devices.

Times follow the alpha-beta model: a message of n bytes takes ``latency + n / bandwidth``. With p devices and n bytes
(of the whole result for all-gather, of the whole input for reduce-scatter):

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
from torch.utils._pytree import tree_leaves

from modelsummary.errors import InputError, TraceError
from modelsummary.fx.meta_info import MetaInfo
from modelsummary.fx.shape_prop import checked

__all__ = ["CommunicationProfiler", "MeshSpec"]

# Parts of the names of collectives, in functional form and as operators; the first that fits.
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
# What a collective's backward is. (That of a broadcast is a reduction: the same tree, from its leaves.)
_BACKWARD = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
_MOVES = frozenset({"to", "cuda", "cpu"})


@dataclass(frozen=True)
class MeshSpec:
    """Devices and the links between them.

    Attributes:
        devices: how many take part in a collective.
        bandwidth: bytes per second of a link, in one direction.
        latency: seconds that a message takes besides.
        algorithm: of all-reduce: ``"ring"`` or ``"tree"``.

    Raises:
        InputError: a value is out of range.
    """

    devices: int
    bandwidth: float
    latency: float = 0.0
    algorithm: str = "ring"

    def __post_init__(self) -> None:
        if type(self.devices) is not int or self.devices < 1:
            raise InputError(f"devices={self.devices!r}; expected an integer >= 1")
        if not self.bandwidth > 0 or not self.latency >= 0:
            raise InputError(f"bandwidth={self.bandwidth!r} bytes/s, latency={self.latency!r} s; expected > 0 and >= 0")
        if self.algorithm not in ("ring", "tree"):
            raise InputError(f"algorithm={self.algorithm!r}; expected 'ring' or 'tree'")

    def sent_bytes(self, kind: str, nbytes: int) -> int:
        """Bytes that each device sends (p2p, broadcast: that go over the busiest link; tree: that pass by the root).

        Args:
            kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"`` or
                ``"p2p"``.
            nbytes: of the whole tensor: for all-gather of the result, for reduce-scatter of the input.

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
        raise InputError(f"kind={kind!r} is no collective; expected one of {sorted({*_KINDS.values()})}")

    def seconds(self, kind: str, nbytes: int) -> float:
        """Time of a collective; arguments as for ``sent_bytes``, formulas at the top of this module."""
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
    """Fills ``fwd_comm``, ``bwd_comm`` (bytes) and ``fwd_time``, ``bwd_time`` (seconds) of the nodes that communicate.

    Collectives are those of ``torch.distributed`` and its functional forms. A tensor that is moved by
    ``.to(device)``, ``.cuda()`` or ``.cpu()`` is a message, its gradient one back. The graph must know its shapes:
    trace it, or run ``ShapeProp``.

    Args:
        module: the graph.
        mesh: the devices.
    """

    def __init__(self, module: GraphModule, mesh: MeshSpec) -> None:
        if not isinstance(mesh, MeshSpec):
            raise InputError(f"mesh={mesh!r:.80}; expected a MeshSpec")
        self.module, self.mesh = checked(module), mesh

    def propagate(self) -> tuple[int, float]:
        """Fill the nodes. Returns bytes and seconds of all, forward and backward.

        Raises:
            TraceError: a node has no shape yet.
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
        """Bytes of the whole tensor, and whether it has a gradient."""
        own = _metas(node)
        given = [meta for each in node.all_input_nodes for meta in _metas(each)]
        if not own and not given:
            raise TraceError(f"the shapes of node {node.name!r} are not known; run ShapeProp(gm).propagate(...) first")
        known = given if kind == "reduce_scatter" else own or given
        nbytes = sum(meta.shape.numel() * meta.dtype.itemsize for meta in known)
        return nbytes, any(meta.requires_grad for meta in given)


def _metas(node: Node) -> list[TensorMetadata]:
    leaves = tree_leaves(node.meta.get("tensor_meta"), is_leaf=lambda each: isinstance(each, TensorMetadata))
    return [each for each in leaves if isinstance(each, TensorMetadata)]


def _kind(node: Node) -> str | None:
    """What a node communicates by; None if it does not."""
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
    named = [each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, (str, torch.device))]
    return bool(named)
