"""Pictures: what is drawn is what the tree says."""

from __future__ import annotations

import pickle
import sys
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import DeviceSpec, InputError, MissingExtraError, Statistics
from modelsummary.views.amounts import ADDITIVE, find_amounts
from modelsummary.views.folding import folded_tree
from modelsummary.views.treemap_layout import heads_of, icicle, pieces, treemap
from tests.models import Call
from tests.trees import SPECS, tree
from tests.untouched import untouched

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("matplotlib.pyplot")
pytest.importorskip("squarify")
matplotlib.use("Agg")
KINDS = ["bars", "treemap", "icicle"]


@pytest.fixture(autouse=True)
def _close():
    yield
    matplotlib.pyplot.close("all")


class WithOwn(nn.Module):
    """4 parameters of its own, 9 and 4 in its children; MACs: 2 x (6 + 3) and 2 x 4 of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.last = nn.Linear(3, 1)
        self.own = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return self.last(self.first(x @ self.own))


def rectangles(axes):
    """Width and height of what was drawn."""
    boxes = [path.get_extents() for path in axes.collections[0].get_paths()]
    return [(box.width, box.height) for box in boxes]


def texts(axes):
    return {text.get_text() for text in axes.texts}


# ------------------------------------------------------------------------------------------------ bars


def test_bars_add_up_to_the_model():
    axes = Statistics(WithOwn(), (2, 2)).plot.bars("params")
    assert [bar.get_width() for bar in axes.patches] == [9, 4, 4]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first", "WithOwn", "last"]
    assert axes.get_xlabel() == "Parameters"
    assert texts(axes) == {"9", "4"}


def test_bars_of_what_is_hidden_and_of_others():
    plot = Statistics(WithOwn(), (2, 2)).plot
    assert [bar.get_width() for bar in plot.bars("macs", depth=0).patches] == [2 * (6 + 3 + 4)]
    axes = plot.bars("macs", top=1)
    assert [bar.get_width() for bar in axes.patches] == [12, 8 + 6]
    assert axes.get_yticklabels()[1].get_text() == "2 others"


def test_bars_of_a_column_that_does_not_add_up():
    axes = Statistics(nn.Sequential(nn.Linear(1000, 500), nn.ReLU()), (1, 1000)).plot.bars("output_bytes")
    assert [bar.get_width() for bar in axes.patches] == [2.0, 2.0, 2.0]
    assert axes.get_xlabel() == "Output Size (kB)"


def test_the_unit_stands_in_the_label():
    stats = Statistics(nn.Sequential(nn.Linear(1000, 500), nn.Linear(500, 10)), (1, 1000))
    axes = stats.plot.bars("num_params")
    assert axes.get_xlabel() == "Parameters (K)"
    assert [bar.get_width() for bar in axes.patches] == [500.5, 5.01]
    assert stats.plot.bars("param_bytes").get_xlabel() == "Size of parameters (MB)"
    assert stats.plot.treemap("params_bytes").get_xlabel() == "area: Size of parameters, 2.02 MB in all"


def test_a_second_call_has_a_bar_of_its_own():
    shared = Call(lambda self, x: self.linear(self.linear(x)), linear=nn.Linear(2, 2))
    axes = Statistics(shared, (1, 2)).plot.bars("macs")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["linear", "linear (call 2)"]


# --------------------------------------------------------------------------------------------- folding


def alike(count):
    """Equal blocks of Linear 2 -> 3 (9 parameters), ReLU and Linear 3 -> 2 (8 parameters), and a head of 3."""
    block = lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))  # noqa: E731
    return nn.Sequential(nn.Sequential(*(block() for _ in range(count))), nn.Linear(2, 1))


def test_equal_modules_are_one_bar():
    axes = Statistics(alike(40), (1, 2)).plot.bars("params")
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["40 x 0.0…39.0", "40 x 0.0…39.2", "1"]
    assert [bar.get_width() for bar in axes.patches] == [40 * 9, 40 * 8, 3]


def test_equal_modules_are_drawn_one_by_one_on_request_and_in_small_models():
    assert len(Statistics(alike(40), (1, 2)).plot.bars("params", top=100, fold=False).patches) == 40 * 2 + 1
    small = Statistics(alike(3), (1, 2)).plot
    assert len(small.bars("params").patches) == 3 * 2 + 1
    assert len(small.bars("params", fold=True).patches) == 2 + 1
    assert len(small.bars("output_bytes", fold=True).patches) == 1 + 1 + 3 * 4 + 1


@pytest.mark.parametrize("kind", ["treemap", "icicle"])
def test_folded_areas_add_up(kind):
    stats = Statistics(alike(40), (1, 2))
    axes = stats.plot(kind)
    whole = 40 * 17 + 3
    sizes = [w * h if kind == "treemap" else h for w, h in rectangles(axes)]
    leaves = sizes if kind == "treemap" else sizes[-3:]
    scale = sum(leaves) / whole if kind == "treemap" else 1
    assert sorted(size / scale for size in leaves) == pytest.approx([3, 40 * 8, 40 * 9])
    assert axes.get_xlabel().endswith("683 in all")
    assert any("40 x 0" in text for text in texts(axes))


@settings(deadline=None)
@given(SPECS)
def test_a_folded_tree_has_the_same_totals(spec):
    root = tree(spec)
    if not root.num_params:
        return
    merged = folded_tree(root)
    assert sum(row.self_params for row in merged.walk()) == root.num_params
    amounts = find_amounts(merged, "params")
    for row in merged.walk():
        assert amounts.total[row] == amounts.self_amount[row] + sum(amounts.total[child] for child in row.children)


def test_a_folded_roofline():
    """A point of equal modules has the work and the time of all: its place is their mean speed."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    stats = Statistics(model, (3, 4))
    for row, milliseconds in zip(stats.root.walk(), (5.0, 2.0, 3.0), strict=True):
        row.latency_ms, row.self_latency_ms = milliseconds, milliseconds if row.depth else 0.0
    axes = stats.plot.roofline(DeviceSpec("mine", {torch.float32: 1e6}, bandwidth=1e5), fold=True)
    (point,) = axes.collections[0].get_offsets()
    assert point.tolist() == pytest.approx([2 * 48 / (4 * (12 + 16 + 12)), 2 * (48 + 48) / 5e-3])


# ------------------------------------------------------------------------------------------ rectangles


def test_areas_of_a_treemap():
    axes = Statistics(WithOwn(), (2, 2)).plot.treemap("params")
    width, height = axes.get_xlim()[1], axes.get_ylim()[0]
    shares = sorted(w * h / (width * height) for w, h in rectangles(axes))
    assert shares == pytest.approx([4 / 17, 4 / 17, 9 / 17])
    assert {text.split("\n")[0] for text in texts(axes)} == {"first", "last", "WithOwn (own)"}


def test_heights_of_an_icicle():
    axes = Statistics(WithOwn(), (2, 2)).plot.icicle("params")
    assert [height for _, height in rectangles(axes)] == pytest.approx([17, 9, 4, 4])
    assert [box.get_extents().y0 for box in axes.collections[0].get_paths()] == pytest.approx([0, 0, 9, 13])
    assert len(rectangles(Statistics(WithOwn(), (2, 2)).plot.icicle("params", depth=0))) == 1


@settings(deadline=None)
@given(SPECS, st.integers(1, 50), st.integers(0, 4) | st.none())
def test_pieces_add_up_exactly(spec, parts, depth):
    root = tree(spec)
    if not root.num_params:
        return
    amounts = find_amounts(root, "params")
    whole = pieces(root, amounts, depth, root.num_params / parts)
    assert whole.amount == root.num_params
    pending = [whole]
    for piece in pending:
        assert piece.amount > 0
        assert not piece.inside or piece.amount == sum(each.amount for each in piece.inside)
        pending += piece.inside
    leaves = [piece for piece in pending if not piece.inside]
    assert sum(piece.amount for piece in leaves) == root.num_params


@settings(deadline=None)
@given(SPECS)
def test_rectangles_lie_in_their_parents_and_fill_them(spec):
    root = tree(spec)
    if not root.num_params:
        return
    whole = pieces(root, find_amounts(root, "params"), None, root.num_params / 200)
    areas = {each.piece: each for each in treemap(whole, 300.0, 200.0)}
    for piece, outer in areas.items():
        assert outer.width * outer.height == pytest.approx(60000 * piece.amount / whole.amount, rel=1e-6, abs=1e-3)
        for inner in (areas[each] for each in piece.inside):
            assert outer.x - 1e-3 <= inner.x
            assert outer.y - 1e-3 <= inner.y
            assert inner.x + inner.width <= outer.x + outer.width + 1e-3
            assert inner.y + inner.height <= outer.y + outer.height + 1e-3
    bars = {each.piece: each for each in icicle(whole)}
    for piece, outer in bars.items():
        at = outer.y
        for inner in (bars[each] for each in piece.inside):
            assert (inner.x, inner.y) == (outer.x + 1, at)
            at += inner.height
        assert not piece.inside or at == outer.y + outer.height


def test_many_small_modules_are_put_together():
    root = tree((0, [(1, [])] * 5000))
    whole = pieces(root, find_amounts(root, "params"), None, 5000 / 250)
    assert {each.amount for each in whole.inside} == {20}
    assert len(whole.inside) == 250
    assert whole.inside[0].labels == ("20 small: 0 … 19", "20 small")
    assert len(list(treemap(whole, 800, 600))) == 251


def test_levels_of_an_icicle_above_the_colours_are_narrow():
    """One module around all others: two levels without a colour of their own, then the layers."""
    axes = Statistics(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))).plot.icicle("params")
    assert [width for width, _ in rectangles(axes)] == pytest.approx([0.2, 0.2, 1, 1])


def test_colours_go_to_the_children_of_the_one_that_has_nearly_all():
    root = tree((0, [(1, []), (0, [(50, []), (49, []), (0, [])])]))
    heads = heads_of(root, find_amounts(root, "params").total)
    assert [head.fqn for head in heads] == ["0", "1.0", "1.1"]


# ------------------------------------------------------------------------------------------- rooflines


def test_points_and_roof():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    stats = Statistics(model, (3, 4))
    with pytest.raises(InputError, match=r"call measure_latency\(\) first"):
        stats.plot.roofline("H100")
    for row, milliseconds in zip(stats.root.walk(), (10.0, 2.0, 3.0, 4.0), strict=True):
        row.latency_ms, row.self_latency_ms = milliseconds, milliseconds if row.depth else 1.0
    axes = stats.plot.roofline(DeviceSpec("mine", {torch.float32: 1e6}, bandwidth=1e5))
    # 3 x 4 x 8 and 3 x 8 x 2 multiply-adds; floats: 12 + 32 in, 24 out, and 24 + 16 in, 6 out
    expected = [(2 * 96 / (4 * 68), 2 * 96 / 2e-3), (2 * 48 / (4 * 46), 2 * 48 / 4e-3)]
    for point, place in zip(axes.collections[0].get_offsets(), expected, strict=True):
        assert point.tolist() == pytest.approx(place)
    knee = axes.lines[0].get_xydata()[1]
    assert knee.tolist() == [10, 1e6]
    assert axes.get_title() == "Sequential on mine, float32"
    with pytest.raises(InputError, match=r"peak of mine with torch\.float16 is not known"):
        stats.plot.roofline(DeviceSpec("mine", {torch.float32: 1e6}, 1e5), torch.float16)


def test_names_of_points_overlap_nothing():
    """Ten layers that reach similar speeds at the same intensity."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(10)), nn.Linear(8, 4, bias=False))
    stats = Statistics(model, (3, 8))
    for index, row in enumerate(stats.root.walk()):
        row.latency_ms = row.self_latency_ms = 10.0 + index
    axes = stats.plot.roofline(DeviceSpec("mine", {torch.float32: 1e6}, bandwidth=1e5))
    axes.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert boxes
    assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
    assert all(box.x1 < axes.get_window_extent().x1 for box in boxes)


def test_a_measured_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with untouched(model):
        stats = Statistics(model, (3, 4)).measure_latency(runs=2, warmup=0)
        stats.memory()
        for by in ("latency", "activation"):
            assert stats.plot.treemap(by).get_xlabel().startswith("area: ")
        assert len(stats.plot.roofline("H100").collections[0].get_offsets()) == 2
        stats.estimate_latency("H100")
        total = find_amounts(stats.root, "estimated_latency").total[stats.root]
        assert total == pytest.approx(stats.root.estimated_latency_ms)


# --------------------------------------------------------------------------------------------- manners


@pytest.mark.parametrize("kind", [*KINDS, "roofline"])
def test_it_draws_into_given_axes(kind):
    stats = Statistics(WithOwn(), (2, 2)).measure_latency(runs=1, warmup=0)
    axes = matplotlib.pyplot.subplots()[1]
    options = {"spec": "H100"} if kind == "roofline" else {}
    assert stats.plot(kind, **options, ax=axes) is axes
    with pytest.raises(InputError, match=r"ax must be matplotlib Axes.*, got 3"):
        stats.plot(kind, **options, ax=3)
    with pytest.raises(InputError, match=r"depth must be an integer >= 0.*, got -1"):
        stats.plot(kind, **options, depth=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_drawn_as_they_are(kind):
    model = nn.Sequential()
    for name in ("$\\frac{$", "<script>", 'a"\nb', "{}%s"):
        model.add_module(name, nn.Linear(2, 2))
    axes = Statistics(model, (1, 2)).plot(kind)
    axes.figure.canvas.draw()
    drawn = texts(axes) | {label.get_text() for label in axes.get_yticklabels()}
    assert {"$\\frac{$", "<script>", 'a" b', "{}%s"} <= {text.split("\n")[0].split("  ")[0] for text in drawn}


@pytest.mark.parametrize("kind", KINDS)
def test_deep_and_wide_models(kind):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)) for _ in range(300)])
    axes = Statistics(model, (1, 3)).plot(kind)
    assert len(axes.patches) + sum(len(each.get_paths()) for each in axes.collections) < 1000
    axes.figure.canvas.draw()


def test_pickled_statistics_are_drawn():
    stats = pickle.loads(pickle.dumps(Statistics(WithOwn(), (2, 2)).measure_latency(runs=1, warmup=0)))
    assert len(rectangles(stats.plot.treemap("macs"))) == 3
    assert stats.plot.roofline("H100").get_title() == "WithOwn on H100, float32"


def test_errors():
    plot = Statistics(WithOwn(), (2, 2)).plot
    with pytest.raises(
        InputError,
        match=r"by must be an amount that adds up .* got 'parms'; expected .*; did you mean .*'params'.*\?$",
    ):
        plot.bars("parms")
    with pytest.raises(InputError, match="by must be an amount that adds up over modules, got 'output_bytes'"):
        plot.treemap("output_bytes")
    with pytest.raises(InputError, match=r"call memory\(\) first"):
        plot.icicle("activation")
    with pytest.raises(InputError, match=r"call measure_latency\(backward=True\) first"):
        plot.icicle("backward_latency")
    with pytest.raises(InputError, match=r"by='buffers' is 0 for all modules of WithOwn$"):
        plot.bars("buffers")
    with pytest.raises(InputError, match="is 0 for all modules of WithOwn; pass an input to Statistics"):
        Statistics(WithOwn()).plot.bars("macs")
    with pytest.raises(InputError, match="by='peak_bytes' is unknown for all rows"):
        plot.bars("peak_bytes")
    with pytest.raises(InputError, match="top must be an integer >= 1, got 0"):
        plot.bars(top=0)
    with pytest.raises(InputError, match=r"kind must be 'bars'.*, got 'pie'"):
        plot("pie")


def test_every_name_of_an_amount():
    stats = Statistics(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), (3, 2))
    stats.measure_latency(runs=1, warmup=0, backward=True).estimate_latency("H100")
    stats.memory()
    for name in ADDITIVE:
        amounts = find_amounts(stats.root, name)
        assert amounts.total[stats.root] == pytest.approx(sum(amounts.self_amount.values()))


@pytest.mark.parametrize(
    ("library", "kind"), [("matplotlib", "bars"), ("matplotlib", "icicle"), ("squarify", "treemap")]
)
def test_without_the_extra(library, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        MissingExtraError, match=rf"{library} is not installed; pip install 'torch-modelsummary\[plot\]'"
    ):
        Statistics(WithOwn(), (2, 2)).plot(kind)


def test_shares_of_hidden_rows_count():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    axes = Statistics(model, (1, 2)).plot.bars(by="params_percent", depth=1)
    widths = sorted(round(patch.get_width(), 1) for patch in axes.patches)
    assert widths == [33.3, 66.7]
    matplotlib.pyplot.close("all")
