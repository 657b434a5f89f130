"""Runs of a model between the rounds in which its operator calls are measured, so both meet the same seconds."""

from __future__ import annotations

import gc
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from modelsummary.latency import kernel_runs

_LEAST_RUNS = 8  # of a visit, if there are so many rounds of calls
Run = tuple[float, float]  # milliseconds, share of a core


def preemptions() -> int:
    """How often another process took a core from a thread of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def minor_faults() -> int:
    """How many pages of memory this process touched first."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextmanager
def only_latest_visit(tables: Path) -> Iterator[None]:
    """Predict from the times of the latest visit alone."""
    with tempfile.TemporaryDirectory() as folder:
        for path in tables.rglob("*.json"):
            table = json.loads(path.read_text())
            for entry in table["entries"].values():
                entry["visits"] = entry["visits"][-1:]
            copy = Path(folder) / path.relative_to(tables)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(json.dumps(table))
        os.environ["MODELSUMMARY_CACHE"] = folder
        yield
    os.environ["MODELSUMMARY_CACHE"] = str(tables)


@contextmanager
def between_rounds(run: Callable[[], None]) -> Iterator[None]:
    """Call a function after each round of operator calls; after eight rounds, only in half of the time."""
    real = kernel_runs.counted
    count, in_runs, latest = 0, 0.0, time.perf_counter()

    def followed() -> None:
        nonlocal count, in_runs, latest
        begin = time.perf_counter()
        in_runs -= begin - latest
        if count < _LEAST_RUNS or in_runs <= 0:
            run()
            count += 1
        latest = time.perf_counter()
        in_runs += latest - begin

    gc.collect()
    gc.disable()
    kernel_runs.counted = lambda *_args: nullcontext(followed)
    try:
        yield
    finally:
        kernel_runs.counted = real
        gc.enable()


def timed(run: Callable[[], object]) -> Run:
    """Milliseconds, and the share of a core that this thread had; 0 if another thread of the process lost its core."""
    lost = preemptions()
    cpu, begin = time.thread_time(), time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    share = (time.thread_time() - cpu) / seconds
    return 1e3 * seconds, 0.0 if torch.get_num_threads() > 1 and preemptions() > lost else share


def typical(runs: list[Run], *, cpu_time: bool = False) -> float:
    """The lower quartile of the runs of a visit that had their core; of their CPU time where that counts."""
    if cpu_time:
        runs = [(run * min(share, 1.0), 1.0) for run, share in runs]
    quiet = [run for run, share in runs if share > 0.95]
    chosen = sorted(quiet if len(quiet) >= 3 else [run for run, _ in runs])
    return chosen[len(chosen) // 4]
