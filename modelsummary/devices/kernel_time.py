"""Time of a kernel on a device that need not be present: a few fitted coefficients on top of its data sheet.

A kernel computes and moves data at the same time, so it takes a little more than the longer of both, plus a launch::

    launch + (computing ** p + moving ** p) ** (1 / p)

*Moving* is bytes divided by the bandwidth times an efficiency of the operator's class. *Computing* of a matrix product
is the time of its tiles (``product_time``), but in half precision no less than what the power of the board allows
(``sustained``). Products of groups of rows, as of experts, and products that add to sums, hide less of their moving: a
group reads weights of its own, and a tile ends by reading and writing its part of the sums. Their ``p`` is fitted apart
(``benchmarks/fit_grouped.py``). Convolutions on tensor cores convert images, weight and result, before and after they
compute, unless these are in channels last or the convolution is a product of each image as it is; on devices of some
generations, cuDNN then runs the groups of a convolution one after the other. Efficiencies hold for the largest tile, as
a fraction of the peak; GeForce cards, whose clock exceeds the data sheet's, reach more than 1 on tensor cores. The
coefficients are fitted by ``benchmarks/fit_kernels.py`` and, for half-precision products, by
``benchmarks/fit_products.py``, and kept, with their sources and errors, in ``kernel_fits.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, exp, prod
from typing import Any

import torch

from modelsummary.devices.attention_time import (
    EFFICIENT,
    KERNELS,
    MOST_OF_TF32,
    attention_seconds,
    diagonal_of,
    efficient_share_of_tf32,
    preferred_kernel,
    share_of_options,
    share_of_peak,
)
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.kernel_table import HOST_CALLS
from modelsummary.devices.product_time import PARTS, TILES, Tiles, product_seconds
from modelsummary.devices.sustained import (
    half_peak,
    half_speed,
    is_geforce,
    is_in_desktop,
    narrow_peak,
    tensor_factor,
    vector_share,
)
from modelsummary.errors import InputError
from modelsummary.file_contents import packaged
from modelsummary.operators.operator_work import ALIGNED_BYTES, Work
from modelsummary.units import number_of

__all__ = ["DeviceModel", "device_model", "fits"]

_GEFORCE = "RTX 3090"
# Operators that take few parameters: they find what the kernel before them wrote in the last level of the cache. If
# each new line replaces a random one, exp(-bytes / cache) of it is left when they read it. The cache is about three
# times as fast as the memory (an A100 and an H100 measured by Chips and Cheese 2023,
# https://chipsandcheese.com/2023/07/02/nvidias-h100-funny-l2-and-tons-of-bandwidth/).
_FROM_CACHE = frozenset(
    {"conv", "depthwise", "norm", "batch_norm", "softmax", "reduction", "pool", "elementwise", "copy", "attention"}
)
_CACHE_SPEED = 3.0
_HOST_OF_GEFORCE = 0.29  # 8 us for an operator
_LOADED_BYTES = 4  # at a time, where rows do not begin at multiples of more
# Small kernels beside the one that computes: conversions of the image, the weight and the result of a convolution;
# deviations, and a copy of the running statistics, of a native batch norm.
_LAYOUT_KERNELS, _NORM_KERNELS = 3, 2
_PRODUCTS = frozenset({"gemm", "conv"})
_BLOCKS_PER_UNIT, _SHARED_BYTES = 2, 48 * 1024  # of a softmax over wide rows, and of a block without a special request
_HELD_IN_CACHE = 0.6  # the share of an H100's cache up to which rows of 100 kB are read from memory once


@lru_cache(maxsize=1)
def fits() -> dict[str, Any]:
    """Return the fitted coefficients with their sources and errors.

    >>> sorted(fits())[:2]
    ['coefficients', 'compiled_error']
    """
    return packaged("modelsummary.devices", "kernel_fits.json")


@dataclass(frozen=True)
class DeviceModel:
    """A model of the seconds of kernels on one device.

    Attributes:
        spec: the device.
        coefficients: as in ``kernel_fits.json``: ``"simt"`` and ``"tensor"`` for products without and with tensor
            cores, ``"moving"`` by operator class, ``"launch_us"``, ``"host_us"``, ``"overlap"``, ``"grouped_overlap"``.
        stream: fraction of the data sheet's bandwidth that copies reach.
        tensor, simt: factors on the fitted efficiency of products on this device, with and without tensor cores.
        fit: name of the fit, such as ``"A100"`` or ``"generation ampere"``.
        typical_error: mean error of eager steps that the fit had not seen, as a fraction.
        compiled_error: the same of compiled steps.
        tf32: float32 products run on tensor cores.
        tf32_in_cudnn: float32 convolutions and recurrent layers run on them.
        half: fitted coefficients of half-precision matrix products on devices of this generation; None if there are
            none. Convolutions take the coefficients of ``"tensor"``.
        sustained: operations per second that half-precision products sustain; 0.0 if ``half`` is None.
        attention: operations per second of large half-precision attention with heads of 128; 0.0 if not measured.
        attention_kernel: fused kernels that it holds for, one of ``attention_time.KERNELS``.
        conv: factor on the speed of convolutions without tensor cores, relative to products; 1.0 if not measured.
    """

    spec: DeviceSpec
    coefficients: Mapping[str, Any]
    stream: float
    tensor: float
    simt: float
    fit: str = ""
    typical_error: float = 0.0
    compiled_error: float = 0.0
    tf32: bool = False
    tf32_in_cudnn: bool = False
    half: Mapping[str, Any] | None = None
    sustained: float = 0.0
    attention: float = 0.0
    attention_kernel: str = "flash2"
    conv: float = 1.0

    @property
    def launch(self) -> float:
        """Seconds between two kernels of a stream."""
        return float(self.coefficients["launch_us"]) * 1e-6

    @property
    def host_seconds(self) -> dict[str, float]:
        """What the host takes: kind of call, one of ``HOST_CALLS`` of ``kernel_table`` -> seconds.

        Measured on a server with an H100. Layers of Megatron's GPT on A100s (vTrain, MICRO 2024) ask for 3.7 ms each,
        which agrees; GeForce cards in desktops, as in the tables of timm, do not wait for their hosts as long. A policy
        is asked for each operator in the forward and when the block runs again: a step of a Llama with four such blocks
        took 28 ms longer there than with whole blocks.
        """
        factor = 1e-6 * self.spec.factors.host * (_HOST_OF_GEFORCE if is_in_desktop(self.spec) else 1.0)
        return {kind: factor * float(self.coefficients["host_us"][kind]) for kind in HOST_CALLS}

    @property
    def host(self) -> float:
        """Seconds that the host needs to dispatch one operator of a forward in eager mode.

        Steps of clusters count it alone, for operators of the backward, too.
        """
        return self.host_seconds["operator"]

    @property
    def policy_share(self) -> float:
        """What the host takes to ask a checkpoint whether it keeps a result, as a multiple of ``host``."""
        return self.host_seconds["policy"] / self.host_seconds["operator"]

    def seconds(self, work: Work) -> float:
        """Return the seconds of a kernel in a stream of others, its launch included, as measured steps correct it."""
        seconds = min(model._launches(work) * self.launch + model.busy(work) for model in self._choices(work))
        return self.spec.factors.of(work.op_class) * seconds

    def _choices(self, work: Work) -> tuple[DeviceModel, ...]:
        """Return the models of the kernels that the library chooses from: with TF32, float32 kernels stay allowed."""
        may_be_exact = work.op_class in _PRODUCTS and self._rounds(work)
        return (self, replace(self, tf32=False, tf32_in_cudnn=False)) if may_be_exact else (self,)

    def _launches(self, work: Work) -> int:
        """Return how many kernels the library runs, the small ones beside the one that computes included."""
        if work.op_class == "conv":
            return self._groups_in_turn(work) * (1 + _LAYOUT_KERNELS * self._converts(work))
        return 1 + _NORM_KERNELS if work.op_class == "batch_norm" and _is_without_cudnn(work) else 1

    def busy(self, work: Work) -> float:
        """Return the seconds in which a kernel computes and moves data, without its launch.

        With TF32, the library may still choose a float32 kernel, such as Winograd's algorithm: the faster one counts.

        Raises:
            InputError: the device has no peak for the dtype of a product.
        """
        if work.dtype.is_complex and not self.spec.has(work.dtype):
            work = _as_real(work)
        return min(model._busy(work) for model in self._choices(work))

    def _busy(self, work: Work) -> float:
        groups = self._groups_in_turn(work)
        if groups > 1:
            sizes, flops, nbytes = (1, *work.sizes[1:]), work.flops // groups, work.nbytes // groups
            return groups * self._busy(work._replace(sizes=sizes, flops=flops, nbytes=nbytes))
        moving = self.moving(work)
        computing = self.computing(work) if work.flops else 0.0
        if not computing:
            return moving
        power = float(self.coefficients["grouped_overlap" if work.is_grouped or work.is_added else "overlap"])
        half = self._half_of(work)
        fixed = 0.0 if half is None else 1e-6 * float(half["fixed_us"])
        return float(fixed + self._converting(work) + (computing**power + moving**power) ** (1 / power))

    def _converting(self, work: Work) -> float:
        """Return the seconds of converting images, weight and result of a convolution to channels last and back."""
        if not self._converts(work):
            return 0.0
        units, rate = self.spec.units or 100, float(self.coefficients["unit"]["conversion"])
        bandwidth = self.spec.bandwidth * self.stream * float(self.coefficients["moving"]["conversion"])
        return max(2 * work.nbytes / bandwidth, work.nbytes / work.dtype.itemsize / (units * rate))

    def moving(self, work: Work) -> float:
        """Return the seconds that moving the bytes of a kernel takes."""
        by_class = self.coefficients["moving"]
        efficiency = next(by_class[name] for name in _moving_names(work) if name in by_class)
        half = self._half_of(work)
        efficiency = efficiency if half is None else half["moving"]
        seconds = work.nbytes / (self.spec.bandwidth * self.stream * float(efficiency))
        cache = self.spec.cache_bytes or 0
        if cache and work.op_class in _FROM_CACHE:
            seconds *= 1 - (1 - 1 / _CACHE_SPEED) * exp(-work.nbytes / cache)
        is_of_rows = len(work.sizes) > 1  # not one of several fused ones
        if work.op_class == "softmax" and is_of_rows and not work.is_backward:
            seconds = max(seconds, self._reading_again(work))
        return max(float(seconds), self._loading(work))

    def _reading_again(self, work: Work) -> float:
        """Return the least seconds of a softmax over rows so wide that no cache holds them until they are read again.

        A block of threads reads its row three times: for the maximum, the sum, and the result. Short rows stay in the
        shared memory of a unit. Two blocks run on a unit at the same time.
        """
        row = work.sizes[-1] * work.dtype.itemsize
        held = _BLOCKS_PER_UNIT * (self.spec.units or 100) * row
        if row <= _SHARED_BYTES or held <= _HELD_IN_CACHE * (self.spec.cache_bytes or 0):
            return 0.0
        return (work.nbytes + 2 * work.sizes[0] * row) / self.spec.bandwidth

    def _loading(self, work: Work) -> float:
        """Return the seconds that the units of the device take to load and store elements, whatever the bandwidth.

        A unit has a rate of its own for kernels that load elements one by one, or in another order; a row, an image or
        a channel that is reduced takes it a time of its own. Devices with much bandwidth per unit show it first.
        """
        units, figures, part = self.spec.units or 100, self.coefficients["unit"], work.part
        if part in ("element by element", "strided", "transposed"):
            return work.sizes[0] / (units * float(figures[part]))
        if work.op_class == "pool":
            per_element = float(figures["pool_ns"].get(part, 0.0)) * 1e-9
            return 0.0 if work.channels_last else work.sizes[0] * per_element / units
        streaming = work.nbytes / (self.spec.bandwidth * self.stream)
        if work.op_class == "norm" and not work.is_backward and len(work.sizes) > 1:  # not one of several fused ones
            return work.sizes[0] * float(figures["row_ns"]) * 1e-9 / units + streaming
        if work.op_class == "reduction" and part == "over rows":
            return float(figures["columns_us"]) * 1e-6 + streaming
        is_single = part == "inference" and work.dtype is torch.float32 and not work.channels_last  # cuDNN is as slow
        if not (_is_without_cudnn(work) or is_single):
            return 0.0
        if work.op_class == "depthwise":
            element, multiply_add = (float(value) for value in figures["depthwise_ns"])
            passes = float(figures["depthwise_weight"]) if part == "weight" else 1.0
            return passes * work.sizes[0] * (element + multiply_add * work.sizes[1]) * 1e-9 / units
        channels, batch, image = work.sizes
        if image == 1:  # rows of features, without images
            return 0.0
        elements = batch * image
        images = channels * batch * float(figures["image_ns"]) * 1e-9 / units
        images = max(images, channels * elements / (units * float(figures["element by element"])))
        if part == "without cuDNN":  # one block of threads sums up a channel, and a backward writes its results, too
            block, unit = (float(value) for value in figures["backward sums" if work.is_backward else "sums"])
            sums = elements * max(1 / block, channels / units / unit)
            return sums if work.is_backward else sums + images
        return images if part == "inference" else 0.0

    def computing(self, work: Work) -> float:
        """Return the seconds that the multiply-adds of a kernel take."""
        peak = self._peak(work)
        units, bandwidth = self.spec.units or 100, self.spec.bandwidth * self.stream
        half = self._half_of(work)
        if half is not None:
            rate = min(max(peak * float(half["efficiency"]), self.sustained), self._unaligned_rate(work))
            seconds = product_seconds(_product_sizes(work), rate, units, half, bandwidth)
            return max(seconds, work.flops / self.sustained)
        path = self._path(work)
        if work.op_class == "attention":
            is_measured = bool(self.attention) and self._is_half(work.dtype)
            kernel = self.attention_kernel if is_measured else "efficient"
            rate = self._attention_rate(work) * (share_of_options(work) if kernel == "cudnn" else 1.0)
            diagonal = diagonal_of(self.spec.generation) if kernel == "cudnn" else None
            return attention_seconds(work, rate, units, kernel, diagonal)
        cycles = narrow_peak(self.spec) if work.op_class == "depthwise" and self._is_half(work.dtype) else None
        if cycles is not None:  # no tensor cores compute it, and it loads what it multiplies
            return work.flops / (cycles * float(path["depthwise"]))
        peak *= self.tensor if self._on_tensor_cores(work) else self.simt
        if work.op_class == "rnn":  # each step waits for the one before
            return work.flops / (peak * float(path["other"])) + work.sizes[0] * self.launch
        if work.op_class not in _PRODUCTS:
            return work.flops / (peak * float(path.get(work.op_class, path["other"])))
        coefficients = {**path["gemm"], **path[work.op_class]}  # a convolution is a product, with figures of its own
        rate = peak * float(coefficients["efficiency"]) * float(coefficients.get(work.part, 1.0))
        rate = min(rate, self._unaligned_rate(work)) if self._is_half(work.dtype) else rate
        if work.op_class == "conv" and not self._on_tensor_cores(work):
            rate *= self.conv
        sizes = _product_sizes(work) if self._on_tensor_cores(work) else work.sizes[:4]
        seconds = product_seconds(sizes, rate, units, coefficients, bandwidth, *self._cuts(work))  # type: ignore[arg-type]
        return min(seconds, self._winograd(work, rate, coefficients)) if self._is_winograd(work) else seconds

    def _unaligned_rate(self, work: Work) -> float:
        """Return the operations per second of a half-precision product whose rows begin at few bytes' multiples.

        Tensor cores are then fed by instructions of the Ampere generation, which load four bytes at a time, or two.
        """
        if work.alignment >= ALIGNED_BYTES:
            return float("inf")
        per_unit = self.coefficients["unit"]["odd_flops" if work.alignment < _LOADED_BYTES else "unaligned_flops"]
        return float(per_unit) * (self.spec.units or 100)

    def _attention_rate(self, work: Work) -> float:
        """Return the operations per second of large fused attention with heads of 128."""
        generation = self.spec.generation
        if self.attention and self._is_half(work.dtype):
            is_slower = work.is_efficient and self.attention_kernel == "flash2"  # cuDNN's kernels take masks
            return self.attention * (EFFICIENT if is_slower else 1.0)
        # tensor cores of GeForce cards run the instructions of the Ampere generation at their full rate
        share = efficient_share_of_tf32("ampere" if is_geforce(self.spec) else generation)
        if work.dtype is torch.float32 and share is not None and self.spec.has("tf32"):
            peak = half_peak(self.spec)
            limit = MOST_OF_TF32 * self.sustained / peak if peak and self.sustained else share  # the power of the board
            return self.spec.peak("tf32") * min(share, limit)
        factor = self.tensor if self._on_tensor_cores(work) else self.simt
        return self._peak(work) * factor * float(self._path(work)["attention"])

    def _half_of(self, work: Work) -> Mapping[str, Any] | None:
        """Return the coefficients of half-precision products, if this is one and they were fitted."""
        return self.half if (work.op_class == "gemm" or work.is_product) and self._is_half(work.dtype) else None

    def _is_half(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.bfloat16, torch.float16)

    def _path(self, work: Work) -> Mapping[str, Any]:
        path: Mapping[str, Any] = self.coefficients["tensor" if self._on_tensor_cores(work) else "simt"]
        return path

    def _cuts(self, work: Work) -> tuple[Tiles, tuple[int, ...]]:
        """Return the tiles of a product, and the numbers of parts of its inner dimension, that the library has.

        Without tensor cores, cuBLAS has few tiles for batched products, and neither these nor the implicit products of
        cuDNN cut the inner dimension, except in the gradient of weights.
        """
        path = self._path(work)
        if path is not self.coefficients["simt"]:
            return TILES, PARTS
        if work.op_class == "conv":
            return TILES, PARTS if work.part == "weight" else (1,)
        if work.sizes[0] == 1:
            return TILES, PARTS
        return tuple((rows, columns) for rows, columns in path["batched_tiles"].get(self.spec.generation, TILES)), (1,)

    def _rounds(self, work: Work) -> bool:
        """Return True for float32 work that rounds its operands to TF32."""
        is_rounded = self.tf32_in_cudnn if work.op_class in ("conv", "rnn") else self.tf32
        return is_rounded and work.dtype is torch.float32 and self.spec.has("tf32")

    def _on_tensor_cores(self, work: Work) -> bool:
        return work.dtype not in (torch.float32, torch.float64) or self._rounds(work)

    def _peak(self, work: Work) -> float:
        if self._rounds(work):
            return self.spec.peak("tf32")
        try:
            return self.spec.peak(work.dtype)
        except InputError as error:
            raise InputError(f"{work.name} computes with {work.dtype}: {error}") from None

    def _is_winograd(self, work: Work) -> bool:
        """Return True if cuDNN may run Winograd's algorithm: a 3 x 3 convolution of stride 1 in float32."""
        return work.op_class == "conv" and work.dtype is torch.float32 and not self._rounds(work) and work.is_3x3

    def _winograd(self, work: Work, rate: float, coefficients: Mapping[str, Any]) -> float:
        """Return the seconds of Winograd's algorithm in four kernels (Lavin and Gray 2015, arXiv:1509.09308).

        It transforms images, filters and results, and computes 4 x 4 results with 36 products instead of 144. Filters
        come from memory; transformed images and results stay in caches, as far as cuDNN stores them at all.
        """
        _, m, n, k, height, width = work.sizes
        is_weight = work.part == "weight"
        pixels, out, channels = (k, m, n // 9) if is_weight else (m, n, k // 9)
        tiles = pixels // max(height * width, 1) * ceil(height / 4) * ceil(width / 4)
        sizes = (out, channels, tiles) if is_weight else (tiles, out, channels)
        bandwidth = self.spec.bandwidth * self.stream
        elements = (72 * tiles + pixels) * (channels + out) / float(coefficients["transform"]) + 81 * channels * out
        moving = elements * work.dtype.itemsize / bandwidth
        rate *= float(coefficients["winograd"])
        parts = PARTS if is_weight else (1,)
        products = product_seconds(
            (36, *sizes), rate, self.spec.units or 100, coefficients, bandwidth, part_counts=parts
        )
        return products + moving + 3 * self.launch

    def _converts(self, work: Work) -> bool:
        """Return True if images are converted for a convolution: tensor cores expect channels last.

        A product of the weight and of each image takes images as they are.
        """
        return self._on_tensor_cores(work) and work.op_class == "conv" and not (work.channels_last or work.is_product)

    def _groups_in_turn(self, work: Work) -> int:
        """Return the number of groups that a convolution computes one after the other, each with kernels of its own."""
        in_turn = self.spec.generation in self.coefficients["groups_in_turn"]
        is_grouped = work.op_class == "conv" and self._converts(work)
        return work.sizes[0] if in_turn and is_grouped else 1


def _is_without_cudnn(work: Work) -> bool:
    """Return True for depthwise convolutions and batch norms in bfloat16, which are torch's own kernels.

    cuDNN gets float16 alone (``use_cudnn_depthwise`` in aten/src/ATen/native/Convolution.cpp), or channels last.
    """
    is_of_class = work.op_class in ("depthwise", "batch_norm")
    return is_of_class and work.dtype is torch.bfloat16 and not work.channels_last


def _product_sizes(work: Work) -> tuple[int, int, int, int]:
    """Return batch, rows, columns and inner dimension of a product; a convolution may be one of each image."""
    batch, m, n, k = work.sizes[:4]
    if work.is_product and work.part != "weight":
        pixels = prod(work.sizes[4:])
        batch, m = batch * max(m // max(pixels, 1), 1), pixels
    return batch, m, n, k


def _moving_names(work: Work) -> tuple[str, ...]:
    """Return the names under which the efficiency of moving the bytes of a kernel may be kept, the best first."""
    if work.part == "triton":
        return (work.part,)
    special = f"{work.op_class} {'backward' if work.is_backward else work.part}"
    layout = (f"{special} channels last".replace("  ", " "),) if work.channels_last else ()
    return (*layout, special, work.op_class, "other")


def _as_real(work: Work) -> Work:
    """Return complex work as real work: a complex multiply-add is four real ones.

    A complex product is the product of a real matrix, twice as wide, and one that is twice as high and twice as wide:
    ``[Re A, Im A] @ [[Re B, Im B], [-Im B, Re B]] == [Re AB, Im AB]``.
    """
    sizes = work.sizes
    if work.op_class == "gemm":
        batch, m, n, k = sizes
        sizes = (batch, m, 2 * n, 2 * k)
    return work._replace(dtype=work.dtype.to_real(), sizes=sizes, flops=4 * work.flops)


def device_model(
    spec: DeviceSpec, *, tf32: bool = False, tf32_in_cudnn: bool = False, attention: str | None = None
) -> DeviceModel:
    """Return the time model of a device: its own fit, or its generation's, or the fit of all devices.

    Args:
        tf32: float32 products run on tensor cores.
        tf32_in_cudnn: float32 convolutions and recurrent layers run on tensor cores.
        attention: fused kernels of attention: ``"flash1"``, ``"flash2"`` or ``"flash3"`` for the generations of
            FlashAttention, ``"cudnn"``, or ``"efficient"`` for xFormers' memory-efficient ones. Default: what torch
            prefers on the device since version 2.10. Before, it ran FlashAttention-2 on every NVIDIA device. Devices
            on which none was measured take the speed of their products, whichever kernels run.

    Raises:
        InputError: the kernels are unknown, or their speed on devices of this generation is.

    >>> device_model(DeviceSpec("A100")).fit
    'A100'
    """
    if attention not in (None, *KERNELS):
        raise InputError(f"attention must be None or one of {', '.join(map(repr, KERNELS))}, got {attention!r}")
    kernel_fits = fits()
    devices, geforce = kernel_fits["devices"], is_geforce(spec)
    fitted_device = next((name for name in devices if spec.name == name or spec.name.startswith(f"{name} ")), None)
    same_generation = [name for name, entry in devices.items() if entry["generation"] == spec.generation]
    name = fitted_device or next(iter(same_generation), _GEFORCE if geforce else None)
    entry = devices[name] if name is not None else kernel_fits["default"]
    half = None if geforce else kernel_fits["half"].get(spec.generation)
    other_fit = f"generation {spec.generation}" if same_generation or half else f"as {name}"
    label = fitted_device or (other_fit if name is not None or half else "no fit of its own")
    label += f", calibrated with {number_of(spec.factors.steps, 'measured step')}" if spec.factors.steps else ""
    error = float(entry["error"]) if fitted_device else float(kernel_fits["unseen_error"])
    coefficients, measured = kernel_fits["coefficients"], kernel_fits["half"]
    simt = float(entry["simt"]) if fitted_device is not None else vector_share(spec, kernel_fits["flops_per_joule"])
    if torch.float32 in spec.sustained_flops:
        best = spec.peak(torch.float32) * float(coefficients["simt"]["gemm"]["efficiency"])
        simt = spec.sustained_flops[torch.float32] / best
    is_fitted = fitted_device == _GEFORCE and not spec.sustained_flops
    tensor = float(entry["tensor"]) if is_fitted else tensor_factor(spec, coefficients, measured)
    sustained = 0.0 if half is None else half_speed(spec, measured) or 0.0
    return DeviceModel(
        spec,
        coefficients,
        stream=float(entry["stream"]),
        tensor=tensor,
        simt=simt,
        fit=label,
        typical_error=error,
        compiled_error=max(error, float(kernel_fits["compiled_error"])),
        tf32=tf32,
        tf32_in_cudnn=tf32_in_cudnn,
        half=half,
        sustained=sustained,
        attention=_attention_speed(spec, attention, sustained),
        attention_kernel=attention or preferred_kernel(spec.generation),
        conv=float(entry.get("conv", 1.0)) if fitted_device is not None else 1.0,
    )


def _attention_speed(spec: DeviceSpec, kernel: str | None, sustained: float) -> float:
    """Return the speed of large half-precision attention; 0.0 if it was not measured on the device's generation.

    It does not exceed the speed that products sustain, which power limits for both.
    """
    preferred = preferred_kernel(spec.generation)
    peak = half_peak(spec)
    is_measured = not is_geforce(spec) and share_of_peak(spec.generation, preferred) is not None
    if not peak or not is_measured:
        if kernel is not None:
            raise InputError(
                f"the speed of attention={kernel!r} on the {spec.name} is not known: no fused attention was measured "
                "on such a device, so it follows the speed of products; leave attention out"
            )
        return 0.0
    share = share_of_peak(spec.generation, kernel or preferred)
    if share is None:
        raise InputError(
            f"the speed of attention={kernel!r} on the {spec.name} is not known; pass None or {preferred!r}"
        )
    return min(peak * share, sustained)
