"""``Cluster``: nodes of devices, and the links inside and between nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelsummary.devices.device_spec import DeviceSpec, check_speed, device_of, device_values
from modelsummary.devices.factors import Factors, calibrated_factors, factors_of
from modelsummary.errors import InputError, check_integers, is_number
from modelsummary.file_contents import read_toml, saved, toml_text
from modelsummary.keywords import check_names, choice_of, takes_keywords
from modelsummary.tables import Printed, Report
from modelsummary.units import parse_bytes, scaled

if TYPE_CHECKING:
    from modelsummary.cluster.estimate import StepEstimate

__all__ = ["PCIE_BANDWIDTH", "PRESETS", "Cluster", "calibrated_device", "check_cluster"]

PCIE_BANDWIDTH = 64e9  # bytes per second and direction of sixteen lanes of the fifth generation
_NVLINK_4 = 900e9  # bytes per second of all NVLinks of a Hopper SXM module, both directions


@takes_keywords()
@dataclass(frozen=True)
class Cluster(Printed):
    """The devices to train on, and the links between them.

    Bandwidths are as in a data sheet, for one direction; the fraction that collectives reach is in ``collectives``.

    Attributes:
        device: a ``DeviceSpec``, or the name of an accelerator.
        nodes: number of nodes. Default: 1.
        devices_per_node: devices in a node. Default: 8.
        link_bandwidth: bytes per second that a device sends to others of its node. Default: half of the device's
            ``interconnect``, which counts both directions.
        network_bandwidth: bytes per second that a network interface sends. Default: 25e9 (200 Gbit/s).
        interfaces_per_node: network interfaces of a node, shared evenly by its devices. Default: one per device.
        link_latency: seconds of a message inside a node; None: as fitted.
        network_latency: seconds of a message between nodes; None: as NCCL's own model has it.
        link_efficiency: fraction of ``link_bandwidth`` that large messages reach; None: as fitted.
        network_efficiency: fraction of ``network_bandwidth`` that large messages reach; None: see ``collectives``.
        memory_bytes: memory of a device that training may use, or text such as ``"60GB"``. Default: what torch sees of
            the device's memory.
        nvlink_sharp: whether the switches of a node reduce. Default: True for SXM modules since Hopper, whose NVLinks
            have 900 GB/s or more, unless ``link_bandwidth`` is 64 GB/s or less, as of PCIe.
        factors: by which measured steps correct predictions; see ``calibrated``.

    Raises:
        InputError: a value is out of range, or the device is unknown.

    >>> cluster = Cluster("A100", nodes=16)
    >>> cluster.devices, cluster.link_bandwidth, cluster.memory_bytes
    (128, 300000000000.0, 84975927951)
    """

    device: DeviceSpec
    nodes: int = 1
    devices_per_node: int = 8
    link_bandwidth: float = 0.0
    network_bandwidth: float = 25e9
    interfaces_per_node: int = 0
    link_latency: float | None = None
    network_latency: float | None = None
    link_efficiency: float | None = None
    network_efficiency: float | None = None
    memory_bytes: int = 0
    name: str = field(default="", compare=False)
    nvlink_sharp: bool | None = None
    factors: Factors = field(default_factory=Factors)

    def __post_init__(self) -> None:
        put = object.__setattr__
        if isinstance(self.device, str):
            put(self, "device", DeviceSpec(self.device))
        if not isinstance(self.device, DeviceSpec):
            raise InputError(f"device must be a DeviceSpec or the name of an accelerator, got {self.device!r:.80}")
        check_integers(nodes=self.nodes, devices_per_node=self.devices_per_node)
        defaults = {
            "link_bandwidth": (self.device.interconnect or 0.0) / 2,
            "interfaces_per_node": self.devices_per_node,
            "memory_bytes": self.device.memory_bytes or 0,
        }
        for name, default in defaults.items():
            if getattr(self, name) in (0, None) and getattr(self, name) is not False:
                put(self, name, default)
        if self.memory_bytes:
            put(self, "memory_bytes", parse_bytes(self.memory_bytes, "memory_bytes"))
        self._check()

    def _check(self) -> None:
        for name in ("link_bandwidth", "network_bandwidth", "interfaces_per_node", "memory_bytes"):
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise InputError(f"{name} of a cluster of {self.device.name} must be a number > 0, got {value!r}")
            if name.endswith("bandwidth"):
                check_speed(name, "bytes per second, such as 25e9", value)
        if type(self.interfaces_per_node) is not int:
            raise InputError(f"interfaces_per_node must be an integer >= 1, got {self.interfaces_per_node!r}")
        for name in ("link_latency", "network_latency"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 0):
                raise InputError(f"{name} must be a number >= 0 or None, got {value!r}")
        for name in ("link_efficiency", "network_efficiency"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value <= 1):
                raise InputError(f"{name} must be a number > 0 and <= 1, or None, got {value!r}")
        if self.nvlink_sharp is not None and not isinstance(self.nvlink_sharp, bool):
            raise InputError(f"nvlink_sharp must be True, False or None, got {self.nvlink_sharp!r:.80}")
        if not isinstance(self.factors, Factors):
            raise InputError(f"factors must be Factors, such as Factors(products=1.1), got {self.factors!r:.80}")
        if not isinstance(self.name, str):
            raise InputError(f"name must be a string, got {self.name!r:.80}")

    @property
    def reduces_in_switch(self) -> bool:
        """Whether the switches of a node reduce, by NVLink Sharp."""
        if self.nvlink_sharp is not None:
            return self.nvlink_sharp
        has_switch = (self.device.interconnect or 0.0) >= _NVLINK_4 and self.link_bandwidth > PCIE_BANDWIDTH
        return has_switch and self.device.generation in ("hopper", "blackwell")

    def _report(self) -> Report:
        rows = [
            ["device", self.device.name],
            ["nodes", str(self.nodes)],
            ["devices per node", str(self.devices_per_node)],
            ["memory of a device", scaled(self.memory_bytes, "B")],
            ["link of a device", scaled(self.link_bandwidth, "B/s")],
            ["network interfaces of a node", str(self.interfaces_per_node)],
            ["network interface", scaled(self.network_bandwidth, "B/s")],
            ["switches reduce", "yes" if self.reduces_in_switch else "no"],
        ]
        factors = [f"Corrected by {self.factors!r}"] if self.factors.values else []
        return Report(rows, [self.name or "Cluster", ""], "lr", below=factors)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.nodes * self.devices_per_node

    @classmethod
    def preset(cls, name: str, nodes: int = 1, **changes: Any) -> Cluster:
        """Return a common kind of machine, with changed attributes if some are given.

        Args:
            name: one of ``PRESETS``, such as ``"DGX A100"``.
            nodes: number of nodes.
            **changes: other attributes of the cluster.

        Raises:
            InputError: the preset or an attribute is unknown, or a value is out of range.

        >>> Cluster.preset("DGX H100", nodes=4, interfaces_per_node=4).devices
        32
        """
        name = choice_of(name, PRESETS, "name", ", or use Cluster(...)")
        return _from_attributes({**PRESETS[name], "nodes": nodes, "name": name, **changes})

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Cluster:
        """Return the cluster that a TOML file describes.

        The keys of the file are the attributes of the cluster. ``preset`` names the kind of machine that they change.
        ``device`` is a name, or a table with the arguments of ``DeviceSpec``; ``factors`` is a table of ``Factors``.

        Raises:
            InputError: the file cannot be read, or a key or value is unusable.
        """
        data = read_toml(path)
        preset, name = data.pop("preset", None), data.pop("name", None)
        if isinstance(data.get("device"), dict):
            data["device"] = device_of(data["device"])
        if "factors" in data:
            data["factors"] = factors_of(data["factors"])
        cluster = _from_attributes(data) if preset is None else cls.preset(preset, **data)
        return cluster if name is None else replace(cluster, name=name)

    def to_toml(self, path: str | PathLike[str]) -> Path:
        """Write the cluster to a TOML file that ``from_toml`` reads, and return its path.

        Raises:
            InputError: the file cannot be written.
        """
        values = {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}
        device = device_values(self.device)
        values |= {"device": device["name"] if [*device] == ["name"] else device, "factors": self.factors.values}
        return saved(toml_text(values), path)

    def calibrated(self, measured: Sequence[tuple[StepEstimate, float, float | None]]) -> Cluster:
        """Return the cluster with factors that correct predictions by a few measured steps of your own.

        One to five steps are enough. Each factor stays near 1 unless the steps ask for another; ``print(factors)``
        shows them, and ``to_toml`` saves them with the cluster. The factors of this cluster are replaced, and come in
        addition to the factors of its devices.

        Args:
            measured: for each step its estimate, the seconds that it took, and the peak bytes of its fullest rank, as
                by ``torch.cuda.max_memory_allocated``; None: not measured. Estimates may be of several models.

        Raises:
            InputError: a value is unusable, or an estimate was loaded without its model.

        >>> from torch import nn
        >>> from modelsummary import Statistics
        >>> from modelsummary.cluster import Cluster, Plan
        >>> stats = Statistics(nn.Linear(4096, 4096), (512, 4096))
        >>> cluster = Cluster("A100")
        >>> step = stats.simulate(Plan(data=8, micro_batch=512), cluster, 4096)
        >>> calibrated = cluster.calibrated([(step, 1.3 * step.step_seconds, None)])
        >>> 1.2 < step.on(calibrated).step_seconds / step.step_seconds < 1.3
        True
        """
        is_list = isinstance(measured, Sequence) and not isinstance(measured, (str, bytes))
        for entry in measured if is_list else [None]:
            _check_measured(entry)
        if not measured:
            raise InputError(
                "measured must have one step or more, got none; pass [(estimate, seconds, peak_bytes or None)]"
            )

        def predict(factors: Factors) -> list[float]:
            other = replace(self, factors=factors)
            steps = [step.on(other.with_nodes(max(self.nodes, step.cluster.nodes))) for step, *_ in measured]
            peaks = [float(step.memory_bytes) for step, (*_, peak) in zip(steps, measured, strict=True) if peak]
            return [step.step_seconds for step in steps] + peaks

        peaks = [peak for *_, peak in measured if peak is not None]
        return replace(self, factors=calibrated_factors(predict, [seconds for _, seconds, _ in measured], peaks))

    def with_nodes(self, nodes: int) -> Cluster:
        """Return the same kind of machine with another number of nodes."""
        return replace(self, nodes=nodes)


def _check_measured(entry: Any) -> None:
    """Raise ``InputError`` if this is not an estimate with its seconds and its peak."""
    if not (isinstance(entry, (tuple, list)) and len(entry) == 3 and hasattr(entry[0], "step_seconds")):
        raise InputError(
            "measured must be a list of (estimate, seconds, peak_bytes or None), with estimates of stats.simulate, got "
            f"{entry!r:.80}"
        )
    for name, value, or_none in (("seconds", entry[1], ""), ("peak_bytes", entry[2], " or None")):
        if not (is_number(value) and value > 0) and not (or_none and value is None):
            raise InputError(f"{name} of a measured step must be a number > 0{or_none}, got {value!r:.80}")


def check_cluster(cluster: object) -> None:
    """Raise ``InputError`` for anything but a ``Cluster``."""
    if not isinstance(cluster, Cluster):
        raise InputError(f"cluster must be a Cluster, such as Cluster.preset('DGX H100', nodes=4), got {cluster!r:.80}")


def calibrated_device(cluster: Cluster) -> DeviceSpec:
    """Return the device of a cluster, with the factors of both.

    >>> calibrated_device(Cluster("A100", factors=Factors(products=1.1))).factors.products
    1.1
    """
    return replace(cluster.device, factors=cluster.device.factors.times(cluster.factors))


def _from_attributes(values: Mapping[str, Any]) -> Cluster:
    names = [attribute.name for attribute in fields(Cluster)]
    check_names("a cluster", values, names)
    if "device" not in values:
        raise InputError("a cluster needs a device: the name of an accelerator, such as 'A100 80GB'")
    return Cluster(**values)


# Network bandwidths are bytes per second of one interface and direction.
PRESETS: dict[str, dict[str, Any]] = {
    "DGX A100": {"device": "A100 80GB", "devices_per_node": 8, "network_bandwidth": 25e9},
    "DGX H100": {"device": "H100", "devices_per_node": 8, "network_bandwidth": 50e9},
    "HGX H200": {"device": "H200", "devices_per_node": 8, "network_bandwidth": 50e9},
    "GB200 NVL72": {"device": "GB200", "devices_per_node": 72, "network_bandwidth": 50e9},
    "A100 PCIe": {
        "device": "A100 80GB PCIe",
        "devices_per_node": 8,
        "link_bandwidth": 32e9,
        "network_bandwidth": 25e9,
        "interfaces_per_node": 2,
    },
    "RTX 4090": {
        "device": "RTX 4090",
        "devices_per_node": 8,
        "link_bandwidth": 32e9,
        "network_bandwidth": 12.5e9,
        "interfaces_per_node": 1,
    },
}
