"""Put stages on their device: move tensors with values, create and fill tensors on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.errors import SplitError

__all__ = ["Checkpoint", "Init", "materialize"]

Checkpoint = Mapping[str, Tensor] | str | PathLike[str]
Init = Callable[[nn.Module], object]


def materialize(
    stages: Sequence[nn.Module], device: torch.device, checkpoint: Checkpoint | None = None, init: Init | None = None
) -> None:
    """Move stages to a device. Create their meta parameters and buffers there, and fill them.

    Args:
        checkpoint: state dict of the model, or path of one saved with ``torch.save``. The file is memory-mapped. Each
            stage takes its own keys.
        init: called with each module that has meta tensors, to fill them. Values of ``checkpoint`` are loaded
            afterwards.

    Raises:
        SplitError: a tensor on meta gets no values, or has another shape in the checkpoint.
    """
    replacements: dict[int, Tensor] = {}
    empty: dict[str, nn.Module] = {}
    for stage in stages:
        for fqn, module in stage.named_modules():
            if _make(module, device, replacements):
                empty[fqn] = module
    for module in empty.values() if init is not None else ():
        assert init is not None
        init(module)
    filled: set[int] = set()
    if checkpoint is not None:
        filled = _load(stages, checkpoint)
    if init is None:
        new = set(map(id, replacements.values()))
        for stage in stages:
            for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
                if id(tensor) in new and id(tensor) not in filled:
                    raise SplitError(
                        f"{name!r} is on meta and has no values"
                        f"{' in the checkpoint' if checkpoint is not None else ''}; pass init= or checkpoint="
                    )
    for stage in stages:
        stage.to(device)


def _make(module: nn.Module, device: torch.device, replacements: dict[int, Tensor]) -> bool:
    """Replace a module's meta tensors by empty ones on the device. Return True if there are any.

    ``made`` holds the replacements, so tied tensors stay tied.
    """
    tables: list[Any] = [module._parameters, module._buffers]
    has_meta = False
    for table in tables:
        for name, tensor in table.items():
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in replacements:
                new: Tensor = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                replacements[id(tensor)] = new
                replacements[-id(tensor)] = tensor  # kept alive, so that its id is not reused
            table[name] = replacements[id(tensor)]
            has_meta = True
    if has_meta and isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return has_meta


@torch.no_grad()
def _load(stages: Sequence[nn.Module], checkpoint: Checkpoint) -> set[int]:
    """Copy values by name. Return the ids of the filled tensors."""
    values: Any = checkpoint
    if not isinstance(checkpoint, Mapping):
        values = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    filled: set[int] = set()
    for stage in stages:
        for name, tensor in (
            *stage.named_parameters(remove_duplicate=False),
            *stage.named_buffers(remove_duplicate=False),
        ):
            if name in values:
                if values[name].shape != tensor.shape:
                    raise SplitError(
                        f"{name!r} has shape {list(tensor.shape)}, but {list(values[name].shape)} in the checkpoint"
                    )
                tensor.copy_(values[name])
                filled.add(id(tensor))
    return filled
