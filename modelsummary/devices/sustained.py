"""The speed that products sustain: power limits it, not only the peak of the data sheet.

Random numbers switch more transistors than constant ones, so a device that multiplies real data draws more power, and
lowers its clock after some milliseconds (https://www.thonking.ai/p/strangely-matrix-multiplications). The highest
published speed of a product is therefore more than training sees. ``kernel_fits.json`` has what devices sustain in
large products of random bfloat16 numbers that ran back to back, from the measurements of NVIDIA's aiconfigurator
(https://github.com/ai-dynamo/aiconfigurator). The first device of a generation stands for those without a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch

from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.device_table import TABLE

__all__ = [
    "clock_of",
    "half_peak",
    "half_speed",
    "is_geforce",
    "is_in_desktop",
    "narrow_peak",
    "tensor_factor",
    "vector_share",
]

# Fractions of the peak that float32 products reach in units with 64 lanes (at most 0.25 TFLOP/s) and with 128.
_NARROW, _WIDE, _WIDE_UNIT = 0.95, 0.75, 0.25e12
# Fractions of the peak that half-precision products reach if power does not limit them: the A100; MI300X to MI355X.
_USUAL_HALF, _USUAL_HALF_OF_AMD = 0.87, 0.6
_CLOCK_OF_GEFORCE = 1.1  # over the data sheet's: an RTX 3090 and an RTX 4090 in the models of timm
# Generations whose GeForce cards have tensor cores at half rate, and the least ratio of TF32 and float32 elsewhere.
_HALVED_IN_GEFORCE, _LEAST_OF_WORKSTATIONS = ("ampere", "ada", "rtx blackwell"), 1.5
# Watts per multiprocessor: GeForce cards for desktops have 3.4 to 6, an L40 in a server has 2.1.
_LEAST_OF_DESKTOPS = 3.2
# Half-precision operations per joule of generations that the measurements lack: products on a T4 of 70 W
# (https://forums.developer.nvidia.com/t/about-gpu-peak-performance/264462).
_HALF_PER_JOULE = dict.fromkeys(("volta", "turing"), 24e12 / 70)


def vector_share(spec: DeviceSpec, flops_per_joule: Mapping[str, float]) -> float:
    """Return the fraction of their peak that vector units sustain in products of large matrices.

    The power of the board limits it, and in units with 128 lanes, whose registers and shared memory feed no more than
    in units with 64, also the supply with operands.

    Args:
        flops_per_joule: generation -> 10^9 operations per joule.

    >>> vector_share(DeviceSpec("V100"), {"volta": 50}), vector_share(DeviceSpec("T4"), {"turing": 50})
    (0.95, 0.43209876543209874)
    """
    watts, peak = spec.watts, spec.peak_flops.get(torch.float32)
    per_joule = flops_per_joule.get(spec.generation)
    is_wide = bool(peak and spec.units and peak / spec.units > _WIDE_UNIT)
    best = _WIDE if is_wide else _NARROW
    return min(best, per_joule * 1e9 * watts / peak) if watts and peak and per_joule else min(best, 0.85)


def narrow_peak(spec: DeviceSpec) -> float | None:
    """Return the float32 operations per second of 64 lanes of each unit, as its cycles; None without such a peak.

    What loads as much as it computes, such as depthwise convolutions, takes as many cycles in units with 128 lanes.

    >>> narrow_peak(DeviceSpec("A100")), narrow_peak(DeviceSpec("RTX 3090"))
    (19500000000000.0, 17800000000000.0)
    """
    peak = spec.peak_flops.get(torch.float32)
    is_wide = bool(peak and spec.units and peak / spec.units > _WIDE_UNIT)
    return peak / 2 if peak and is_wide else peak


def half_peak(spec: DeviceSpec) -> float | None:
    """Return the peak of half precision in operations per second; None if the device has none.

    >>> half_peak(DeviceSpec("T4"))
    65000000000000.0
    """
    return spec.peak_flops.get(torch.bfloat16) or spec.peak_flops.get(torch.float16)


def half_speed(spec: DeviceSpec, measured: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the operations per second that large half-precision products sustain; None without half precision.

    A speed that was measured on this very board counts, if there is one. A device with a published highest speed
    sustains the share of it that the measured device of its type or generation does.
    Otherwise the speed follows from the measured one by the square root of the power and of the units that share it,
    as the power of a unit grows with about the square of its clock. It is at most the usual fraction of the peak.

    Args:
        measured: generation -> ``"sustained"``: device -> operations per second, as in ``kernel_fits.json``.

    >>> half_speed(DeviceSpec("T4"), {})
    24000000000000.0
    >>> half_speed(DeviceSpec("A100"), {"ampere": {"sustained": {"A100 80GB": 2.5e14}}})
    250000000000000.0
    """
    peak = half_peak(spec)
    if peak is None:
        return None
    measured_here = spec.sustained_flops.get(torch.bfloat16) or spec.sustained_flops.get(torch.float16)
    if measured_here is not None:
        return measured_here
    published = spec.achievable_flops.get(torch.bfloat16) or spec.achievable_flops.get(torch.float16)
    speeds: Mapping[str, float] = measured.get(spec.generation, {}).get("sustained", {})
    device = spec.name if spec.name in speeds else next(iter(speeds), None)
    reference = None if device is None else TABLE[device]
    if published is not None:
        best = None if reference is None else reference.achievable
        return published * (speeds[device] / (best * 1e12) if device is not None and best else 1.0)
    usual = _USUAL_HALF_OF_AMD if spec.generation.startswith("cdna") else _USUAL_HALF
    limit = peak * (clock_of(spec) if is_geforce(spec) else usual)
    watts = spec.watts
    if watts and device is not None and reference is not None and reference.watts and spec.units:
        shares = watts / reference.watts * spec.units / reference.units
        return min(limit, speeds[device] * sqrt(shares))
    per_joule = _HALF_PER_JOULE.get(spec.generation)
    return min(limit, watts * per_joule) if watts and per_joule else limit


def clock_of(spec: DeviceSpec) -> float:
    """Return the clock that a device runs at, over the one that its data sheet counts operations with.

    >>> clock_of(DeviceSpec("RTX 4090")), clock_of(DeviceSpec("A100"))
    (1.1, 1.0)
    """
    return _CLOCK_OF_GEFORCE if is_in_desktop(spec) else 1.0


def is_in_desktop(spec: DeviceSpec) -> bool:
    """Return True for GeForce cards with the power of a desktop; a server's has too little to exceed its clock.

    >>> is_in_desktop(DeviceSpec("RTX 4090")), is_in_desktop(DeviceSpec("L40"))
    (True, False)
    """
    has_power = not spec.watts or not spec.units or spec.watts >= _LEAST_OF_DESKTOPS * spec.units
    return is_geforce(spec) and has_power


def is_geforce(spec: DeviceSpec) -> bool:
    """Return True for cards whose tensor cores run at half rate with float32 accumulation: GeForce since Ampere.

    With TF32 they are then no faster than the vector units. Most boards for workstations and data centers are at least
    twice as fast, an H20 1.7 times. One with halved tensor cores, such as the L20, counts as a GeForce card.

    >>> is_geforce(DeviceSpec("RTX 4090")), is_geforce(DeviceSpec("L40S"))
    (True, False)
    """
    vector, tf32 = spec.peak_flops.get(torch.float32), spec.peak_flops.get("tf32")
    half = half_peak(spec)
    if tf32 is None and half is not None and spec.generation in _HALVED_IN_GEFORCE:
        tf32 = half / 2
    return bool(vector and half and tf32 and tf32 < _LEAST_OF_WORKSTATIONS * vector)


def tensor_factor(
    spec: DeviceSpec, coefficients: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]
) -> float:
    """Return the factor on the fitted efficiency with which large products reach ``half_speed``.

    Args:
        spec: the device; without half precision, the usual fraction of the peak counts.
        coefficients: ``"coefficients"`` of ``kernel_fits.json``.
        measured: as for ``half_speed``.
    """
    peak = half_peak(spec)
    reached = half_speed(spec, measured)
    best = float(coefficients["tensor"]["gemm"]["efficiency"])
    return reached / peak / best if reached and peak else _USUAL_HALF / best
