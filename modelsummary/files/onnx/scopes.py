"""Find the modules around an ONNX operator, from the metadata of torch's exporter or from parts of its name."""

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
    """Return the modules around a node, outermost first, without the model.

    Args:
        called: path of each call of a function -> the name of the function.
    """
    names, classes = _metadata(node)
    if len(names) > 1:
        return _from_metadata(names, classes)
    return _from_name(name, called)


def class_of_model(node: Any) -> str:
    """Return the class of the exported model; empty if the node's metadata lack it."""
    _, classes = _metadata(node)
    return classes[0].rpartition(".")[2] if classes else ""


def _metadata(node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    metadata = {entry.key: entry.value for entry in node.metadata_props if entry.key in (_NAMES, _CLASSES)}
    return _list_of(metadata.get(_NAMES, "")), _list_of(metadata.get(_CLASSES, ""))


@lru_cache(4096)
def _list_of(text: Any) -> tuple[str, ...]:
    """Return the strings of a list in Python's notation; empty for any other text."""
    if not isinstance(text, str) or not text or len(text) > _LONGEST:  # names that are not text are bytes
        return ()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ()
    return tuple(map(str, value)) if isinstance(value, list) else ()


@lru_cache(4096)
def _from_metadata(names: tuple[str, ...], classes: tuple[str, ...]) -> tuple[Scope, ...]:
    """Return scopes without the first name, the model's, and the last, the operator's."""
    return tuple(
        Scope(f"{fqn}|{position}", fqn, classes[position].rpartition(".")[2] if position < len(classes) else "Module")
        for position, fqn in enumerate(names[1:-1], 1)
        if fqn
    )


def _from_name(name: str, called: Mapping[str, str]) -> tuple[Scope, ...]:
    """Return the scopes in a name; a part that repeats the part before it continues its FQN.

    >>> [scope.fqn for scope in _from_name("/features/features.0/conv/conv.1/Conv", {})]
    ['features', 'features.0', 'features.0.conv', 'features.0.conv.1']
    """
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
