"""How views name a row, and which levels they show."""

from __future__ import annotations

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo

__all__ = ["check_depth", "one_line", "row_label"]


def one_line(text: str) -> str:
    """``text`` with a space for every character that is not printed: a module may be named ``"a\\nb"``."""
    return "".join(char if char.isprintable() else " " for char in text)


def row_label(row: LayerInfo) -> str:
    """FQN, with the number of the call from the second on; for the model its class."""
    name = one_line(row.fqn or row.class_name)
    return f"{name} (call {row.call_index + 1})" if row.call_index else name


def check_depth(depth: int | None, least: int = 0, name: str = "depth") -> int | None:
    """Return ``depth``; raise ``InputError`` if it is neither a level from ``least`` on nor None."""
    if depth is not None and (type(depth) is not int or depth < least):
        raise InputError(f"{name}={depth!r} is no level of the tree; expected an integer >= {least}, or None for all")
    return depth
