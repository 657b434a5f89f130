"""Fit half-precision products on accelerators to published measurements, and say how well others are met.

    python benchmarks/fit_products.py DATA_FOLDER [--write]

``DATA_FOLDER`` is ``systems/data`` of the package ``aiconfigurator-core`` (NVIDIA, Apache-2.0,
https://github.com/ai-dynamo/aiconfigurator): products of bfloat16 numbers by size and device, from three frameworks.
SGLang's rows are products of normally distributed numbers, 54 of them back to back with six different weights, which
is as close to training as the tables come: they are fitted. TensorRT-LLM's are random as well, but one long product
runs nine times only, so less heat builds up. vLLM's weights are uninitialised memory, which mostly holds zeros: these
rows show how much faster a product of predictable numbers is.

For an A100, an L40S, an H100, a B200 and an RTX PRO 6000: six coefficients. For these and an H200, a B300, a GB200 and
a GB300: the speed that long products sustain. A short run of products is faster than that: a measurement of ``cold``
seconds is taken as ``hot + (cold - hot) * exp(-cold / tau)``, with a ``tau`` per device. Small products whose six
weights lie in the cache are left out: in a model, weights come from memory. Held out: other rows of the first five
devices, the other framework, and the rows of the other four, but for their speed.

``--write`` puts the coefficients into ``modelsummary/devices/kernel_fits.json``, and the errors into the tables of
LATENCY.md, by ``latency_page.py``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from fit_kernels import rounded
from latency_page import PRODUCTS, save
from scipy.optimize import least_squares
from tabulate import tabulate

from modelsummary import DeviceSpec
from modelsummary.devices import kernel_time
from modelsummary.devices.kernel_time import DeviceModel, device_model
from modelsummary.operators.operator_work import Work

JSON = Path(kernel_time.__file__).with_name("kernel_fits.json")
SOURCE = (
    "half-precision products and attention: aiconfigurator-core 0.12, https://github.com/ai-dynamo/aiconfigurator"
    " (Apache-2.0)"
)
FITTED = {
    "ampere": ("a100_sxm", "A100 80GB"),
    "ada": ("l40s", "L40S"),
    "hopper": ("h100_sxm", "H100"),
    "blackwell": ("b200_sxm", "B200"),
    "rtx blackwell": ("rtx_pro_6000_server", "RTX PRO 6000"),
}
HELD_OUT = {"H200": "h200_sxm", "B300": "b300_sxm", "GB200": "gb200", "GB300": "gb300"}
START = {"efficiency": 0.85, "edge": 6.0, "start": 100.0, "alone": 0.3, "moving": 0.9, "fixed_us": 2.0}
_TAU = 1.0  # milliseconds of a product
_LONG = 6.4e-3  # seconds of a product whose repetition reaches the speed that is sustained
_WEIGHTS = 6  # that SGLang's rows take turns with
Row = tuple[Work, float]


def rows_of(folder: Path, system: str, framework: str, spec: DeviceSpec) -> list[Row]:
    """Return the products that a framework measured on a device, with their seconds."""
    found = []
    least = (spec.cache_bytes or 0) / (_WEIGHTS * 2)
    for path in sorted((folder / system / "gemm" / framework).glob("*/gemm_perf.parquet")):
        table = pq.read_table(path, columns=["gemm_dtype", "m", "n", "k", "latency"]).to_pylist()
        for row in table:
            m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
            if row["gemm_dtype"] == "bfloat16" and min(n, k) >= 256 and n * k > least:
                found.append((product(m, n, k), float(row["latency"]) * 1e-3))
    return found


def product(m: int, n: int, k: int) -> Work:
    """Return the work of a product."""
    return Work("aten.mm", "gemm", torch.bfloat16, (1, m, n, k), 2 * m * n * k, 2 * (m * n + n * k + m * k))


def sample(rows: list[Row], count: int, seed: int) -> list[Row]:
    """Return some rows, as many small ones as large ones."""
    doublings = np.array([int(np.log2(work.sizes[1])) for work, _ in rows])
    weights = 1 / np.bincount(doublings)[doublings]
    places = np.random.default_rng(seed).choice(
        len(rows), min(count, len(rows)), replace=False, p=weights / weights.sum()
    )
    return [rows[place] for place in places]


def sustained_speed(rows: list[Row]) -> float:
    """Return the median speed of long products."""
    long = [work.flops / seconds for work, seconds in rows if seconds > _LONG and min(work.sizes[1:]) >= 2048]
    return float(np.median(long))


def ratios(model: DeviceModel, rows: list[Row], tau: float) -> np.ndarray:
    """Return predicted over measured seconds of products that ran ``cold / tau`` long."""
    best = model.spec.peak(torch.bfloat16) * float(model.half["efficiency"]) if model.half else 0.0
    cool = replace(model, sustained=max(best, model.sustained))  # no limit of power
    cold = np.array([cool.seconds(work) for work, _ in rows])
    hot = np.array([model.seconds(work) for work, _ in rows])
    predicted = hot + (cold - hot) * np.exp(-cold / (1e-3 * tau)) if tau else hot
    return predicted / np.array([seconds for _, seconds in rows])


def fitted(folder: Path, generation: str, count: int) -> tuple[dict[str, Any], float, list[Row]]:
    """Return the coefficients of a generation, ``tau``, and the rows that the fit did not see."""
    system, name = FITTED[generation]
    rows = rows_of(folder, system, "sglang", DeviceSpec(name))
    order = np.random.default_rng(0).permutation(len(rows))
    train, test = ([rows[place] for place in part] for part in (order[::2], order[1::2]))
    train = sample(train, count, 1)
    sustained = sustained_speed(rows)
    base = device_model(DeviceSpec(name))

    def model(values: np.ndarray) -> DeviceModel:
        half = dict(zip(START, map(float, np.abs(values)), strict=False))
        return replace(base, half=half, sustained=sustained)

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log(ratios(model(values[:-1]), train, abs(values[-1])))

    start = np.array([*START.values(), _TAU])
    least = [0.3, 0.0, 0.0, 0.0, 0.5, 0.0, 0.05]
    most = [1.0, 60.0, 400.0, 1.0, 1.0, 10.0, 20.0]
    scale = np.maximum(start, 0.1)
    options: dict[str, Any] = {"loss": "soft_l1", "f_scale": 0.1, "x_scale": scale, "diff_step": 0.02, "max_nfev": 25}
    found = least_squares(residuals, start, bounds=(least, most), **options).x
    half = dict(zip(START, map(float, found), strict=False))
    speeds = {name: sustained}
    for other, other_system in HELD_OUT.items():
        spec = DeviceSpec(other)
        if spec.generation == generation:
            speeds[other] = sustained_speed(rows_of(folder, other_system, "sglang", spec))
    return {"sustained": speeds, **half}, float(found[-1]), test


def main() -> None:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--write", action="store_true", help="the coefficients into the package")
    parser.add_argument("--rows", type=int, default=1000, help="to fit each device to")
    options = parser.parse_args()
    half: dict[str, Any] = {}
    tested: dict[str, tuple[list[Row], float]] = {}
    for generation, (_, name) in FITTED.items():
        half[generation], tau, test = fitted(options.folder, generation, options.rows)
        tested[name] = test, tau
        print(name, {key: round(value, 3) for key, value in half[generation].items() if key != "sustained"}, tau)
    data = json.loads(JSON.read_text(encoding="utf-8"))
    kernel_time.fits.cache_clear()
    old_fits = kernel_time.fits
    kernel_time.fits = lambda: {**data, "half": half}  # type: ignore[assignment]
    table: list[list[Any]] = []
    errors: dict[str, dict[str, float]] = {}
    for framework, label in (("sglang", "SGLang"), ("trtllm", "TensorRT-LLM")):
        for name, system in {**{name: system for system, name in FITTED.values()}, **HELD_OUT}.items():
            if name in tested and framework == "sglang":
                rows = sample(tested[name][0], 3000, 2)
            elif name in tested or framework == "sglang":
                rows = sample(rows_of(options.folder, system, framework, DeviceSpec(name)), 3000, 3)
            else:
                continue
            found = ratios(device_model(DeviceSpec(name)), rows, tested[name][1] if name in tested else 1.0)
            table.append(_line(f"{name}, {label}", found, rows))
            large = np.array([work.sizes[1] >= 2048 for work, _ in rows])
            short = name.removesuffix(" 80GB")
            errors.setdefault(label, {})[short] = float(np.abs(found - 1).mean())
            errors.setdefault(f"{label}, at least 2,048 rows", {})[short] = float(np.abs(found - 1)[large].mean())
    headers = ["device", "products", "mean error", "of >= 2048 rows", "their bias", "roofline"]
    print(tabulate(table, headers, tablefmt="github"))
    kernel_time.fits = old_fits
    if options.write:
        data["half"] = rounded(half)
        data["sources"] = [*(each for each in data["sources"] if "aiconfigurator" not in each), SOURCE]
        JSON.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        save({PRODUCTS: errors})


def _line(label: str, found: np.ndarray, rows: list[Row]) -> list[Any]:
    large = np.array([work.sizes[1] >= 2048 for work, _ in rows])
    spec = DeviceSpec(label.partition(",")[0])
    old = np.array([spec.bound(work.flops, work.nbytes, torch.bfloat16).seconds / seconds for work, seconds in rows])
    own = np.abs(found - 1)
    figures = (own.mean(), own[large].mean(), found[large].mean() - 1, np.abs(old - 1).mean())
    return [label, len(rows), *(f"{each:.1%}" for each in figures)]


if __name__ == "__main__":
    main()
