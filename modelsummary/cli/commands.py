# PYTHON_ARGCOMPLETE_OK
"""The command ``modelsummary``: the layers of a model, their costs, and whether they exceed a budget."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

import torch

from modelsummary.cli.arguments import (
    Parser,
    parse_budget,
    parse_dtype,
    parse_input,
    parse_optimizer,
    parse_settings,
)
from modelsummary.cli.calibrate import calibrate
from modelsummary.cli.explore import explore
from modelsummary.cli.models import arguments_of, inputs_of_file, statistics_of
from modelsummary.cli.serve_plan import serve_plan
from modelsummary.cli.sources import SOURCES, build_model
from modelsummary.errors import InputError, ModelSummaryError
from modelsummary.files.comparing import compare
from modelsummary.files.loading import is_file, is_torchscript, load
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.step_plan import OPTIMIZERS
from modelsummary.split import Stages
from modelsummary.statistics import ModelStatistics, Statistics, as_live
from modelsummary.views.columns import COLUMNS
from modelsummary.views.terminal import shows_colours

__all__ = ["main", "run"]

_HELP_OF_INPUT = "size of an input tensor, such as 1,3,224,224; repeatable"
_FORMATS = ("text", "json", "csv", "markdown", "latex", "html")
_EXAMPLES = f"""\
a model is one of
  {SOURCES}
an input is SIZE, or NAME=SIZE for a keyword argument; append :DTYPE if it differs from the model's dtype;
NAME==NUMBER is a number, where the model takes one

examples
  modelsummary resnet50 --input 1,3,224,224 --sort macs
  modelsummary net.py:MyNet --input 1,3,224,224
  modelsummary timm:vit_small_patch16_224 --input 8,3,224,224 --memory adamw --split 4
  modelsummary hf:config.json --input input_ids=1,128:long --depth 3
  modelsummary models.net:build --kwargs '{{"width": 64}}' --input 1,3,32,32 --format markdown --output net.md
  modelsummary model.onnx --input images=1,3,224,224
  modelsummary compare torchvision:mobilenet_v2 mobilenet_v2.onnx mobilenet_v2.pt2 --input 1,3,224,224
  modelsummary calibrate torchvision:resnet50 --input 8,3,224,224
  modelsummary serve-plan hf:config.json --device H100 --context 32768 --dtype bfloat16
  modelsummary explore torchvision:resnet50 --input 1,3,224,224 --open
  modelsummary torchvision:resnet50 --input 1,3,224,224 --max-params 30M --max-macs 4.2G --max-memory 1GiB

exit status: 0; 1 if a budget is exceeded, or --max-macs cannot be checked; 2 after an error

columns: {", ".join(COLUMNS)}
"""


_RUN = "run TorchScript, which is code, on the --input: in a process with limits of time and memory"


def main() -> NoReturn:
    """Run the command of this process and exit with its status."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for output encodings without box-drawing characters
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit status.

    >>> settings = '{"in_features": 2, "out_features": 3}'
    >>> columns = "class_name,num_params,macs"
    >>> run(["torch.nn:Linear", "--kwargs", settings, "--input", "1,2", "--format", "csv", "--columns", columns])
    class_name,num_params,macs
    Linear,9,6
    0
    """
    debug = "--debug" in arguments
    try:
        if arguments[:1] == ["compare"]:
            return _compare(arguments[1:])
        if arguments[:1] == ["calibrate"]:
            return calibrate(arguments[1:])
        if arguments[:1] == ["serve-plan"]:
            return serve_plan(arguments[1:])
        if arguments[:1] == ["explore"]:
            return explore(arguments[1:])
        options = _parsed(arguments)
        return _run(options)
    except ModelSummaryError as error:
        if debug:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        print(f"{_red('error:')} {lines[0]}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except Exception as error:  # status 1 is only for budgets
        if debug:
            raise
        lines = str(error).splitlines() or [""]
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        print(f"{_red('error:')} {name}{lines[0]} (--debug shows the traceback)", file=sys.stderr)
        return 2


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "modelsummary",
        description="Layers, shapes, parameters, multiply-adds and memory of a PyTorch model; nothing is computed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="name or file of the model, see below")
    add("--input", action="append", type=parse_input, metavar="SIZE", help=_HELP_OF_INPUT)
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make the model with")
    add("--mode", choices=["train", "eval"], help="mode of the model (default: the mode it is made in)")
    add("--run", action="store_true", help=_RUN)
    add("--columns", type=lambda text: text.split(","), metavar="A,B", help="columns of the table, see below")
    add("--depth", type=int, metavar="N", help="deepest level shown (default: all, of a large model what fits)")
    add("--full", action="store_true", help="all rows of a large model: nothing folded, all levels")
    add("--sort", metavar="AMOUNT", help="sort the rows of the table by macs, params, flops ..., largest first")
    add("--units", metavar="PREFIX", help="prefix of counts and bytes in the table: K, M, G, Ki ...")
    add("--format", choices=_FORMATS, default="text", help="format of the output (default: text)")
    add("--output", type=Path, metavar="FILE", help="write the output to this file")
    add("--split", type=int, metavar="N", help="cut the model into N stages")
    add("--latency", action="store_true", help="run the model and time its layers")
    add("--memory", type=parse_optimizer, metavar="OPTIMIZER", help=_help_of_memory())
    add("--diff", metavar="MODEL", help="compare with another model, made and called with the same options")
    for what, unit in (("params", "25M"), ("macs", "4.1G"), ("memory", "16GiB")):
        add(
            f"--max-{what}",
            type=parse_budget,
            metavar=unit,
            help=f"budget of {what}: exit with status 1 if it is exceeded",
        )
    add("--device", help="device of the model (default: the CPU)")
    add("--dtype", type=parse_dtype, help="floating point dtype of the model, such as bfloat16 (default: its own)")
    add("--debug", action="store_true", help="show tracebacks")
    add("--version", action="version", version=_version())
    _complete(parser)
    return parser.parse_args(arguments)


def _compare(arguments: Sequence[str]) -> int:
    """Run the command ``modelsummary compare`` and return its exit status."""
    parser = Parser("modelsummary compare", description="Forms of one model side by side.", allow_abbrev=False)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="name or file of a model, as for modelsummary")
    add("--input", action="append", type=parse_input, metavar="SIZE", help=_HELP_OF_INPUT)
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make live models with")
    add("--mode", choices=["train", "eval"], default="eval", help="mode of live models (default: eval)")
    add("--run", action="store_true", help=_RUN)
    add("--format", choices=("text", "json"), default="text", help="format of the output (default: text)")
    add("--output", type=Path, metavar="FILE", help="write the output to this file")
    add("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    models: dict[str, ModelStatistics] = {}
    for name in options.models:
        if is_file(name):
            models[name] = load(name, inputs_of_file(options.input), run=options.run and is_torchscript(name))
        else:
            source = build_model(name, options.kwargs, with_values=False)
            args, kwargs = arguments_of(source, options.input or (), False)
            models[name] = Statistics(source.model.train(options.mode == "train"), args, **kwargs)
    found = compare(models)
    facts = {"forms": found.to_records(), "reasons": found.reasons}
    _write(json.dumps(facts) if options.format == "json" else str(found), options.output)
    return 0


def _help_of_memory() -> str:
    return f"memory of a training step: none, {', '.join(OPTIMIZERS)}; or of an inference: inference"


def _version() -> str:
    import modelsummary

    return f"modelsummary {modelsummary.__version__}, torch {torch.__version__}"


def _complete(parser: argparse.ArgumentParser) -> None:
    """Enable completion in the shell if argcomplete is installed."""
    if "_ARGCOMPLETE" in os.environ:
        try:
            import argcomplete
        except ImportError:
            return
        argcomplete.autocomplete(parser)


# ------------------------------------------------------------------------------------------------ work


def _run(options: argparse.Namespace) -> int:
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
    for each in (stats, other) if options.latency else ():
        if each is not None:
            as_live(each, "measure_latency").measure_latency()
    _write(_report(stats, memory, stages, other, options), options.output)
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


def _write(text: str, path: Path | None) -> None:
    if path is None:
        print(text)
    else:
        path.write_text(f"{text}\n", encoding="utf-8")


def _exceeded(stats: ModelStatistics, memory: MemoryEstimate | None, options: argparse.Namespace) -> int:
    """Print which budgets are exceeded, and return the exit status."""
    found = {
        "params": (stats.total_params, options.max_params),
        "macs": (stats.root.macs, options.max_macs),
        "memory": (memory.peak if memory is not None else 0, options.max_memory),
    }
    status = 0
    for what, (value, most) in found.items():
        if most is not None and value > most:
            unit = " bytes" if what == "memory" else ""
            print(f"{_red('exceeded:')} {value:,} {what}{unit}, of {most:,} allowed", file=sys.stderr)
            status = 1
        elif most is not None and what == "macs" and any(row.is_uncertain for row in stats.root.walk()):
            why = ", ".join(stats.uncounted_ops) or "calls that cannot be seen"
            print(
                f"{_red('unknown:')} at least {value:,} macs, of {most:,} allowed; not counted: {why}", file=sys.stderr
            )
            status = 1
    return status


def _red(text: str) -> str:
    return f"\x1b[31m{text}\x1b[0m" if shows_colours(sys.stderr) else text
