"""Time of a kernel on a device that need not be present: a few fitted coefficients on top of its data sheet.

A kernel computes and moves data at the same time, so it takes a little more than the longer of both, plus a launch::

    launch + (computing ** p + moving ** p) ** (1 / p)

*Moving* is bytes divided by the bandwidth times an efficiency of the operator's class. *Computing* of a matrix product
is the time of its tiles: the result is cut into tiles, the tiles run in waves over the units of the device, and each
tile works through the inner dimension after a start-up, which costs most where the inner dimension is short. The model
takes the fastest of several tile sizes, as cuBLAS and cuDNN choose; where tiles are few, it also cuts the inner
dimension. The efficiencies are fitted by ``benchmarks/fit_kernels.py`` and kept, with their sources and errors, in
``kernel_fits.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from math import ceil
from typing import Any

import torch

from modelsummary.costs.device_table import WATTS
from modelsummary.costs.devices import DeviceSpec
from modelsummary.costs.operator_work import Work

__all__ = ["DeviceModel", "device_model", "fits", "sustained"]

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 128), (128, 32), (32, 64), (64, 32))
_PARTS = (1, 2, 4, 8, 16, 32)  # of the inner dimension
_UNIT_TILE = 128 * 128  # elements of the result that keep a unit busy
_GEFORCE = "RTX 3090"
# Half-precision operations per joule of NVIDIA's 4N process: the speed of matrix products on an H100 of 700 W.
_HALF_PER_JOULE = 794.5e12 / 700
_PRODUCTS = frozenset({"gemm", "conv"})


@lru_cache(maxsize=1)
def fits() -> dict[str, Any]:
    """Return the fitted coefficients with their sources and errors.

    >>> sorted(fits())[:2]
    ['coefficients', 'date']
    """
    text = files("modelsummary.costs").joinpath("kernel_fits.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass(frozen=True)
class DeviceModel:
    """A model of the seconds of kernels on one device.

    Attributes:
        spec: the device.
        coefficients: as in ``kernel_fits.json``: ``"simt"`` and ``"tensor"`` for products without and with tensor
            cores, ``"moving"`` by operator class, ``"launch_us"``, ``"host_us"``, ``"overlap"``.
        stream: fraction of the data sheet's bandwidth that copies reach.
        tensor, simt: factors on the fitted efficiency of products on this device, with and without tensor cores.
        fit: name of the fit, such as ``"A100"`` or ``"generation ampere"``.
        typical_error: mean error of steps that the fit had not seen, as a fraction.
        tf32: float32 products run on tensor cores.
    """

    spec: DeviceSpec
    coefficients: Mapping[str, Any]
    stream: float
    tensor: float
    simt: float
    fit: str = ""
    typical_error: float = 0.0
    tf32: bool = False

    @property
    def launch(self) -> float:
        """Seconds between two kernels of a stream."""
        return float(self.coefficients["launch_us"]) * 1e-6

    @property
    def host(self) -> float:
        """Seconds that the host needs to dispatch one operator in eager mode."""
        return float(self.coefficients["host_us"]) * 1e-6

    def seconds(self, work: Work) -> float:
        """Return the seconds of a kernel in a stream of others, its launch included."""
        return self.launch + self.busy(work)

    def busy(self, work: Work) -> float:
        """Return the seconds in which a kernel computes and moves data, without its launch.

        Raises:
            InputError: the device has no peak for the dtype of a product.
        """
        moving = self.moving(work)
        computing = self.computing(work) if work.flops else 0.0
        if not computing:
            return moving
        power = float(self.coefficients["overlap"])
        return float((computing**power + moving**power) ** (1 / power))

    def moving(self, work: Work) -> float:
        """Return the seconds that moving the bytes of a kernel takes."""
        passes = self._layout_passes(work)
        by_class = self.coefficients["moving"]
        special = f"{work.op_class} {_variant(work)}"
        efficiency = by_class.get(special, by_class.get(work.op_class, by_class["other"]))
        return passes * work.nbytes / (self.spec.bandwidth * self.stream * float(efficiency))

    def computing(self, work: Work) -> float:
        """Return the seconds that the multiply-adds of a kernel take."""
        peak = self._peak(work.dtype)
        path = self._path(work.dtype)
        peak *= self.tensor if self._on_tensor_cores(work.dtype) else self.simt
        if work.op_class not in _PRODUCTS:
            return work.flops / (peak * float(path.get(work.op_class, path["other"])))
        own = path[work.op_class]
        rate = peak * float(own["efficiency"])
        batch, m, n, k, *image = work.sizes
        units, flush = self.spec.units or 100, 8.0 / (self.spec.bandwidth * self.stream)
        least = self._least_tile(work)
        seconds = _product_seconds(batch, m, n, k, rate, units, own, flush * batch * m * n, least)
        if self._is_winograd(work):
            height, width = image
            padded = 16 * (m // (height * width)) * ceil(height / 4) * ceil(width / 4)
            winograd = rate * float(own["winograd"])
            seconds = min(seconds, _product_seconds(batch, padded, n, 4 * k // 9, winograd, units, own, flush * m * n))
        return seconds

    def _path(self, dtype: torch.dtype) -> Mapping[str, Any]:
        path: Mapping[str, Any] = self.coefficients["tensor" if self._on_tensor_cores(dtype) else "simt"]
        return path

    def _least_tile(self, work: Work) -> int:
        """Return the elements of the library's smallest tile for batched products without tensor cores."""
        if work.op_class != "gemm" or work.sizes[0] == 1:
            return 0
        return int(self._path(work.dtype).get("batched_tile", {}).get(self.spec.generation, 0))

    def _on_tensor_cores(self, dtype: torch.dtype) -> bool:
        return dtype not in (torch.float32, torch.float64) or (dtype is torch.float32 and self.tf32)

    def _peak(self, dtype: torch.dtype) -> float:
        if dtype is torch.float32 and self.tf32 and self.spec.has("tf32"):
            return self.spec.peak("tf32")
        if dtype is torch.bfloat16 and not self.spec.has(dtype) and self.spec.has(torch.float32):
            return self.spec.peak(torch.float32)  # emulated with conversions
        return self.spec.peak(dtype)

    def _is_winograd(self, work: Work) -> bool:
        """Return True if cuDNN may run Winograd's algorithm: a 3 x 3 convolution of stride 1 in float32.

        The algorithm computes blocks of 2 x 2 results, four at a time, with 16 products instead of 36 (Lavin and Gray
        2015, https://arxiv.org/abs/1509.09308).
        """
        return work.op_class == "conv" and work.dtype is torch.float32 and not self.tf32 and "3x3" in work.name

    def _layout_passes(self, work: Work) -> float:
        """Return how often a convolution moves its bytes: half-precision kernels expect channels last."""
        return float(self._path(work.dtype).get("conv_passes", 1.0)) if work.op_class == "conv" else 1.0


def _variant(work: Work) -> str:
    """Return the variant of a kernel within its class: some are far slower in the backward."""
    return "backward" if "backward" in work.name else work.name.rpartition("(")[2].removesuffix(")")


def _product_seconds(
    batch: int, m: int, n: int, k: int, rate: float, units: int, own: Mapping[str, Any], flush: float, least: int = 0
) -> float:
    """Return the least seconds of a product over tile sizes and cuts of its inner dimension."""
    rate_of_unit = rate / units
    edge, start = float(own["edge"]), float(own["start"])
    best = float("inf")
    for rows, columns in _TILES:
        if rows * columns < least:
            continue
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        slowed = 1 + edge * (1 / rows + 1 / columns)
        for parts in _PARTS:
            if parts > 1 and (tiles * parts > 4 * units or k < 64 * parts):
                break
            tile = 2.0 * rows * columns * (k / parts + start) * slowed / rate_of_unit
            alone = tile * max(1.0, _UNIT_TILE / (rows * columns))
            seconds = max(ceil(tiles * parts / units) * tile, alone) + (parts * flush if parts > 1 else 0.0)
            best = min(best, seconds)
    return best


def sustained(spec: DeviceSpec, flops_per_joule: Mapping[str, float], best: float = 0.95) -> float:
    """Return the fraction of their peak that vector units sustain with the power of the board.

    Args:
        spec: the device.
        flops_per_joule: generation -> 10^9 operations per joule.
        best: fraction reached if power does not limit the clock.

    >>> sustained(DeviceSpec("V100"), {"volta": 50}), sustained(DeviceSpec("T4"), {"turing": 50})
    (0.95, 0.43209876543209874)
    """
    watts, peak = WATTS.get(spec.name), spec.peak_flops.get(torch.float32)
    own = flops_per_joule.get(spec.generation)
    return min(best, own * 1e9 * watts / peak) if watts and peak and own else 0.85


def device_model(spec: DeviceSpec, *, tf32: bool = False) -> DeviceModel:
    """Return the time model of a device: its own fit, or its generation's, or the fit of all devices.

    >>> device_model(DeviceSpec("A100")).fit
    'A100'
    """
    found = fits()
    devices = found["devices"]
    own = next((name for name in devices if spec.name == name or spec.name.startswith(f"{name} ")), None)
    by_generation = [name for name, each in devices.items() if each["generation"] == spec.generation]
    is_geforce = spec.name.startswith("RTX")  # clocks exceed the data sheet's, as on the fitted card
    name = own or next(iter(by_generation), _GEFORCE if is_geforce else None)
    entry = devices[name] if name is not None else found["default"]
    tensor = float(entry["tensor"])
    peak = spec.peak_flops.get(torch.bfloat16)
    reached = spec.achievable_flops.get(torch.bfloat16)
    if reached is None and spec.generation == "ada" and spec.name in WATTS:
        reached = min(_HALF_PER_JOULE * WATTS[spec.name], tensor * (peak or 0.0))
    if own is None and reached and peak:
        gemm = found["coefficients"]["tensor"]["gemm"]
        best = float(gemm["efficiency"]) / (1 + float(gemm["edge"]) * (1 / _TILES[0][0] + 1 / _TILES[0][1]))
        tensor = reached / peak / best
    like = f"generation {spec.generation}" if by_generation else f"as {name}"
    label = own or (like if name is not None else "no fit of its own")
    error = float(entry["error"]) if own else float(found["unseen_error"])
    stream = float(entry["stream"])
    simt = float(entry["simt"]) if own is not None else sustained(spec, found["flops_per_joule"])
    return DeviceModel(spec, found["coefficients"], stream, tensor, simt, label, error, tf32)
