"""Fit products of groups of rows to published measurements, and say how well others are met.

    python benchmarks/fit_grouped.py SYSTEMS_FOLDER [--write]

``SYSTEMS_FOLDER`` is ``configs/system`` of https://github.com/MooreThreads/SimuMax: the share of the peak that grouped
products of Transformer Engine reach on a B200 and on an A100, by the number of groups, their rows and both widths, for
the result, and for the gradients of the input and of the weights. The latter add to sums in float32 or bfloat16, which
they read and write. Its boards sustain 1,107 and 234 TFLOP/s in long products.

One coefficient is fitted: how much of the shorter of computing and moving is hidden by the longer. Half of the rows of
each device are fitted, and the devices count the same; the other rows are held out. ``--write`` puts it into
``modelsummary/devices/kernel_fits.json``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from tabulate import tabulate

from modelsummary import DeviceSpec
from modelsummary.devices import kernel_time
from modelsummary.devices.kernel_time import device_model
from modelsummary.operators.operator_work import Work

JSON = Path(kernel_time.__file__).with_name("kernel_fits.json")
SOURCE = "products of groups: SimuMax, https://github.com/MooreThreads/SimuMax"
SYSTEMS = {"b200_bf16_ceperm.json": ("B200", 1.107e15), "a100_pcie.json": ("A100 80GB PCIe", 2.34e14)}
STAGES = {"fwd": "forward", "bwd_grad_act": "input", "bwd_grad_w": "weight"}
Row = tuple[str, str, Work, float]  # device, stage, work, seconds


def rows_of(folder: Path) -> list[Row]:
    """Return the grouped products of both devices with their seconds."""
    rows = []
    for name, (device, _) in SYSTEMS.items():
        measured = json.loads((folder / name).read_text())["accelerator"]["op"]["group_matmul"]
        for text, share in measured["accurate_efficient_factor"].items():
            sizes = {key: int(value) for key, value in re.findall(r"(ng|M|N|K)=(\d+)", text)}
            stage = re.findall(r"stage=(\w+)", text)[0]
            sum_bytes = 2 if "main_grad_dtype=bf16" in text else 4
            work = product(*sizes.values(), stage, sum_bytes)
            rows.append((device, STAGES[stage], work, work.flops / (share * measured["tflops"] * 1e12)))
    return rows


def product(groups: int, m: int, n: int, k: int, stage: str, sum_bytes: int) -> Work:
    """Return the work of a grouped product; gradients of weights read and write the sums that they add to."""
    flops, weights, rows = 2 * groups * m * n * k, groups * n * k, groups * m * (n + k)
    sizes = {"fwd": (m, n, k), "bwd_grad_act": (m, k, n), "bwd_grad_w": (n, k, m)}[stage]
    nbytes = 2 * rows + (2 * sum_bytes if stage == "bwd_grad_w" else 2) * weights
    return Work(
        "aten._grouped_mm",
        "gemm",
        torch.bfloat16,
        (groups, *sizes),
        flops,
        nbytes,
        is_grouped=True,
        is_added=stage == "bwd_grad_w",
    )


def ratios(rows: Iterable[Row], coefficients: dict[str, Any], overlap: float) -> np.ndarray:
    """Return predicted over measured seconds."""
    specs = {name: DeviceSpec(name, sustained_flops={torch.bfloat16: speed}) for name, speed in SYSTEMS.values()}
    models = {
        name: replace(device_model(spec), coefficients={**coefficients, "grouped_overlap": overlap})
        for name, spec in specs.items()
    }
    return np.array([models[device].busy(work) / seconds for device, _, work, seconds in rows])


def main() -> None:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--write", action="store_true", help="the coefficient into the package")
    options = parser.parse_args()
    data = json.loads(JSON.read_text(encoding="utf-8"))
    coefficients, rows = data["coefficients"], rows_of(options.folder)
    by_device = [[row for row in rows if row[0] == device] for device, _ in SYSTEMS.values()]
    halves = [[some[index] for index in np.random.default_rng(0).permutation(len(some))[::2]] for some in by_device]

    def loss(overlap: float) -> float:
        return sum(float(np.abs(np.log(ratios(half, coefficients, overlap))).mean()) for half in halves)

    overlap = round(float(minimize_scalar(loss, bounds=(1.0, 4.0), method="bounded").x), 3)
    table = []
    for device, stage in dict.fromkeys(row[:2] for row in rows):
        held_out = [row for row in rows if row[:2] == (device, stage) and not any(row in half for half in halves)]
        for name, power in (("fitted", overlap), ("as one product", coefficients["overlap"])):
            off = ratios(held_out, coefficients, power)
            table.append([device, stage, name, len(off), f"{np.abs(off - 1).mean():.1%}", f"{off.mean() - 1:+.1%}"])
    print(tabulate(table, ["Device", "Product", "Overlap", "Rows held out", "Error", "Bias"], tablefmt="github"))
    print(f"overlap {overlap}")
    if options.write:
        coefficients["grouped_overlap"] = overlap
        data["sources"] = [*(source for source in data["sources"] if source != SOURCE), SOURCE]
        JSON.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
