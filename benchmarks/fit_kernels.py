"""Fit the time of kernels on accelerators to published measurements, and say how well rows that were held out are met.

    python benchmarks/fit_kernels.py DATA_FOLDER [--write] [--models 90] [--cache FOLDER] [--products]

``DATA_FOLDER`` holds measurements that others published (its README has sources and licences): kernels in float32
(NeuSight, ASPLOS 2025), tables of timm on an RTX 3090 and an RTX 4090, training iterations on A100s (vTrain,
MICRO 2024).

1. Bandwidth and float32 products, on kernels: an efficiency per operator class, shared by all devices, and two numbers
   for each device. A measured single call is ``max(floor, offset + kernel)``: the host's dispatch, and what is between
   events on an idle device, are fitted, too, and left out of what is kept.
   What is kept is fitted to all devices.
2. Half precision, on whole models of timm: half of the models is held out, in all tables (``whole_steps.py``).
   Half-precision products of data center devices have a fit of their own, ``fit_products.py``.
3. A check, on training iterations of A100s without tensor and pipeline parallelism: nothing of the device is fitted.

``--products`` fits float32 products and convolutions alone, with everything else as it is. ``--write`` puts the
coefficients into ``modelsummary/devices/kernel_fits.json``; ``latency_page.py`` then measures the errors for the docs.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from single_kernels import KernelFit, error_of, flops_per_joule
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
from modelsummary.devices.sustained import vector_share

_OF_DEVICE = ("simt", "conv", "stream")  # figures of a device
_OTHER_SOURCES = ("aiconfigurator", "SimuMax", "gpu_truth")  # of other fits
JSON = Path(kernel_time.__file__).with_name("kernel_fits.json")
SOURCES = [
    "single kernels: NeuSight, ASPLOS 2025, https://github.com/sitar-lab/NeuSight (MIT)",
    "timm models on an RTX 3090 and an RTX 4090: https://github.com/huggingface/pytorch-image-models, results/"
    " (Apache-2.0)",
    "training iterations on A100: vTrain, MICRO 2024, https://github.com/VIA-Research/vTrain (MIT)",
]


def main() -> None:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--write", action="store_true", help="the coefficients into the package")
    parser.add_argument("--models", type=int, default=90, help="of each table of timm")
    parser.add_argument("--cache", type=Path, help="folder that keeps the operators of the models of timm")
    parser.add_argument("--products", action="store_true", help="fit float32 products and convolutions alone")
    parser.add_argument("--date", default="", help="to be written into the file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    coefficients = copy.deepcopy(kernel_time.fits()["coefficients"])
    kernels = KernelFit(options.folder, coefficients)
    if options.products:
        kernels.keep_bandwidths(kernel_time.fits()["devices"])
        kernels.fit_products()
    else:
        kernels.fit()
    coefficients = kernels.coefficients
    print({name: {what: round(value, 3) for what, value in own.items()} for name, own in kernels.devices.items()})
    errors = {} if options.products else _fit_models(options, coefficients)
    ratios = check_a100(options.folder, coefficients)
    errors["a100"] = error_of(ratios)
    print("A100 iterations", len(ratios), f"{errors['a100']:.1%}")
    print(json.dumps(coefficients))
    if options.write:
        _write(coefficients, kernels, errors, options.date)


def _fit_models(options: argparse.Namespace, coefficients: dict[str, Any]) -> dict[str, float]:
    """Fit half precision to the shown models of timm; return the errors of those held out, by table."""
    models = timm_models(options.folder, options.models, options.cache)
    fit_half(coefficients, shown(models))
    print(report(models, coefficients))
    errors = {}
    for name, steps in models.items():
        test = [step for step in steps if is_held_out(step[0])]
        errors[name] = error_of(step_ratios(test, device_of(TABLES[name], coefficients)))
    return errors


def _write(coefficients: dict[str, Any], kernels: KernelFit, errors: dict[str, float], date: str) -> None:
    per_joule = flops_per_joule(kernels)
    old = kernel_time.fits()  # ``fit_products.py`` and ``fit_grouped.py`` made parts of it
    devices = copy.deepcopy(old["devices"])
    devices["RTX 3090"]["simt"] = vector_share(DeviceSpec("RTX 3090"), per_joule)
    by_group = kernels.errors()
    for name in ("A100", "V100", "T4", "P100", "P4"):
        keys = [key for key in kernels.test if key[1].split()[0] == name]
        devices[name] |= {what: kernels.devices[keys[0][1]][what] for what in _OF_DEVICE}
        devices[name]["error"] = float(np.mean([by_device[name] for by_device in by_group.values()]))
    devices["A100"]["error"] = errors["a100"]
    if "infer" in errors:
        devices["RTX 3090"]["error"] = errors["infer"]
        unseen = max(errors["infer"], errors["train"], errors["a100"], 0.15)
        old = {**old, "unseen_error": unseen, "compiled_error": errors["compiled"]}
    simt = kernels.mean_of_devices("simt")
    found = {
        **old,
        "date": date or old["date"],
        "sources": SOURCES + [source for source in old["sources"] if any(name in source for name in _OTHER_SOURCES)],
        "flops_per_joule": per_joule,
        "coefficients": coefficients,
        "devices": devices,
        "default": {**old["default"], "simt": simt},
    }
    JSON.write_text(json.dumps(rounded(found), indent=1) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Return numbers with six digits, also in nested dicts."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
