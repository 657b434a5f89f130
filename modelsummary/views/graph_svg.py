"""A dataflow graph as SVG, drawn without other programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from modelsummary.views.graph_layout import Box, arrange
from modelsummary.views.graph_nodes import Edge, Group, Node
from modelsummary.views.labels import one_line

__all__ = ["to_svg"]

_CHAR, _LINE = 7.3, 15.0  # of a monospaced font of 12 pixels
_PAD, _TITLE = 12.0, 20.0
_BEHIND = 4.0  # by which the second rectangle of equal modules is moved
# Attributes instead of a style sheet, which would apply to the whole page that the picture is in.
_FONT = 'font-family="monospace" font-size="12"'
_GROUPS = 'fill="#888" fill-opacity="0.06" stroke="#999" stroke-dasharray="4"'
_TITLES = 'text-anchor="start" fill="#555"'
_EDGES = 'fill="none" stroke="#666"'
_LABELS = 'text-anchor="start" font-size="10" fill="#555"'
_ARROW = (
    '<defs><marker id="modelsummary-arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0L8 4L0 8z" fill="#666"/></marker></defs>'
)
_Path = tuple[str, ...]  # keys of the groups around a node, the model first, and its own key


class _Laid(NamedTuple):
    """A group that was laid out: the box of each item, the lanes of each edge in it, and a box around all."""

    boxes: dict[str, Box]
    lanes: dict[tuple[str, str], list[Box]]
    whole: Box


def to_svg(model: Group, edges: Sequence[Edge], colour_of: Mapping[str, str]) -> str:
    """Return a graph as SVG.

    Args:
        model: its nodes and groups.
        edges: the edges between nodes.
        colour_of: key of a node -> its colour; the others are white.
    """
    paths = dict(_paths(model, ()))
    between: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for edge in edges:
        for group, source, target in _legs(paths[edge.source], paths[edge.target]):
            between[group].append((source, target))
    laid: dict[str, _Laid] = {}
    _lay_out(model, between, laid)
    whole = laid[model.key].whole
    corners: dict[str, tuple[float, float]] = {}
    groups = list(_groups(model, laid, (_PAD, _PAD), corners))
    width, height = whole.width + 2 * _PAD, whole.height + 2 * _PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" {_FONT}>{_ARROW}',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
        *groups,
    ]
    for edge in edges:
        points = _points(edge, paths, laid, corners)
        parts += [_curve(points), _label(edge, points)]
    for node in model.nodes():
        parts += _node(node, *_place(paths[node.key], laid, corners), colour_of.get(node.key) or "#fff")
    return "\n".join([*parts, "</svg>"])


# ---------------------------------------------------------------------------------------------- layout


def _paths(group: Group, around: _Path) -> Iterator[tuple[str, _Path]]:
    for item in group.items:
        if isinstance(item, Group):
            yield from _paths(item, (*around, group.key))
        else:
            yield item.key, (*around, group.key, item.key)


def _legs(source: _Path, target: _Path) -> Iterator[tuple[str, str, str]]:
    """Yield the groups that an edge leads through, from its source, and the items of each that it connects.

    An empty item is outside of the group: the edge leaves it downwards, or enters it from above.
    """
    level = next(index for index, pair in enumerate(zip(source, target, strict=False)) if pair[0] != pair[1])
    for group, item in zip(source[-2 : level - 1 : -1], source[:level:-1], strict=True):
        yield group, item, ""
    yield source[level - 1], source[level], target[level]
    for group, item in pairwise(target[level:]):
        yield group, "", item


def _lay_out(group: Group, between: Mapping[str, Sequence[tuple[str, str]]], laid: dict[str, _Laid]) -> None:
    boxes: dict[str, Box] = {}
    for item in group.items:
        if isinstance(item, Group):
            _lay_out(item, between, laid)
            inside = laid[item.key].whole
            boxes[item.key] = Box(
                max(inside.width, _CHAR * len(item.label)) + 2 * _PAD, inside.height + _TITLE + 2 * _PAD
            )
        else:
            longest, count = max(map(len, item.lines), default=1), max(len(item.lines), 1)
            boxes[item.key] = Box(_CHAR * longest + 16, _LINE * count + 10)
    pairs = {pair: (boxes.get(pair[0]), boxes.get(pair[1])) for pair in between.get(group.key, ())}
    lanes, whole = arrange(list(boxes.values()), pairs.values())
    laid[group.key] = _Laid(boxes, {pair: lanes[ends] for pair, ends in pairs.items()}, whole)


# --------------------------------------------------------------------------------------------- drawing

_Corners = Mapping[str, tuple[float, float]]


def _groups(
    group: Group, laid: Mapping[str, _Laid], corner: tuple[float, float], corners: dict[str, tuple[float, float]]
) -> Iterator[str]:
    """Yield the frames of the groups inside a group, and note the place of the origin of each in the picture."""
    corners[group.key] = x, y = corner
    for item in group.items:
        if isinstance(item, Group):
            box, inside = laid[group.key].boxes[item.key], laid[item.key].whole
            left, top = x + box.x - box.width / 2, y + box.y
            size = f'width="{box.width:.1f}" height="{box.height:.1f}"'
            yield f'<rect class="group" x="{left:.1f}" y="{top:.1f}" {size} {_GROUPS}/>'
            label = escape(one_line(item.label))
            yield f'<text x="{left + 6:.1f}" y="{top + 15:.1f}" {_TITLES}>{label}</text>'
            yield from _groups(item, laid, (x + box.x - inside.width / 2, top + _TITLE + _PAD), corners)


def _node(node: Node, box: Box, left: float, top: float, colour: str) -> Iterator[str]:
    """Yield the rectangles and the text of a node in a group with this origin."""
    middle, top = left + box.x, top + box.y
    radius = 4 if node.kind == "module" else box.height / 2
    for shift in (_BEHIND, 0.0) if node.times > 1 else (0.0,):
        yield (
            f'<rect class="{"behind" if shift else "node"}" stroke="#333" x="{middle - box.width / 2 + shift:.1f}" '
            f'y="{top + shift:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="{radius:.1f}" '
            f'fill="{colour}"/>'
        )
    for index, line in enumerate(node.lines):
        attributes = f'text-anchor="middle" x="{middle:.1f}" y="{top + 17 + _LINE * index:.1f}"'
        yield f"<text {attributes}>{escape(one_line(line))}</text>"


def _points(
    edge: Edge, paths: Mapping[str, _Path], laid: Mapping[str, _Laid], corners: _Corners
) -> list[tuple[float, float]]:
    """Return the points that an edge leads through: below its source, along its lanes, above its target."""
    box, left, top = _place(paths[edge.source], laid, corners)
    points = [(left + box.x, top + box.y + box.height), (left + box.x, top + box.floor)]
    for group, source, target in _legs(paths[edge.source], paths[edge.target]):
        left, top = corners[group]
        for lane in laid[group].lanes[source, target]:
            points += [(left + lane.x, top + lane.y), (left + lane.x, top + lane.y + lane.height)]
    box, left, top = _place(paths[edge.target], laid, corners)
    return [*points, (left + box.x, top + box.ceiling), (left + box.x, top + box.y)]


def _curve(points: Sequence[tuple[float, float]]) -> str:
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x, y), (next_x, next_y) in pairwise(points):
        middle = (y + next_y) / 2
        path += f"C{x:.1f} {middle:.1f} {next_x:.1f} {middle:.1f} {next_x:.1f} {next_y:.1f}"
    return f'<path class="edge" {_EDGES} marker-end="url(#modelsummary-arrow)" d="{path}"/>'


def _label(edge: Edge, points: Sequence[tuple[float, float]]) -> str:
    x, y = ((first + second) / 2 for first, second in zip(points[1], points[2], strict=True))
    return f'<text x="{x + 5:.1f}" y="{y + 3:.1f}" {_LABELS}>{escape(one_line(edge.label))}</text>'


def _place(path: _Path, laid: Mapping[str, _Laid], corners: _Corners) -> tuple[Box, float, float]:
    """Return the box of a node, and the place of its group's origin in the picture."""
    return laid[path[-2]].boxes[path[-1]], *corners[path[-2]]
