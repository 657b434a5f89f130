# PYTHON_ARGCOMPLETE_OK
"""The command ``modelsummary`` and its options. Torch is imported when a command runs: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

from modelsummary.cli.arguments import (
    SOURCES,
    Parser,
    parse_budget,
    parse_dtype,
    parse_input,
    parse_optimizer,
    parse_settings,
)
from modelsummary.errors import ModelSummaryError
from modelsummary.views.columns import COLUMNS
from modelsummary.views.terminal import red

__all__ = ["main", "run"]

_AS_THERE = "as for modelsummary"
_HELP_OF_INPUT = "size of an input tensor, such as 1,3,224,224; repeatable"
_HELP_OF_RUN = (
    "follow the code of TorchScript on the --input: it is interpreted, and only operators that compute are run"
)
_HELP_OF_MEMORY = "memory of a training step with an optimizer such as adamw, or none; or of an inference: inference"
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
        print(f"{red('error:', sys.stderr)} {lines[0]}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except Exception as error:  # status 1 is only for budgets
        if debug:
            raise
        lines = str(error).splitlines() or [""]
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        print(f"{red('error:', sys.stderr)} {name}{lines[0]} (--debug shows the traceback)", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, or summarize a model; return the exit status.

    Only its parser is made: subparsers of one parser would all be, and some need torch.
    """
    command = next((name for name in arguments[:1] if name in _PARSERS), "")
    parser = _PARSERS[command]()
    _complete(parser)
    options = parser.parse_args(arguments[1:] if command else arguments)
    from modelsummary.cli import actions

    action: Callable[[argparse.Namespace], int] = getattr(actions, command.replace("-", "_") or "summarize")
    return action(options)


# ------------------------------------------------------------------------------------ options of several commands


def _made() -> Parser:
    """Return the options with which a model is made and called."""
    parent = Parser(add_help=False)
    add = parent.add_argument
    add("--input", action="append", type=parse_input, metavar="SIZE", help=_HELP_OF_INPUT)
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make the model with")
    add("--debug", action="store_true", help="show tracebacks")
    return parent


def _read(mode: str | None = None) -> Parser:
    """Return the options of a model that is live or in a file."""
    parent = Parser(add_help=False)
    default = mode or "the mode it is made in"
    add = parent.add_argument
    add("--mode", choices=["train", "eval"], default=mode, help=f"mode of the model (default: {default})")
    add("--run", action="store_true", help=_HELP_OF_RUN)
    return parent


def _trained() -> Parser:
    """Return the options of a model that is placed, trained and split."""
    parent = Parser(add_help=False)
    add = parent.add_argument
    add("--device", help="device of the model (default: the CPU)")
    add("--dtype", type=parse_dtype, help="floating point dtype of the model, such as bfloat16 (default: its own)")
    add("--memory", type=parse_optimizer, metavar="OPTIMIZER", help=_HELP_OF_MEMORY)
    add("--split", type=int, metavar="N", help="cut the model into N stages")
    return parent


def _written(*formats: str) -> Parser:
    """Return the options of what is printed."""
    parent = Parser(add_help=False)
    add = parent.add_argument
    add("--format", choices=("text", "json", *formats), default="text", help="format of the output (default: text)")
    add("--output", type=Path, metavar="FILE", help="write the output to this file")
    return parent


# ------------------------------------------------------------------------------------------------ commands


def _summarize() -> Parser:
    parser = Parser(
        "modelsummary",
        description="Layers, shapes, parameters, multiply-adds and memory of a PyTorch model; nothing is computed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_made(), _read(), _written("csv", "markdown", "latex", "html"), _trained()],
    )
    add = parser.add_argument
    add("model", help="name or file of the model, see below")
    add("--columns", type=lambda text: text.split(","), metavar="A,B", help="columns of the table, see below")
    add("--depth", type=int, metavar="N", help="deepest level shown (default: all, of a large model what fits)")
    add("--full", action="store_true", help="all rows of a large model: nothing folded, all levels")
    add("--sort", metavar="AMOUNT", help="sort the rows of the table by macs, params, flops ..., largest first")
    add("--units", metavar="PREFIX", help="prefix of counts and bytes in the table: K, M, G, Ki ...")
    add("--latency", action="store_true", help="run the model and time its layers")
    add("--diff", metavar="MODEL", help="compare with another model, made and called with the same options")
    for figure, unit in (("params", "25M"), ("macs", "4.1G"), ("memory", "16GiB")):
        help_ = f"budget of {figure}: exit with status 1 if it is exceeded"
        add(f"--max-{figure}", type=parse_budget, metavar=unit, help=help_)
    add("--version", action=_Version, nargs=0, help="show the versions of modelsummary and torch")
    return parser


def _compare() -> Parser:
    parser = Parser(
        "modelsummary compare",
        description="Forms of one model side by side.",
        parents=[_made(), _read("eval"), _written()],
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help=f"name or file of a model, {_AS_THERE}")
    return parser


def _explore() -> Parser:
    parser = Parser(
        "modelsummary explore",
        description="One HTML page to look at a model: tree, graph, treemap, roofline; it needs no network.",
        parents=[_made(), _read(), _trained()],
    )
    add = parser.add_argument
    add("model", help=f"name or file of a model, {_AS_THERE}; or a .json file that it wrote")
    add("--compare", metavar="MODEL", help="another model, shown beside it with the differences marked")
    add("--output", type=Path, default=Path("model.html"), metavar="FILE", help="page to write (default: model.html)")
    add("--open", action="store_true", help="show the page in the browser")
    return parser


def _calibrate() -> Parser:
    parser = Parser(
        "modelsummary calibrate",
        description="Measure how long operators take on this machine, each alone, and what they allocate: the calls of "
        "a model, or without one a grid of some 650 common calls (about a minute). What is known is not repeated.",
        parents=[_made()],
    )
    add = parser.add_argument
    add("model", nargs="?", help=f"{_AS_THERE}; without one: the standard grid")
    add("--backward", action="store_true", help="with the backward of the model")
    add("--optimizer", metavar="NAME", help="with a step of this optimizer, such as adamw")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--again", action="store_true", help="measure what is known once more")
    return parser


def _serve_plan() -> Parser:
    from modelsummary.operators.kernels import MODES
    from modelsummary.serving.cache import CACHES

    parser = Parser(
        "modelsummary serve-plan",
        description="Memory and time of serving a model with a cache: what fits, prefill, decode, tokens per second. "
        "Nothing is computed or downloaded.",
        parents=[_made(), _written()],
    )
    add = parser.add_argument
    add("model", help=f"{_AS_THERE}, such as hf:config.json")
    add("--device", required=True, help="name of an accelerator such as H100; cpu or cuda of this calibrated machine")
    add("--context", type=int, required=True, metavar="TOKENS", help="tokens of each request that the cache holds")
    add("--batch", type=int, default=1, metavar="N", help="number of requests decoded together (default: 1)")
    add("--dtype", type=parse_dtype, help="dtype of weights and cache, such as bfloat16 (default: the model's)")
    add("--tensor", type=int, default=1, metavar="N", help="devices over which the layers are split (default: 1)")
    add("--cache", choices=CACHES, help="kind of cache of transformers (default: the one that the model makes)")
    add("--mode", choices=MODES, help="default: compiled on a named device, eager on this machine")
    add("--memory", metavar="BYTES", help="memory of the device, such as 24GB (default: the device's)")
    add("--plot", type=Path, metavar="FILE", help="draw tokens per second against the batch size into this file")
    return parser


_PARSERS: dict[str, Callable[[], Parser]] = {
    "": _summarize,
    "calibrate": _calibrate,
    "compare": _compare,
    "explore": _explore,
    "serve-plan": _serve_plan,
}


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
