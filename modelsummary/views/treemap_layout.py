"""The layout of treemaps and icicles: rectangles as plain numbers, without drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from modelsummary.extras import needs
from modelsummary.layer_info import LayerInfo
from modelsummary.views.amounts import Amounts
from modelsummary.views.labels import one_line, row_label

__all__ = ["Piece", "Rectangle", "heads_of", "icicle", "pieces", "treemap"]

_DOMINANT = 0.9
_WORTH_OPENING = 4  # times the smallest amount that is shown


@dataclass(eq=False)
class Piece:
    """A part of a model that is drawn as one rectangle; its amount is exactly the sum of the amounts inside.

    Attributes:
        row: the module, or the first of several.
        amount: parameters, bytes, milliseconds ... of the part.
        labels: texts to choose from: the FQN, its last two names, its last name.
        kind: ``"module"``; ``"own"`` for the part of a module outside its submodules; ``"rest"`` for several modules
            that are too small to be drawn one by one.
        inside: the parts of this part.
    """

    row: LayerInfo
    amount: float
    labels: tuple[str, ...]
    kind: str = "module"
    inside: list[Piece] = field(default_factory=list)


@dataclass(frozen=True)
class Rectangle:
    """The position and size of a piece; ``level`` is 0 for the model."""

    piece: Piece
    x: float
    y: float
    width: float
    height: float
    level: int = 0


def pieces(root: LayerInfo, amounts: Amounts, depth: int | None, smallest: float) -> Piece:
    """Return the tree down to ``depth`` as pieces; parts below ``smallest`` are joined with their neighbours."""
    piece = Piece(root, amounts.total[root], _labels(root))
    if piece.amount < _WORTH_OPENING * smallest or (depth is not None and root.depth >= depth):
        return piece
    small: list[Piece] = []
    for child in root.children:
        if amounts.total[child] >= smallest:
            piece.inside.append(pieces(child, amounts, depth, smallest))
        elif amounts.total[child]:
            small.append(Piece(child, amounts.total[child], _labels(child)))
    amount = amounts.self_amount[root]
    if amount and root.children:
        labels = (*(f"{label} (own)" for label in _labels(root)), "(own)")
        (piece.inside if amount >= smallest else small).append(Piece(root, amount, labels, "own"))
    rest = list(_together(small, smallest))
    if piece.inside or len(rest) > 1:
        piece.inside += rest
    return piece


def _labels(row: LayerInfo) -> tuple[str, ...]:
    fqn = row_label(row)
    names = [fqn, ".".join(one_line(row.fqn).split(".")[-2:]), one_line(row.name)]
    return tuple(dict.fromkeys(name for name in names if name))


def _together(small: Sequence[Piece], smallest: float) -> Iterator[Piece]:
    """Join neighbours until they reach ``smallest``; the last piece may stay below it."""
    group: list[Piece] = []
    amount: float = 0
    for index, piece in enumerate(small):
        group.append(piece)
        amount += piece.amount
        if amount < smallest and index < len(small) - 1:
            continue
        if len(group) == 1:
            yield group[0]
        else:
            first, last = (one_line(part.row.name or part.row.class_name) for part in (group[0], group[-1]))
            labels = (f"{len(group)} small: {first} … {last}", f"{len(group)} small")
            yield Piece(group[0].row, amount, labels, "rest")
        group, amount = [], 0


def icicle(piece: Piece, start: float = 0.0, level: int = 0) -> Iterator[Rectangle]:
    """Yield rectangles with levels from left to right and amounts from top to bottom.

    A rectangle is as high as the rectangles to its right together.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> from modelsummary.views.amounts import find_amounts
    >>> root = Statistics(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))).root
    >>> whole = pieces(root, find_amounts(root, "params"), depth=None, smallest=0)
    >>> [(area.piece.labels[-1], area.x, area.y, area.height) for area in icicle(whole)]
    [('Sequential', 0, 0.0, 13), ('0', 1, 0.0, 9), ('1', 1, 9.0, 4)]
    """
    yield Rectangle(piece, level, start, 1.0, piece.amount, level)
    for inner in piece.inside:
        yield from icicle(inner, start, level + 1)
        start += inner.amount


def treemap(piece: Piece, width: float, height: float) -> Iterator[Rectangle]:
    """Yield rectangles of a squarified treemap (Bruls, Huizing, van Wijk 2000); leaves fill ``width x height``.

    Raises:
        MissingExtraError: squarify is not installed.
    """
    with needs("squarify", "plot"):
        import squarify
    pending = [Rectangle(piece, 0.0, 0.0, width, height)]
    while pending:
        outer = pending.pop()
        yield outer
        parts = sorted(outer.piece.inside, key=lambda inner: -inner.amount)
        if parts and outer.width > 0 and outer.height > 0:
            least = 1e-9 * outer.piece.amount  # the layout divides by the amount left over
            amounts = [max(inner.amount, least) for inner in parts]
            sizes = squarify.normalize_sizes(amounts, outer.width, outer.height)
            places = squarify.squarify(sizes, outer.x, outer.y, outer.width, outer.height)
            for part, at in zip(parts, places, strict=True):
                pending.append(Rectangle(part, at["x"], at["y"], at["dx"], at["dy"], outer.level + 1))


def heads_of(root: LayerInfo, total: dict[LayerInfo, float]) -> list[LayerInfo]:
    """Return the rows with a colour of their own: the model's children, or for one with >= 90 % its children."""
    heads: list[LayerInfo] = []
    row = root
    while row.children:
        largest = max(row.children, key=lambda child: total[child])
        if total[largest] < _DOMINANT * total[root] or not largest.children:
            break
        heads += [child for child in row.children if child is not largest]
        row = largest
    return [head for head in (*heads, *row.children) if total[head]]
