"""Fit the time of kernels on accelerators to published measurements, and say how well rows that were held out are met.

    python benchmarks/fit_kernels.py DATA_FOLDER [--write] [--models 500] [--cache FOLDER]

``DATA_FOLDER`` holds measurements that others published (its README has sources and licences): kernels in float32
(NeuSight, ASPLOS 2025), tables of timm on an RTX 3090 and an RTX 4090, training iterations on A100s (vTrain,
MICRO 2024).

1. Bandwidth and float32 products, on kernels: an efficiency per operator class, shared by all devices, and two numbers
   for each device. A measured single call is ``max(floor, offset + kernel)``: the host's dispatch, and what is between
   events on an idle device, are fitted, too, and left out of what is kept.
   The held-out errors are of a fit without the held-out device; what is kept is fitted to all devices.
2. Half precision, on whole models of timm: half of the models is held out, in all tables (``whole_steps.py``).
   Half-precision products of data center devices have a fit of their own, ``fit_products.py``.
3. A check, on training iterations of A100s without tensor and pipeline parallelism: nothing of the device is fitted.

``--write`` puts the coefficients and the errors into ``modelsummary/devices/kernel_fits.json``.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from single_kernels import F32, HELD_OUT_DEVICE, KernelFit, error_of
from tabulate import tabulate
from whole_steps import (
    TABLES,
    check_a100,
    device_of,
    fit_half,
    is_held_out,
    report,
    shown,
    step_ratios,
    timm_models,
)

from modelsummary import DeviceSpec
from modelsummary.devices import kernel_time
from modelsummary.devices.device_table import TABLE
from modelsummary.devices.kernel_time import DeviceModel
from modelsummary.devices.sustained import vector_share

_OF_DEVICE = ("simt", "conv", "stream")  # figures of a device
JSON = Path(kernel_time.__file__).with_name("kernel_fits.json")
SOURCES = [
    "single kernels: NeuSight, ASPLOS 2025, https://github.com/sitar-lab/NeuSight (MIT)",
    "timm models on an RTX 3090 and an RTX 4090: https://github.com/huggingface/pytorch-image-models, results/"
    " (Apache-2.0)",
    "training iterations on A100: vTrain, MICRO 2024, https://github.com/VIA-Research/vTrain (MIT)",
]
# --------------------------------------------------------------------------------------------------------- main


def main() -> None:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--write", action="store_true", help="the coefficients into the package")
    parser.add_argument("--models", type=int, default=90, help="of each table of timm")
    parser.add_argument("--cache", type=Path, help="folder that keeps the operators of the models of timm")
    parser.add_argument("--date", default="", help="to be written into the file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    coefficients = copy.deepcopy(kernel_time.fits()["coefficients"])
    others = KernelFit(options.folder, coefficients, without=HELD_OUT_DEVICE)
    others.fit()
    seen = [each for name, each in others.devices.items() if name != HELD_OUT_DEVICE]
    default = {what: float(np.mean([each[what] for each in seen])) for what in ("simt", "stream")}
    spec = DeviceSpec(HELD_OUT_DEVICE)
    per_joule = _flops_per_joule(others, without=HELD_OUT_DEVICE)
    unseen = DeviceModel(spec, others.coefficients, default["stream"], 1.0, vector_share(spec, per_joule))
    rows = others.table(unseen)
    kernels = KernelFit(options.folder, coefficients)
    kernels.fit()
    coefficients = kernels.coefficients
    headers = ["class", "rows held out", f"{HELD_OUT_DEVICE}, without its own figures", "roofline", "by device"]
    print(tabulate(rows, headers, tablefmt="github"))
    print({name: {what: round(value, 3) for what, value in own.items()} for name, own in kernels.devices.items()})

    errors = _fit_models(options, coefficients)
    ratios = check_a100(options.folder, coefficients)
    errors["a100"] = error_of(ratios)
    within = [f"{np.mean(np.abs(ratios - 1) < limit):.0%}" for limit in (0.1, 0.2)]
    print("A100 iterations", len(ratios), f"{errors['a100']:.1%}", *within)
    print(json.dumps(coefficients))
    if options.write:
        _write(coefficients, kernels, default, errors, options.date, rows)


def _fit_models(options: argparse.Namespace, coefficients: dict[str, Any]) -> dict[str, float]:
    """Fit half precision to the shown models of timm; return the errors of those held out, by table."""
    models = timm_models(options.folder, options.models, options.cache)
    fit_half(coefficients, shown(models))
    # torch 1.12, of the tables of training, had a slow backward of layer norms, which is fused since
    moving = coefficients["moving"]
    moving["norm backward"] = max(moving["norm backward"], 0.6 * moving["norm"])
    print(report(models, coefficients))
    errors = {}
    for name, steps in models.items():
        test = [step for step in steps if is_held_out(step[0])]
        errors[name] = error_of(step_ratios(test, device_of(TABLES[name], coefficients)))
    return errors


# 10^9 operations per joule of newer processes, by the figures of NVIDIA's data sheets relative to 7 nm: not fitted.
_NEWER = {"ada": 130.0, "hopper": 130.0, "blackwell": 150.0}
_PROCESS = {"volta": "12 nm", "turing": "12 nm", "pascal": "16 nm", "ampere": "7 nm"}


def _flops_per_joule(kernels: KernelFit, without: str = "") -> dict[str, float]:
    """What a watt sustains of the vector units, from boards of the process that lack power; else from all of them."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, own in kernels.devices.items():
        spec = DeviceSpec(name)
        if name != without and "simt" in own:
            value = own["simt"] * spec.peak(F32) / TABLE[name].watts / 1e9
            found[_PROCESS[spec.generation]].append(value)
    return {each: float(max(found[process])) for each, process in _PROCESS.items()} | _NEWER


def _write(
    coefficients: dict[str, Any],
    kernels: KernelFit,
    default: dict[str, float],
    errors: dict[str, float],
    date: str,
    rows: list[list[Any]],
) -> None:
    per_joule = _flops_per_joule(kernels)
    old = kernel_time.fits()  # ``fit_products.py`` and ``fit_grouped.py`` made parts of it
    simt = vector_share(DeviceSpec("RTX 3090"), per_joule)
    devices: dict[str, Any] = {
        "RTX 3090": {"generation": "ampere", "tensor": 1.0, "simt": simt, "stream": 0.92, "error": errors["infer"]},
        "A100": {
            "generation": "ampere",
            **{what: kernels.devices["A100 40GB PCIe"][what] for what in _OF_DEVICE},
            "error": errors["a100"],
        },
    }
    for name, generation in (("V100", "volta"), ("T4", "turing"), ("P100", "pascal"), ("P4", "pascal")):
        own = kernels.devices.get(name) or kernels.devices[f"{name} PCIe"]
        ratios = np.concatenate(
            [kernels.ratios(key, kernels.test[key]) for key in kernels.test if key[1].split()[0] == name]
        )
        devices[name] = {
            "generation": generation,
            **{what: own[what] for what in _OF_DEVICE},
            "error": error_of(ratios),
        }
    found = {
        "date": date,
        "sources": SOURCES + [each for each in old["sources"] if "aiconfigurator" in each or "SimuMax" in each],
        "held_out_error": {
            **old["held_out_error"],
            **{row[0]: row[1] for row in rows},
            **{k: f"{v:.1%}" for k, v in errors.items()},
        },
        "unseen_error": max(errors["infer"], errors["train"], errors["a100"], 0.15),
        "compiled_error": errors["compiled"],
        "flops_per_joule": per_joule,
        "coefficients": coefficients,
        "devices": devices,
        "default": {"simt": default["simt"], "stream": 0.87, "error": 0.15},
        "half": old["half"],
    }
    JSON.write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Return numbers with four digits, also in nested dicts."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
