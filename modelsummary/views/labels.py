"""The names of rows in views, their branches and settings, and the check of ``depth``."""

from __future__ import annotations

from collections.abc import Mapping

from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo, Sizes
from modelsummary.units import NOTHING

__all__ = ["branch", "call_label", "check_depth", "one_line", "row_label", "settings", "sizes_label"]


def one_line(text: str) -> str:
    r"""Return ``text`` with a space for each unprintable character.

    >>> one_line("a\nb")  # a module may have this name
    'a b'
    """
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def row_label(row: LayerInfo) -> str:
    """Return the FQN of a row, or the model's class, with the number of the call from the second call on."""
    return call_label(one_line(row.fqn or row.class_name), row.call_index)


def call_label(name: str, call_index: int) -> str:
    """Return a name with the number of the call from the second call on.

    >>> call_label("fc", 0), call_label("fc", 1)
    ('fc', 'fc (call 2)')
    """
    return f"{name} (call {call_index + 1})" if call_index else name


def sizes_label(sizes: Sizes, batch: tuple[int | None, int | None] = (None, None)) -> str:
    """Return shapes as text; the ``batch``, its position and size, is -1, and an open dimension of a file is a name.

    >>> sizes_label(([2, 8], {"mask": [2]}, None)), sizes_label([2, 8], (0, 2))
    ('([2, 8], {mask: [2]}, --)', '[-1, 8]')
    """
    if isinstance(sizes, list):
        shown = (-1 if numbered == batch else numbered[1] for numbered in enumerate(sizes))
        return f"[{', '.join(map(str, shown))}]"
    if isinstance(sizes, tuple):
        return f"({', '.join(sizes_label(inner, batch) for inner in sizes)})"
    if isinstance(sizes, Mapping):
        return f"{{{', '.join(f'{key}: {sizes_label(inner, batch)}' for key, inner in sizes.items())}}}"
    return NOTHING if sizes is None else sizes


def branch(depth: int, *, ascii_only: bool = False, narrow: bool = False) -> str:
    """Return the tree's branch before the name of a row at this depth; empty for the model.

    >>> branch(0), branch(1), branch(2), branch(3, narrow=True)
    ('', '├─', '│    └─', '│ │ └─')
    """
    if not depth:
        return ""
    stem, first, deeper = ("|    ", "+ ", "+ ") if ascii_only else ("│    ", "├─", "└─")
    stem = stem[:2] if narrow else stem
    return first if depth == 1 else stem * (depth - 1) + deeper


def settings(row: LayerInfo) -> str | None:
    """Return the ``extra_repr()`` of the module on one line; None without a live module."""
    return None if row.module is None else " ".join(str(row.module.extra_repr()).split())


def check_depth(depth: int | None, least: int = 0, name: str = "depth") -> int | None:
    """Return ``depth``; raise ``InputError`` unless it is an integer >= ``least`` or None."""
    if depth is not None and (type(depth) is not int or depth < least):
        raise InputError(f"{name} must be an integer >= {least}, or None for all levels, got {depth!r}")
    return depth
