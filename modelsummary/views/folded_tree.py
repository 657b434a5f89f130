"""A tree in which equal siblings are one row, for pictures: its figures add up to the same totals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from modelsummary.layer_info import LayerInfo
from modelsummary.views.amounts import ADDITIVE
from modelsummary.views.folding import Folding, Shown

__all__ = ["folded_tree"]

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
        for each in folding.below(shown):
            inner = _path(each, shown.row, path)
            row = _merged(each, inner)
            row.parent_info = above
            above.children.append(row)
            pending.append((each, row, inner))
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
        known = [value for value in (getattr(row, name) for row in shown.rows) if value is not None]
        sums[name] = sum(known) if known else None
    return replace(
        shown.row,
        fqn=f"{count} x {path}" if count > 1 else path,
        name=f"{shown.times} x {shown.names(shown.row.name, '…')}" if shown.times > 1 else shown.row.name,
        children=[],
        **sums,
    )
