"""Which modules an ONNX operator stands in: by the metadata of torch's exporter, or by the parts of its name."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from modelsummary.files.program import Scope

__all__ = ["class_of_model", "scopes_of"]

_LONGEST = 4096  # characters of metadata worth reading
_DEEPEST = 64  # parts of a name
_NAMES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"


def scopes_of(node: Any, name: str, called: Mapping[str, str]) -> tuple[Scope, ...]:
    """The modules around a node, outermost first, without the model.

    Args:
        called: path of each call of a function -> the name of the function.
    """
    names, classes = _metadata(node)
    if len(names) > 1:
        return _from_metadata(names, classes)
    return _from_name(name, called)


def class_of_model(node: Any) -> str:
    """Class of the model that was exported; empty if the node does not tell."""
    _, classes = _metadata(node)
    return classes[0].rpartition(".")[2] if classes else ""


def _metadata(node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = {each.key: each.value for each in node.metadata_props if each.key in (_NAMES, _CLASSES)}
    return _list_of(found.get(_NAMES, "")), _list_of(found.get(_CLASSES, ""))


@lru_cache(4096)
def _list_of(text: Any) -> tuple[str, ...]:
    """The texts in a list as Python prints it; none if it is something else."""
    if not isinstance(text, str) or not text or len(text) > _LONGEST:  # bytes, where it is no text
        return ()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else ()


@lru_cache(4096)
def _from_metadata(names: tuple[str, ...], classes: tuple[str, ...]) -> tuple[Scope, ...]:
    """The first name is the model's, the last that of the operator."""
    return tuple(
        Scope(f"{fqn}|{position}", fqn, classes[position].rpartition(".")[2] if position < len(classes) else "Module")
        for position, fqn in enumerate(names[1:-1], 1)
        if fqn
    )


def _from_name(name: str, called: Mapping[str, str]) -> tuple[Scope, ...]:
    """Of ``/features/features.0/conv/conv.1/Conv``; a part that repeats the one before it continues its name."""
    scopes: list[Scope] = []
    path, fqn, last = "", "", ""
    for part in name.split("/")[:-1][:_DEEPEST]:
        path += part
        if part:
            fqn = fqn + part[len(last) :] if last and part.startswith(f"{last}.") else f"{fqn}.{part}" if fqn else part
            scopes.append(Scope(path, fqn, called.get(path, part)))
            last = part
        path += "/"
    return tuple(scopes)
