"""The time of collectives between the devices that serve a model together."""

from __future__ import annotations

from collections.abc import Callable

from modelsummary.cluster.collectives import Network
from modelsummary.cluster.topology import Cluster
from modelsummary.devices.target import Target
from modelsummary.errors import InputError

__all__ = ["PER_NODE", "communication"]

PER_NODE = 8
"""Devices of a node with the links of a named device."""


def communication(
    target: Target, ranks: int, shared_by: str, cluster: Cluster | None = None
) -> Callable[[str, int], float] | None:
    """Return the function from a collective and its bytes to seconds; None for a single device.

    Args:
        target: the device.
        ranks: number of devices.
        shared_by: argument that shares the model out over them, for messages.
        cluster: the nodes and links; None: nodes of eight devices with the links of ``target``.

    Raises:
        InputError: the links between devices are not known, or the cluster has fewer devices.
    """
    if ranks == 1:
        return None
    if cluster is None:
        if target.model is None or target.model.spec.interconnect is None:
            raise InputError(
                f"{shared_by}: the links between devices are not known for {target.name}; pass cluster=Cluster(...)"
            )
        spec = target.model.spec
        cluster = Cluster(spec, nodes=-(-ranks // PER_NODE), memory_bytes=spec.memory_bytes or 1)
    if ranks > cluster.devices:
        raise InputError(f"{shared_by} needs as many devices, the cluster has {cluster.devices}")
    network = Network(cluster)
    group = network.group(ranks)
    return lambda name, nbytes: network.seconds(name, nbytes, group)
