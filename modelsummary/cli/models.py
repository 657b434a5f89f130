"""The statistics of the models that a command line names, and their inputs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from modelsummary.capture.devices import available_device
from modelsummary.cli.arguments import Input
from modelsummary.cli.sources import Source, add_adapters, build_model, check_unset
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.errors import InputError
from modelsummary.files.loading import is_file, load
from modelsummary.statistics import ModelStatistics, Statistics

__all__ = ["accelerator_of", "inputs_of_file", "live_statistics", "statistics_of"]


def statistics_of(name: str, options: argparse.Namespace) -> ModelStatistics:
    """Return the statistics of a model or a file, made and called as the options of the command line say."""
    runs = getattr(options, "latency", False) or any(
        getattr(options, option, None) is not None for option in ("memory", "max_memory", "split", "device", "mode")
    )
    if is_file(name) and options.dtype is not None:
        raise InputError(f"the dtype of {name!r} is fixed; leave out --dtype {options.dtype}")
    lora = getattr(options, "lora", None)
    if is_file(name) and lora is not None:
        raise InputError(
            f"--lora adds adapters to a model that is made, and {name!r} is a file; leave out --lora {lora}"
        )
    if is_file(name) and not (runs and name.endswith(".pt2")):  # torch can make a module of a .pt2 file
        check_unset(f"the model in {name!r}", options.kwargs)
        if options.mode is not None:
            raise InputError(f"the mode of {name!r} is fixed; leave out --mode {options.mode}")
        if options.values:
            raise InputError(f"--values makes a model with values, and {name!r} is a file; leave out --values")
        return load(name, inputs_of_file(options.input), run=options.run)
    moves = options.device is not None and accelerator_of(options) is None
    device = available_device(options.device) if moves else None
    return live_statistics(name, options, device=device)


def live_statistics(
    name: str, options: argparse.Namespace, example: str = "", device: torch.device | None = None
) -> Statistics:
    """Return the statistics of a model that is made, with the mode, the dtype and the adapters that the options name.

    Args:
        example: an input for the error of a command that needs one; empty: none is needed.
        device: where the model is. Default: where it is made.

    Raises:
        InputError: the model cannot be made, or lacks an input that the command needs.
    """
    is_timed = getattr(options, "latency", False)
    with_values = options.values or is_timed or (device is not None and device.type != "meta")
    source = build_model(name, options.kwargs, with_values=with_values)
    model = source.model if device is None else source.model.to(device)
    dtype, lora, mode = (getattr(options, option, None) for option in ("dtype", "lora", "mode"))
    if dtype is not None:
        model.to(dtype)
    if lora is not None:
        model = add_adapters(model, lora)
        source = source._replace(model=model)
    if mode is not None:
        model.train(mode == "train")
    args, kwargs = arguments_of(source, options.input, with_values)
    if example and args is None and not kwargs:
        raise InputError(f"{options.command} needs an --input, such as --input {example}")
    return Statistics(model, args, **kwargs)


def accelerator_of(options: argparse.Namespace) -> str | None:
    """Return the accelerator that ``--device`` names, on which memory is predicted; None for a device of torch.

    Raises:
        InputError: the name is neither, or nothing is predicted.
    """
    try:
        torch.device(options.device or "cpu")
    except RuntimeError:
        if getattr(options, "memory", None) is None and getattr(options, "max_memory", None) is None:
            raise InputError(
                f"device must name a torch device, got {options.device!r}; pass one such as 'cpu' or 'cuda', or add "
                "--memory for an accelerator such as H100"
            ) from None
    else:
        return None
    name = DeviceSpec(options.device).name
    if getattr(options, "latency", False):
        raise InputError(f"--latency measures on this machine, not on {name}; leave one of the two out")
    return name


def arguments_of(
    source: Source, inputs: Sequence[Input] | None, with_values: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Return ``input_data`` and keyword arguments of the forward; None and an empty dict without an input."""
    if not inputs:
        return source.inputs or (None, {})
    usual, device = torch.float32, torch.device("cpu")
    for parameter in source.model.parameters():
        if parameter.is_floating_point():
            usual, device = parameter.dtype, parameter.device
            break
    tensors: list[torch.Tensor] = []
    for _, size, dtype in inputs:
        if isinstance(size, torch.Tensor):  # a number
            tensors.append(size)
            continue
        kind = dtype or (torch.long if source.takes_indices and not tensors else usual)
        tensor = torch.zeros(size, dtype=kind, device=device if with_values else "meta")
        tensors.append(tensor.normal_() if with_values and kind.is_floating_point else tensor)
    return _named([name for name, _, _ in inputs], tensors) or tuple(tensors), {}


def inputs_of_file(inputs: Sequence[Input] | None) -> dict[str, Any] | list[Any] | None:
    """Return the inputs as ``load`` takes them: sizes, or meta tensors where a dtype is given."""
    sizes = [
        torch.empty(size, dtype=dtype, device="meta") if dtype and not isinstance(size, torch.Tensor) else size
        for _, size, dtype in inputs or ()
    ]
    return _named([name for name, _, _ in inputs or ()], sizes) or sizes or None


def _named(names: Sequence[str | None], values: Sequence[Any]) -> dict[str, Any]:
    """Return the values by their names; an empty dict if they are given by position."""
    named = {name: value for name, value in zip(names, values, strict=True) if name is not None}
    if named and len(named) < len(values):
        raise InputError("--input: name all inputs differently, or none")
    return named
