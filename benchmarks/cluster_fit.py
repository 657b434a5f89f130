"""Fit what all-reduces reach of the links inside a node, and say how well sizes that were held out are met.

    python benchmarks/cluster_fit.py DATA_FOLDER [--write] [--date DATE]

``DATA_FOLDER`` holds all-reduces among 2 to 8 A100 of one node (vTrain, MICRO 2024). Every second size is held out. The
fit has four numbers for all sizes and groups: a base, a latency per step of the ring, the share of the data sheet's
bandwidth, and how much of that share small groups lose. ``--write`` puts them into
``modelsummary/cluster/collective_fits.json``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from modelsummary.cluster import collectives

JSON = Path(collectives.__file__).with_name("collective_fits.json")
LINK = 300e9  # bytes per second and direction of the NVLinks of an A100


def rows_of(folder: Path) -> np.ndarray:
    """Return the ranks, bytes and seconds of the measured all-reduces."""
    with gzip.open(folder / "collectives" / "all_reduce_a100_nvlink.csv.gz", "rt") as file:
        rows = [(int(row["gpus"]), int(row["bytes"]), float(row["in_place_us"])) for row in csv.DictReader(file)]
    return np.array(rows, dtype=float) * (1, 1, 1e-6)


def seconds(rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the seconds of ring all-reduces with a base, a latency per step (us), an efficiency, and its loss."""
    base, step, efficiency, loss = values
    n, nbytes = rows[:, 0], rows[:, 1]
    reached = LINK * efficiency * (1 - loss / n)
    return 1e-6 * base + 2 * (n - 1) * 1e-6 * step + 2 * (n - 1) / n * nbytes / reached


def main() -> None:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--write", action="store_true", help="the coefficients into the package")
    parser.add_argument("--date", default="", help="to be written into the file")
    options = parser.parse_args()
    rows = rows_of(options.folder)

    def residuals(values: np.ndarray) -> np.ndarray:
        weights = 1 / np.sqrt(rows[::2, 1] / rows[:, 1].min())  # as many small sizes as large ones
        return weights * np.log(seconds(rows[::2], values) / rows[::2, 2])

    found = least_squares(residuals, [20.0, 2.0, 0.75, 0.1], bounds=(0, [200, 50, 1, 1])).x
    held_out = rows[1::2]
    ratios = seconds(held_out, found) / held_out[:, 2]
    error = float(np.mean(np.abs(ratios - 1)))
    base, step, efficiency, loss = found
    print(f"base {base:.1f} us, {step:.2f} us per step, {efficiency:.3f} x (1 - {loss:.3f} / n) of the bandwidth")
    for n in sorted(set(held_out[:, 0])):
        own = ratios[held_out[:, 0] == n]
        print(f"{int(n)} ranks: mean error {np.mean(np.abs(own - 1)):.1%}, mean ratio {np.mean(own):.3f}")
    print(f"all held-out sizes: mean error {error:.1%}")
    if options.write:
        data = {
            "date": options.date,
            "source": "all-reduces on A100: vTrain, MICRO 2024, https://github.com/VIA-Research/vTrain (MIT)",
            "error": round(error, 4),
            "link": dict(
                zip(
                    ("base_us", "step_us", "efficiency", "loss"), (round(float(each), 4) for each in found), strict=True
                )
            ),
            "network": {"step_us": 14.0, "efficiency": 0.9},
        }
        JSON.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
