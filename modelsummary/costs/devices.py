"""``DeviceSpec``: what a device can do at most, for rooflines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from modelsummary.errors import InputError

__all__ = ["Bound", "DeviceSpec"]

Precision = torch.dtype | str
_TERA = 1e12
_RUNS = 5
_OTHER_MODELS = frozenset({"NVL", "LAPTOP", "MOBILE", "D", "PCIE"})  # of the same name, with other figures


class Bound(NamedTuple):
    """The least time that work takes on a device, in seconds, and what limits it: ``"compute"`` or ``"memory"``."""

    seconds: float
    limited_by: str


@dataclass(frozen=True)
class DeviceSpec:
    """Peaks of a device.

    Attributes:
        name: of the device.
        peak_flops: dtype (or ``"tf32"``) -> dense floating point operations per second of matrix products.
        bandwidth: bytes per second between the device and its memory.
        source: where the figures are from.
    """

    name: str
    peak_flops: Mapping[Precision, float]
    bandwidth: float
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        peaks = self.peak_flops.values() if isinstance(self.peak_flops, Mapping) else ()
        figures = [*peaks, self.bandwidth]
        if not peaks or not all(isinstance(figure, (int, float)) and figure > 0 for figure in figures):
            raise InputError(f"{self.name!r}: peak_flops and bandwidth must be numbers > 0, got {self!r:.120}")

    @classmethod
    def of(cls, name: str) -> DeviceSpec:
        """The accelerator of the table whose words are among those of ``name``, such as ``"NVIDIA H100 80GB HBM3"``.

        Raises:
            InputError: the table has none of this name. (Variants such as PCIe, NVL or laptop models differ.)
        """
        words = set(re.split(r"[^A-Z0-9]+", str(name).upper()))
        for known in _TABLE:
            if words.issuperset(known.upper().split()) and not words & _OTHER_MODELS:
                return _from_table(known)
        raise InputError(
            f"no accelerator {name!r} in the table; expected one of {', '.join(_TABLE)}, or DeviceSpec(...)"
        )

    @classmethod
    def measure(
        cls, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = (torch.float32,)
    ) -> DeviceSpec:
        """What a device of this machine reaches: the best of some large matrix products, convolutions and copies.

        Args:
            dtypes: of the products, each in turn.
        """
        place = _existing(device)
        if isinstance(dtypes, str) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
            raise InputError(f"dtypes={dtypes!r}; expected a list of torch.dtype")
        small = place.type == "cpu"
        size = 1024 if small else 8192
        peaks: dict[Precision, float] = {}
        for dtype in dtypes:
            matrix = torch.ones(size, size, dtype=dtype, device=place)
            images = torch.ones(16 if small else 256, 256, 58, 58, dtype=dtype, device=place)
            kernel = torch.ones(256, 256, 3, 3, dtype=dtype, device=place)
            convolution = len(images) * 56 * 56 * kernel.numel()
            product = size**3 / _least_seconds(place, torch.matmul, matrix, matrix)
            peaks[dtype] = 2 * max(product, convolution / _least_seconds(place, nn.functional.conv2d, images, kernel))
        source = torch.zeros(2**27 if small else 2**31, dtype=torch.uint8, device=place)
        target = torch.zeros_like(source)
        seconds = _least_seconds(place, target.copy_, source)
        return cls(f"this machine's {place}", peaks, 2 * source.numel() / seconds, "measured")

    def __hash__(self) -> int:
        return hash((self.name, self.bandwidth))

    def peak(self, dtype: Precision) -> float:
        """Operations per second with a dtype. Raises ``InputError`` if the peak is not known."""
        if not isinstance(dtype, (str, torch.dtype)) or dtype not in self.peak_flops:
            known = ", ".join(map(str, self.peak_flops))
            raise InputError(f"the peak of {self.name} with {dtype} is not known; pass dtype= one of {known}")
        return self.peak_flops[dtype]

    def bound(self, flops: float, moved_bytes: float, dtype: Precision) -> Bound:
        """The roofline (Williams et al. 2009): computing and moving overlap at best, so the longer of both counts."""
        computing, moving = flops / self.peak(dtype), moved_bytes / self.bandwidth
        return Bound(max(computing, moving), "compute" if computing >= moving else "memory")


def _existing(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (AssertionError, RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} cannot be measured: {str(error).splitlines()[0]}") from None
    if place.type == "meta":
        raise InputError("device='meta' computes nothing that could be measured")
    return place


def _least_seconds(device: torch.device, work: Callable[..., object], *args: torch.Tensor) -> float:
    """The shortest of some runs, after one that does not count."""
    times = []
    for _ in range(_RUNS + 1):
        begin = time.perf_counter()
        work(*args)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


# Dense peaks in 10^12 operations per second and bandwidth in 10^12 bytes per second, at the boost clock of the data
# sheet. float32 is that of the vector units: PyTorch uses TF32 for products only where it is told to.
_FLOAT32, _HALF, _FLOAT64, _BYTE = ("float32",), ("float16", "bfloat16"), ("float64",), ("int8",)
_FP8 = ("int8", "float8_e4m3fn", "float8_e5m2")
_A100: dict[tuple[str, ...], float] = {_HALF: 312, ("tf32",): 156, _FLOAT32: 19.5, _FLOAT64: 19.5, _BYTE: 624}
_HOPPER: dict[tuple[str, ...], float] = {_HALF: 989.5, ("tf32",): 494.5, _FLOAT32: 67, _FLOAT64: 67, _FP8: 1979}
_TABLE: dict[str, tuple[float, dict[tuple[str, ...], float], str]] = {
    "V100": (0.9, {("float16",): 125, _FLOAT32: 15.7, _FLOAT64: 7.8}, "NVIDIA V100 data sheet, SXM2, 2020"),
    "T4": (0.32, {("float16",): 65, _FLOAT32: 8.1, _BYTE: 130}, "NVIDIA T4 data sheet, 2019"),
    "A10": (0.6, {_HALF: 125, ("tf32",): 62.5, _FLOAT32: 31.2, _BYTE: 250}, "NVIDIA A10 data sheet, 2021"),
    "A100 40GB": (
        1.555,
        _A100,
        "NVIDIA A100 data sheet, SXM4, 2021",
    ),
    "A100 80GB": (
        2.039,
        _A100,
        "NVIDIA A100 data sheet, SXM4, 2021",
    ),
    "L4": (
        0.3,
        {_HALF: 121, ("tf32",): 60, _FLOAT32: 30.3, _FP8: 242.5},
        "NVIDIA L4 data sheet, 2023; half of the figures with sparsity",
    ),
    "L40S": (0.864, {_HALF: 362, ("tf32",): 183, _FLOAT32: 91.6, _FP8: 733}, "NVIDIA L40S data sheet, 2023"),
    "RTX 4090": (
        1.008,
        {_HALF: 165.2, ("tf32",): 82.6, _FLOAT32: 82.6, _BYTE: 660.6},
        "NVIDIA Ada GPU architecture whitepaper, appendix A; products accumulated in float32",
    ),
    "H100": (
        3.35,
        _HOPPER,
        "NVIDIA H100 data sheet, SXM5; half of the figures with sparsity",
    ),
    "H200": (
        4.8,
        _HOPPER,
        "NVIDIA H200 data sheet, SXM; half of the figures with sparsity",
    ),
    "MI300X": (
        5.3,
        {_HALF: 1307.4, ("tf32",): 653.7, _FLOAT32: 163.4, _FLOAT64: 163.4, _BYTE: 2614.9},
        "AMD Instinct MI300X data sheet, 2023",
    ),
}


def _from_table(name: str) -> DeviceSpec:
    bandwidth, teraflops, source = _TABLE[name]
    peaks: dict[Precision, float] = {
        key if key == "tf32" else getattr(torch, key): value * _TERA
        for keys, value in teraflops.items()
        for key in keys
    }
    return DeviceSpec(name, peaks, bandwidth * _TERA, source)
