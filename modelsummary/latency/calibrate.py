"""Fill the kernel table of this machine: with the operator calls of a model, or with a grid of common calls."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from modelsummary.devices.device_spec import least_seconds
from modelsummary.devices.kernel_table import Entry, KernelTable, machine_of
from modelsummary.latency.grid import standard_grid
from modelsummary.latency.kernel_runs import seconds_of, workspaces_of
from modelsummary.operators.kernels import one_kernel_of
from modelsummary.operators.operator_calls import OperatorCall

__all__ = ["Calibration", "calibrate_calls", "calibrate_grid"]

_REPETITIONS = 200


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration.

    Attributes:
        measured: number of operator calls measured now.
        known: number of calls that were in the table already.
        failed: number of calls that do not run alone; they are predicted from other calls.
        seconds: duration of the calibration.
        path: file of the table.
        cpu_share: fraction of single-threaded work during which this process had a core; below 0.9, other processes
            were running, and the times are too long.

    >>> print(Calibration(12, 3, 0, 4.2, Path("table.json"), 0.75))
    12 operator calls measured in 4.2 s, 3 known, 0 failed; other processes took 25% of a core: table.json
    """

    measured: int
    known: int
    failed: int
    seconds: float
    path: Path
    cpu_share: float

    def __str__(self) -> str:
        text = (
            f"{self.measured} operator calls measured in {self.seconds:.1f} s, {self.known} known, {self.failed} failed"
        )
        busy = f"; other processes took {1 - self.cpu_share:.0%} of a core" if self.cpu_share < 0.9 else ""
        return f"{text}{busy}: {self.path}"


def calibrate_grid(device: torch.device, *, again: bool = False) -> Calibration:
    """Measure the standard grid; see ``calibrate_calls``."""
    calls = standard_grid()
    # Calls of similar size run together, as in a model, and between two calls of an operator others run.
    order = random.Random(0)
    calls.sort(key=lambda call: (call.nbytes.bit_length() // 2, order.random()))
    return calibrate_calls(calls, device, again=again)


def calibrate_calls(calls: Iterable[OperatorCall], device: torch.device, *, again: bool = False) -> Calibration:
    """Measure operator calls that are not in the table of a device yet, and store the table.

    Args:
        calls: calls to measure, without views and calls whose arguments cannot be made.
        device: the CPU, or a CUDA device.
        again: also measure calls that the table has; the table takes the median of all visits.
    """
    begin = time.perf_counter()
    table = KernelTable.load(machine_of(device))
    share = _cpu_share()
    wanted = {call.key: call for call in calls if call.rule.launches_kernel}
    missing = [call for key, call in wanted.items() if again or key not in table.entries]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # arguments are drawn at random
        if not table.facts or again:
            table.facts = _facts(device)
        workspaces = _workspaces(table, missing, device)
        usable = [call for call in missing if call.key in workspaces]
        n_measured = 0
        for call, seconds in zip(usable, seconds_of(usable, device), strict=True):
            if seconds is not None:
                n_measured += 1
                entry = table.entries.get(call.key) or Entry.of(one_kernel_of(call))
                entry.workspace = workspaces[call.key]
                entry.visit(seconds)
                table.add(call.key, entry)
    path, n_failed = table.save(), len(missing) - n_measured
    return Calibration(n_measured, len(wanted) - len(missing), n_failed, time.perf_counter() - begin, path, share)


def _workspaces(table: KernelTable, calls: Sequence[OperatorCall], device: torch.device) -> dict[str, int]:
    """Return the workspaces of the calls that run alone: of the earlier visit, as they do not vary, or measured now."""
    workspaces = {call.key: entry.workspace for call in calls if (entry := table.entries.get(call.key)) is not None}
    new = [call for call in calls if workspaces.get(call.key) is None]
    workspaces |= zip([call.key for call in new], workspaces_of(new, device), strict=True)
    return {key: workspace for key, workspace in workspaces.items() if workspace is not None}


def _cpu_share() -> float:
    """Return the fraction of a short piece of work during which this process had a core: the best of several."""
    shares = []
    for _ in range(12):
        wall, cpu = time.perf_counter(), time.thread_time()
        while time.perf_counter() - wall < 0.01:
            pass
        shares.append((time.thread_time() - cpu) / (time.perf_counter() - wall))
    return min(max(shares), 1.0)


def _facts(device: torch.device) -> dict[str, float]:
    """Measure the speeds that the machine reaches, and the seconds that the host needs per call."""
    on_cuda = device.type == "cuda"
    width = 4096 if on_cuda else 1024  # so large that queuing a kernel does not count
    square = torch.rand(width, width, device=device)
    source = torch.rand(2**26 if on_cuda else 2**24, device=device)
    one = torch.rand(1, device=device)
    with torch.no_grad():
        return {
            "flops_per_second": 2 * width**3 / least_seconds(device, torch.matmul, square, square),
            "bytes_per_second": 2 * source.nbytes / least_seconds(device, torch.empty_like(source).copy_, source),
            "operator": least_seconds(device, lambda: [torch.relu(one) for _ in range(_REPETITIONS)]) / _REPETITIONS,
        }
