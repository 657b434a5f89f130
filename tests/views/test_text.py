"""The printed table: layout, columns, options, footer."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from wcwidth import wcswidth

from modelsummary import InputError, Statistics
from modelsummary.layer_info import LayerInfo
from modelsummary.tables import Screen
from modelsummary.views.columns import COLUMNS
from tests.models import Call, Decoder, Stack


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU())
        self.head = nn.Linear(8, 3)
        self.head.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


@pytest.fixture(scope="module")
def stats():
    return Statistics(Small(), (1, 1, 4, 4))


# Conv2d: 2*1*9 + 2 parameters, 2*2*2 outputs of 9 multiply-adds. Linear: 8*3 + 3 parameters, 24 multiply-adds.
# Activations: the outputs of Conv2d, ReLU (8 floats each) and Linear (3 floats).
TABLE = """\
===============================================================================
Layer (type:depth-idx)    Input Shape    Output Shape      Param #    Mult-Adds
===============================================================================
Small                     [1, 1, 4, 4]   [1, 3]                 --           --
├─Sequential: 1-1         [1, 1, 4, 4]   [1, 2, 2, 2]           --           --
│    └─Conv2d: 2-1        [1, 1, 4, 4]   [1, 2, 2, 2]           20           72
│    └─ReLU: 2-2          [1, 2, 2, 2]   [1, 2, 2, 2]           --           --
├─Linear: 1-2             [1, 8]         [1, 3]               (27)           24
===============================================================================
Total params: 47
Trainable params: 20
Non-trainable params: 27
Buffers: 0
Total mult-adds: 96
===============================================================================
Input size (B): 64
Forward activations (B): 76
Params size (B): 188
Buffers size (B): 0
===============================================================================
Execution: shape-only, nothing was computed
==============================================================================="""


def test_the_whole_table(stats):
    assert str(stats) == TABLE
    assert repr(stats) == TABLE


def rows(text):
    """The lines between the header and the totals."""
    return text.split("\n")[3 : text.split("\n").index(text.split("\n")[0], 3)]


def test_depth_adds_hidden_rows_to_the_row_above(stats):
    assert [row.split()[0] for row in rows(stats.table(depth=1))] == ["Small", "├─Sequential:", "├─Linear:"]
    assert rows(stats.table(depth=1))[1].split()[-2:] == ["20", "72"]
    assert rows(stats.table(depth=0))[0].split()[-2:] == ["47", "96"]
    shallow = Statistics(Small(), (1, 1, 4, 4), depth=1)
    assert str(shallow).startswith(stats.table(depth=1).split("Total")[0])
    assert shallow.table() == str(shallow)
    assert shallow.table(depth=None) == str(stats)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, None])
def test_printed_columns_add_up_at_any_depth(depth):
    stats = Statistics(Decoder(), torch.zeros(2, 6, dtype=torch.long))

    def column(name):
        cells = [row.split("  ")[-1].strip() for row in rows(stats.table(columns=[name], depth=depth))]
        return sum(int(cell.strip("()").replace(",", "")) for cell in cells if cell not in ("--", "(recursive)"))

    assert column("num_params") == stats.total_params
    assert column("mult_adds") == stats.total_mult_adds


def test_flat_names(stats):
    assert [row.split("  ")[0] for row in rows(stats.table(branching=False))] == [
        "Small",
        "body (Sequential)",
        "body.0 (Conv2d)",
        "body.1 (ReLU)",
        "head (Linear)",
    ]
    assert str(Statistics(Small(), (1, 1, 4, 4), branching=False)) == stats.table(branching=False)


def test_variable_names(stats):
    text = stats.table(var_names=True)
    assert text.split("\n")[1].startswith("Layer (type (var_name):depth-idx)")
    assert "├─Sequential (body): 1-1" in text
    assert "│    └─Conv2d (0): 2-1" in text


def test_ascii(stats):
    text = stats.table(ascii_only=True)
    assert text.isascii()
    assert "+ Sequential: 1-1" in text
    assert "|    + Conv2d: 2-1" in text


def test_a_narrow_table_keeps_what_was_asked_for(monkeypatch):
    monkeypatch.setattr("modelsummary.views.text.screen_of_output", lambda: Screen(50, "utf-8", True))
    stats = Statistics(nn.Sequential(nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1)), (1, 3, 4, 4))
    assert stats.table(ascii_only=True, columns=["kernel_size", "macs", "params_percent"]).isascii()
    assert "(1)" not in stats.table()
    assert "(1)" in stats.table(var_names=True)


def test_recursive_rows():
    shared = nn.Linear(4, 4)
    stats = Statistics(nn.Sequential(shared, nn.ReLU(), shared), (2, 4))
    assert rows(str(stats))[3].split()[-2:] == ["(recursive)", "32"]
    assert len(rows(stats.table(hide_recursive=True))) == 3
    first, second = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    first.w = second.w = nn.Parameter(torch.ones(1))
    names = [
        row.split()[0] for row in rows(Statistics(nn.Sequential(first, second), (2, 4)).table(hide_recursive=True))
    ]
    assert names == ["Sequential", "├─Sequential:", "│", "├─Sequential:", "│"]  # new layers stay below their parent


def test_all_shapes():
    stats = Statistics(nn.LSTM(4, 5), (7, 2, 4))
    assert "[7, 2, 5]" in str(stats)
    assert "([7, 2, 5], ([1, 2, 5], [1, 2, 5]))" in stats.table(all_shapes=True)
    stats = Statistics(Call(lambda self, x, m: x), {"x": torch.rand(2), "m": torch.rand(2, 3)}, batch_dim=0)
    assert "{x: [-1], m: [-1, 3]}" in stats.table(all_shapes=True)


def test_units():
    stats = Statistics(nn.Linear(1000, 1000), (10, 1000))
    text = stats.table(columns=["num_params", "mult_adds", "params_bytes"], units="M")
    assert text.split("\n")[1].endswith("    Param # (M)    Mult-Adds (M)    Params Size (MB)")
    assert rows(text)[0].split() == ["Linear", "1.00", "10.00", "4.00"]
    text = stats.table(columns=["params_bytes"], units="Ki")
    assert text.split("\n")[1].endswith("Params Size (KiB)")
    assert rows(text)[0].split() == ["Linear", "3,910.16"]  # 4,004,000 / 1024
    assert "Params Size (B)" in stats.table(columns=["params_bytes"])


def test_every_fact_of_a_layer_is_a_column(stats):
    facts = set(LayerInfo.__dataclass_fields__) | {
        name for name, value in vars(LayerInfo).items() if isinstance(value, property)
    }
    structural = {"name", "layer_id", "module", "depth", "depth_index", "is_recursive", "parent_info", "children"}
    structural |= {"call_order", "key"}
    own_shares = {"self_trainable_params", "self_params_bytes", "self_buffers", "self_buffer_bytes"}
    flags = {"has_uninitialized", "is_uncertain", "is_leaf", "uncounted_ops", "values"}
    assert facts - structural - own_shares - flags <= set(COLUMNS)
    text = stats.table(columns=list(COLUMNS))
    for column in COLUMNS.values():
        assert column.header in text.split("\n")[1]


def test_columns_of_one_layer(stats):
    cells = {
        "kernel_size": "[3, 3]",
        "groups": "1",
        "inner_layers": "weight [2, 1, 3, 3], bias [2]",
        "trainable": "True",
        "training": "train",
        "fqn": "body.0",
        "class_name": "Conv2d",
        "executed": "True",
        "params_percent": "42.55%",  # 20 of 47
        "total_params": "20",
        "params_bytes": "80",
        "macs": "72",
        "flops": "144",
        "input_bytes": "64",
        "output_bytes": "32",
        "size_bytes": "176",
        "buffer_bytes": "--",
    }
    for column, expected in cells.items():
        assert rows(stats.table(columns=[column]))[2].split("  ", 6)[-1].strip().endswith(expected), column


def test_an_unknown_column_lists_the_known_ones(stats):
    with pytest.raises(
        InputError, match=r"unknown column 'mac'; expected some of: macs, .* and \d+ more; did you mean 'macs'.*\?$"
    ):
        stats.table(columns=["mac"])
    with pytest.raises(InputError, match="columns must be a list of names, got 3"):
        stats.table(columns=3)
    with pytest.raises(InputError, match="unknown unit prefix 'MB'"):
        stats.table(units="MB")


def test_groups_are_those_of_convolutions_not_a_setting_of_a_model():
    model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=2))
    model.groups = 2
    records = Statistics(model, (1, 4, 2, 2)).to_records(["groups"])
    assert [each["groups"] for each in records] == [None, 2]


def test_without_a_forward_there_is_nothing_to_say_of_runs():
    text = str(Statistics(Stack()))
    assert text.split("\n")[1].rsplit("  ", maxsplit=1)[-1] == "Param #"
    assert "mult-adds" not in text
    assert "Total params: 65" in text


def test_wide_characters_align():
    wide = type("畳み込み", (nn.Conv2d,), {})
    lines = rows(str(Statistics(nn.Sequential(wide(1, 2, 3), nn.ReLU()), (1, 1, 4, 4))))
    assert len({wcswidth(line) for line in lines}) == 1


def test_uncertain_mult_adds_are_a_lower_bound():
    stats = Statistics(Call(lambda self, x: torch.linalg.inv(self.linear(x)), linear=nn.Linear(4, 4)), (4, 4))
    assert [row.split()[-1] for row in rows(str(stats))] == ["?", "64"]
    assert rows(stats.table(depth=0))[0].endswith("≥ 64")
    assert rows(stats.table(depth=0, ascii_only=True))[0].endswith(">= 64")
    assert "Total mult-adds: >= 64" in str(stats)
    assert "Not in mult-adds, no formula (see register_op_cost): aten.linalg_inv_ex (1x)" in str(stats)


def test_long_lists_of_notes_are_cut():
    def risky(self, x):
        for layer in self.layers:
            with contextlib.suppress(RuntimeError):
                layer(x)
        return x

    stats = Statistics(Call(risky, layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(7))), (2, 4))
    assert "layers.4: raised an exception\n... and 2 more rows with a note" in str(stats)
