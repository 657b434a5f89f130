"""``DeviceSpec``: the peaks of a device.

Which device a model or an input is on is the subject of ``capture.devices``.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import SequenceMatcher, get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from modelsummary.devices.device_table import TABLE
from modelsummary.devices.factors import OF_DEVICES, Factors, calibrated_factors, factors_of
from modelsummary.errors import InputError, is_number
from modelsummary.file_contents import read_toml, saved, toml_text
from modelsummary.keywords import dtype_named, listed, takes_keywords
from modelsummary.tables import Printed, Report
from modelsummary.units import parse_bytes, scaled

__all__ = ["Bound", "DeviceSpec", "Predicted", "check_speed", "device_of", "device_values", "least_seconds"]

Precision = torch.dtype | str
_TERA = 1e12
_RUNS = 5
_OF_BOARD = {"sustained_flops", "watts", "factors"}  # what may differ between boards of one type
_SUSTAINED = (torch.float32, torch.float16, torch.bfloat16)
# variants with the same name and other figures, and parts of a device
_OTHER_MODELS = frozenset({"NVL", "LAPTOP", "MOBILE", "D", "MAX", "TI", "SUPER", "MIG", "GRID", "3E", "SFF"})
_VARIANTS = frozenset({"40GB", "80GB", "PCIE"})
_MEMORY = re.compile(r"\b(\d+) ?GI?B?\b")
_MOST = 5  # entries that share a word with an unknown name
_SMALL = 1e5  # a peak or a bandwidth below lacks its unit; 1 is made up
_SAME_MEMORY = 0.1  # data sheets and names round it, or leave out what the device keeps for itself

# Copies to pinned memory reach about 80 % of sixteen lanes of PCIe, whose data sheets have 15.75, 31.5 and 63 GB/s for
# the third, fourth and fifth generation. NVLink-C2C of Grace has 450 GB/s in one direction, which two Blackwells share.
_PCIE_3, _PCIE_4, _PCIE_5 = 12.5e9, 25e9, 50e9
_HOST_BANDWIDTHS = {
    **dict.fromkeys(("pascal", "volta", "turing"), _PCIE_3),
    **dict.fromkeys(("ampere", "ada"), _PCIE_4),
    **dict.fromkeys(("hopper", "blackwell", "rtx blackwell", "cdna3", "cdna4"), _PCIE_5),
}
_ON_GRACE = {"GH200": 360e9, "GB200": 180e9, "GB300": 180e9}


class Bound(NamedTuple):
    """The least time of some work on a device, in seconds, and its limit: ``"compute"`` or ``"memory"``."""

    seconds: float
    limited_by: str


@takes_keywords()
@dataclass(frozen=True)
class DeviceSpec(Printed):
    """Peaks and other figures that the speed of a device depends on.

    Without ``peak_flops`` and ``bandwidth``, all figures are taken from the table of accelerators, and ``source`` says
    from which entry; ``sustained_flops`` and ``watts`` may be given nevertheless, as boards of one type differ.
    Otherwise, figures that are not given are None.

    Args:
        name: name of the device.
        peak_flops: dtype (or ``"tf32"``) -> dense floating point operations per second of matrix products.
        bandwidth: bytes per second between the device and its memory.
        source: where the figures are from.
        memory_bytes: bytes of the memory that torch sees; for a few devices of the table, the data sheet's.
        interconnect: bytes per second to other devices of the node, both directions together.
        units: number of streaming multiprocessors, compute units or tensor cores that share the work.
        cache_bytes: size of the last level of the cache, or of the part of it that serves one unit.
        generation: architecture, such as ``"ampere"``; a device without a fit of its own uses its generation's fit.
        achievable_flops: dtype -> highest published speed of matrix products.
        sustained_flops: float32, float16 or bfloat16 -> speed that long products of random numbers sustain on this
            very board, as ``DeviceSpec.sustained`` measures it. Predictions take it instead of an estimate.
        watts: power of the board. Products of large matrices slow down on a board with little power.
        factors: by which measured kernels and steps correct predictions; see ``calibrated``.

    Raises:
        InputError: the name is not in the table, or a figure is not positive.

    >>> spec = DeviceSpec("A100")
    >>> spec.name, spec.memory_bytes, spec.source
    ('A100 80GB', 84975927951, 'A100 taken as A100 80GB: NVIDIA A100 data sheet, SXM4, 2021')
    >>> DeviceSpec("B200", sustained_flops={torch.bfloat16: 1.107e15}).watts
    1000
    """

    name: str
    peak_flops: Mapping[Precision, float] = field(default_factory=dict)
    bandwidth: float = 0.0
    source: str = field(default="", compare=False)
    memory_bytes: int | None = None
    interconnect: float | None = None
    units: int | None = None
    cache_bytes: int | None = None
    generation: str = ""
    achievable_flops: Mapping[Precision, float] = field(default_factory=dict, compare=False)
    sustained_flops: Mapping[Precision, float] = field(default_factory=dict)
    watts: float | None = None
    factors: Factors = field(default_factory=Factors)

    def __post_init__(self) -> None:
        if self.peak_flops == {} and self.bandwidth == 0:
            for name, value in _from_table(_known_name(self.name), self.name).items():
                if name != "watts" or self.watts is None:
                    object.__setattr__(self, name, value)
        if isinstance(self.peak_flops, Mapping):
            object.__setattr__(self, "peak_flops", {_precision(key): peak for key, peak in self.peak_flops.items()})
        if not isinstance(self.peak_flops, Mapping) or not self.peak_flops:
            raise InputError(
                f"{self.name!r}: peak_flops must map dtypes to FLOP/s, such as {{torch.bfloat16: 312e12}}, got "
                f"{self.peak_flops!r:.80}"
            )
        for key, peak in self.peak_flops.items():
            check_speed(f"{self.name!r}: peak_flops of {key}", "FLOP/s, such as 312e12", peak)
        check_speed(f"{self.name!r}: bandwidth", "bytes per second, such as 2e12", self.bandwidth)
        if self.memory_bytes is not None:
            object.__setattr__(self, "memory_bytes", parse_bytes(self.memory_bytes, "memory_bytes"))
        speeds = self.sustained_flops
        if not isinstance(speeds, Mapping) or not all(
            dtype in _SUSTAINED and is_number(speed) and speed > 0 for dtype, speed in speeds.items()
        ):
            names = ", ".join(map(str, _SUSTAINED))
            raise InputError(f"{self.name!r}: sustained_flops must map {names} to numbers > 0, got {speeds!r:.120}")
        if self.watts is not None and not (is_number(self.watts) and self.watts > 0):
            raise InputError(f"{self.name!r}: watts must be a number > 0 or None, got {self.watts!r:.120}")
        if not isinstance(self.factors, Factors):
            raise InputError(f"{self.name!r}: factors must be Factors(products=1.1, ...), got {self.factors!r:.120}")

    def _report(self) -> Report:
        figures = [
            *(
                (f"peak, {str(dtype).removeprefix('torch.')}", peak, "FLOP/s")
                for dtype, peak in self.peak_flops.items()
            ),
            ("bandwidth", self.bandwidth, "B/s"),
            ("memory", self.memory_bytes, "B"),
            ("interconnect", self.interconnect, "B/s"),
            ("power", self.watts, "W"),
        ]
        rows = [[name, scaled(value, unit)] for name, value, unit in figures if value]
        return Report(rows, [self.name, ""], "lr", below=[self.source] if self.source else [])

    @property
    def host_bandwidth(self) -> float | None:
        """Bytes per second that copies to pinned memory of the host reach in one direction; None if it is not known.

        >>> DeviceSpec("A100").host_bandwidth
        25000000000.0
        """
        if self.name in _ON_GRACE:
            return _ON_GRACE[self.name]
        return _HOST_BANDWIDTHS.get(self.generation)

    @classmethod
    def of(cls, name: str) -> DeviceSpec:
        """Return the accelerator of the table that matches ``name``.

        Raises:
            InputError: the table has no such accelerator. (Variants such as NVL or laptop models differ.)

        >>> DeviceSpec.of("NVIDIA H100 80GB HBM3").name
        'H100'
        """
        return cls(name)

    @classmethod
    def measure(
        cls, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = (torch.float32,)
    ) -> DeviceSpec:
        """Measure a device of this machine: the best of several large matrix products, convolutions and copies.

        Args:
            device: a device other than meta; default: the CPU.
            dtypes: dtypes whose peak is measured; default: float32.

        Raises:
            InputError: the device cannot be used, or ``dtypes`` is not a list of ``torch.dtype``.
        """
        torch_device = _existing(device)
        if isinstance(dtypes, str) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
            raise InputError(f"dtypes must be a list of torch.dtype, got {dtypes!r}")
        is_cpu = torch_device.type == "cpu"
        size = 1024 if is_cpu else 8192
        peaks: dict[Precision, float] = {}
        for dtype in dtypes:
            matrix = torch.ones(size, size, dtype=dtype, device=torch_device)
            images = torch.ones(16 if is_cpu else 256, 256, 58, 58, dtype=dtype, device=torch_device)
            kernel = torch.ones(256, 256, 3, 3, dtype=dtype, device=torch_device)
            convolution = len(images) * 56 * 56 * kernel.numel()
            product = size**3 / least_seconds(torch_device, torch.matmul, matrix, matrix)
            peaks[dtype] = 2 * max(
                product, convolution / least_seconds(torch_device, nn.functional.conv2d, images, kernel)
            )
        threads = f" with {torch.get_num_threads()} threads" if is_cpu else ""
        source = torch.zeros(2**27 if is_cpu else 2**31, dtype=torch.uint8, device=torch_device)
        target = torch.zeros_like(source)
        seconds = least_seconds(torch_device, target.copy_, source)
        return cls(f"this machine's {torch_device}", peaks, 2 * source.numel() / seconds, f"measured{threads}")

    @staticmethod
    def sustained(
        device: torch.device | str = "cuda", dtypes: Sequence[torch.dtype] = (torch.bfloat16,), seconds: float = 20.0
    ) -> dict[Precision, float]:
        """Return the operations per second that products of random numbers sustain on a device of this machine.

        Power and heat slow a board down within seconds, so products run back to back, and the second half of the time
        counts.

        Args:
            device: a device other than meta.
            dtypes: dtypes to measure, one after the other: float32, float16 or bfloat16.
            seconds: time for each dtype.

        Raises:
            InputError: the device cannot be used, ``dtypes`` has another dtype, or ``seconds`` is not positive.

        >>> speeds = DeviceSpec.sustained("cpu", [torch.float32], seconds=0.05)
        >>> speeds[torch.float32] > 1e8
        True
        """
        torch_device = _existing(device)
        if isinstance(dtypes, str) or not all(dtype in _SUSTAINED for dtype in dtypes):
            raise InputError(f"dtypes must be a list of {', '.join(map(str, _SUSTAINED))}, got {dtypes!r}")
        if not (is_number(seconds) and seconds > 0):
            raise InputError(f"seconds must be a number > 0, got {seconds!r}")
        size = 512 if torch_device.type == "cpu" else 8192
        return {dtype: 2 * size**3 / _back_to_back(torch_device, dtype, size, seconds) for dtype in dtypes}

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> DeviceSpec:
        """Return the device that a TOML file describes. Its keys are the arguments of ``DeviceSpec``.

        Raises:
            InputError: the file cannot be read, or a key or value is unusable.
        """
        return device_of(read_toml(path))

    def to_toml(self, path: str | PathLike[str]) -> Path:
        """Write the device to a TOML file that ``from_toml`` reads, and return its path.

        Raises:
            InputError: the file cannot be written.
        """
        return saved(toml_text(device_values(self)), path)

    def calibrated(self, measured: Sequence[tuple[Predicted, float]]) -> DeviceSpec:
        """Return the device with factors that correct predictions by a few measurements of your own.

        One to five are enough. Each factor stays near 1 unless the measurements ask for another; ``print(factors)``
        shows them, and ``to_toml`` saves them with the device. The factors of this device are replaced.

        Args:
            measured: for each measurement its prediction, and the seconds that it took. A forward or a step is a
                ``stats.estimate_latency(...)``; kernels that were measured alone are part of ``stats.kernels(...)``,
                such as ``kernels[3:4]``. Predictions may be of several models, and for other devices.

        Raises:
            InputError: a value is unusable, or an estimate was loaded without its model.

        >>> from modelsummary import Statistics
        >>> stats = Statistics(nn.Linear(4096, 4096), (4096, 4096))
        >>> estimate = stats.estimate_latency("A100")
        >>> board = DeviceSpec("A100").calibrated([(estimate, 1.3 * estimate.seconds)])
        >>> 1.2 < stats.estimate_latency(board) / estimate < 1.3
        True
        """
        plain = replace(self, factors=Factors())
        is_list = isinstance(measured, Sequence) and not isinstance(measured, (str, bytes))
        for entry in measured if is_list else [measured]:
            _check_measured(entry)
        if not measured:
            raise InputError("measured must have one measurement or more, got none; pass [(estimate, seconds)]")

        def predict(factors: Factors) -> list[float]:
            device = replace(plain, factors=factors)
            return [predicted.on(device).seconds for predicted, _ in measured]

        seconds = [seconds for _, seconds in measured]
        return replace(plain, factors=calibrated_factors(predict, seconds, names=OF_DEVICES))

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth))

    def has(self, dtype: Precision) -> bool:
        """Return True if the peak of a dtype is known.

        >>> DeviceSpec("T4").has(torch.bfloat16)
        False
        """
        return isinstance(dtype, (str, torch.dtype)) and _precision(dtype) in self.peak_flops

    def peak(self, dtype: Precision, argument: str = "dtype") -> float:
        """Return the peak of a dtype in operations per second.

        Args:
            dtype: a ``torch.dtype``, or ``"tf32"``.
            argument: name of the argument that the error names.

        Raises:
            InputError: the peak is not known; names other floating point dtypes for a floating point dtype.

        >>> DeviceSpec("A100").peak("tf32")
        156000000000000.0
        """
        if not self.has(dtype):
            is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            precisions = [precision for precision in self.peak_flops if not is_floating or _runs_forwards(precision)]
            one_of = ", ".join(map(str, precisions or self.peak_flops))
            raise InputError(f"the peak of {self.name} with {dtype} is not known; pass {argument}= one of {one_of}")
        return self.peak_flops[_precision(dtype)]

    def bound(self, flops: float, moved_bytes: float, dtype: Precision) -> Bound:
        """Return the roofline's bound (Williams et al. 2009): computing or moving data, whichever takes longer.

        Raises:
            InputError: the peak of the dtype is not known, or an amount is not a number >= 0.

        >>> DeviceSpec("made up", {torch.float32: 1e12}, 1e11).bound(1e12, 1e10, torch.float32)
        Bound(seconds=1.0, limited_by='compute')
        """
        for name, amount in (("flops", flops), ("moved_bytes", moved_bytes)):
            if not is_number(amount) or amount < 0:
                raise InputError(f"{name} must be a number >= 0, got {amount!r:.80}")
        computing, moving = flops / self.peak(dtype), moved_bytes / self.bandwidth
        return Bound(max(computing, moving), "compute" if computing >= moving else "memory")


def check_speed(name: str, unit: str, value: Any) -> None:
    """Raise ``InputError`` for a speed that is not a number > 0, or that is in TFLOP/s, GB/s or TB/s instead of units.

    >>> check_speed("link_bandwidth", "bytes per second, such as 3e11", 600)
    Traceback (most recent call last):
    modelsummary.errors.InputError: link_bandwidth must be in bytes per second, such as 3e11, got 600
    """
    if not is_number(value) or value <= 0:
        raise InputError(f"{name} must be a number > 0 in {unit}, got {value!r:.80}")
    if 1 < value < _SMALL:
        raise InputError(f"{name} must be in {unit}, got {value!r}")


class Predicted(Protocol):
    """What can be predicted on another device: an estimate of a step, or kernels."""

    @property
    def seconds(self) -> float:
        """The predicted seconds."""

    def on(self, device: DeviceSpec) -> Predicted:
        """Return the same on another device."""


def _check_measured(entry: Any) -> None:
    """Raise ``InputError`` if this is not a prediction with its measured seconds."""
    is_pair = isinstance(entry, (tuple, list)) and len(entry) == 2 and hasattr(entry[0], "on")
    if not is_pair or not hasattr(entry[0], "seconds"):
        raise InputError(
            "measured must be a list of (estimate, seconds), with a stats.estimate_latency(...), or a part of "
            f"stats.kernels(...) such as kernels[3:4], got {_types_of(entry)}"
        )
    if not (is_number(entry[1]) and entry[1] > 0):
        raise InputError(f"seconds of a measurement must be a number > 0, got {entry[1]!r:.80}")
    if not entry[0].seconds > 0:
        raise InputError("measured must have predictions that take time, got one without kernels; leave it out")


def _types_of(entry: Any) -> str:
    """Return the type of a value, of a tuple or list the types in it: a printed model would be long."""
    if not isinstance(entry, (tuple, list)):
        return type(entry).__name__
    return f"({', '.join(type(element).__name__ for element in entry)})"


def device_values(spec: DeviceSpec) -> dict[str, Any]:
    """Return a device as a table of a file: of a device that is known by name, what differs from its figures.

    >>> device_values(DeviceSpec("A100", watts=300))
    {'name': 'A100 80GB', 'watts': 300}
    """
    values = {attribute.name: getattr(spec, attribute.name) for attribute in fields(spec)}
    if spec.name in TABLE:
        named = DeviceSpec(spec.name)
        differing = [name for name, value in values.items() if name != "source" and value != getattr(named, name)]
        if set(differing) <= _OF_BOARD:
            values = {"name": spec.name, **{name: values[name] for name in differing}}
    values = {name: value.values if isinstance(value, Factors) else value for name, value in values.items()}
    return {name: value for name, value in values.items() if value not in (None, "", {})}


def device_of(values: Mapping[str, Any]) -> DeviceSpec:
    """Return the device that a table of a file describes. Raise ``InputError`` for an unusable key or value.

    >>> device_of({"name": "A100", "watts": 300, "factors": {"products": 1.2}}).factors.products
    1.2
    """
    figures = dict(values)
    for name in ("peak_flops", "achievable_flops", "sustained_flops"):
        peaks = figures.get(name, {})
        if not isinstance(peaks, dict):
            raise InputError(
                f"device: {name} must be a table of dtypes and FLOP/s, such as {{ bfloat16 = 1e14 }}, got {peaks!r:.80}"
            )
        if peaks:
            figures[name] = {
                key if key == "tf32" else dtype_named(key, f"device: {name}", "", " or 'tf32'"): value
                for key, value in peaks.items()
            }
    if "factors" in figures:
        figures["factors"] = factors_of(figures["factors"])
    try:
        return DeviceSpec(**figures)
    except TypeError as error:
        raise InputError(f"device: {error}") from error


def _back_to_back(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """Return the mean seconds of a product of random matrices in the second half of a run of so many seconds."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype, device=device)
    begin, runs, half = time.perf_counter(), 0, 0.0
    with torch.no_grad():
        while (elapsed := time.perf_counter() - begin) < seconds or not runs:
            if not half and elapsed >= seconds / 2:
                half = elapsed
            torch.mm(left, right, out=out)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            runs += bool(half)
    return (time.perf_counter() - begin - half) / runs


def _runs_forwards(dtype: Precision) -> bool:
    """Return True for a floating point dtype of two bytes or more, in which all operators of a forward run."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


def _existing(device: torch.device | str) -> torch.device:
    try:
        torch_device = torch.device(device)
        torch.empty(1, device=torch_device)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} cannot be used: {str(error).splitlines()[0]}") from None
    if torch_device.type == "meta":
        raise InputError("device must be one that computes, got 'meta'")
    return torch_device


def least_seconds(device: torch.device, work: Callable[..., object], *args: torch.Tensor) -> float:
    """Return the seconds of the shortest of several runs, after one run to warm up.

    >>> 0 < least_seconds(torch.device("cpu"), torch.relu, torch.ones(8)) < 1
    True
    """
    times = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        work(*args)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _precision(dtype: Precision) -> Precision:
    """Return a dtype for its name; ``"tf32"``, and what is not known, stay as they are."""
    if not isinstance(dtype, str) or dtype == "tf32":
        return dtype
    try:
        return dtype_named(dtype, "dtype", "")
    except InputError:
        return dtype


def _known_name(name: str) -> str:
    """Return the table's entry for a name. Raise ``InputError`` with the nearest names if there is none."""
    same = [entry for entry in TABLE if isinstance(name, str) and _letters(entry) == _letters(name)]
    if same:
        return same[0]
    plain = re.sub(r"\bSXM\d?\b", " ", name.upper()) if isinstance(name, str) else ""
    words = set(re.split(r"[^A-Z0-9]+", _MEMORY.sub(r"\1GB", plain)))
    parts = {entry: set(re.split(r"[^A-Z0-9]+", entry.upper())) for entry in TABLE}
    same_model = {entry: part for entry, part in parts.items() if words & _OTHER_MODELS <= part}
    models = [model for part in same_model.values() if words.issuperset(model := part - _VARIANTS)]
    if all(model <= other or other <= model for model in models for other in models):  # one is named, not several
        matches = [entry for entry, part in same_model.items() if part <= words]
        if not matches:  # variants of one model, such as different memories: take the first
            matches = [entry for entry, part in same_model.items() if part - _VARIANTS <= words][:1]
            if "PCIE" in words:
                matches = [f"{entry} PCIe" for entry in matches if f"{entry} PCIe" in TABLE]
        best = max(matches, key=lambda entry: len(parts[entry]), default=None)
        if best is not None and not ("PCIE" in words and "PCIe" not in best and f"{best} PCIe" in TABLE):
            return best
    shared = {entry: words & set(entry.upper().split()) for entry in TABLE}
    often = Counter(word for entry in TABLE for word in entry.upper().split())

    def nearness(entry: str) -> tuple[float, float]:
        return sum(1 / often[word] for word in shared[entry]), SequenceMatcher(None, plain, entry.upper()).ratio()

    similar = sorted(filter(shared.get, shared), key=nearness, reverse=True)[:_MOST]
    for query in (plain, *sorted(words - {""}, key=len, reverse=True)):
        similar += get_close_matches(query, TABLE, n=3, cutoff=0.6)
    near = f"the nearest are {', '.join(dict.fromkeys(similar))}" if similar else f"expected one of {listed(TABLE)}"
    raise InputError(
        f"no accelerator {name!r:.80} in the table; {near}; pass one of the table's, or DeviceSpec(name, peak_flops, "
        "bandwidth)"
    )


def _letters(name: str) -> str:
    """Return the letters and digits of a name."""
    return re.sub(r"[\W_]+", "", name).upper()


def _from_table(entry: str, name: str) -> dict[str, Any]:
    figures = TABLE[entry]
    peaks = {
        key if key == "tf32" else getattr(torch, key): value * _TERA
        for keys, value in figures.teraflops.items()
        for key in keys
    }
    achievable = figures.achievable
    memory = int(figures.memory * 1e9 if figures.usable_gib is None else figures.usable_gib * 2**30)
    source = figures.source if name.upper() == entry.upper() else f"{name} taken as {entry}: {figures.source}"
    stated_memory = _MEMORY.search(name.upper())
    if stated_memory is not None and abs(int(stated_memory[1]) - figures.memory) > _SAME_MEMORY * figures.memory:
        memory, source = int(stated_memory[1]) * 10**9, f"{source}, with {stated_memory[1]} GB"
    return {
        "name": entry,
        "peak_flops": peaks,
        "bandwidth": figures.bandwidth * _TERA,
        "source": source,
        "memory_bytes": memory,
        "interconnect": figures.interconnect * 1e9,
        "units": figures.units,
        "cache_bytes": int(figures.cache_mb * 1e6),
        "generation": figures.generation,
        "watts": figures.watts,
        "achievable_flops": {}
        if achievable is None
        else {torch.bfloat16: achievable * _TERA, torch.float16: achievable * _TERA},
    }
