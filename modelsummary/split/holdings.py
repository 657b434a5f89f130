"""The modules and tensors of the model that each stage holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from modelsummary.record.events import attributes_in
from modelsummary.split.stage import find
from modelsummary.split.stage_parts import StagePart

__all__ = ["Holdings"]


class Holdings:
    """The paths of the modules and tensors that each stage holds: those its calls use, and unused ones.

    An unused parameter or buffer goes to the stage of the one before it, so that the stages together have the keys of
    the model's state dict. A module with several paths is held under all of them.
    """

    def __init__(self, model: nn.Module, parts: Sequence[StagePart], result: Any) -> None:
        self._aliases: dict[int, list[str]] = {}
        for fqn, module in model.named_modules(remove_duplicate=False):
            self._aliases.setdefault(id(module), []).append(fqn)
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        names_of: dict[int, list[str]] = {}
        for fqn, tensor in tensors:
            names_of.setdefault(id(tensor), []).append(fqn)
        stage_of: dict[str, set[int]] = {}
        self._extra: list[list[str]] = [[] for _ in parts]
        self._placed: list[list[str]] = []
        for index, part in enumerate(parts):
            modules = list(dict.fromkeys(event.fqn for event in part.events if event.is_module))
            paths = [alias for fqn in modules for alias in self._aliases[id(model.get_submodule(fqn))]]
            used = [(event.args, event.kwargs) for event in part.events]
            if index == len(parts) - 1:
                used.append(result)  # the model may return its own parameter or buffer
            for templates in used:
                for attribute in attributes_in(templates):
                    paths.append(attribute.fqn)
                    paths.extend(names_of.get(id(find(model, attribute.fqn)), ()))
            self._placed.append(paths)
            placed = set(paths)
            for fqn, _ in tensors:
                if _is_within(fqn, placed):
                    stage_of.setdefault(fqn, set()).add(index)
        self._attach_unused([fqn for fqn, tensor in _in_order(model) if tensor is not None], stage_of)
        self._position = {fqn: position for position, (fqn, _) in enumerate(_in_order(model))}

    def _attach_unused(self, names: list[str], stage_of: Mapping[str, set[int]]) -> None:
        last = 0
        for fqn in names:
            if fqn in stage_of:
                last = max(stage_of[fqn])
            else:
                self._extra[last].append(fqn)

    def of(self, stage_index: int) -> list[str]:
        """Return the paths that a stage holds, in the order of the model: a tied parameter keeps its first name."""
        paths = dict.fromkeys([*self._placed[stage_index], *self._extra[stage_index]])
        return sorted(paths, key=lambda path: self._position.get(path, len(self._position)))


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
