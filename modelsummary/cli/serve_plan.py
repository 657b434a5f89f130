"""The command ``modelsummary serve-plan``: what serving a model takes on a device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from modelsummary.cli.arguments import Parser, parse_dtype, parse_input, parse_settings
from modelsummary.cli.output import write
from modelsummary.cli.sources import build_model
from modelsummary.errors import InputError
from modelsummary.operators.kernels import MODES
from modelsummary.serving.cache import CACHES
from modelsummary.statistics import Statistics

__all__ = ["serve_plan"]

_TOKENS = (1, 16)  # size of the recorded input; requests have the sizes of the options


def serve_plan(arguments: Sequence[str]) -> int:
    """Print what serving a model takes, and return the exit status."""
    options = _parser().parse_args(arguments)
    source = build_model(options.model, options.kwargs, with_values=False)
    sizes = options.input or []
    if not sizes and not source.takes_indices:
        raise InputError(f"serve-plan needs an --input of {options.model!r}, such as input_ids=1,16:long")
    inputs = {
        name or source.model.main_input_name: torch.empty(size, dtype=dtype or torch.float32, device="meta")
        for name, size, dtype in sizes
    } or {"input_ids": torch.empty(_TOKENS, dtype=torch.long, device="meta")}
    estimate = Statistics(source.model, inputs).serving(
        options.context,
        options.batch,
        options.device,
        options.dtype,
        tensor=options.tensor,
        cache=options.cache,
        mode=options.mode,
        memory_bytes=options.memory,
    )
    text = json.dumps(estimate.to_dict()) if options.format == "json" else str(estimate)
    write(text, options.output)
    if options.plot is not None:
        estimate.plot().figure.savefig(options.plot)  # type: ignore[union-attr]
    return 0


def _parser() -> Parser:
    parser = Parser(
        "modelsummary serve-plan",
        description="Memory and time of serving a model with a cache: what fits, prefill, decode, tokens per second. "
        "Nothing is computed or downloaded.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", help="as for modelsummary, such as hf:config.json")
    add("--device", required=True, help="name of an accelerator such as H100; cpu or cuda of this calibrated machine")
    add("--context", type=int, required=True, metavar="TOKENS", help="tokens of each request that the cache holds")
    add("--batch", type=int, default=1, metavar="N", help="number of requests decoded together (default: 1)")
    add("--dtype", type=parse_dtype, help="dtype of weights and cache, such as bfloat16 (default: the model's)")
    add("--tensor", type=int, default=1, metavar="N", help="devices over which the layers are split (default: 1)")
    add("--cache", choices=CACHES, help="kind of cache of transformers (default: the one that the model makes)")
    add("--mode", choices=MODES, help="default: compiled on a named device, eager on this machine")
    add("--memory", metavar="BYTES", help="memory of the device, such as 24GB (default: the device's)")
    add("--input", action="append", type=parse_input, metavar="SIZE", help="recorded input, as for modelsummary")
    add("--kwargs", type=parse_settings, default={}, metavar="JSON", help="keyword arguments to make the model with")
    add("--format", choices=("text", "json"), default="text", help="format of the output (default: text)")
    add("--output", type=Path, metavar="FILE", help="write the output to this file")
    add("--plot", type=Path, metavar="FILE", help="draw tokens per second against the batch size into this file")
    add("--debug", action="store_true", help="show tracebacks")
    return parser
