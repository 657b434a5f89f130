"""The modules and tensors of the model that each stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from modelsummary.record.events import attributes_in
from modelsummary.split.stage import find
from modelsummary.split.stage_parts import StagePart

__all__ = ["holdings"]


def holdings(model: nn.Module, parts: Sequence[StagePart], result: Any) -> list[list[str]]:
    """Return the paths of the modules and tensors that each stage holds: those its calls use, and unused ones.

    An unused parameter or buffer goes to the stage of the one before it, so that the stages together have the keys of
    the model's state dict. A module with several paths is held under all of them. Paths are in the order of the model:
    a tied parameter keeps its first name.
    """
    modules: dict[int, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), []).append(fqn)
    in_order = list(_in_order(model))
    names = [fqn for fqn, tensor in in_order if tensor is not None]
    names_of: dict[int, list[str]] = {}
    for fqn, tensor in in_order:
        names_of.setdefault(id(tensor), []).append(fqn)
    held: list[list[str]] = []
    stage_of: dict[str, int] = {}  # the last one that uses a tensor
    for index, part in enumerate(parts):
        called = dict.fromkeys(event.fqn for event in part.events if event.is_module)
        paths = [alias for fqn in called for alias in modules[id(model.get_submodule(fqn))]]
        used = [(event.args, event.kwargs) for event in part.events]
        if index == len(parts) - 1:
            used.append(result)  # the model may return its own parameter or buffer
        for templates in used:
            for attribute in attributes_in(templates):
                paths += [attribute.fqn, *names_of.get(id(find(model, attribute.fqn)), ())]
        held.append(paths)
        placed = set(paths)
        stage_of.update({fqn: index for fqn in names if _is_within(fqn, placed)})
    last = 0
    for fqn in names:
        last = stage_of.get(fqn, last)
        if fqn not in stage_of:
            held[last].append(fqn)
    position = {fqn: position for position, (fqn, _) in enumerate(in_order)}
    return [sorted(dict.fromkeys(paths), key=lambda path: position.get(path, len(position))) for paths in held]


def _is_within(fqn: str, paths: set[str]) -> bool:
    """Return True if ``paths`` has the name itself or the name of a module around it."""
    while fqn and fqn not in paths:
        fqn = fqn.rpartition(".")[0]
    return bool(fqn)


def _in_order(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Yield each module, with None, and then its parameters and buffers."""
    for fqn, module in model.named_modules(remove_duplicate=False):
        yield fqn, None
        prefix = f"{fqn}." if fqn else ""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield prefix + name, tensor
