"""Folding of a tree of rows: consecutive siblings with equal structure, shapes and figures are shown once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from modelsummary.equality import kinds_of
from modelsummary.layer_info import LayerInfo
from modelsummary.tables import name_range
from modelsummary.views.amounts import ADDITIVE

__all__ = [
    "LARGE",
    "Folding",
    "Shown",
    "deepest_fitting",
    "folded_tree",
    "is_folded",
]

LARGE = 100  # rows: a tree with more is folded by default


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
        name, last = self.row.name, self.rows[self.times - 1].name
        if name and first.endswith(name):
            return first[: len(first) - len(name)] + name_range(name, last, between)
        return first if last == name else f"{first}{between}{last}"


class Folding:
    """The rows of a tree as they are shown: equal consecutive siblings once.

    Args:
        root: root of the tree.
        fold: False shows every row by itself.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> stats = Statistics(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()), (1, 2))
    >>> [(shown.row.class_name, shown.times) for shown in Folding(stats.root).walk()]
    [('Sequential', 1), ('Linear', 2), ('ReLU', 1)]
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
            numbers = [index for index, _ in group]
            rows = [row.children[index] for row in shown.rows for index in numbers]
            yield Shown(shown.row.children[numbers[0]], len(numbers), rows)

    def _kind(self, numbered: tuple[int, LayerInfo]) -> int:
        return numbered[0] if self._kinds is None else self._kinds[id(numbered[1])]


def is_folded(root: LayerInfo, fold: bool | None) -> bool:
    """Return ``fold``, or if it is None, whether the tree has more than 100 rows."""
    return sum(1 for _ in root.walk()) > LARGE if fold is None else fold


def deepest_fitting(root: LayerInfo, most_rows: int) -> int | None:
    """Return the deepest level, at least 1, down to which the folded tree has at most ``most_rows`` rows.

    Return None if all levels fit.
    """
    at_depth: dict[int, int] = {}
    for shown in Folding(root).walk():
        at_depth[shown.row.depth] = at_depth.get(shown.row.depth, 0) + 1
    rows = 0
    for depth in sorted(at_depth):
        rows += at_depth[depth]
        if rows > most_rows:
            return max(1, depth - 1)
    return None


_OWN = sorted({attribute for _, _, attribute in ADDITIVE.values()} - {"self_flops"})  # twice the multiply-adds


def folded_tree(root: LayerInfo) -> LayerInfo:
    """Return a copy of the tree in which equal consecutive siblings are one row, with the own figures of all of them.

    Names give the number of calls that a row represents: ``12 x h.0…11.mlp``. Figures that do not add up are copied
    from the first of these calls.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> tree = folded_tree(Statistics(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU()), (1, 2)).root)
    >>> [(row.fqn, row.self_params) for row in tree.walk()]
    [('', 0), ('2 x 0…1', 12), ('2', 0)]
    """
    folding = Folding(root)
    whole = replace(root, children=[], parent_info=None)
    pending = [(folding.top, whole, "")]
    while pending:
        shown, above, path = pending.pop()
        for inner_row in folding.below(shown):
            inner = _path(inner_row, shown.row, path)
            row = _merged(inner_row, inner)
            row.parent_info = above
            above.children.append(row)
            pending.append((inner_row, row, inner))
    return whole


def _path(shown: Shown, above: LayerInfo, path: str) -> str:
    """Return the FQN with the names of all siblings that a row represents, and of the rows above it."""
    row = shown.row
    start = f"{above.fqn}." if above.fqn else ""
    is_inside = bool(path) and row.fqn.startswith(start)
    return shown.names(f"{path}.{row.fqn.removeprefix(start)}" if is_inside else row.fqn, "…")


def _merged(shown: Shown, path: str) -> LayerInfo:
    count = len(shown.rows)
    sums: dict[str, Any] = {}
    for name in _OWN:
        values = [value for value in (getattr(row, name) for row in shown.rows) if value is not None]
        sums[name] = sum(values) if values else None
    return replace(
        shown.row,
        fqn=f"{count} x {path}" if count > 1 else path,
        name=f"{shown.times} x {shown.names(shown.row.name, '…')}" if shown.times > 1 else shown.row.name,
        children=[],
        **sums,
    )
