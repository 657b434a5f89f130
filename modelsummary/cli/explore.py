"""The command ``modelsummary explore``: write the page in which a model is explored."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from modelsummary.cli.arguments import Parser, parse_dtype, parse_input, parse_optimizer, parse_settings
from modelsummary.cli.models import statistics_of
from modelsummary.statistics import ModelStatistics, as_live

__all__ = ["explore"]

# Options of the main command that this one lacks.
_UNUSED = {"latency": False, "full": False, **dict.fromkeys("max_memory columns units depth sort".split())}


def explore(arguments: Sequence[str]) -> int:
    """Write the page of a model, or of two models side by side; return the exit status."""
    options = _parsed(arguments)
    stats = _statistics(options.model, options)
    other = None if options.compare is None else _statistics(options.compare, options)
    memory = None
    if options.memory is not None:
        mode, optimizer = ("inference", None) if options.memory == "inference" else ("train", options.memory)
        memory = as_live(stats, "memory").memory(mode, optimizer=None if optimizer == "none" else optimizer)
    stages = None if options.split is None else as_live(stats, "split").split(options.split)
    path = stats.explore(compare=other, memory=memory, stages=stages).save(options.output)
    print(f"written: {path}")
    if options.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "modelsummary explore",
        description="One HTML page to look at a model: tree, graph, treemap, roofline; it needs no network.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="name or file of a model, as for modelsummary; or a .json file that it wrote")
    add("--compare", metavar="MODEL", help="another model, shown beside it with the differences marked")
    add("--input", action="append", type=parse_input, metavar="SIZE", help="size of an input tensor; repeatable")
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make the model with")
    add("--mode", choices=["train", "eval"], help="mode of the model (default: the mode it is made in)")
    add("--run", action="store_true", help="run TorchScript, which is code, on the --input")
    add("--memory", type=parse_optimizer, metavar="OPTIMIZER", help="add the memory timeline")
    add("--split", type=int, metavar="N", help="colour N pipeline stages")
    add("--device", help="device of the model (default: the CPU)")
    add("--dtype", type=parse_dtype, help="floating point dtype of the model, such as bfloat16 (default: its own)")
    add("--output", type=Path, default=Path("model.html"), metavar="FILE", help="page to write (default: model.html)")
    add("--open", action="store_true", help="show the page in the browser")
    add("--debug", action="store_true", help="show tracebacks")
    return parser.parse_args(arguments, argparse.Namespace(**_UNUSED))


def _statistics(name: str, options: argparse.Namespace) -> ModelStatistics:
    return ModelStatistics.from_json(Path(name)) if name.endswith(".json") else statistics_of(name, options)
