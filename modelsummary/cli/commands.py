# PYTHON_ARGCOMPLETE_OK
"""The command ``modelsummary`` and its options. Torch is imported when a command runs: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from modelsummary.cli.arguments import (
    HELP_OF_INPUT,
    HELP_OF_RUN,
    SOURCES,
    Parser,
    parse_budget,
    parse_dtype,
    parse_input,
    parse_optimizer,
    parse_settings,
)
from modelsummary.cli.output import red
from modelsummary.errors import ModelSummaryError
from modelsummary.views.columns import COLUMNS

__all__ = ["main", "run"]

_HELP_OF_MEMORY = "memory of a training step with an optimizer such as adamw, or none; or of an inference: inference"
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
        return _run(arguments)
    except ModelSummaryError as error:
        if debug:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        print(f"{red('error:')} {lines[0]}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except Exception as error:  # status 1 is only for budgets
        if debug:
            raise
        lines = str(error).splitlines() or [""]
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        print(f"{red('error:')} {name}{lines[0]} (--debug shows the traceback)", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, or summarize a model; return the exit status."""
    if arguments[:1] == ["compare"]:
        from modelsummary.cli.compare import compare_models

        return compare_models(arguments[1:])
    if arguments[:1] == ["calibrate"]:
        from modelsummary.cli.calibrate import calibrate

        return calibrate(arguments[1:])
    if arguments[:1] == ["serve-plan"]:
        from modelsummary.cli.serve_plan import serve_plan

        return serve_plan(arguments[1:])
    if arguments[:1] == ["explore"]:
        from modelsummary.cli.explore import explore

        return explore(arguments[1:])
    options = _parsed(arguments)
    from modelsummary.cli.summarize import summarize

    return summarize(options)


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
    add("--input", action="append", type=parse_input, metavar="SIZE", help=HELP_OF_INPUT)
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make the model with")
    add("--mode", choices=["train", "eval"], help="mode of the model (default: the mode it is made in)")
    add("--run", action="store_true", help=HELP_OF_RUN)
    add("--columns", type=lambda text: text.split(","), metavar="A,B", help="columns of the table, see below")
    add("--depth", type=int, metavar="N", help="deepest level shown (default: all, of a large model what fits)")
    add("--full", action="store_true", help="all rows of a large model: nothing folded, all levels")
    add("--sort", metavar="AMOUNT", help="sort the rows of the table by macs, params, flops ..., largest first")
    add("--units", metavar="PREFIX", help="prefix of counts and bytes in the table: K, M, G, Ki ...")
    add("--format", choices=_FORMATS, default="text", help="format of the output (default: text)")
    add("--output", type=Path, metavar="FILE", help="write the output to this file")
    add("--split", type=int, metavar="N", help="cut the model into N stages")
    add("--latency", action="store_true", help="run the model and time its layers")
    add("--memory", type=parse_optimizer, metavar="OPTIMIZER", help=_HELP_OF_MEMORY)
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
    add("--version", action=_Version, nargs=0, help="show the versions of modelsummary and torch")
    _complete(parser)
    return parser.parse_args(arguments)


class _Version(argparse.Action):
    """The option ``--version``."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any, **_kwargs: Any) -> None:
        """Print the versions, and exit."""
        import torch

        import modelsummary

        parser.exit(message=f"modelsummary {modelsummary.__version__}, torch {torch.__version__}\n")


def _complete(parser: argparse.ArgumentParser) -> None:
    """Enable completion in the shell if argcomplete is installed."""
    if "_ARGCOMPLETE" in os.environ:
        try:
            import argcomplete
        except ImportError:
            return
        argcomplete.autocomplete(parser)
