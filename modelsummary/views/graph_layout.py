"""The layout of a dataflow graph: boxes in layers from top to bottom, groups around the boxes inside them.

Each group is laid out alone and is then one box of the group around it. Within a group, a box stands below all boxes
that it takes tensors from; an edge past other layers has a lane of its own through them (K. Sugiyama et al. 1981,
https://doi.org/10.1109/TSMC.1981.4308636).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["Box", "arrange", "spread"]

_GAP_X, _GAP_Y = 24.0, 40.0
_LANE = 10.0
_SWEEPS = 4


@dataclass(eq=False)
class Box:
    """A rectangle of the layout: a node, a group, or a lane for an edge.

    Attributes:
        width, height: size.
        x, y: centre and upper side, within the box around it.
        ceiling, floor: upper and lower side of its layer.
        layer: number of the layer.
        is_lane: True for a lane.
        above, below: neighbours in the layers before and after.
    """

    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    ceiling: float = 0.0
    floor: float = 0.0
    layer: int = 0
    is_lane: bool = False
    above: list[Box] = field(default_factory=list)
    below: list[Box] = field(default_factory=list)


Pair = tuple[Box | None, Box | None]  # the ends of an edge; None is outside, above or below all boxes


def arrange(boxes: Sequence[Box], edges: Iterable[Pair]) -> tuple[dict[Pair, list[Box]], Box]:
    """Place boxes in layers; an edge leads from a box to a later one, from above to a box, or from a box downwards.

    Returns:
        The lanes of each edge from top to bottom, and a box that bounds all others, with the origin at its upper left.

    >>> top, left, right = (Box(40, 20) for _ in range(3))
    >>> lanes, whole = arrange([top, left, right], [(top, left), (top, right)])
    >>> left.y == right.y > top.y, left.x < top.x < right.x, whole.width
    (True, True, 104.0)
    """
    pairs = list(dict.fromkeys(edges))
    _assign_layers(boxes, pairs)
    layers: defaultdict[int, list[Box]] = defaultdict(list)
    for box in boxes:
        layers[box.layer].append(box)
    last = max(layers)
    lanes = {pair: _lanes(pair, layers, last) for pair in pairs}
    ordered = [layers[index] for index in sorted(layers)]
    for sweep in range(_SWEEPS):
        _order(ordered, downwards=sweep % 2 == 0)
    for sweep in range(_SWEEPS + 1):
        _place(ordered, downwards=sweep % 2 == 0)
    y = 0.0
    for layer in ordered:
        height = max(box.height for box in layer)
        for box in layer:
            box.height = height if box.is_lane else box.height
            box.y, box.ceiling, box.floor = y + (height - box.height) / 2, y, y + height
        y += height + _GAP_Y
    every = [box for layer in ordered for box in layer]
    left = min(box.x - box.width / 2 for box in every)
    for box in every:
        box.x -= left
    return lanes, Box(max(box.x + box.width / 2 for box in every), y - _GAP_Y)


def _assign_layers(boxes: Sequence[Box], pairs: Sequence[Pair]) -> None:
    sources: defaultdict[Box, list[Box]] = defaultdict(list)
    targets: defaultdict[Box, list[Box]] = defaultdict(list)
    for source, target in pairs:
        if source is not None and target is not None:
            sources[target].append(source)
            targets[source].append(target)
    for box in boxes:
        box.layer = max((source_box.layer + 1 for source_box in sources[box]), default=0)
    for box in reversed(boxes):  # a box without sources stands right above the first that needs it
        if not sources[box] and targets[box]:
            box.layer = min(target_box.layer for target_box in targets[box]) - 1


def _lanes(pair: Pair, layers: dict[int, list[Box]], last: int) -> list[Box]:
    source, target = pair
    first, end = -1 if source is None else source.layer, last + 1 if target is None else target.layer
    chain = [Box(_LANE, 0.0, layer=layer, is_lane=True) for layer in range(first + 1, end)]
    ends = [*([] if source is None else [source]), *chain, *([] if target is None else [target])]
    for upper, lower in pairwise(ends):
        upper.below.append(lower)
        lower.above.append(upper)
    for lane in chain:
        layers[lane.layer].append(lane)
    return chain


def _order(layers: Sequence[list[Box]], *, downwards: bool) -> None:
    """Sort each layer by the mean position of the neighbours in the layer before it."""
    for layer in layers if downwards else reversed(layers):
        positions = {box: index / max(len(members) - 1, 1) for members in layers for index, box in enumerate(members)}

        def mean(box: Box, positions: dict[Box, float] = positions) -> float:
            near = box.above if downwards else box.below
            return sum(map(positions.__getitem__, near)) / len(near) if near else positions[box]

        layer.sort(key=mean)


def _place(layers: Sequence[list[Box]], *, downwards: bool) -> None:
    """Move the boxes of each layer as near as possible to the middle of their neighbours in the layer before it."""
    for layer in layers if downwards else reversed(layers):
        wanted = []
        for box in layer:
            near = box.above if downwards else box.below
            wanted.append(sum(neighbour.x for neighbour in near) / len(near) if near else box.x)
        for box, x in zip(layer, spread(wanted, [box.width for box in layer]), strict=True):
            box.x = x


def spread(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return centres in the given order that leave a gap between boxes, with the least squared distance to ``wanted``.

    Boxes that touch move together to the mean of what they want (isotonic regression).

    >>> spread([0.0, 0.0, 200.0], [20.0, 20.0, 20.0])
    [-22.0, 22.0, 200.0]
    """
    offsets = [0.0]
    for first, second in pairwise(widths):
        offsets.append(offsets[-1] + (first + second) / 2 + _GAP_X)
    blocks: list[tuple[float, int]] = []  # mean of what its boxes want, less their offsets; number of boxes
    for want, offset in zip(wanted, offsets, strict=False):
        mean, count = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, size = blocks.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]
