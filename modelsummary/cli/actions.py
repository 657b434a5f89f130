"""What the commands do: each function takes the parsed options, and returns the exit status."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import webbrowser
from collections.abc import Callable, Iterator
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

import torch

import modelsummary
from modelsummary.cli.models import accelerator_of, inputs_of_file, live_statistics, statistics_of
from modelsummary.cli.sources import build_model
from modelsummary.cluster import Cluster
from modelsummary.devices.kernel_table import device_here
from modelsummary.errors import InputError
from modelsummary.file_contents import saved
from modelsummary.files.comparing import compare as compare_forms
from modelsummary.files.loading import is_archive, is_file, load
from modelsummary.files.statistics import FileStatistics
from modelsummary.findings import Findings
from modelsummary.latency import calibrate_grid
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.serving import Engine, Load, ServingEstimate, ServingPlans, ServingSimulation, ServingSpace, Uniform
from modelsummary.serving.number_formats import format_of_checkpoint
from modelsummary.split import Stages
from modelsummary.statistics import ModelStatistics, Statistics, as_live
from modelsummary.views.cells import TableOptions
from modelsummary.views.diff import ModelDiff
from modelsummary.views.terminal import red, shows_colours

__all__ = ["calibrate", "check", "compare", "env", "explore", "plan", "serve_plan", "summarize"]

_OF_DEVELOPMENT = re.compile("extra == .(dev|docs|examples|test|zoo)")  # extras that users do not install
_IMAGES = "8,3,224,224"  # an input, in messages
_TOKENS = (1, 16)  # size of the recorded input of serve-plan; requests have the sizes of the options


def compare(options: argparse.Namespace) -> int:
    """Print the figures of several forms of a model side by side."""
    models: dict[str, ModelStatistics] = {}
    for name in options.models:
        if is_file(name):
            models[name] = load(name, inputs_of_file(options.input), run=options.run and is_archive(name))
        else:
            models[name] = live_statistics(name, options)
    comparison = compare_forms(models)
    facts = {"forms": comparison.to_records(), "reasons": comparison.reasons}
    _write(json.dumps(facts) if options.format == "json" else str(comparison), options.output)
    return 0


def env(options: argparse.Namespace) -> int:
    """Print the versions of what modelsummary runs on, for a report of a defect."""
    facts = dict(_environment())
    text = "\n".join(f"{name}: {value}" for name, value in facts.items())
    _write(json.dumps(facts) if options.format == "json" else text, options.output)
    return 0


def _environment() -> Iterator[tuple[str, str]]:
    yield "modelsummary", modelsummary.__version__
    yield "Python", platform.python_version()
    yield "platform", platform.platform()
    yield "torch", torch.__version__
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield "devices", ", ".join(devices) or "cpu"
    yield "threads", str(torch.get_num_threads())
    try:
        requirements = metadata("torch-modelsummary").get_all("Requires-Dist") or []
    except PackageNotFoundError:  # run from a checkout that is not installed
        return
    used = [requirement for requirement in requirements if not _OF_DEVELOPMENT.search(requirement)]
    for library in sorted({re.split(r"[^\w.-]", requirement)[0] for requirement in used} - {"torch"}):
        try:
            yield library, version(library)
        except PackageNotFoundError:
            continue


def check(options: argparse.Namespace) -> int:
    """Print what is wrong with a model; the status is 1 if something is."""
    files = [Path(file).resolve() for file in (options.baseline, options.output) if file is not None]
    if len(set(files)) < len(files):
        raise InputError(
            f"--output {options.output} would replace the accepted findings of --baseline by the new ones; "
            "pass another file, or leave out --baseline to accept all"
        )
    stats = live_statistics(options.model, options, example=_IMAGES)
    findings = stats.check(options.device, select=options.select, ignore=options.ignore, autocast=options.autocast)
    if options.baseline is not None:
        findings = findings.since(options.baseline)
    formats: dict[str, Callable[[Findings], str]] = {
        "text": str,
        "json": Findings.to_json,
        "sarif": Findings.to_sarif,
    }
    _write(formats[options.format](findings), options.output)
    return 1 if findings else 0


def explore(options: argparse.Namespace) -> int:
    """Write the page of a model, or of two models side by side."""
    stats = _loaded(options.model, options)
    other = None if options.compare is None else _loaded(options.compare, options)
    memory, stages = _memory(stats, options.memory, options), _stages(stats, options)
    path = stats.explore(compare=other, memory=memory, stages=stages).save(options.output)
    print(f"written: {path}")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _loaded(name: str, options: argparse.Namespace) -> ModelStatistics:
    return ModelStatistics.from_json(Path(name)) if name.endswith(".json") else statistics_of(name, options)


def calibrate(options: argparse.Namespace) -> int:
    """Measure the operator calls of a model, or the standard grid."""
    device = device_here(options.device)
    if options.model is None:
        print(calibrate_grid(device, again=options.again))
        return 0
    stats = live_statistics(options.model, options, example=_IMAGES)
    backward = options.backward or options.optimizer is not None
    print(stats.calibrate(device, backward, options.optimizer, again=options.again))
    return 0


def serve_plan(options: argparse.Namespace) -> int:
    """Print what serving a model takes."""
    _check_load(options)
    source = build_model(options.model, options.kwargs, with_values=options.values)
    sizes = options.input or []
    if not sizes and not source.takes_indices:
        raise InputError(f"serve-plan needs an --input of {options.model!r}, such as input_ids=1,16:long")
    name_of_ids = getattr(source.model, "main_input_name", None)
    if name_of_ids is None and not all(name for name, _, _ in sizes):
        raise InputError("serve-plan needs the name of each --input of this model, such as input_ids=1,16:long")
    device = "cpu" if options.values else "meta"
    inputs = {
        name or name_of_ids: torch.zeros(size, dtype=dtype or torch.float32, device=device)
        for name, size, dtype in sizes
    } or {"input_ids": torch.zeros(_TOKENS, dtype=torch.long, device=device)}
    weights, quantization = options.weights, source.quantization
    if weights is None and quantization:
        weights = format_of_checkpoint(quantization)
    estimate = Statistics(source.model, inputs).serving(
        options.context,
        options.batch,
        options.device,
        options.dtype,
        tensor=options.tensor,
        cache=options.cache,
        mode=options.mode,
        memory_bytes=options.memory,
        weights=weights,
        cache_dtype=options.cache_dtype,
        expert=options.expert,
    )
    served = _served(estimate, options)
    if options.format == "json":
        text = json.dumps({**estimate.to_dict(), **({} if served is None else {"load": served.to_records()})})
    else:
        text = "\n\n".join(map(str, [estimate] if served is None else [estimate, served]))
    _write(text, options.output)
    if options.plot is not None:
        try:
            estimate.plot().figure.savefig(options.plot)  # type: ignore[union-attr]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--plot {str(options.plot)!r} cannot be written: {reason}; pass another path") from None
    return 0


def plan(options: argparse.Namespace) -> int:
    """Print the fastest ways to train a model on a cluster."""
    stats = live_statistics(options.model, options, example="input_ids=1,4096:long")
    cluster = Cluster(options.device, nodes=options.nodes, devices_per_node=options.per_node)
    search: dict[str, Any] = {"sequence_length": options.sequence, "limit": options.limit}
    plans = stats.plan(cluster, options.batch, **search)
    text = json.dumps(plans.to_records(), default=str) if options.format == "json" else str(plans)
    _write(text, options.output)
    return 0


def _check_load(options: argparse.Namespace) -> None:
    """Raise ``InputError`` for options of a load or of a plan that are without effect."""
    if options.prompt is None or options.new_tokens is None:
        names = "prompt new_tokens rate max_requests token_budget ttft tpot devices price"
        if any(getattr(options, name) is not None for name in names.split()):
            raise InputError("a load needs --prompt and --new-tokens, such as --prompt 300 --new-tokens 100:200")
    elif options.ttft is None and options.tpot is None and (options.devices is not None or options.price is not None):
        raise InputError("--devices and --price are for a plan, which needs --ttft or --tpot")


def _served(estimate: ServingEstimate, options: argparse.Namespace) -> ServingSimulation | ServingPlans | None:
    """Return the simulation of the load, or the plans for it if there are limits; None without a load."""
    if options.prompt is None or options.new_tokens is None:
        return None
    prompt, output = (
        Uniform(*lengths) if isinstance(lengths, tuple) else lengths for lengths in (options.prompt, options.new_tokens)
    )
    requests = Load(options.requests, prompt=prompt, output=output, rate=options.rate)
    batching = {name: getattr(options, name) for name in ("max_requests", "token_budget")}
    batching = {name: value for name, value in batching.items() if value is not None}
    if options.ttft is None and options.tpot is None:
        return estimate.simulate(requests, Engine(**batching, overhead_ms=options.overhead))
    only = {**batching, **({"tensor": options.tensor, "expert": options.expert} if estimate.ranks > 1 else {})}
    plans = estimate.plan(
        requests,
        ttft_ms=options.ttft,
        tpot_ms=options.tpot,
        devices=options.devices,
        space=ServingSpace(**{name: [value] for name, value in only.items()}),
        engine=Engine(overhead_ms=options.overhead),
        price=options.price,
    )
    _ = plans.best  # raises ``InputError`` if no way keeps the limits
    return plans


def _write(text: str, path: Path | None) -> None:
    """Print the text, or write it to a file."""
    if path is None:
        print(text)
    else:
        saved(f"{text}\n", path)


def summarize(options: argparse.Namespace) -> int:
    """Write what the options ask about a model, and return the exit status."""
    extra = [name for name in ("memory", "split", "diff") if getattr(options, name) is not None]
    if extra and options.format not in ("text", "json"):
        raise InputError(f"--format {options.format} writes only the table; --{extra[0]} needs --format text or json")
    if options.sort is not None and options.format != "text":
        raise InputError(f"--sort is for the printed table; leave out --format {options.format}")
    if options.max_growth is not None and options.diff is None:
        raise InputError("--max-growth is the growth since another model; pass its JSON, such as --diff before.json")
    stats = statistics_of(options.model, options)
    stats.options = _table_options(options)
    asks = ("max_macs", "max_memory", "memory", "split", "latency")
    asked = [name.replace("_", "-") for name in asks if getattr(options, name) not in (None, False)]
    if stats.execution == "none" and asked:
        lacks = "a forward, and weights have none" if isinstance(stats, FileStatistics) else "an --input"
        raise InputError(f"--{asked[0]} needs {lacks}")
    step = "inference" if options.memory is None and options.max_memory is not None else options.memory
    memory = _memory(stats, step, options)
    stages = _stages(stats, options)
    other = None if options.diff is None else _loaded(options.diff, options)
    for measured in (stats, other) if options.latency else ():
        if measured is not None:
            as_live(measured, "measure_latency").measure_latency()
    difference = None if other is None else stats.diff(other)
    _write(_report(stats, memory, stages, difference, options), options.output)
    return _exceeded(stats, memory, difference, options)


def _table_options(options: argparse.Namespace) -> TableOptions:
    depth_options: dict[str, Any] = {} if options.depth is None else {"depth": options.depth}
    depth_options |= {"depth": options.depth, "fold": False} if options.full else {}
    return TableOptions(columns=options.columns, units=options.units, sort=options.sort, **depth_options)


def _memory(stats: ModelStatistics, step: str | None, options: argparse.Namespace) -> MemoryEstimate | None:
    """Return the memory of an inference, or of a training step with an optimizer or ``none``; None for no step."""
    if step is None:
        return None
    live, device = as_live(stats, "memory"), accelerator_of(options)
    if step == "inference":
        return live.memory("inference", device=device)
    return live.memory(optimizer=None if step == "none" else step, device=device)


def _stages(stats: ModelStatistics, options: argparse.Namespace) -> Stages | None:
    return None if options.split is None else as_live(stats, "split").split(options.split)


def _report(
    stats: ModelStatistics,
    memory: MemoryEstimate | None,
    stages: Stages | None,
    difference: ModelDiff | None,
    options: argparse.Namespace,
) -> str:
    shown_memory = memory if options.memory is not None else None
    if options.format == "text":
        colours = options.output is None and shows_colours(sys.stdout)
        parts = [stats.printed(colours=colours) if difference is None else difference, shown_memory, stages]
        return "\n\n".join(str(part) for part in parts if part is not None)
    if options.format == "json":
        facts = stats.to_dict()
        if shown_memory is not None:
            facts["memory"] = shown_memory.to_dict()
        if stages is not None:
            facts["stages"] = stages.to_records()
        if difference is not None:
            facts["diff"] = difference.to_dict()
        return json.dumps(facts)
    text: str = getattr(stats, f"to_{options.format}")(
        columns=options.columns, depth=options.depth, units=options.units
    )
    return text.rstrip()


def _check_closed(stats: FileStatistics) -> None:
    """Raise ``InputError`` if multiply-adds depend on open dimensions, which the table counts as 1."""
    names = stats.open_dimensions()
    if names:
        inputs = [tensor for tensor in stats.program.inputs if any(isinstance(dim, str) for dim in tensor.shape or ())]
        sizes = " ".join(f"--input {tensor.name}={','.join(map(str, tensor.shape or ()))}" for tensor in inputs[:4])
        listed = ", ".join(names[:8])
        raise InputError(f"--max-macs cannot be checked: multiply-adds depend on {listed}; pass numbers in {sizes}")


def _exceeded(
    stats: ModelStatistics, memory: MemoryEstimate | None, difference: ModelDiff | None, options: argparse.Namespace
) -> int:
    """Print which budgets are exceeded, and return the exit status."""
    peak = memory.peak if memory is not None else 0
    limits: list[tuple[str, int, int]] = [
        (figure, value, limit)
        for figure, value, limit in (
            ("params", stats.total_params, options.max_params),
            ("macs", stats.root.macs, options.max_macs),
            ("memory bytes", peak, options.max_memory),
        )
        if limit is not None
    ]
    if options.max_growth is not None and difference is not None:
        limits += _limits_of_growth(difference, options.max_growth)
    if options.max_macs is not None and isinstance(stats, FileStatistics):
        _check_closed(stats)
    status = 0
    for figure, value, limit in limits:
        if value > limit:
            print(f"{red('exceeded:', sys.stderr)} {value:,} {figure}, of {limit:,} allowed", file=sys.stderr)
            status = 1
        elif figure == "macs" and any(row.is_uncertain for row in stats.root.walk()):
            reason = ", ".join(stats.uncounted_ops) or "calls that cannot be seen"
            print(
                f"{red('unknown:', sys.stderr)} at least {value:,} macs, of {limit:,} allowed; not counted: {reason}",
                file=sys.stderr,
            )
            status = 1
    return status


def _limits_of_growth(difference: ModelDiff, growth: Fraction) -> Iterator[tuple[str, int, int]]:
    """Yield parameters, multiply-adds and bytes of a model, and the most of them after a growth of the other one."""
    for measure, figure in (("params", "params"), ("macs", "macs"), ("bytes", "bytes of parameters and buffers")):
        value, earlier, change = difference.totals[measure]
        if change is not None and value is not None and earlier is not None:
            yield figure, int(value), int(earlier * (1 + growth))
        elif (value is None) != (earlier is None):
            raise InputError(
                f"--max-growth compares {figure}, which need an --input for both models, and for the one in a JSON"
            )
