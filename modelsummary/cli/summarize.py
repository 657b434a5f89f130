"""The command ``modelsummary MODEL``: the layers of a model, their costs, and whether they exceed a budget."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from modelsummary.cli.models import statistics_of
from modelsummary.cli.output import red, write
from modelsummary.errors import InputError
from modelsummary.files.statistics import FileStatistics
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.split import Stages
from modelsummary.statistics import ModelStatistics, as_live
from modelsummary.views.terminal import shows_colours

__all__ = ["summarize"]


def summarize(options: argparse.Namespace) -> int:
    """Write what the options ask about a model, and return the exit status."""
    extra = [name for name in ("memory", "split", "diff") if getattr(options, name) is not None]
    if extra and options.format not in ("text", "json"):
        raise InputError(f"--format {options.format} writes only the table; --{extra[0]} needs --format text or json")
    if options.sort is not None and options.format != "text":
        raise InputError(f"--sort is for the printed table; leave out --format {options.format}")
    stats = statistics_of(options.model, options)
    asks = ("max_macs", "max_memory", "memory", "split", "latency")
    asked = [name.replace("_", "-") for name in asks if getattr(options, name) not in (None, False)]
    if stats.execution == "none" and asked:
        raise InputError(f"--{asked[0]} needs an --input")
    memory = _memory(stats, options)
    stages = None if options.split is None else as_live(stats, "split").split(options.split)
    other = None if options.diff is None else statistics_of(options.diff, options)
    for measured in (stats, other) if options.latency else ():
        if measured is not None:
            as_live(measured, "measure_latency").measure_latency()
    write(_report(stats, memory, stages, other, options), options.output)
    return _exceeded(stats, memory, options)


def _memory(stats: ModelStatistics, options: argparse.Namespace) -> MemoryEstimate | None:
    if options.memory is None and options.max_memory is None:
        return None
    live = as_live(stats, "memory")
    if options.memory in (None, "inference"):
        return live.memory("inference")
    return live.memory(optimizer=None if options.memory == "none" else options.memory)


def _report(
    stats: ModelStatistics,
    memory: MemoryEstimate | None,
    stages: Stages | None,
    other: ModelStatistics | None,
    options: argparse.Namespace,
) -> str:
    difference = None if other is None else stats.diff(other)
    asked = memory if options.memory is not None else None
    if options.format == "text":
        colours = options.output is None and shows_colours(sys.stdout)
        parts = [stats.printed(colours=colours) if difference is None else difference, asked, stages]
        return "\n\n".join(str(part) for part in parts if part is not None)
    if options.format == "json":
        facts = stats.to_dict()
        if asked is not None:
            facts["memory"] = asked.to_dict()
        if stages is not None:
            facts["stages"] = stages.to_records()
        if difference is not None:
            facts["diff"] = difference.to_dict()
        return json.dumps(facts)
    writers: dict[str, Callable[..., str]] = {
        "csv": stats.to_csv,
        "markdown": stats.to_markdown,
        "latex": stats.to_latex,
        "html": stats.to_html,
    }
    return writers[options.format](columns=options.columns, depth=options.depth, units=options.units).rstrip()


def _check_closed(stats: FileStatistics) -> None:
    """Raise ``InputError`` if multiply-adds depend on open dimensions, which the table counts as 1."""
    names = stats.open_dimensions()
    if names:
        inputs = [tensor for tensor in stats.program.inputs if any(isinstance(dim, str) for dim in tensor.shape or ())]
        sizes = " ".join(f"--input {tensor.name}={','.join(map(str, tensor.shape or ()))}" for tensor in inputs[:4])
        listed = ", ".join(names[:8])
        raise InputError(f"--max-macs cannot be checked: multiply-adds depend on {listed}; pass numbers in {sizes}")


def _exceeded(stats: ModelStatistics, memory: MemoryEstimate | None, options: argparse.Namespace) -> int:
    """Print which budgets are exceeded, and return the exit status."""
    figures = {
        "params": (stats.total_params, options.max_params),
        "macs": (stats.root.macs, options.max_macs),
        "memory": (memory.peak if memory is not None else 0, options.max_memory),
    }
    if options.max_macs is not None and isinstance(stats, FileStatistics):
        _check_closed(stats)
    status = 0
    for what, (value, most) in figures.items():
        if most is not None and value > most:
            unit = " bytes" if what == "memory" else ""
            print(f"{red('exceeded:')} {value:,} {what}{unit}, of {most:,} allowed", file=sys.stderr)
            status = 1
        elif most is not None and what == "macs" and any(row.is_uncertain for row in stats.root.walk()):
            why = ", ".join(stats.uncounted_ops) or "calls that cannot be seen"
            print(
                f"{red('unknown:')} at least {value:,} macs, of {most:,} allowed; not counted: {why}", file=sys.stderr
            )
            status = 1
    return status
