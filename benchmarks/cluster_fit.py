"""Fit what all-reduces reach of the links inside a node, and say how well sizes that were held out are met.

    python benchmarks/cluster_fit.py DATA_FOLDER [--write] [--date DATE]

``DATA_FOLDER`` holds all-reduces among 2 to 8 A100 of one node (vTrain, MICRO 2024). Every second size is held out. The
fit has five numbers for all sizes and groups: of the protocol Simple a base, a latency per step of the ring, the share
of the data sheet's bandwidth, and how much of that share small groups lose; of LL128 its share of Simple's bandwidth.
Which protocol ran follows from NCCL's own estimates (``modelsummary/cluster/protocols.py``). A sixth number belongs to
the measurement: one thread started the kernels of all devices, so no size took less than some 12 us per device; such
sizes are not counted in the errors.

All-reduces in a switch with NVLink Sharp are fitted to a table of 8 H200, of which every second size is held out, too:
a base, the chunks that fill the pipeline, the seconds of a chunk, and the share of the links. Three other tables are
compared. ``--write`` puts the nine numbers into ``modelsummary/cluster/collective_fits.json``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from math import inf
from pathlib import Path
from unittest.mock import patch

import numpy as np
from scipy.optimize import least_squares

from modelsummary.cluster import Cluster, collectives
from modelsummary.cluster.collectives import Network, RankGroup
from modelsummary.cluster.protocols import Links, Switch, seconds_in_switch, seconds_of_protocols

JSON = Path(collectives.__file__).with_name("collective_fits.json")
LINK = 300e9  # bytes per second and direction of the NVLinks of an A100
NVLINK_4 = 450e9  # of an H100, H200 or H20
# Bus bandwidths (GB/s) of 128 KiB, 256 KiB, ... 8 GiB among 8 H200, NCCL 2.20.5 with NCCL_ALGO=NVLS
SWITCH = (7.39, 14.75, 29.38, 52.96, 88.78, 138.44, 181.94, 240.41, 300.91, 368.11, 412.45, 432.24, 442.72, 467.58)
SWITCH += (472.57, 477.41, 479.98)
SWITCH_SOURCE = "https://github.com/Azure/AI-benchmarking-guide, Azure_Results/ND_H200_v5_results.md"
# Other tables: ranks, bytes and microseconds
SWITCH_OTHERS = {
    "8 H20, NCCL 2.30.4, its own choice (Mooncake pull request 3484)": [
        *((8, 2**21, 40.66), (8, 2**22, 53.24), (8, 2**23, 81.16), (8, 2**24, 121.33), (8, 2**25, 195.40)),
    ],
    "4 H100, NCCL 2.29.2 (https://github.com/waynehacking8/nccl-collectives-bench, results/algo_sweep.txt)": [
        *((4, 2**28, 1120.54), (4, 2**30, 4336.86), (4, 2**33, 34221.4)),
    ],
    "5 to 8 H100, 4 GiB, from their bus bandwidths (NCCL issue 1455)": [
        (n, 2**32, 2 * (n - 1) / n * 2**32 / bus / 1e3) for n, bus in ((5, 420), (6, 440), (7, 460), (8, 480))
    ],
}


def rows_of(folder: Path) -> np.ndarray:
    """Return the ranks, bytes and seconds of the measured all-reduces."""
    with gzip.open(folder / "collectives" / "all_reduce_a100_nvlink.csv.gz", "rt") as file:
        rows = [(int(row["gpus"]), int(row["bytes"]), float(row["in_place_us"])) for row in csv.DictReader(file)]
    return np.array(rows, dtype=float) * (1, 1, 1e-6)


def with_ll128(rows: np.ndarray) -> np.ndarray:
    """Return True for the all-reduces for which NCCL chooses LL128, as it estimates with 235 GB/s (``compCap80``)."""
    found = []
    for n, nbytes, _ in rows:
        links = Links(int(n), 1, int(n), 235e9, 235e9, "nvlink")
        found.append(seconds_of_protocols("all_reduce", nbytes, links) < inf)
    return np.array(found)


def seconds(rows: np.ndarray, is_ll128: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the seconds of ring all-reduces.

    ``values`` are a base, a latency per step (us), an efficiency and its loss, and the share of LL128.
    """
    base, step, efficiency, loss, share = values
    n, nbytes = rows[:, 0], rows[:, 1]
    reached = LINK * efficiency * (1 - loss / n)
    simple = 1e-6 * base + 2 * (n - 1) * 1e-6 * step + 2 * (n - 1) / n * nbytes / reached
    ll128 = 14e-6 + 2 * (n - 1) * 1.9e-6 + 2 * (n - 1) / n * nbytes / (share * reached)
    return np.where(is_ll128, ll128, simple)


def in_switch(ranks: int, nbytes: float, values: np.ndarray, efficiency: float) -> float:
    """Return the seconds of an all-reduce in a switch for a base (us), chunks that fill, a chunk (us) and a share."""
    base, fill, sync, share = (float(each) for each in values)
    link = NVLINK_4 * efficiency
    return seconds_in_switch(nbytes, ranks, Switch(share * link, 1e-6 * base, fill, 1e-6 * sync, link))


def fit_switch(efficiency: float) -> np.ndarray:
    """Return the fitted values of a switch, and print the errors."""
    nbytes = [2.0 ** (17 + at) for at in range(len(SWITCH))]
    measured = [2 * 7 / 8 * size / bus / 1e9 for size, bus in zip(nbytes, SWITCH, strict=True)]

    def ratios(values: np.ndarray, start: int) -> np.ndarray:
        found = [in_switch(8, each, values, efficiency) for each in nbytes[start::2]]
        return np.array(found) / measured[start::2]

    values = least_squares(lambda values: np.log(ratios(values, 0)), [20, 1.5, 3, 0.85], bounds=(0, 100)).x
    base, fill, sync, share = values
    print(f"switch: base {base:.1f} us, {fill:.2f} chunks fill, {sync:.2f} us per chunk, {share:.3f} of the links")
    print(f"switch, held-out sizes: {_errors(ratios(values, 1))}, worst {np.max(np.abs(ratios(values, 1) - 1)):.1%}")
    for name, rows in SWITCH_OTHERS.items():
        found = np.array([in_switch(n, size, values, efficiency) / us * 1e6 for n, size, us in rows])
        print(f"{name}: {_errors(found)}, worst {np.max(np.abs(found - 1)):.1%}")
    return values


def main() -> None:
    """Fit, print the errors, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the measurements")
    parser.add_argument("--write", action="store_true", help="the coefficients into the package")
    parser.add_argument("--date", default="", help="to be written into the file")
    options = parser.parse_args()
    rows = rows_of(options.folder)

    is_ll128 = with_ll128(rows)

    def residuals(values: np.ndarray) -> np.ndarray:
        weights = 1 / np.sqrt(rows[::2, 1] / rows[:, 1].min())  # as many small sizes as large ones
        *own, start = values
        found = np.maximum(seconds(rows[::2], is_ll128[::2], np.array(own)), 1e-6 * start * rows[::2, 0])
        return weights * np.log(found / rows[::2, 2])

    bounds = (0, [200, 50, 1, 1, 1, 50])
    *found, start = least_squares(residuals, [20.0, 2.0, 0.75, 0.1, 0.9, 10.0], bounds=bounds).x
    base, step, efficiency, loss, share = found
    print(f"base {base:.1f} us, {step:.2f} us per step, {efficiency:.3f} x (1 - {loss:.3f} / n) of the bandwidth")
    print(f"LL128 reaches {share:.3f} of it; {start:.1f} us per device to start the kernels")
    held_out = rows[1::2]
    held_out = held_out[held_out[:, 2] > 1.1e-6 * start * held_out[:, 0]]
    data = {
        "date": options.date,
        "source": "all-reduces on A100: vTrain, MICRO 2024, https://github.com/VIA-Research/vTrain (MIT)",
        "error": 0.0,
        "link": dict(
            zip(
                ("base_us", "step_us", "efficiency", "loss", "ll128"),
                (round(float(each), 4) for each in found),
                strict=True,
            )
        ),
        "network": {"step_us": 14.0, "efficiency": 0.9},
        "switch": {
            "source": f"all-reduces on H200: {SWITCH_SOURCE}",
            **{
                name: round(float(each), 4)
                for name, each in zip(
                    ("base_us", "fill", "sync_us", "share"), fit_switch(float(efficiency)), strict=True
                )
            },
        },
    }
    with patch.object(collectives, "collective_fits", lambda: data):
        network = Network(Cluster("A100", link_bandwidth=LINK))
        predicted = [network.seconds("all_reduce", nbytes, RankGroup(int(n), int(n))) for n, nbytes, _ in held_out]
    ratios = np.array(predicted) / held_out[:, 2]
    error = float(np.mean(np.abs(ratios - 1)))
    small = held_out[:, 1] <= 2**25
    for n in sorted(set(held_out[:, 0])):
        own = held_out[:, 0] == n
        print(f"{int(n)} ranks: {_errors(ratios[own & small])} up to 32 MiB, {_errors(ratios[own & ~small])} above")
    print(f"held-out sizes: {_errors(ratios[small])} up to 32 MiB, {_errors(ratios)} in all")
    if options.write:
        JSON.write_text(json.dumps({**data, "error": round(error, 4)}, indent=1) + "\n", encoding="utf-8")


def _errors(ratios: np.ndarray) -> str:
    return f"mean error {np.mean(np.abs(ratios - 1)):.1%}, mean ratio {np.mean(ratios):.3f}"


if __name__ == "__main__":
    main()
