"""Folding of a tree of rows: consecutive siblings with equal structure, shapes and figures are shown once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from modelsummary.layer_info import LayerInfo
from modelsummary.views.labels import name_range

__all__ = ["LARGE", "Folding", "Shown", "deepest_fitting", "fold", "is_folded", "kinds_of", "signature", "unfolded"]

LARGE = 100  # rows: a tree with more is folded by default

# Attributes that must be equal: without names, measurements and values that depend on earlier rows.
_COMPARED = (
    "class_name executed training input_size output_size inner_layers kernel_size groups num_params trainable_params"
    " num_buffers params_bytes buffer_bytes self_params self_trainable_params self_buffers is_recursive"
    " has_uninitialized macs self_macs self_skipped_macs elementwise_ops bytes_read bytes_written uncounted_ops note"
).split()


class Shown(NamedTuple):
    """A row of a folded table.

    Attributes:
        row: the row shown, the first of its equal siblings.
        times: number of equal siblings, this row included.
        rows: all rows that this one represents, those below equal siblings of its parents included.
    """

    row: LayerInfo
    times: int
    rows: list[LayerInfo]

    def names(self, first: str, between: str = " .. ") -> str:
        """Return ``first``, a name or FQN of the first row, with what differs in the name of its last equal sibling."""
        own, last = self.row.name, self.rows[self.times - 1].name
        if own and first.endswith(own):
            return first[: len(first) - len(own)] + name_range(own, last, between)
        return first if last == own else f"{first}{between}{last}"


class Folding:
    """The rows of a tree as they are shown: equal consecutive siblings once.

    Args:
        root: root of the tree.
        fold: False shows every row by itself.
    """

    def __init__(self, root: LayerInfo, *, fold: bool = True) -> None:
        self.top = Shown(root, 1, [root])
        self._kinds = kinds_of(root) if fold else None

    def walk(self, depth: int | None = None) -> Iterator[Shown]:
        """Yield the rows down to ``depth`` in printed order."""
        pending = [self.top]
        while pending:
            shown = pending.pop()
            yield shown
            if depth is None or shown.row.depth < depth:
                pending.extend(reversed(list(self.below(shown))))

    def below(self, shown: Shown) -> Iterator[Shown]:
        """Yield the rows below ``shown``, each with the corresponding children of all rows that it represents."""
        for _, group in groupby(enumerate(shown.row.children), key=self._kind):
            numbers = [number for number, _ in group]
            rows = [row.children[number] for row in shown.rows for number in numbers]
            yield Shown(shown.row.children[numbers[0]], len(numbers), rows)

    def _kind(self, numbered: tuple[int, LayerInfo]) -> int:
        return numbered[0] if self._kinds is None else self._kinds[id(numbered[1])]


def is_folded(root: LayerInfo, fold: bool | None) -> bool:
    """Return ``fold``, or if it is None, whether the tree has more than 100 rows."""
    return sum(1 for _ in root.walk()) > LARGE if fold is None else fold


def unfolded(root: LayerInfo, depth: int | None = None) -> Iterator[Shown]:
    """Yield every row of the tree down to ``depth``, in printed order."""
    return (Shown(row, 1, [row]) for row in root.walk(depth))


def fold(root: LayerInfo, depth: int | None = None) -> Iterator[Shown]:
    """Yield the rows of the tree down to ``depth`` in printed order, with only the first of equal consecutive siblings.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> stats = Statistics(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()), (1, 2))
    >>> [(shown.row.class_name, shown.times) for shown in fold(stats.root)]
    [('Sequential', 1), ('Linear', 2), ('ReLU', 1)]
    """
    return Folding(root).walk(depth)


def deepest_fitting(root: LayerInfo, most_rows: int) -> int | None:
    """Return the deepest level, at least 1, down to which the folded tree has at most ``most_rows`` rows.

    Return None if all levels fit.
    """
    at_depth: dict[int, int] = {}
    for shown in fold(root):
        at_depth[shown.row.depth] = at_depth.get(shown.row.depth, 0) + 1
    rows = 0
    for depth in sorted(at_depth):
        rows += at_depth[depth]
        if rows > most_rows:
            return max(1, depth - 1)
    return None


def kinds_of(root: LayerInfo) -> dict[int, int]:
    """Return a number for the id of each row; rows with equal numbers are equal, and so are the rows below them."""
    numbers: dict[Any, int] = {}
    kinds: dict[int, int] = {}
    for row in reversed(list(root.walk())):
        key = (signature(row), tuple(kinds[id(child)] for child in row.children))
        kinds[id(row)] = numbers.setdefault(key, len(numbers))
    return kinds


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
