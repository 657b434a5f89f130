"""Equality of modules by what their rows show: for display, and for figures that are checked afterwards.

It is a guess: modules that look equal may compute other values. Where forwards must be the same, their operators are
compared (``record.fingerprint``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from modelsummary.layer_info import LayerInfo

__all__ = ["kinds_of", "looks_equal", "patterns", "signature"]

_LONGEST_PATTERN = 12  # members

# Attributes that must be equal: without names, measurements and values that depend on earlier rows.
_COMPARED = (
    "class_name executed training input_size output_size inner_layers kernel_size groups num_params trainable_params"
    " num_buffers params_bytes buffer_bytes self_params self_trainable_params self_buffers is_recursive"
    " has_uninitialized macs self_macs self_skipped_macs elementwise_ops bytes_read bytes_written uncounted_ops note"
).split()


def kinds_of(root: LayerInfo) -> dict[int, int]:
    """Return a number for the id of each row; rows with equal numbers look equal, and so do the rows below them.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()), (1, 2)).root
    >>> first, second, relu = (kinds_of(root)[id(row)] for row in root.children)
    >>> first == second, first == relu
    (True, False)
    """
    return looks_equal(list(root.walk()), signature)


def looks_equal(nodes: Sequence[Any], facts: Callable[[Any], Hashable]) -> dict[int, int]:
    """Return a number for the id of each node of a tree: equal ones have equal facts, and equal ``children``.

    Args:
        nodes: all nodes, each after the nodes around it.
        facts: returns what two nodes must have in common.
    """
    numbers: dict[Hashable, int] = {}
    kinds: dict[int, int] = {}
    for node in reversed(nodes):
        key = (facts(node), tuple(kinds[id(child)] for child in node.children))
        kinds[id(node)] = numbers.setdefault(key, len(numbers))
    return kinds


def patterns(kinds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of neighbours of these kinds: first position, members of the pattern, times that it comes.

    A pattern of several members must come three times.

    >>> patterns([7, 7, 1, 2, 1, 2, 1, 2, 5])
    [(0, 1, 2), (2, 2, 3), (8, 1, 1)]
    """
    runs: list[tuple[int, int, int]] = []
    start = 0
    while start < len(kinds):
        period, times = 1, 1
        for length in range(1, min(_LONGEST_PATTERN, (len(kinds) - start) // 2) + 1):
            if kinds[start] != kinds[start + length]:
                continue
            pattern, count = kinds[start : start + length], 1
            while kinds[start + count * length : start + (count + 1) * length] == pattern:
                count += 1
            if count > (1 if length == 1 else 2) and count * length > period * times:
                period, times = length, count
        runs.append((start, period, times))
        start += period * times
    return runs


def signature(row: LayerInfo) -> tuple[Any, ...]:
    """Return what two rows must have in common to be equal: structure, shapes and figures, without names."""
    return tuple(_frozen(getattr(row, name)) for name in _COMPARED)


def _frozen(value: Any, *, is_inside: bool = False) -> Any:
    """Return a hashable value that is equal for equal values.

    Of an object among the arguments, only its presence counts: a cache of keys and values grows from layer to layer.
    """
    if isinstance(value, dict):
        return "object" if is_inside else tuple((name, _frozen(inner, is_inside=True)) for name, inner in value.items())
    if isinstance(value, tuple):
        return "tuple", tuple(_frozen(inner, is_inside=True) for inner in value)
    return ("list", *value) if isinstance(value, list) else value
