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

from modelsummary.costs.device_spec import DeviceSpec
from modelsummary.costs.device_table import WATTS
from modelsummary.costs.operator_work import Work

__all__ = ["DeviceModel", "device_model", "fits", "half_speed", "sustained", "tensor_factor"]

_Tiles = tuple[tuple[int, int], ...]
_TILES: _Tiles = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (32, 128),
    (128, 32),
    (32, 64),
    (64, 32),
)
_PARTS = (1, 2, 4, 8, 16, 32)  # of the inner dimension
_UNIT_TILE = 128 * 128  # elements of the result that keep a unit busy
_GEFORCE = "RTX 3090"
# Operators that take few parameters: they find what the kernel before them wrote in the last level of the cache, as
# far as it is large enough. It is about three times as fast as the memory (an A100 and an H100 measured by
# Chips and Cheese 2023, https://chipsandcheese.com/2023/07/02/nvidias-h100-funny-l2-and-tons-of-bandwidth/).
_FROM_CACHE = frozenset({"norm", "batch_norm", "softmax", "reduction", "pool", "elementwise", "copy", "attention"})
_CACHE_SPEED = 3.0
# Fractions of the peak that float32 products reach in units with 64 lanes (at most 0.25 TFLOP/s) and with 128.
_NARROW, _WIDE, _WIDE_UNIT = 0.95, 0.75, 0.25e12
_ATTENTION_TILE = 128  # queries, or keys, of one block of threads
# FlashAttention-2 on an A100 reaches 190 TFLOP/s forward with heads of 64, 225 with heads of 128, and 20 % less in the
# backward (Dao 2023, https://arxiv.org/abs/2307.08691, figures 4 to 6): the exponentials take as long as 26 more
# elements of a head.
_EXPONENTIALS, _ATTENTION_BACKWARD = 26, 0.8
# Half-precision operations per joule, by generation: the speed of matrix products on a T4 of 70 W
# (https://forums.developer.nvidia.com/t/about-gpu-peak-performance/264462), and the published ones of ``device_table``
# on an A100 of 400 W, an H100 of 700 W, a B200 of 1000 W.
_HALF_PER_JOULE = {
    **dict.fromkeys(("volta", "turing"), 24e12 / 70),
    "ampere": 271.2e12 / 400,
    **dict.fromkeys(("ada", "hopper"), 794.5e12 / 700),
    "blackwell": 1745e12 / 1000,
}
# Fractions of the peak that half-precision products reach if power does not limit them: the A100; MI300X to MI355X.
_USUAL_HALF, _USUAL_HALF_OF_AMD = 0.87, 0.6
_MOST_WINOGRAD = 1.7  # times the peak: on each device, 99 % of the measured 3 x 3 convolutions are at most that fast
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
        seconds = passes * work.nbytes / (self.spec.bandwidth * self.stream * float(efficiency))
        cache = self.spec.cache_bytes or 0
        if work.nbytes < cache and work.op_class in _FROM_CACHE:
            seconds *= 1 - (1 - 1 / _CACHE_SPEED) * (1 - work.nbytes / cache)
        return float(seconds)

    def computing(self, work: Work) -> float:
        """Return the seconds that the multiply-adds of a kernel take."""
        peak = self._peak(work.dtype)
        path = self._path(work.dtype)
        peak *= self.tensor if self._on_tensor_cores(work.dtype) else self.simt
        if work.op_class == "attention":
            return self._attending(work, peak * float(path["attention"]))
        if work.op_class == "rnn":  # each step waits for the one before
            return work.flops / (peak * float(path["other"])) + work.sizes[0] * self.launch
        if work.op_class not in _PRODUCTS:
            return work.flops / (peak * float(path.get(work.op_class, path["other"])))
        own = path[work.op_class]
        rate = peak * float(own["efficiency"])
        batch, m, n, k = work.sizes[:4]
        units, flush = self.spec.units or 100, 8.0 / (self.spec.bandwidth * self.stream)
        tiles, parts = self._cuts(work)
        seconds = _product_seconds(batch, m, n, k, rate, units, own, flush * batch * m * n, tiles, parts)
        seconds *= self._far_rows(work)
        if self._is_winograd(work):
            least_seconds = work.flops / (_MOST_WINOGRAD * self._peak(work.dtype))
            seconds = min(seconds, max(self._winograd(work, rate, own), least_seconds))
        return seconds

    def _attending(self, work: Work, rate: float) -> float:
        """Return the seconds of fused attention with ``rate`` operations per second for very large heads.

        Blocks of threads, one per tile of queries (of keys, where these are more), run in waves over the units. A
        causal kernel leaves out the tiles above the diagonal. The exponentials take as long for small heads as for
        large ones.
        """
        outer, queries, keys, head = work.sizes
        flops = work.flops * (min(1.0, 0.5 + _ATTENTION_TILE / (2 * max(keys, 1))) if "causal" in work.name else 1.0)
        rate /= 1 + _EXPONENTIALS / max(head, 1)
        if "backward" in work.name:
            rate *= _ATTENTION_BACKWARD
        units, length = self.spec.units or 100, max(queries, keys, 1)
        blocks = outer * ceil(length / _ATTENTION_TILE)
        of_a_block = flops / (max(outer, 1) * length) * min(length, _ATTENTION_TILE)
        return ceil(blocks / units) * units * of_a_block / rate

    def _path(self, dtype: torch.dtype) -> Mapping[str, Any]:
        path: Mapping[str, Any] = self.coefficients["tensor" if self._on_tensor_cores(dtype) else "simt"]
        return path

    def _cuts(self, work: Work) -> tuple[_Tiles, tuple[int, ...]]:
        """Return the tiles of a product, and the numbers of parts of its inner dimension, that the library has.

        Without tensor cores, cuBLAS has few tiles for batched products, and neither these nor the implicit products of
        cuDNN cut the inner dimension, except in the gradient of weights.
        """
        path = self._path(work.dtype)
        if path is not self.coefficients["simt"]:
            return _TILES, _PARTS
        if work.op_class == "conv":
            return _TILES, _PARTS if "weight" in work.name else (1,)
        if work.sizes[0] == 1:
            return _TILES, _PARTS
        return tuple((rows, columns) for rows, columns in path["batched_tiles"].get(self.spec.generation, _TILES)), (1,)

    def _far_rows(self, work: Work) -> float:
        """Return the factor by which long rows slow down a product; 1.0 on most devices.

        The measured boards of the Pascal generation slow down, probably because the rows of a tile then lie on more
        pages of memory than their address translation holds.
        """
        own = self._path(work.dtype)["gemm"].get("far_rows", {}).get(self.spec.name)
        if own is None or work.op_class != "gemm" or work.sizes[0] > 1:
            return 1.0
        reached = 1024 * float(own["reach_kib"]) / (work.sizes[3] * work.dtype.itemsize)
        return 1.0 + float(own["slowdown"]) * max(0.0, 1.0 - reached)

    def _on_tensor_cores(self, dtype: torch.dtype) -> bool:
        return dtype not in (torch.float32, torch.float64) or (dtype is torch.float32 and self.tf32)

    def _peak(self, dtype: torch.dtype) -> float:
        if dtype is torch.float32 and self.tf32 and self.spec.has("tf32"):
            return self.spec.peak("tf32")
        return self.spec.peak(dtype)

    def _is_winograd(self, work: Work) -> bool:
        """Return True if cuDNN may run Winograd's algorithm: a 3 x 3 convolution of stride 1 in float32."""
        return work.op_class == "conv" and work.dtype is torch.float32 and not self.tf32 and "3x3" in work.name

    def _winograd(self, work: Work, rate: float, own: Mapping[str, Any]) -> float:
        """Return the seconds of Winograd's algorithm in four kernels (Lavin and Gray 2015, arXiv:1509.09308).

        It transforms images, filters and results, and computes 4 x 4 results with 36 products instead of 144.
        """
        _, m, n, k, height, width = work.sizes
        is_weight = "weight" in work.name
        pixels, out, channels = (k, m, n // 9) if is_weight else (m, n, k // 9)
        tiles = pixels // max(height * width, 1) * ceil(height / 4) * ceil(width / 4)
        sizes = (out, channels, tiles) if is_weight else (tiles, out, channels)
        elements = (72 * tiles + pixels) * (channels + out) + 81 * channels * out
        bandwidth = self.spec.bandwidth * self.stream
        moving = elements * work.dtype.itemsize / (bandwidth * float(own["transform"]))
        flush = 8.0 / bandwidth * 36 * sizes[0] * sizes[1]
        rate *= float(own["winograd"])
        parts = _PARTS if is_weight else (1,)
        products = _product_seconds(36, *sizes, rate, self.spec.units or 100, own, flush, parts_of=parts)
        return products + moving + 3 * self.launch

    def _layout_passes(self, work: Work) -> float:
        """Return how often a convolution moves its bytes: half-precision kernels expect channels last."""
        is_expected = work.op_class != "conv" or "channels last" in work.name
        return 1.0 if is_expected else float(self._path(work.dtype).get("conv_passes", 1.0))


def _variant(work: Work) -> str:
    """Return the variant of a kernel within its class: some are far slower in the backward."""
    return "backward" if "backward" in work.name else work.name.rpartition("(")[2].removesuffix(")")


def _product_seconds(
    batch: int,
    m: int,
    n: int,
    k: int,
    rate: float,
    units: int,
    own: Mapping[str, Any],
    flush: float,
    tiles_of: _Tiles = _TILES,
    parts_of: tuple[int, ...] = _PARTS,
) -> float:
    """Return the least seconds of a product over tile sizes and cuts of its inner dimension."""
    rate_of_unit = rate / units
    edge, start, alone_power = float(own["edge"]), float(own["start"]), float(own.get("alone", 1.0))
    best = float("inf")
    for rows, columns in tiles_of:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        slowed = 1 + edge * (1 / rows + 1 / columns)
        for parts in parts_of:
            if parts > 1 and (tiles * parts > 4 * units or k < 64 * parts):
                break
            tile = 2.0 * rows * columns * (k / parts + start) * slowed / rate_of_unit
            alone = tile * max(1.0, _UNIT_TILE / (rows * columns)) ** alone_power
            seconds = max(ceil(tiles * parts / units) * tile, alone) + (parts * flush if parts > 1 else 0.0)
            best = min(best, seconds)
    return best


def sustained(spec: DeviceSpec, flops_per_joule: Mapping[str, float]) -> float:
    """Return the fraction of their peak that vector units sustain in products of large matrices.

    The power of the board limits it, and in units with 128 lanes, whose registers and shared memory feed no more than
    in units with 64, also the supply with operands.

    Args:
        spec: the device.
        flops_per_joule: generation -> 10^9 operations per joule.

    >>> sustained(DeviceSpec("V100"), {"volta": 50}), sustained(DeviceSpec("T4"), {"turing": 50})
    (0.95, 0.43209876543209874)
    """
    watts, peak = WATTS.get(spec.name), spec.peak_flops.get(torch.float32)
    own = flops_per_joule.get(spec.generation)
    is_wide = bool(peak and spec.units and peak / spec.units > _WIDE_UNIT)
    best = _WIDE if is_wide else _NARROW
    return min(best, own * 1e9 * watts / peak) if watts and peak and own else min(best, 0.85)


def half_speed(spec: DeviceSpec) -> float | None:
    """Return the operations per second of large half-precision products; None if the device has no half precision.

    It is the published speed if there is one, else what the power of the board allows, and at most the usual fraction
    of the peak. The clocks of GeForce cards exceed the data sheet's.

    >>> half_speed(DeviceSpec("T4"))
    24000000000000.0
    """
    published = spec.achievable_flops.get(torch.bfloat16)
    peak = spec.peak_flops.get(torch.bfloat16) or spec.peak_flops.get(torch.float16)
    if published is not None or peak is None:
        return published
    usual = _USUAL_HALF_OF_AMD if spec.generation.startswith("cdna") else _USUAL_HALF
    most = peak * (1.0 if _is_geforce(spec) else usual)
    watts, per_joule = WATTS.get(spec.name), _HALF_PER_JOULE.get(spec.generation)
    return min(most, watts * per_joule) if watts and per_joule else most


def _is_geforce(spec: DeviceSpec) -> bool:
    return spec.name.startswith("RTX")


def device_model(spec: DeviceSpec, *, tf32: bool = False) -> DeviceModel:
    """Return the time model of a device: its own fit, or its generation's, or the fit of all devices.

    >>> device_model(DeviceSpec("A100")).fit
    'A100'
    """
    found = fits()
    devices = found["devices"]
    own = next((name for name in devices if spec.name == name or spec.name.startswith(f"{name} ")), None)
    by_generation = [name for name, each in devices.items() if each["generation"] == spec.generation]
    name = own or next(iter(by_generation), _GEFORCE if _is_geforce(spec) else None)
    entry = devices[name] if name is not None else found["default"]
    like = f"generation {spec.generation}" if by_generation else f"as {name}"
    label = own or (like if name is not None else "no fit of its own")
    error = float(entry["error"]) if own else float(found["unseen_error"])
    simt = float(entry["simt"]) if own is not None else sustained(spec, found["flops_per_joule"])
    tensor = float(entry["tensor"]) if own == _GEFORCE else tensor_factor(spec, found["coefficients"])
    return DeviceModel(spec, found["coefficients"], float(entry["stream"]), tensor, simt, label, error, tf32)


def tensor_factor(spec: DeviceSpec, coefficients: Mapping[str, Any]) -> float:
    """Return the factor on the fitted efficiency with which large products reach ``half_speed``."""
    peak = spec.peak_flops.get(torch.bfloat16) or spec.peak_flops.get(torch.float16)
    reached = half_speed(spec)
    gemm = coefficients["tensor"]["gemm"]
    best = float(gemm["efficiency"]) / (1 + float(gemm["edge"]) * (1 / _TILES[0][0] + 1 / _TILES[0][1]))
    return reached / peak / best if reached and peak else _USUAL_HALF / best
