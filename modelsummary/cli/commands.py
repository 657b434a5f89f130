# PYTHON_ARGCOMPLETE_OK
"""The command ``modelsummary`` and its options. Torch is imported when a command runs: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn, TypeAlias

from modelsummary.cli.arguments import (
    SOURCES,
    Parser,
    parse_budget,
    parse_count,
    parse_dtype,
    parse_input,
    parse_lengths,
    parse_memory,
    parse_name,
    parse_percentage,
    parse_settings,
)
from modelsummary.errors import InputError, ModelSummaryError, close_to
from modelsummary.views.columns import COLUMNS
from modelsummary.views.terminal import red

__all__ = ["main", "run"]

_Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
_MODEL, _QUESTIONS, _OUTPUT = "model and inputs", "questions", "output"  # groups of options
_DEFAULT = "summarize"
_TABLES = ("csv", "markdown", "latex", "html")
_HELP_OF_INPUT = "size of an input tensor, such as 1,3,224,224; repeatable"
_HELP_OF_RUN = (
    "follow the code of TorchScript on the --input: it is interpreted, and only operators that compute are run"
)
_HELP_OF_VALUES = (
    "make model and inputs with values, so that a forward that reads them runs for real, and check sees how weights are"
    " initialised"
)
_HELP_OF_MEMORY = "memory of a training step with an optimizer such as adamw, or none; or of an inference: inference"
_HELP_OF_WEIGHTS = "form of products' weights: fp8, int8, int4, mxfp4 or nvfp4 (default: as the configuration says)"
_HELP_OF_CACHE = "kind of cache of transformers: dynamic, static, fp8 or quanto (default: the one that the model makes)"
_HELP_OF_SERVING_MODE = "eager or compiled (default: compiled on a named device, eager on this machine)"
_STEPS = parse_name("inference", "none", listed="memory.step_options.OPTIMIZERS")
_MODELS = f"""\
a model is one of
  {fill(SOURCES, 100, subsequent_indent="  ")}
an input is SIZE, or NAME=SIZE for a keyword argument; append :DTYPE if it differs from the model's dtype;
NAME==NUMBER is a number, where the model takes one
"""
_STATUS = "exit status: 0; 1 if a budget is exceeded, or --max-macs cannot be checked; 2 after an error\n"


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
    """Run the command that the first argument names, or summarize a model; return the exit status."""
    parser, parsers = _parsers()
    _complete(parser, parsers)
    options = _parsed(parser, arguments)
    from modelsummary.cli import actions

    action: Callable[[argparse.Namespace], int] = getattr(actions, options.command.replace("-", "_"))
    return action(options)


def _parsed(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options. If no command is named, ``summarize`` is meant."""
    first = arguments[0] if arguments else ""
    if first in _COMMANDS or first in ("-h", "--help", "--version"):
        return parser.parse_args(arguments)
    try:
        return parser.parse_args([_DEFAULT, *arguments])
    except InputError as error:
        hint = close_to(first, _COMMANDS)
        raise InputError(f"{error}; {first!r} is not a command{hint}" if hint else str(error)) from None


def _parsers() -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser of all commands, and the parser of each."""
    parser = Parser(
        prog="modelsummary",
        usage="modelsummary [COMMAND] MODEL [OPTIONS]",
        description="Layers, shapes, parameters, multiply-adds and memory of a PyTorch model; nothing is computed.",
        epilog=f"modelsummary COMMAND --help shows the options of a command, and examples\n\n{_MODELS}\n{_STATUS}",
        parents=[_version()],
    )
    commands = parser.add_subparsers(
        title="commands",
        dest="command",
        metavar=f"COMMAND (default: {_DEFAULT})",
        prog=parser.prog,
    )
    for define in _COMMANDS.values():
        define(commands)
    return parser, commands.choices


# ------------------------------------------------------------------------------------ options of several commands


def _made(name: str = "model", **options: Any) -> Parser:
    """Return the options with which a model is made and called.

    Args:
        name: name of the argument that names the model.
        options: its other properties.
    """
    parent = Parser(add_help=False)
    add = parent.group(_MODEL).add_argument
    add(name, metavar="MODEL", **options)
    add("--input", action="append", type=parse_input, metavar="SIZE", help=_HELP_OF_INPUT)
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make the model with")
    add("--values", action="store_true", help=_HELP_OF_VALUES)
    parent.add_argument("--debug", action="store_true", help="show tracebacks")
    return parent


def _read(mode: str | None = None) -> Parser:
    """Return the options of a model that is live or in a file."""
    parent = Parser(add_help=False)
    default = mode or "the mode it is made in"
    add = parent.group(_MODEL).add_argument
    add("--mode", **_one_of("train", "eval"), default=mode, help=f"mode of the model (default: {default})")
    add("--run", action="store_true", help=_HELP_OF_RUN)
    return parent


def _trained() -> Parser:
    """Return the options of a model that is placed, trained and split."""
    parent = Parser(add_help=False)
    add = parent.group(_MODEL).add_argument
    add("--device", help="device of the model (default: the CPU), or of --memory, such as H100")
    add("--dtype", type=parse_dtype, help="floating point dtype of the model, such as bfloat16 (default: its own)")
    add("--lora", type=parse_count, metavar="RANK", help="freeze the model and train LoRA adapters of peft")
    add = parent.group(_QUESTIONS).add_argument
    add("--memory", type=_STEPS, metavar="OPTIMIZER", help=_HELP_OF_MEMORY)
    add("--split", type=parse_count, metavar="N", help="cut the model into N stages")
    return parent


def _written(*formats: str) -> Parser:
    """Return the options of what is printed."""
    parent = Parser(add_help=False)
    add = parent.group(_OUTPUT).add_argument
    add("--format", **_one_of("text", "json", *formats), default="text", help="format of the output (default: text)")
    add("--output", type=Path, metavar="FILE", help="write the output to this file")
    return parent


def _version() -> Parser:
    parent = Parser(add_help=False)
    parent.add_argument("--version", action=_Version, nargs=0, help="show the versions of modelsummary and torch")
    return parent


def _one_of(*names: str) -> dict[str, Any]:
    """Return the properties of an option that takes one of the names."""
    return {"type": parse_name(*names), "choices": names}


def _examples(*lines: str) -> str:
    return "\n".join(("examples", *(f"  modelsummary {line}" for line in lines), ""))


# ------------------------------------------------------------------------------------------------ commands


def _summarize(commands: _Commands) -> None:
    examples = _examples(
        "resnet50 --input 1,3,224,224 --sort macs",
        "net.py:MyNet --input 1,3,224,224",
        "timm:vit_small_patch16_224 --input 8,3,224,224 --memory adamw --split 4",
        "hf:config.json --input input_ids=1,128:long --depth 3",
        "models.net:build --kwargs '{\"width\": 64}' --input 1,3,32,32 --format markdown --output net.md",
        "model.onnx --input images=1,3,224,224",
        "torchvision:resnet50 --input 1,3,224,224 --max-params 30M --max-macs 4.2G --max-memory 1GiB",
    )
    columns = fill(f"columns: {', '.join(COLUMNS)}", 100)
    parser = commands.add_parser(
        _DEFAULT,
        prog=f"modelsummary [{_DEFAULT}]",
        help="the table of a model, and more if asked for",
        description="The table of a model, and more if asked for; nothing is computed.",
        epilog=f"{_MODELS}\n{examples}\n{_STATUS}\n{columns}\n",
        parents=[
            _made(help="name or file of the model, see below"),
            _read(),
            _trained(),
            _written(*_TABLES),
            _version(),
        ],
    )
    add = parser.group(_QUESTIONS).add_argument
    add("--latency", action="store_true", help="run the model and time its layers")
    add("--diff", metavar="MODEL", help="compare with another model, made and called likewise, or with the JSON of one")
    add = parser.group("table").add_argument
    add("--columns", type=_names, metavar="A,B", help="columns of the table, see below")
    add(
        "--depth",
        type=partial(parse_count, least=0),
        metavar="N",
        help="deepest level shown (default: all, of a large model what fits)",
    )
    add("--full", action="store_true", help="all rows of a large model: nothing folded, all levels")
    add("--sort", metavar="AMOUNT", help="sort the rows of the table by macs, params, flops ..., largest first")
    add("--units", metavar="PREFIX", help="prefix of counts and bytes in the table: K, M, G, Ki ...")
    add = parser.group("budgets").add_argument
    for figure, unit, parse in (
        ("params", "25M", parse_budget),
        ("macs", "4.1G", parse_budget),
        ("memory", "16GiB", parse_memory),
    ):
        help_ = f"budget of {figure}: exit with status 1 if it is exceeded"
        add(f"--max-{figure}", type=parse, metavar=unit, help=help_)
    help_ = "budget of params, macs and their bytes: such as 5%%: so much more than the model of --diff has"
    add("--max-growth", type=parse_percentage, metavar="PERCENT", help=help_)


def _compare(commands: _Commands) -> None:
    commands.add_parser(
        "compare",
        help="forms of one model side by side",
        description="Forms of one model side by side.",
        epilog=f"{_MODELS}\n"
        + _examples("compare torchvision:mobilenet_v2 mobilenet_v2.onnx mobilenet_v2.pt2 --input 1,3,224,224"),
        parents=[_made("models", nargs="+", help="names or files of models, see below"), _read("eval"), _written()],
    )


def _check(commands: _Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="what is wrong with a model: where, what it costs, and what to do",
        description="What is wrong with a model: where, what it costs, and what to do. Nothing is computed.",
        epilog=f"{_MODELS}\n"
        + _examples("check torchvision:vgg11_bn --input 8,3,224,224 --ignore U202 --format sarif")
        + "\nexit status: 0; 1 if something was found; 2 after an error\n",
        parents=[_made(help="name of the model, see below"), _written("sarif")],
    )
    add = parser.group(_MODEL).add_argument
    add("--mode", **_one_of("train", "eval"), default="train", help="mode of the model (default: train)")
    add("--dtype", type=parse_dtype, help="floating point dtype of the model, such as bfloat16 (default: its own)")
    add("--autocast", type=parse_dtype, help="dtype of torch.autocast around the forward (default: none)")
    add = parser.group("rules").add_argument
    add("--select", type=_names, metavar="G,D401", help="rules, by code or beginning of a code (default: all)")
    add("--ignore", type=_names, metavar="U202", help="rules to leave out, likewise")
    add("--baseline", metavar="FILE", help="leave out the findings in this file, which --format json wrote")
    add("--device", default="A100", help="device of the predicted times (default: A100)")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _explore(commands: _Commands) -> None:
    model = "name or file of the model, see below; or a .json file that modelsummary wrote"
    parser = commands.add_parser(
        "explore",
        help="one HTML page to look at a model",
        description="One HTML page to look at a model: tree, graph, treemap, roofline; it needs no network.",
        epilog=f"{_MODELS}\n" + _examples("explore torchvision:resnet50 --input 1,3,224,224 --open"),
        parents=[_made(help=model), _read(), _trained()],
    )
    add = parser.group(_QUESTIONS).add_argument
    add("--compare", metavar="MODEL", help="another model, shown beside it with the differences marked")
    add = parser.group(_OUTPUT).add_argument
    add("--output", type=Path, default=Path("model.html"), metavar="FILE", help="page to write (default: model.html)")
    add("--open", action="store_true", help="show the page in the browser")


def _calibrate(commands: _Commands) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure how long operators take on this machine",
        description="Measure how long operators take on this machine, each alone, and what they allocate: the calls\n"
        "of a model, or without one a grid of some 650 common calls (about a minute). What is known is not repeated.",
        epilog=f"{_MODELS}\n" + _examples("calibrate torchvision:resnet50 --input 8,3,224,224"),
        parents=[_made(nargs="?", help="name or file of the model, see below; without one: the standard grid")],
    )
    add = parser.group("measurement").add_argument
    add("--backward", action="store_true", help="with the backward of the model")
    add("--optimizer", metavar="NAME", help="with a step of this optimizer, such as adamw")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--again", action="store_true", help="measure what is known once more")


def _env(commands: _Commands) -> None:
    commands.add_parser(
        "env",
        help="versions of modelsummary, torch and the optional libraries, for a report of a defect",
        description="Versions of modelsummary, torch and the optional libraries, and the devices that torch sees.",
        parents=[_written()],
    )


def _serve_plan(commands: _Commands) -> None:
    parser = commands.add_parser(
        "serve-plan",
        help="memory and time of serving a model with a cache",
        description="Memory and time of serving a model with a cache: what fits, prefill, decode, tokens per second.\n"
        "With --prompt and --new-tokens, a server under load is simulated, or searched for if there are limits.\n"
        "Nothing is computed or downloaded.",
        epilog=f"{_MODELS}\n" + _examples("serve-plan hf:config.json --device H100 --context 32768 --dtype bfloat16"),
        parents=[_made(help="name of the model, see below; such as hf:config.json"), _written()],
    )
    add = parser.group("requests").add_argument
    add(
        "--context",
        type=parse_count,
        required=True,
        metavar="TOKENS",
        help="tokens of each request that the cache holds",
    )
    add("--batch", type=parse_count, default=1, metavar="N", help="number of requests decoded together (default: 1)")
    add = parser.group("a server under load").add_argument
    add("--prompt", type=parse_lengths, metavar="TOKENS", help="tokens of each prompt: 300, or 100:500")
    add("--new-tokens", type=parse_lengths, metavar="TOKENS", help="tokens that each request generates, likewise")
    add(
        "--requests",
        type=parse_count,
        default=300,
        metavar="N",
        help="requests (default: 300; a plan says if it needs more)",
    )
    add("--rate", type=float, metavar="R", help="mean requests per second (default: all at once)")
    add(
        "--max-requests",
        type=parse_count,
        metavar="N",
        help="most requests that run together (default: 256; a plan tries 32, 128 and 512)",
    )
    help_of_budget = "tokens of a step (default: 2048; a plan tries 512, 2048 and 8192)"
    add("--token-budget", type=parse_count, metavar="N", help=help_of_budget)
    add("--overhead", type=float, default=0.0, metavar="MS", help="time of a step besides its forward (default: 0)")
    add("--ttft", type=float, metavar="MS", help="limit of the time to the first token at p95: searches a plan")
    add("--tpot", type=float, metavar="MS", help="limit of the time per further token at p95: searches a plan")
    add("--devices", type=parse_count, metavar="N", help="devices of the plan (default: 8 of a named device)")
    add("--price", type=float, metavar="P", help="price of a device and an hour, for requests per unit of cost")
    add = parser.group("devices").add_argument
    add("--device", required=True, help="name of an accelerator such as H100; cpu or cuda of this calibrated machine")
    add(
        "--tensor",
        type=parse_count,
        default=1,
        metavar="N",
        help="devices over which the layers are split (default: 1; a plan tries 1, 2, 4 and 8)",
    )
    help_of_expert = "devices over which experts are divided, each with requests of its own (default: 1)"
    add("--expert", type=parse_count, default=1, metavar="N", help=help_of_expert)
    add("--memory", metavar="BYTES", help="memory of the device, such as 24GB (default: the device's)")
    add("--mode", type=parse_name(listed="operators.kernels.MODES"), help=_HELP_OF_SERVING_MODE)
    add = parser.group("weights and cache").add_argument
    add("--dtype", type=parse_dtype, help="dtype of weights and cache, such as bfloat16 (default: the model's)")
    add("--cache", type=parse_name(listed="serving.cache.CACHES"), help=_HELP_OF_CACHE)
    add("--weights", type=parse_name(listed="serving.number_formats.WEIGHTS"), help=_HELP_OF_WEIGHTS)
    add("--cache-dtype", type=parse_dtype, help="dtype of what attention reads of the cache, such as float8_e4m3fn")
    add = parser.group(_OUTPUT).add_argument
    add("--plot", type=Path, metavar="FILE", help="draw tokens per second against the batch size into this file")


def _plan(commands: _Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="the fastest ways to train a model on a cluster",
        description="The fastest ways to train a model on a cluster, with the time and memory of a step.\n"
        "Nothing is computed or downloaded.",
        epilog=f"{_MODELS}\n"
        + _examples("plan hf:config.json --input input_ids=1,4096:long --device H100 --nodes 4 --batch 256"),
        parents=[_made(help="name of the model, see below; such as hf:config.json"), _written()],
    )
    add = parser.group("training").add_argument
    add("--batch", type=parse_count, required=True, metavar="N", help="samples in a step of all devices")
    add("--sequence", type=parse_count, metavar="TOKENS", help="tokens in a sample (default: as in the --input)")
    add = parser.group("cluster").add_argument
    add("--device", required=True, help="name of an accelerator such as H100")
    add("--nodes", type=parse_count, default=1, metavar="N", help="number of nodes (default: 1)")
    add("--per-node", type=parse_count, default=8, metavar="N", help="devices of a node (default: 8)")
    add = parser.group(_OUTPUT).add_argument
    add(
        "--limit",
        type=parse_count,
        default=10,
        metavar="N",
        help="number of plans, besides the Pareto set of time and memory (default: 10)",
    )


_COMMANDS: dict[str, Callable[[_Commands], None]] = {
    _DEFAULT: _summarize,
    "compare": _compare,
    "check": _check,
    "explore": _explore,
    "calibrate": _calibrate,
    "env": _env,
    "serve-plan": _serve_plan,
    "plan": _plan,
}


class _Version(argparse.Action):
    """The option ``--version``."""

    def __call__(self, parser: argparse.ArgumentParser, *_args: Any, **_kwargs: Any) -> None:
        """Print the versions, and exit."""
        import torch

        import modelsummary

        parser.exit(message=f"modelsummary {modelsummary.__version__}, torch {torch.__version__}\n")


def _complete(parser: Parser, parsers: Mapping[str, Parser]) -> None:
    """Enable completion in the shell if argcomplete is installed; it reads the line that was typed so far."""
    if "_ARGCOMPLETE" in os.environ:
        try:
            import argcomplete
        except ImportError:
            return
        first = next(iter(os.environ.get("COMP_LINE", "").split()[1:]), "")
        begins_command = any(name.startswith(first) for name in parsers)
        argcomplete.autocomplete(parser if begins_command else parsers[_DEFAULT])
