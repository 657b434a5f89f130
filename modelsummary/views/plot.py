"""Pictures of a tree with matplotlib: bars, treemap, icicle, roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelsummary.devices.device_spec import DeviceSpec, Precision
from modelsummary.devices.sustained import clock_of
from modelsummary.errors import InputError, check_integers
from modelsummary.extras import axes_for
from modelsummary.layer_info import LayerInfo, rows_around
from modelsummary.views.amounts import ADDITIVE, Amounts, Unit, find_amounts
from modelsummary.views.columns import COLUMNS
from modelsummary.views.folding import folded_tree, is_folded
from modelsummary.views.labels import check_depth, one_line, row_label
from modelsummary.views.treemap_layout import Piece, Rectangle, heads_of, icicle, pieces, treemap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Pictures"]

_NUMBERS = ("count", "bytes", "ms", "rate", "percent")
_POINTS = 72.0
_GRAY = (0.55, 0.55, 0.55)
_COLOURS = (0, 1, 2, 3, 4, 5, 6, 8, 9)  # of "tab10", without its gray
_SMALLEST_AREA, _SMALLEST_HEIGHT = 1 / 600, 1 / 250  # shares of the picture; text in smaller ones is unreadable
_MOST_NAMES = 8
_NARROW = 0.2  # width of the gray levels of an icicle
_NAME_SIZE = 7.0  # points


class Pictures:
    """Pictures of one tree: bars, treemap, icicle and roofline.

    Every method draws into ``ax``, or into new axes, and returns the axes. Each child of the model has its own colour;
    a child with 90 % of the amount or more is replaced by its children.

    Equal siblings are one bar, area or point, ``12 x h.0…11.mlp``, with the sum of their amounts. ``fold=False`` draws
    them one by one, ``fold=True`` always as one; by default they are one in models of more than 100 rows.

    Args:
        root: root of the tree.
        precision: function that returns the default dtype of rooflines.
    """

    def __init__(self, root: LayerInfo, precision: Callable[[], Precision]) -> None:
        self._root = root
        self._precision = precision

    def _tree(self, fold: bool | None) -> LayerInfo:
        return folded_tree(self._root) if is_folded(self._root, fold) else self._root

    def __call__(self, kind: str = "treemap", *args: Any, **options: Any) -> Axes:
        """Draw the picture named ``"bars"``, ``"treemap"``, ``"icicle"`` or ``"roofline"`` with its arguments.

        Raises:
            InputError: ``kind`` is unknown, or an argument is unusable.
        """
        if kind not in ("bars", "treemap", "icicle", "roofline"):
            raise InputError(f"kind must be 'bars', 'treemap', 'icicle' or 'roofline', got {kind!r}")
        axes: Axes = getattr(self, kind)(*args, **options)
        return axes

    def bars(
        self,
        by: str = "params",
        depth: int | None = None,
        *,
        top: int = 30,
        fold: bool | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the rows with the largest amounts as bars, and all other rows together as the last bar.

        A bar shows the own amount of a row, with the rows below it if they are hidden, so that the bars add up to the
        model. Columns that do not add up, such as ``"output_bytes"`` or ``"peak_bytes"``, are drawn row by row,
        unchanged.

        Args:
            by: an amount (``"params"``, ``"macs"``, ``"latency"``, ``"activation"`` ...) or a column of numbers.
            depth: deepest level shown; None: all levels.
            top: number of rows with a bar of their own.
            fold: draw equal siblings as one; None: in models of more than 100 rows.
            ax: axes to draw into; None: new axes.

        Raises:
            InputError: an argument is unusable, or ``by`` was not measured.
            MissingExtraError: matplotlib is not installed.
        """
        check_depth(depth)
        check_integers(top=top)
        root = self._root if isinstance(by, str) and by not in ADDITIVE else self._tree(fold)
        amounts = _shown_or_column(root, by, depth)
        unit, values = amounts.unit, amounts.self_amount
        largest = sorted(values, key=lambda row: -values[row])[:top]
        rows = [(row_label(row), values[row], row) for row in largest]
        others = len(values) - len(rows)
        if others and by in ADDITIVE:
            rest = sum(values.values()) - sum(value for _, value, _ in rows)
            rows.append((f"{others} others", rest, root))
        axes = axes_for(ax, figsize=(10, 1 + 0.24 * len(rows)), layout="constrained")
        colour = _Colours(root, amounts.total)
        lengths = [value / unit.factor for _, value, _ in rows]
        bars = axes.barh(range(len(rows)), lengths, color=[colour(row) for *_, row in rows])
        axes.bar_label(bars, [unit.text(value) for _, value, _ in rows], padding=3, fontsize=8)
        axes.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8, parse_math=False)
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel=amounts.label)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(one_line(root.class_name), parse_math=False)
        return axes

    def treemap(
        self, by: str = "params", depth: int | None = None, *, fold: bool | None = None, ax: Axes | None = None
    ) -> Axes:
        """Draw modules as nested areas; the own amount of a module is an area beside its submodules.

        Modules that are too small to be seen are joined.

        Args:
            by: an amount: ``"params"``, ``"macs"``, ``"latency"``, ``"activation"`` ...
            depth: deepest level shown; None: all levels that are readable.
            fold: draw equal siblings as one; None: in models of more than 100 rows.
            ax: axes to draw into; None: new axes.

        Raises:
            InputError: an argument is unusable, ``by`` does not add up, or was not measured.
            MissingExtraError: matplotlib or squarify is not installed.
        """
        check_depth(depth)
        root = self._tree(fold)
        amounts = find_amounts(root, by)
        axes = _framed(axes_for(ax, figsize=(12, 7), layout="constrained"), root, amounts, "area")
        width, height = _size(axes)
        whole = pieces(root, amounts, depth, amounts.total[root] * _SMALLEST_AREA)
        rectangles = list(treemap(whole, width, height))
        axes.set(xlim=(0, width), ylim=(height, 0))
        leaves = [rectangle for rectangle in rectangles if not rectangle.piece.inside]
        _draw(axes, leaves, root, amounts, (1.0, 1.0), lambda piece: (_in_two(piece.labels[0]), *piece.labels))
        heads = set(heads_of(root, amounts.total))
        for rectangle in rectangles:
            if rectangle.piece.row in heads and rectangle.piece.kind == "module":
                _outline(axes, rectangle)
        return axes

    def icicle(
        self, by: str = "params", depth: int | None = None, *, fold: bool | None = None, ax: Axes | None = None
    ) -> Axes:
        """Draw levels from left to right and modules from top to bottom, each as high as its amount.

        Levels above the modules with a colour of their own are narrow.

        Args:
            by, depth, fold, ax: as for ``treemap``.

        Raises:
            InputError: an argument is unusable, ``by`` does not add up, or was not measured.
            MissingExtraError: matplotlib is not installed.
        """
        check_depth(depth)
        root = self._tree(fold)
        amounts = find_amounts(root, by)
        axes = _framed(axes_for(ax, figsize=(12, 8), layout="constrained"), root, amounts, "height")
        width, height = _size(axes)
        total = amounts.total[root]
        rectangles = list(icicle(pieces(root, amounts, depth, total * _SMALLEST_HEIGHT)))
        levels = 1 + max(rectangle.level for rectangle in rectangles)
        around = {row for head in heads_of(root, amounts.total) for row in rows_around(head)}
        gray = len({rectangle.level for rectangle in rectangles if rectangle.piece.row in around and levels > 1})
        narrow = [_NARROW] * gray + [1.0] * (levels - gray)
        begins = [sum(narrow[:level]) for level in range(levels + 1)]
        rectangles = [replace(area, x=begins[area.level], width=narrow[area.level]) for area in rectangles]
        axes.set(xlim=(0, begins[-1]), ylim=(total, 0))
        _draw(axes, rectangles, root, amounts, (width / begins[-1], height / total), lambda piece: piece.labels[-1:])
        return axes

    def roofline(
        self,
        spec: DeviceSpec | str,
        dtype: Precision | None = None,
        depth: int | None = None,
        *,
        fold: bool | None = None,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the FLOP/s that rows reached over their FLOPs per byte moved, below the roof of a device.

        A point shows the own amounts of a row, with the rows below it if they are hidden. Its area is the row's share
        of the latency; measured points are filled, predicted ones (``estimate_latency``) are not. Rows without
        multiply-adds are left out, as the axes are logarithmic.

        Args:
            spec: the device, or its name in the table of ``DeviceSpec.of``.
            dtype: dtype whose peak is the roof; None: the dtype of most parameters.
            depth: deepest level shown; None: all levels.
            fold: draw equal siblings as one; None: in models of more than 100 rows.
            ax: axes to draw into; None: new axes.

        Raises:
            InputError: nothing was measured or predicted, or the device or its peak with this dtype is unknown.
            MissingExtraError: matplotlib is not installed.
        """
        check_depth(depth)
        device = spec if isinstance(spec, DeviceSpec) else DeviceSpec.of(spec)
        dtype = dtype or self._precision()
        peak = device.peak(dtype) * clock_of(device)
        root = self._tree(fold)
        flops, read, written = (
            _shown(root, find_amounts(root, by), depth) for by in ("flops", "bytes_read", "bytes_written")
        )
        intensity = {row: flops[row] / (read[row] + written.get(row, 0)) for row in flops if row in read}
        axes = axes_for(ax, figsize=(10, 6), layout="constrained")
        axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte moved", ylabel="FLOP/s")
        x, y = list(intensity.values()), []
        named: dict[LayerInfo, tuple[float, float]] = {}
        for by in _known_latencies(root):
            amounts = find_amounts(root, by)
            latency = _shown(root, amounts, depth)
            points = {row: (intensity[row], flops[row] / latency[row] * 1e3) for row in latency if row in intensity}
            y += [height for _, height in points.values()]
            _scatter(axes, points, latency, _Colours(root, amounts.total), is_measured=by == "latency")
            named |= {row: points[row] for row in sorted(points, key=lambda row: -latency[row])}
        knee = peak / device.bandwidth
        low, high = min(knee, *x) / 3, max(knee, *x) * 3
        axes.plot([low, knee, high], [low * device.bandwidth, peak, peak], color="black", zorder=2)
        axes.set_xlim(low, high)
        axes.set_ylim(top=2 * max(peak, *y))
        precision = str(dtype).removeprefix("torch.")
        axes.set_title(f"{one_line(root.class_name)} on {device.name}, {precision}", parse_math=False)
        axes.grid(alpha=0.3, which="major")
        _name_points(axes, named)
        return axes


def _shown_or_column(root: LayerInfo, by: str, depth: int | None) -> Amounts:
    """Return the amount of each row shown, or the values of a column that does not add up; zeros are left out."""
    if not (isinstance(by, str) and by in COLUMNS and by not in ADDITIVE and COLUMNS[by].kind in _NUMBERS):
        amounts = find_amounts(root, by)
        shown = _shown(root, amounts, depth)
        return replace(amounts, self_amount=shown, unit=Unit.of(amounts.unit.kind, max(shown.values())))
    column = COLUMNS[by]
    figures = {row: column.of(row, row.depth == depth and bool(row.children)) for row in root.walk(depth)}
    values = {row: float(value) for row, value in figures.items() if value}
    if not values:
        raise InputError(f"by={by!r} is unknown for all rows; call measure_latency() or memory() first")
    unit = Unit.of(column.kind, max(values.values()))
    return Amounts(column.header.removesuffix(" (ms)").removesuffix(" %"), unit, values, values)


def _known_latencies(root: LayerInfo) -> list[str]:
    """Return the latencies that were measured and predicted; the measured one, which then fails, if none was."""
    measured = [by for by in ("latency", "estimated_latency") if getattr(root, f"{by}_ms") is not None]
    return measured or ["latency"]


def _scatter(
    axes: Axes,
    points: dict[LayerInfo, tuple[float, float]],
    latency: dict[LayerInfo, float],
    colour: _Colours,
    *,
    is_measured: bool,
) -> None:
    whole = sum(latency.values())
    colours: Any = [colour(row) for row in points]
    edges: Any = "black" if is_measured else colours
    axes.scatter(
        [x for x, _ in points.values()],
        [y for _, y in points.values()],
        s=[12 + 1500 * latency[row] / whole for row in points],
        c=colours if is_measured else "none",
        edgecolors=edges,
        linewidths=0.5 if is_measured else 1.5,
        alpha=0.85,
        zorder=3,
    )


def _shown(root: LayerInfo, amounts: Amounts, depth: int | None) -> dict[LayerInfo, float]:
    """Return the amount of each row down to ``depth``, with hidden rows below it; zeros are left out."""
    values = {row: (amounts.total if row.depth == depth else amounts.self_amount)[row] for row in root.walk(depth)}
    return {row: value for row, value in values.items() if value}


# --------------------------------------------------------------------------------------------- drawing


def _size(axes: Axes) -> tuple[float, float]:
    """Return width and height in points, after title and labels have been laid out."""
    figure: Any = axes.figure
    figure.figure.draw_without_rendering()
    box = axes.get_window_extent()
    return box.width * _POINTS / figure.dpi, box.height * _POINTS / figure.dpi


class _Colours:
    """The colours of rows: each row has the colour of its head, see ``heads_of``."""

    def __init__(self, root: LayerInfo, total: dict[LayerInfo, float]) -> None:
        from matplotlib import colormaps

        full = {row: total.get(row, 0) for row in root.walk()}
        self._colours = {
            head: tuple(colormaps["tab10"](_COLOURS[index % len(_COLOURS)])[:3])
            for index, head in enumerate(heads_of(root, full))
        }

    def __call__(self, row: LayerInfo, strength: float = 0.6) -> tuple[float, ...]:
        """Return the colour of a row, mixed with white."""
        head = next((around for around in (row, *rows_around(row)) if around in self._colours), None)
        base = _GRAY if head is None else self._colours[head]
        return tuple(1 - strength * (1 - part) for part in base)


_STRENGTH = {"module": 0.6, "own": 0.4, "rest": 0.25}


def _draw(
    axes: Axes,
    rectangles: Iterable[Rectangle],
    root: LayerInfo,
    amounts: Amounts,
    scale: tuple[float, float],
    labels: Callable[[Piece], Sequence[str]],
) -> None:
    """Draw rectangles and the labels that fit into them; ``scale`` is points per unit of x and y."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle as Patch

    colour = _Colours(root, amounts.total)
    patches, fills = [], []
    for rectangle in rectangles:
        patches.append(Patch((rectangle.x, rectangle.y), rectangle.width, rectangle.height))
        fills.append(colour(rectangle.piece.row, _STRENGTH[rectangle.piece.kind]))
        _write(axes, rectangle, labels(rectangle.piece), amounts.unit.text(rectangle.piece.amount), scale)
    lines = [min(0.6, min(patch.get_width() * scale[0], patch.get_height() * scale[1]) / 8) for patch in patches]
    axes.add_collection(PatchCollection(patches, facecolors=fills, edgecolors="white", linewidths=lines))


def _write(axes: Axes, rectangle: Rectangle, labels: Sequence[str], amount: str, scale: tuple[float, float]) -> None:
    """Write the first label that fits, with the amount if there is room; in narrow rectangles also upright."""
    width, height = rectangle.width * scale[0] - 4, rectangle.height * scale[1] - 2
    texts = [f"{label}{between}{amount}" for label in labels for between in ("\n", "  ")] + list(labels)
    orientations = [(7.0, width, height, 0), (5.5, width, height, 0), (5.5, height, width, 90)]
    for least, across, along, rotation in orientations if height > 1.5 * width else orientations[:2]:
        for text in texts:
            lines = text.split("\n")
            size = min(10.0, across / (0.58 * max(map(len, lines))), along / (1.25 * len(lines)))
            if size >= least:
                middle = (rectangle.x + rectangle.width / 2, rectangle.y + rectangle.height / 2)
                style: dict[str, Any] = {"fontsize": size, "rotation": rotation, "parse_math": False, "clip_on": True}
                axes.text(*middle, text, ha="center", va="center", **style)
                return


def _in_two(label: str) -> str:
    """Return a long FQN broken into two lines."""
    dots = [index for index, char in enumerate(label) if char == "."]
    if len(label) < 20 or not dots:
        return label
    middle = min(dots, key=lambda dot: abs(2 * dot - len(label))) + 1
    return f"{label[:middle]}\n{label[middle:]}"


def _outline(axes: Axes, rectangle: Rectangle) -> None:
    from matplotlib.patches import Rectangle as Patch

    axes.add_patch(
        Patch(
            (rectangle.x, rectangle.y), rectangle.width, rectangle.height, fill=False, edgecolor="white", linewidth=2.5
        )
    )


def _name_points(axes: Axes, points: dict[LayerInfo, tuple[float, float]]) -> None:
    """Write names beside the first points, leaving out names that would overlap another one, a point or the edge."""
    right, _ = _size(axes)
    figure: Any = axes.figure
    left = axes.get_window_extent().x0
    at = {row: (axes.transData.transform(point) - (left, 0)) * _POINTS / figure.dpi for row, point in points.items()}
    taken = [(x - 3, x + 3, y) for x, y in at.values()]
    n_names = 0
    for row, (x, y) in at.items():
        label = row_label(row)
        begin, end = x + 7, x + 7 + 0.58 * _NAME_SIZE * len(label)
        is_free = all(end < first or begin > last or abs(y - height) > 8 for first, last, height in taken)
        if n_names < _MOST_NAMES and is_free and end < right:
            n_names += 1
            taken.append((begin, end, y))
            style: dict[str, Any] = {"textcoords": "offset points", "fontsize": _NAME_SIZE, "parse_math": False}
            axes.annotate(label, points[row], (7, -2), zorder=4, **style)


def _framed(axes: Axes, root: LayerInfo, amounts: Amounts, meaning: str) -> Axes:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    text = f"{meaning}: {amounts.title}, {amounts.unit.text(amounts.total[root])} in all"
    axes.set_xlabel(text)
    axes.set_title(one_line(root.class_name), parse_math=False)
    return axes
