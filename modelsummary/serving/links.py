"""The time of collectives between the devices that serve a model together."""

from __future__ import annotations

from collections.abc import Callable

from modelsummary.cluster.collectives import Network
from modelsummary.cluster.topology import Cluster
from modelsummary.devices.target import Target
from modelsummary.errors import InputError

__all__ = ["communication"]

_PER_NODE = 8


def communication(target: Target, ranks: int) -> Callable[[str, int], float] | None:
    """Return the function from a collective and its bytes to seconds; None for a single device.

    Raises:
        InputError: the links between devices are not known.
    """
    if ranks == 1:
        return None
    if target.model is None or target.model.spec.interconnect is None:
        raise InputError(f"tensor={ranks}: the links between devices are not known for {target.name}")
    spec = target.model.spec
    network = Network(Cluster(spec, nodes=-(-ranks // _PER_NODE), memory_bytes=spec.memory_bytes or 1))
    group = network.group(ranks)
    return lambda name, nbytes: network.seconds(name, nbytes, group)
