"""The statistics of the models that a command line names, and their inputs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from modelsummary.capture.devices import available_device
from modelsummary.cli.arguments import Input
from modelsummary.cli.sources import Source, build_model
from modelsummary.errors import InputError
from modelsummary.files.loading import is_file, load
from modelsummary.statistics import ModelStatistics, Statistics
from modelsummary.views.cells import TableOptions

__all__ = ["arguments_of", "inputs_of_file", "statistics_of"]


def statistics_of(name: str, options: argparse.Namespace) -> ModelStatistics:
    """Return the statistics of a model or a file, made and called as the options of the command line say."""
    runs = options.latency or any(
        getattr(options, option) is not None for option in ("memory", "max_memory", "split", "device", "mode")
    )
    if is_file(name) and options.dtype is not None:
        raise InputError(f"the dtype of {name!r} is fixed; leave out --dtype {options.dtype}")
    if is_file(name) and not (runs and name.endswith(".pt2")):  # torch can make a module of a .pt2 file
        if options.kwargs:
            raise InputError(f"the model in {name!r} is made already; leave out --kwargs {options.kwargs!r:.80}")
        if options.mode is not None:
            raise InputError(f"the mode of {name!r} is fixed; leave out --mode {options.mode}")
        file = load(name, inputs_of_file(options.input), run=options.run)
        file.options = _table_options(options)
        return file
    with_values = options.latency or options.device not in (None, "meta")
    source = build_model(name, options.kwargs, with_values=with_values)
    model = source.model if options.device is None else source.model.to(available_device(options.device))
    if options.dtype is not None:
        model.to(options.dtype)
    if options.mode is not None:
        model.train(options.mode == "train")
    args, kwargs = arguments_of(source, options.input or (), with_values)
    stats = Statistics(model, args, **kwargs)
    stats.options = _table_options(options)
    return stats


def _table_options(options: argparse.Namespace) -> TableOptions:
    chosen: dict[str, Any] = {} if options.depth is None else {"depth": options.depth}
    chosen |= {"depth": options.depth, "fold": False} if options.full else {}
    return TableOptions(columns=options.columns, units=options.units, sort=options.sort, **chosen)


def arguments_of(source: Source, given: Sequence[Input], with_values: bool) -> tuple[Any, dict[str, Any]]:
    """Return ``input_data`` and keyword arguments of the forward; None and an empty dict without an input."""
    if not given:
        return source.inputs or (None, {})
    usual, device = torch.float32, torch.device("cpu")
    for parameter in source.model.parameters():
        if parameter.is_floating_point():
            usual, device = parameter.dtype, parameter.device
            break
    tensors: list[torch.Tensor] = []
    for _, size, dtype in given:
        if isinstance(size, torch.Tensor):  # a number
            tensors.append(size)
            continue
        kind = dtype or (torch.long if source.takes_indices and not tensors else usual)
        tensor = torch.zeros(size, dtype=kind, device=device if with_values else "meta")
        tensors.append(tensor.normal_() if with_values and kind.is_floating_point else tensor)
    return _named([name for name, _, _ in given], tensors) or tuple(tensors), {}


def inputs_of_file(given: Sequence[Input] | None) -> dict[str, Any] | list[Any] | None:
    """Return the inputs as ``load`` takes them: sizes, or meta tensors where a dtype is given."""
    sizes = [
        torch.empty(size, dtype=dtype, device="meta") if dtype and not isinstance(size, torch.Tensor) else size
        for _, size, dtype in given or ()
    ]
    return _named([name for name, _, _ in given or ()], sizes) or sizes or None


def _named(names: Sequence[str | None], values: Sequence[Any]) -> dict[str, Any]:
    """Return the values by their names; an empty dict if they are given by position."""
    named = {name: value for name, value in zip(names, values, strict=True) if name is not None}
    if named and len(named) < len(values):
        raise InputError("--input: name all inputs differently, or none")
    return named
