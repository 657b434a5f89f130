"""Give values to what is on meta: make its tensors on a device, and take values from a checkpoint or a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.errors import InputError

__all__ = ["Checkpoint", "Init", "checkpoint_values", "is_empty", "materialize"]

Checkpoint = Mapping[str, Tensor] | str | PathLike[str]
Init = Callable[[nn.Module], object]


def is_empty(module: nn.Module) -> bool:
    """Return True if a module itself holds a tensor on meta."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def checkpoint_values(
    modules: Sequence[nn.Module], checkpoint: Checkpoint | None, init: Init | None
) -> Mapping[str, Any] | None:
    """Return the tensors of a checkpoint by name; None without one.

    Args:
        modules: that take their values from it, by the names of their parameters and buffers.
        checkpoint: state dict of the model, or path of one saved with ``torch.save``. The file is memory-mapped.
        init: as for ``materialize``.

    Raises:
        InputError: a tensor on meta gets no values, or has another shape in the checkpoint.
    """
    values: Any = checkpoint
    if checkpoint is not None and not isinstance(checkpoint, Mapping):
        values = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    filled: set[int] = set()
    empty: dict[int, str] = {}
    for name, tensor in (item for module in modules for item in _named_tensors(module)):
        if values is not None and name in values:
            filled.add(id(tensor))
            if values[name].shape != tensor.shape:
                raise InputError(
                    f"{name!r} has the shape {list(tensor.shape)}, but {list(values[name].shape)} in the checkpoint; "
                    "pass the checkpoint of a model of the same sizes"
                )
        elif tensor.is_meta:
            empty.setdefault(id(tensor), name)
    missing = next((name for identity, name in empty.items() if identity not in filled), None)
    if init is None and missing is not None:
        where = " in the checkpoint" if values is not None else ""
        raise InputError(f"{missing!r} is on meta and has no values{where}; pass init= or checkpoint=")
    whole: Mapping[str, Any] | None = values
    return whole


def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    values: Mapping[str, Any] | None = None,
    init: Init | None = None,
) -> None:
    """Move modules to a device. Create their meta parameters and buffers there, and fill them.

    Tensors that are one stay one, also in several of the modules.

    Args:
        modules: stages of a model, or a model, which may be sharded.
        device: where they are moved.
        values: by name, as ``checkpoint_values`` returns them. They are loaded last.
        init: called with each module that has meta tensors, to fill them.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    parts = [part for module in modules for part in module.modules()]
    empty = list(filter(is_empty, parts))
    held = [
        (table, name, tensor)
        for part in parts
        for table in (part._parameters, part._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    for module in modules:
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    replaced: dict[int, Any] = {}
    for table, name, tensor in held:
        kept = replaced.setdefault(id(tensor), table[name])
        if table[name] is not kept:
            table[name] = kept
    if init is not None:
        for part in empty:
            init(part)
    if values is None:
        return
    for module in modules:
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            set_model_state_dict(module, dict(values), options=StateDictOptions(full_state_dict=True, strict=False))
            continue
        with torch.no_grad():
            for name, tensor in _named_tensors(module):
                if name in values:
                    tensor.copy_(values[name])


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
