"""Equal consecutive siblings are one row; everything else stays as it is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import Statistics
from modelsummary.views.folding import deepest_fitting, fold, unfolded


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


def shown(*layers):
    root = Statistics(nn.Sequential(*layers), (2, 4)).root
    return [(each.row.name, each.times) for each in fold(root)]


def test_equal_blocks_are_one_row():
    assert shown(*(Block() for _ in range(5))) == [("", 1), ("0", 5), ("up", 1), ("act", 1), ("down", 1)]


def test_blocks_that_differ_in_width_mode_or_training_of_parameters_are_not():
    frozen = Block().requires_grad_(False)
    names = [(name, count) for name, count in shown(Block(), Block(8), Block().eval(), frozen) if name.isdigit()]
    assert names == [("0", 1), ("1", 1), ("2", 1), ("3", 1)]


def test_equal_rows_that_are_apart_stay():
    assert shown(nn.ReLU(), nn.Linear(4, 4), nn.ReLU()) == [("", 1), ("0", 1), ("1", 1), ("2", 1)]


def test_a_tied_layer_differs_from_the_first_that_has_its_parameters():
    layer = nn.Linear(4, 4)
    assert shown(layer, layer, layer) == [("", 1), ("0", 1), ("0", 2)]


def test_rows_stands_for_the_rows_of_equal_parents():
    """3 outer blocks with 2 inner ones each: the inner row stands for 6."""
    root = Statistics(nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(3))), (2, 4)).root
    counts = [(each.times, len(each.rows)) for each in fold(root)]
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
        rows = [row for each in fold(root, level) for row in each.rows]
        assert sorted(map(id, rows)) == sorted(id(each.row) for each in unfolded(root, level))
    for each in fold(root):
        assert {(row.class_name, row.self_macs, row.self_params) for row in each.rows} == {
            (each.row.class_name, each.row.self_macs, each.row.self_params)
        }


def test_the_deepest_level_that_fits():
    root = Statistics(nn.Sequential(*(Block(width) for width in (4, 8, 12))), torch.ones(2, 4)).root
    assert deepest_fitting(root, 1 + 3 + 9) is None
    assert deepest_fitting(root, 12) == 1
    assert deepest_fitting(root, 1) == 1
