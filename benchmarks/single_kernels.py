"""Single float32 kernels measured on six accelerators (NeuSight, ASPLOS 2025), and the coefficients fitted to them."""

from __future__ import annotations

import copy
import csv
import gzip
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from modelsummary import DeviceSpec
from modelsummary.devices.device_table import TABLE
from modelsummary.devices.kernel_time import DeviceModel
from modelsummary.devices.sustained import vector_share
from modelsummary.operators.operator_work import Work

DEVICES = {
    "NVIDIA A100-PCIE-40GB": "A100 40GB PCIe",
    "NVIDIA A100 80GB PCIe": "A100 80GB PCIe",
    "Tesla P100-PCIE-16GB": "P100",
    "Tesla P4": "P4",
    "Tesla T4": "T4",
    "Tesla V100-PCIE-32GB": "V100 PCIe",
}
HELD_OUT_DEVICE = "V100 PCIe"
BINARY = ("add", "mul", "div", "pow")
ELEMENTWISE = (*BINARY, "addu", "mulu", "divu", "powu", "relu", "gelu", "tanh")
GROUPS = {  # rows of the table of errors
    "products": ("linear",),
    "batched products": ("bmm",),
    "3 x 3 convolutions": ("conv",),
    "softmax": ("softmax",),
    "layer norm": ("ln",),
    "element-wise": ELEMENTWISE,
}
CLASS_OF = {"bmm": "gemm", "linear": "gemm", "conv": "conv", "softmax": "softmax", "ln": "norm"}
F32 = torch.float32
# Tiles of batched products without tensor cores, by generation: the steps in the measured times show them. Volta has
# the tiles of Turing; newer generations, without measured rows, have all tiles.
_TURING, _AMPERE = ((128, 128), (128, 64), (64, 128), (64, 64)), ((256, 128), (128, 128))
_BATCHED_TILES = {"pascal": ((128, 128), (64, 128)), "volta": _TURING, "turing": _TURING}
_BATCHED_TILES["ampere"] = _AMPERE
# Each measured convolution took 0.06 to 0.15 us longer than the one before, whatever its sizes, on every device.
_GROWING = frozenset({"conv"})
_POWER_SECONDS = 2.6e-3  # in which the clocks of a board fall to what its power allows
_START = {"simt": 0.85, "stream": 0.85, "burst": 0.3, "conv": 1.0}
Sample = tuple[Work, float, int]  # a kernel, its measured seconds, its place among the rows of its operator and device
Key = tuple[str, str]  # operator and device


def kernels_of(folder: Path, op: str) -> dict[Key, list[Sample]]:
    """Measured kernels of an operator by device. In the tables of products, N is the inner dimension."""
    found: dict[Key, list[Sample]] = defaultdict(list)
    with gzip.open(folder / "gpu_kernels" / f"{op}.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            name, seconds = DEVICES[row.pop("device")], float(row.pop("ms")) * 1e-3
            rows = found[op, name]
            rows.append((_work(op, [int(each) for each in row.values()]), seconds, len(rows)))
    return found


def _work(op: str, figures: list[int]) -> Work:
    if op in ("bmm", "linear"):
        b, m, n, k = figures[0], figures[1], figures[3], figures[2]
        sizes = (b, m, n, k) if op == "bmm" else (1, b * m, n, k)
        weights = b * n * k if op == "bmm" else n * k
        return Work(f"aten.{op}", "gemm", F32, sizes, 2 * b * m * n * k, 4 * (b * m * (n + k) + weights))
    if op == "conv":
        b, c, n, kernel, size, stride, padding = figures
        out = (size + 2 * padding - kernel) // stride + 1
        m, k = b * out * out, c * kernel**2
        moved = 4 * (b * (out * out * n + size * size * c) + k * n)
        is_3x3 = (kernel, stride) == (3, 1)
        return Work("aten.convolution", "conv", F32, (1, m, n, k, out, out), 2 * m * n * k, moved, is_3x3=is_3x3)
    rows, width = figures
    op_class = CLASS_OF.get(op, "elementwise")
    sizes = (rows, width) if op_class != "elementwise" else (rows * width,)
    return Work(f"aten.{op}", op_class, F32, sizes, 0, 4 * rows * width * (3 if op in BINARY else 2))


class KernelFit:
    """The float32 part of the coefficients, fitted on single kernels; ``devices`` has what is of one device.

    ``without`` is a device whose rows are not used, except for the overhead of its measured calls.
    """

    def __init__(
        self, folder: Path, coefficients: dict[str, Any], without: str = "", seed: int = 0, per_device: int = 200
    ) -> None:
        rng = np.random.default_rng(seed)
        self.coefficients, self._without = copy.deepcopy(coefficients), without
        self._known: dict[tuple[Key, int], tuple[str, np.ndarray]] = {}
        self.devices: dict[str, dict[str, float]] = {name: {} for name in DEVICES.values()}
        self.train: dict[Key, list[Sample]] = {}
        self.test: dict[Key, list[Sample]] = {}
        self.overhead: dict[Key, tuple[float, float, float]] = {}  # offset, floor, growth per row, in seconds
        for op in (*ELEMENTWISE, "softmax", "ln", "bmm", "linear", "conv"):
            for key, samples in kernels_of(folder, op).items():
                order = rng.permutation(len(samples))
                self.train[key] = [samples[place] for place in order[:per_device]]
                self.test[key] = [samples[place] for place in order[per_device : 3 * per_device]]

    def model(self, name: str) -> DeviceModel:
        """The model of a device with the coefficients as they are now."""
        own = self.devices[name]
        spec, conv = DeviceSpec(name), own.get("conv", 1.0)
        return DeviceModel(spec, self.coefficients, own.get("stream", 0.87), 1.0, own.get("simt", 0.85), conv=conv)

    def fit(self) -> None:
        """Fit one class after the other."""
        for name in self.devices:
            keys = [key for key in self._keys("add", "relu") if key[1] == name]
            if keys:
                self._fit(keys, ["stream"], {})
        self.devices["A100 80GB PCIe"]["stream"] = self.devices["A100 40GB PCIe"]["stream"]
        for op, name in (("softmax", "softmax"), ("ln", "norm")):
            self._fit(self._keys(op), [], {("moving", name): 0.7})
        self.fit_products()

    def keep_bandwidths(self, devices: dict[str, Any]) -> None:
        """Take the bandwidths of devices as ``kernel_fits.json`` has them."""
        for name, figures in self.devices.items():
            figures["stream"] = float(devices[name.split()[0]]["stream"])

    def fit_products(self) -> None:
        """Fit products and convolutions, with the bandwidths of the devices as they are."""
        self.coefficients["simt"]["batched_tiles"] = _BATCHED_TILES
        gemm, conv = ("simt", "gemm"), ("simt", "conv")
        free = {(*gemm, "edge"): 6.0, (*gemm, "start"): 10.0, (*gemm, "alone"): 0.5}
        products = self._keys("bmm", "linear")
        # Boards of 2016 slow down in products of large matrices, without a law in the model: batched products alone
        # show how fast they are if nothing slows them down.
        old = [key for key in products if DeviceSpec(key[1]).generation == "pascal"]
        self._fit([key for key in products if key not in old], ["simt", "burst"], free)
        self._fit([key for key in old if key[0] == "bmm"], ["simt", "burst"], {})
        for name in ("simt", "burst"):
            self.devices["A100 80GB PCIe"][name] = self.devices["A100 40GB PCIe"][name]
        free = {(*conv, "winograd"): 0.8, (*conv, "transform"): 3.0}
        self._fit(self._keys("conv"), ["conv"], free)
        self.devices["A100 40GB PCIe"]["conv"] = self.devices["A100 80GB PCIe"]["conv"]
        for key in self.train:
            if key not in self.overhead:
                self._fit([key], [], {})

    def mean_of_devices(self, figure: str) -> float:
        """Return the mean of a figure over the devices that were fitted."""
        return float(np.mean([figures[figure] for figures in self.devices.values() if figure in figures]))

    def _keys(self, *ops: str) -> list[Key]:
        return [key for key in self.train if key[0] in ops and key[1] != self._without]

    def _fit(self, keys: list[Key], own: list[str], free: dict[tuple[str, ...], float]) -> None:
        """Fit ``own`` figures of the devices in ``keys``, coefficients at the paths ``free``, and the overheads."""
        names = list(dict.fromkeys(name for _, name in keys))
        start = [*free.values(), *(_START[what] for what in own for _ in names), *[25.0, 35.0] * len(keys)]
        growing = [key for key in keys if key[0] in _GROWING]
        start += [0.1] * len(growing)

        def put(values: np.ndarray) -> None:
            left = list(np.abs(values))
            for path in free:
                put_value(self.coefficients, path, left.pop(0))
            for what in own:
                for name in names:
                    self.devices[name][what] = left.pop(0)
            for key in keys:
                self.overhead[key] = left.pop(0) * 1e-6, left.pop(0) * 1e-6, 0.0
            for key in growing:
                self.overhead[key] = *self.overhead[key][:2], left.pop(0) * 1e-6

        def residuals(values: np.ndarray) -> np.ndarray:
            put(values)
            return np.log(np.concatenate([self.ratios(key, self.train[key]) for key in keys]))

        scale = np.maximum(np.abs(start), 0.1)
        found = least_squares(residuals, start, loss="soft_l1", f_scale=0.1, x_scale=scale, diff_step=0.02, max_nfev=25)
        put(found.x)

    def ratios(self, key: Key, samples: list[Sample], model: DeviceModel | None = None) -> np.ndarray:
        """Predicted over measured.

        A board that its power limits is faster by ``burst`` at first: single calls are too short for it to slow down.
        """
        burst = self.devices[key[1]].get("burst", 0.0) if model is None and key[0] in CLASS_OF else 0.0
        offset, floor, growth = self.overhead.get(key, (25e-6, 35e-6, 0.0))
        busy = self._busy(key, samples, model or self.model(key[1]))
        if burst and samples[0][0].flops:
            busy = busy / (1 + burst * np.exp(-busy / _POWER_SECONDS))
        places = np.array([place for *_, place in samples])
        return np.maximum(floor, offset + growth * places + busy) / np.array([seconds for _, seconds, _ in samples])

    def _busy(self, key: Key, samples: list[Sample], model: DeviceModel) -> np.ndarray:
        """Seconds of kernels, computed again only if the coefficients have changed: most steps of a fit change few."""
        state = repr((model.coefficients, model.stream, model.simt, model.conv))
        known = self._known.get((key, id(samples)))
        if known is None or known[0] != state:
            known = state, np.array([model.busy(work) for work, *_ in samples])
            self._known[key, id(samples)] = known
        return known[1]

    def errors(self, unseen: DeviceModel | None = None) -> dict[str, dict[str, float]]:
        """Return the mean errors of each group of operators: device -> of rows held out.

        The device that was left out of the fit is ``unseen``; ``"roofline"`` is of all devices.
        """
        errors: dict[str, dict[str, float]] = {}
        for group, ops in GROUPS.items():
            by_device: dict[str, list[np.ndarray]] = defaultdict(list)
            keys = [key for key in self.test if key[0] in ops]
            for key in sorted(keys, key=lambda key: key[1] == HELD_OUT_DEVICE):
                model = unseen if key[1] == self._without else None
                by_device[key[1].split()[0]].append(self.ratios(key, self.test[key], model))
            by_device["roofline"] = [_roofline_ratios(key, self.test[key]) for key in keys]
            errors[group] = {name: error_of(np.concatenate(ratios)) for name, ratios in by_device.items()}
        return errors


def without_unseen(folder: Path, coefficients: dict[str, Any]) -> tuple[KernelFit, DeviceModel]:
    """Return a fit without the device that is held out, and the model of that device without figures of its own."""
    fit = KernelFit(folder, coefficients, without=HELD_OUT_DEVICE)
    fit.fit()
    stream = fit.mean_of_devices("stream")
    spec = DeviceSpec(HELD_OUT_DEVICE)
    share = vector_share(spec, flops_per_joule(fit, without=HELD_OUT_DEVICE))
    return fit, DeviceModel(spec, fit.coefficients, stream, 1.0, share)


# 10^9 operations per joule of newer processes, by the figures of NVIDIA's data sheets relative to 7 nm: not fitted.
_NEWER = {"ada": 130.0, "hopper": 130.0, "blackwell": 150.0}
_PROCESS = {"volta": "12 nm", "turing": "12 nm", "pascal": "16 nm", "ampere": "7 nm"}


def flops_per_joule(kernels: KernelFit, without: str = "") -> dict[str, float]:
    """Return what a watt sustains of vector units: of boards of the process that lack power; else of all of them."""
    by_process: dict[str, list[float]] = defaultdict(list)
    for name, figures in kernels.devices.items():
        spec = DeviceSpec(name)
        if name != without and "simt" in figures:
            value = figures["simt"] * spec.peak(F32) / TABLE[name].watts / 1e9
            by_process[_PROCESS[spec.generation]].append(value)
    return {generation: float(max(by_process[process])) for generation, process in _PROCESS.items()} | _NEWER


def _roofline_ratios(key: Key, samples: list[Sample]) -> np.ndarray:
    spec = DeviceSpec(key[1])
    return np.array([spec.bound(work.flops, work.nbytes, F32).seconds / seconds for work, seconds, _ in samples])


def error_of(ratios: np.ndarray) -> float:
    """Return the mean absolute error of predictions over measurements."""
    return float(np.abs(ratios - 1).mean())


def put_value(tree: dict[str, Any], path: tuple[str, ...], value: float) -> None:
    """Put a value at a path into nested dicts."""
    for name in path[:-1]:
        tree = tree[name]
    tree[path[-1]] = float(value)
