"""Fill the kernel table of this machine: with the operator calls of a model, or with a grid of common calls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelsummary.devices.kernel_table import Entry, KernelTable, machine_of
from modelsummary.latency.autograd_time import autograd_seconds
from modelsummary.latency.grid import standard_grid
from modelsummary.latency.host_time import host_seconds, page_seconds
from modelsummary.latency.kernel_measure import is_measurable, workspaces_of
from modelsummary.latency.kernel_rounds import seconds_of
from modelsummary.operators.kernels import whole_call
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import is_free

__all__ = ["Calibration", "calibrate_calls", "calibrate_grid"]

_DEFAULT_CACHE_BYTES = 2**25


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
    calls.sort(key=lambda call: (_bytes_of(call).bit_length() // 2, order.random()))
    return calibrate_calls(calls, device, cold=None, again=again)


def calibrate_calls(
    calls: Iterable[OperatorCall], device: torch.device, *, cold: bool | None, again: bool = False
) -> Calibration:
    """Measure operator calls that are not in the table of a device yet, and store the table.

    Args:
        calls: calls to measure, without views and calls whose arguments cannot be made.
        device: the CPU, or a CUDA device.
        cold: True: parameters come from memory; False: from the cache; None: measure both.
        again: also measure calls that the table has; the table takes the median of all visits.
    """
    begin = time.perf_counter()
    table = KernelTable.load(machine_of(device))
    share = _cpu_share()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # arguments are drawn at random
        if "next_view" not in table.facts or again:  # the newest fact, which older tables lack
            table.add_facts(_facts(device))
        counts = _measure_missing(table, calls, device, cold=cold, again=again)
    path = table.save()
    seconds = time.perf_counter() - begin
    return Calibration(*counts, seconds, path, share)


def _measure_missing(
    table: KernelTable, calls: Iterable[OperatorCall], device: torch.device, *, cold: bool | None, again: bool
) -> tuple[int, int, int]:
    """Measure the calls that the table lacks; return the numbers of measured, known and failed calls."""
    wanted = {call.key: call for call in calls if not is_free(call)}
    missing = [call for call in wanted.values() if again or _lacks(table, call, cold)]
    spaces = _known_workspaces(table, missing)
    new = [call for call in missing if call.key not in spaces]
    spaces.update(zip([call.key for call in new], _workspaces(new, device), strict=True))
    usable = [call for call in missing if spaces[call.key] is not None]
    crowded = len(missing) < len(wanted) / 2
    page = table.facts.get("page", 0.0)
    warm_calls = [call for call in usable if cold is not True or not _has_params(call)]
    cold_calls = [call for call in usable if cold is not False and _has_params(call)]
    cold_bytes = 2 * int(table.facts["cache_bytes"])
    options: dict[str, Any] = {"page": page, "crowded": crowded}
    seconds = _by_key(warm_calls, seconds_of(warm_calls, device, **options))
    cold_seconds = _by_key(cold_calls, seconds_of(cold_calls, device, cold_bytes=cold_bytes, **options))
    failed = 0
    for call in missing:
        entry = table.entries.get(call.key) or Entry.of(whole_call(call))
        entry.workspace = spaces[call.key]
        entry.visit(seconds.get(call.key), cold_seconds.get(call.key))
        if call.key in seconds or call.key in cold_seconds:
            table.add(call.key, entry)
        else:
            failed += 1
    return len(missing) - failed, len(wanted) - len(missing), failed


def _bytes_of(call: OperatorCall) -> int:
    return sum(spec.nbytes for spec in (*call.tensors, *call.outputs))


def _workspaces(calls: Sequence[OperatorCall], device: torch.device) -> list[int | None]:
    """Return the workspace of each call; None for a call that does not run alone."""
    workspaces = iter(workspaces_of([call for call in calls if is_measurable(call)], device))
    return [next(workspaces) if is_measurable(call) else None for call in calls]


def _known_workspaces(table: KernelTable, calls: Iterable[OperatorCall]) -> dict[str, int | None]:
    """Return the workspaces of the calls that were measured before; unlike seconds, they do not vary."""
    entries = {call.key: table.entries.get(call.key) for call in calls}
    return {key: entry.workspace for key, entry in entries.items() if entry is not None and entry.workspace is not None}


def _by_key(calls: Sequence[OperatorCall], seconds: Sequence[float | None]) -> dict[str, float]:
    return {
        call.key: call_seconds for call, call_seconds in zip(calls, seconds, strict=True) if call_seconds is not None
    }


def _has_params(call: OperatorCall) -> bool:
    return any(spec.is_param for spec in call.tensors)


def _lacks(table: KernelTable, call: OperatorCall, cold: bool | None) -> bool:
    entry = table.entries.get(call.key)
    if entry is None:
        return True
    wants_cold, wants_warm = cold is not False and _has_params(call), cold is not True or not _has_params(call)
    return (wants_cold and entry.cold_seconds is None) or (wants_warm and entry.seconds is None)


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
    target = torch.empty_like(source)
    one = torch.rand(1, device=device)

    def least(run: Callable[[], object], count: int) -> float:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            run()
            if on_cuda:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begin)
        return min(times)

    repetitions = 200
    with torch.no_grad():
        return {
            "flops_per_second": 2 * width**3 / least(lambda: square @ square, 7),
            "bytes_per_second": 2 * source.nbytes / least(lambda: target.copy_(source), 5),
            "operator": least(lambda: [torch.relu(one) for _ in range(repetitions)], 5) / repetitions,
            **host_seconds(),
            **autograd_seconds(),
            "page": 0.0 if on_cuda else page_seconds(),
            "cache_bytes": float(_cache_bytes(device)),
        }


def _cache_bytes(device: torch.device) -> int:
    """Return the size of the last level of the cache; a default if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}.get(text[-1], 1) if text[-1:].isalpha() else int(text))
    return max(sizes, default=_DEFAULT_CACHE_BYTES)
