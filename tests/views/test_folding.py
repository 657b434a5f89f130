"""Equal consecutive siblings are one row; everything else stays as it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import Statistics
from modelsummary.views.folding import Folding, deepest_fitting
from tests.models import Call


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def shown(*layers):
    root = Statistics(nn.Sequential(*layers), (2, 4)).root
    return [(each.row.name, each.times) for each in Folding(root).walk()]


def test_equal_blocks_are_one_row():
    assert shown(*(Block() for _ in range(5))) == [("", 1), ("0", 5), ("up", 1), ("act", 1), ("down", 1)]


def test_blocks_that_differ_in_width_mode_or_training_of_parameters_are_not():
    frozen = Block().requires_grad_(False)
    names = [(name, count) for name, count in shown(Block(), Block(8), Block().eval(), frozen) if name.isdigit()]
    assert names == [("0", 1), ("1", 1), ("2", 1), ("3", 1)]


@pytest.mark.parametrize("named", [False, True])
def test_a_cache_that_grows_from_layer_to_layer_does_not_keep_layers_apart(named):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, cache):
            cache["keys"] = (*cache["keys"], x)
            return self.linear(x)

    def forward(self, x):
        cache = {"keys": ()}
        for layer in self.layers:
            x = layer(x, cache=cache) if named else layer(x, cache)
        return x

    root = Statistics(Call(forward, layers=nn.ModuleList(Layer() for _ in range(3))), (2, 4)).root
    assert [each.times for each in Folding(root).walk()] == [1, 1, 3, 1]


def test_equal_rows_that_are_apart_stay():
    assert shown(nn.ReLU(), nn.Linear(4, 4), nn.ReLU()) == [("", 1), ("0", 1), ("1", 1), ("2", 1)]


def test_a_tied_layer_differs_from_the_first_that_has_its_parameters():
    layer = nn.Linear(4, 4)
    assert shown(layer, layer, layer) == [("", 1), ("0", 1), ("0", 2)]


def test_rows_stands_for_the_rows_of_equal_parents():
    """3 outer blocks with 2 inner ones each: the inner row stands for 6."""
    root = Statistics(nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3))), (2, 4)).root
    counts = [(each.times, len(each.rows)) for each in Folding(root).walk()]
    assert counts == [(1, 1), (3, 3), (2, 6), (1, 6), (1, 6), (1, 6)]


BLOCKS = st.recursive(
    st.sampled_from([nn.ReLU, nn.Tanh, lambda: nn.Linear(4, 4)]),
    lambda inner: st.lists(inner, min_size=1, max_size=4).map(
        lambda made: lambda: nn.Sequential(*(each() for each in made))
    ),
    max_leaves=12,
)


@given(BLOCKS, st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost(make, depth):
    """Every row of the tree is behind exactly one shown row, and sums over them are those of the tree."""
    root = Statistics(nn.Sequential(make(), make()), (2, 4)).root
    for level in (None, depth):
        rows = [row for each in Folding(root).walk(level) for row in each.rows]
        assert sorted(map(id, rows)) == sorted(id(each.row) for each in Folding(root, fold=False).walk(level))
    for each in Folding(root).walk():
        assert {(row.class_name, row.self_macs, row.self_params) for row in each.rows} == {
            (each.row.class_name, each.row.self_macs, each.row.self_params)
        }


def test_the_deepest_level_that_fits():
    root = Statistics(nn.Sequential(*(Block(width) for width in (4, 8, 12))), torch.ones(2, 4)).root
    assert deepest_fitting(root, 1 + 3 + 9) is None
    assert deepest_fitting(root, 12) == 1
    assert deepest_fitting(root, 1) == 1


# ------------------------------------------------------------------------------------------ printed tables


def deep(blocks=40):
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(blocks))), nn.Linear(4, 2))


def test_a_large_table_is_folded():
    """1 + 1 + 40 x 4 + 1 rows; folded: the model, the list, a block with its 3 layers, the head."""
    table = str(Statistics(deep(), (2, 4)))
    lines = [line.partition("[")[0].rstrip() for line in table.splitlines()[3:10]]
    assert lines == [
        "Sequential",
        "├─Sequential (0): 1-1",
        "│    └─40 x Block (0 .. 39): 2-1",
        "│    │    └─Linear (up): 3-1",
        "│    │    └─ReLU (act): 3-2",
        "│    │    └─Linear (down): 3-3",
        "├─Linear (1): 1-2",
    ]
    assert "Shown: 7 of 163 rows (equal ones once); all of them: table(depth=None, fold=False)" in table


def test_folded_rows_show_totals_of_one():
    """A block: 2 x (4 x 4 + 4) parameters, 2 rows of the batch x 32 multiply-adds; the list has 40 of them."""
    lines = str(Statistics(deep(), (2, 4))).splitlines()
    assert (
        lines[1].split() == "Layer (type (var_name):depth-idx) Input Shape Output Shape Total Params Total MACs".split()
    )
    assert lines[5].split()[-2:] == ["40", "64"]
    assert lines[4].split()[-2:] == ["1,600", "2,560"]


def test_every_row_is_a_wish_away():
    stats = Statistics(deep(), (2, 4))
    full = stats.table(depth=None, fold=False)
    assert full.count("Linear: 3-") == 80
    assert "Shown:" not in full
    assert len(stats.table(fold=False).splitlines()) == len(full.splitlines())
    assert stats.table(depth=1).count("├─") == 2


def test_small_tables_are_folded_on_request():
    stats = Statistics(nn.Sequential(Block(), Block()), (2, 4))
    assert "2 x Block" not in str(stats)
    assert "├─2 x Block: 1-1" in stats.table(fold=True)
    assert "0 .. 1 (2 x Block)" in stats.table(fold=True, branching=False)


def test_levels_are_left_out_until_it_fits():
    """60 blocks of different widths: 60 rows at the second level are too many, so one level remains."""
    model = nn.Sequential(nn.Sequential(*(Block(width) for width in range(1, 61))))
    table = str(Statistics(model, (2, 4)))
    assert "1 of 3 levels" in table
    assert (table.count("├─"), table.count("└─")) == (1, 0)


def test_measured_times_of_equal_rows_are_their_mean():
    stats = Statistics(nn.Sequential(Block(), Block()), (2, 4))
    for row, milliseconds in zip(stats.root.children, (1.0, 3.0), strict=True):
        row.latency_ms = milliseconds
    assert stats.table(["latency_ms"], fold=True).splitlines()[4].split()[-1] == "2.000"


def test_exports_hold_every_row():
    stats = Statistics(deep(), (2, 4))
    assert len(stats.to_records()) == 163
    assert stats.to_markdown().count("\n") == 163 + 1


def test_a_wide_table_has_short_names():
    model = deep()
    model[0].a_name_that_is_longer_than_any_that_people_would_ever_want_to_read_in_a_table = nn.Linear(4, 4)
    lines = str(Statistics(model, (2, 4))).splitlines()
    assert "Output Shape" in lines[1]
    assert max(map(len, lines)) <= 120


def test_calls_of_one_module_have_one_name():
    layer = nn.Linear(4, 4)
    table = Statistics(Call(lambda self, x: [x := self.layer(x) for _ in range(9)][-1], layer=layer), (2, 4)).table(
        fold=True, var_names=True
    )
    assert "├─8 x Linear (layer): 1-2" in table
