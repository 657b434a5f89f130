"""The command ``modelsummary calibrate``: measure the kernels of this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from modelsummary.cli.arguments import Parser
from modelsummary.cli.sources import build_model
from modelsummary.devices.kernel_table import device_here
from modelsummary.errors import InputError
from modelsummary.latency import calibrate_grid
from modelsummary.statistics import Statistics

__all__ = ["calibrate"]


def calibrate(arguments: Sequence[str]) -> int:
    """Measure the operator calls of a model, or the standard grid; return the exit status."""
    parser = Parser(
        "modelsummary calibrate",
        description="Measure how long operators take on this machine, each alone, and what they allocate: the calls of "
        "a model, or without one a grid of some 650 common calls (about a minute). What is known is not repeated.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", help="as for modelsummary; without one: the standard grid")
    add("--input", type=_size, metavar="SIZE", help="of the model's input, such as 8,3,224,224")
    add("--backward", action="store_true", help="with the backward of the model")
    add("--optimizer", metavar="NAME", help="with a step of this optimizer, such as adamw")
    add("--device", default="cpu", help="cpu (default) or cuda")
    add("--again", action="store_true", help="measure what is known once more")
    add("--debug", action="store_true", help="show tracebacks")
    options = parser.parse_args(arguments)
    device = device_here(options.device)
    if options.model is None:
        print(calibrate_grid(device, again=options.again))
        return 0
    if options.input is None:
        raise InputError("calibrating a model needs an --input, such as --input 8,3,224,224")
    stats = Statistics(build_model(options.model, {}, with_values=False).model, tuple(options.input))
    backward = options.backward or options.optimizer is not None
    print(stats.calibrate(device, backward, options.optimizer, again=options.again))
    return 0


def _size(text: str) -> list[int]:
    try:
        return [int(count) for count in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers such as 8,3,224,224, got {text!r}") from None
