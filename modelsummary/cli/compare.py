"""The command ``modelsummary compare``: forms of one model side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from modelsummary.cli.arguments import HELP_OF_INPUT, HELP_OF_RUN, Parser, parse_input, parse_settings
from modelsummary.cli.models import arguments_of, inputs_of_file
from modelsummary.cli.output import write
from modelsummary.cli.sources import build_model
from modelsummary.files.comparing import compare
from modelsummary.files.loading import is_file, is_torchscript, load
from modelsummary.statistics import ModelStatistics, Statistics

__all__ = ["compare_models"]


def compare_models(arguments: Sequence[str]) -> int:
    """Print the figures of several forms of a model, and return the exit status."""
    parser = Parser("modelsummary compare", description="Forms of one model side by side.", allow_abbrev=False)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="name or file of a model, as for modelsummary")
    add("--input", action="append", type=parse_input, metavar="SIZE", help=HELP_OF_INPUT)
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make live models with")
    add("--mode", choices=["train", "eval"], default="eval", help="mode of live models (default: eval)")
    add("--run", action="store_true", help=HELP_OF_RUN)
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
    comparison = compare(models)
    facts = {"forms": comparison.to_records(), "reasons": comparison.reasons}
    write(json.dumps(facts) if options.format == "json" else str(comparison), options.output)
    return 0
