"""What differs between two models."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from modelsummary import InputError, ModelStatistics, Statistics
from modelsummary.tables import Screen
from modelsummary.views.diff import diff_trees
from tests.untouched import untouched


def mlp(hidden=8, out=2):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, out))


def found(diff):
    """Status, names and what differs, of all that is not the same."""
    return [
        (row.status, row.before and row.before.fqn, row.after and row.after.fqn, row.differs)
        for row in diff.rows
        if row.status != "same"
    ]


def test_equal_models():
    model, other = mlp(), Statistics(mlp(), (3, 4))
    with untouched(model):
        diff = Statistics(model, (3, 4)).diff(other)
    assert not diff
    assert diff.changed is False
    assert found(diff) == []
    assert "Nothing differs: Sequential and Sequential have the same 4 modules" in str(diff)
    assert "Linear" not in str(diff)
    assert str(diff.table(all=True)).count("Linear") == 2


def test_a_changed_layer():
    diff = Statistics(mlp(), (3, 4)).diff(Statistics(mlp(out=5), (3, 4)))
    assert diff
    assert found(diff) == [
        ("changed", "", "", ("output_size",)),
        ("changed", "2", "2", ("parameters", "macs", "output_size")),
    ]
    last = diff.rows[-1]
    assert last.change("params") == (18, 45, 27)  # 8 x 2 + 2 and 8 x 5 + 5
    assert last.change("macs") == (48, 120, 72)  # 3 x 8 x 2 and 3 x 8 x 5
    assert last.change("params_bytes") == (72, 180, 108)
    assert last.change("latency_ms") == (None, None, None)
    assert diff.totals["params"] == (58, 85, 27)
    assert diff.totals["macs"] == (144, 216, 72)


def test_the_table():
    changed = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2), nn.Softmax(-1))
    lines = str(Statistics(mlp(), (3, 4)).diff(Statistics(changed, (3, 4)))).splitlines()
    cells = [" ".join(line.split()) for line in lines if "===" not in line]
    assert cells == [
        "Module Class Differs in Params MACs Bytes",
        "~ 1 ReLU -> GELU class_name 0 0 0",
        "+ 3 Softmax 0 0 0",
        "Total 0 0 0",
        "Figures are changes; in all:",
        "Params: 58 -> 58",
        "MACs: 144 -> 144",
        "Bytes: 232 -> 232",
        "Sequential -> Sequential: 1 added, 1 changed, 3 same",
    ]
    assert len(set(map(len, (line for line in lines if "===" in line)))) == 1


def test_the_table_of_large_figures_fits_on_a_page():
    """Layers of 1,000 x 1,000 become 1,000 x 2,000 and 2,000 x 1,000: a million more weights each."""

    def net(hidden):
        layers = [nn.Linear(1000, hidden, bias=False), nn.Linear(hidden, 1000, bias=False)]
        return nn.ModuleDict({"a_name_that_takes_much_room": nn.Sequential(*layers)})

    lines = str(Statistics(net(1000)).diff(Statistics(net(2000)))).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[1].split() == ["Module", "Class", "Differs", "in", "Params", "(M)", "Bytes", "(MB)"]
    assert [line.split()[-2:] for line in lines if line.startswith("~")] == [["+1.00", "+4.00"]] * 2
    assert "Params: 2,000,000 -> 4,000,000" in lines


@pytest.mark.parametrize(("width", "missing"), [(40, "Bytes (MB), Class, MACs (M)"), (60, "Bytes (MB)")])
def test_the_table_fits_into_a_narrow_terminal(width, missing):
    with torch.device("meta"):
        before, after = (nn.Sequential(nn.Linear(1000, hidden), nn.Linear(hidden, 1000)) for hidden in (1000, 2000))
    diff = Statistics(before, (1, 1000)).diff(Statistics(after, (1, 1000)))
    text = diff._report().text(Screen(width))
    assert max(map(len, text.splitlines())) <= width
    assert text.splitlines()[0] == "=" * len(text.splitlines()[0])
    assert f"Left out, as {width} characters have no room: {missing}" in " ".join(text.split())


def test_an_inserted_layer_renames_those_behind_it():
    before, after = mlp(), nn.Sequential(nn.Linear(4, 4), *mlp())
    diff = Statistics(before, (3, 4)).diff(Statistics(after, (3, 4)))
    assert found(diff) == [
        ("added", None, "0", ()),
        ("renamed", "0", "1", ()),
        ("renamed", "1", "2", ()),
        ("renamed", "2", "3", ()),
    ]
    assert "> 0 -> 1 Linear" in " ".join(str(diff).split())
    removed = Statistics(after, (3, 4)).diff(Statistics(before, (3, 4)))
    assert found(removed)[0] == ("removed", "0", None, ())


class Block(nn.Module):
    """Two layers with norms: the norm of a wide block fits into the next stage of a narrow model."""

    def __init__(self, channels, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(channels, width, 1), nn.BatchNorm1d(width)
        self.conv2, self.bn2 = nn.Conv1d(width, 2 * channels, 1), nn.BatchNorm1d(2 * channels)


def stages(factor):
    return nn.Sequential(*(Block(channels, factor * channels) for channels in (2, 4, 8)))


def test_a_wider_model_is_changed_and_not_renamed():
    with torch.device("meta"):
        before, after = stages(1), stages(2)
    diff = Statistics(before).diff(Statistics(after))
    assert found(diff) == [
        ("changed", f"{stage}.{name}", f"{stage}.{name}", differs)
        for stage in range(3)
        for name, differs in (
            ("conv1", ("parameters",)),
            ("bn1", ("parameters", "buffer_bytes")),
            ("conv2", ("parameters",)),
        )
    ]


def test_resnet_50_becomes_resnext_50():
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        before, after = models.resnet50(), models.resnext50_32x4d()
    rows = Statistics(before).diff(Statistics(after)).rows
    assert [row.before.fqn for row in rows] == [row.after.fqn for row in rows]
    # 3 convolutions and 2 norms in each of 16 blocks; the third norm and the shortcuts are as wide as before.
    assert Counter(row.status for row in rows) == {"changed": 16 * 5, "same": len(rows) - 16 * 5}


def test_an_inserted_block_renames_those_behind_it():
    """Blocks are told apart by what they contain, as all have the same class."""
    with torch.device("meta"):
        before, after = nn.Sequential(Block(4, 4), Block(8, 8)), stages(1)
    rows = Statistics(before).diff(Statistics(after)).rows
    assert [(row.before.fqn, row.after.fqn) for row in rows if row.before and "." not in row.before.fqn] == [
        ("", ""),
        ("0", "1"),
        ("1", "2"),
    ]
    assert Counter(row.status for row in rows) == {"added": 5, "renamed": 10, "same": 1}


def test_the_second_of_two_changes_behind_an_insertion():
    before = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    after = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 3))
    assert found(Statistics(before).diff(Statistics(after))) == [
        ("added", None, "1", ()),
        ("renamed", "1", "2", ()),
        ("changed", "2", "3", ("parameters",)),
    ]


def test_attributes_in_another_order_are_the_same():
    before, after = (nn.ModuleDict({name: nn.Linear(4, 4) for name in names}) for names in ("qkv", "vqk"))
    assert not Statistics(before).diff(Statistics(after))


def test_a_wrapped_layer_is_renamed():
    def net(activation):
        return nn.ModuleDict({"act": activation, "fc": nn.Linear(4, 4)})

    diff = Statistics(net(nn.ReLU())).diff(Statistics(net(nn.Sequential(nn.Dropout(), nn.ReLU()))))
    assert found(diff) == [("added", None, "act", ()), ("added", None, "act.0", ()), ("renamed", "act", "act.1", ())]


def test_names_of_modules_are_shortened_last():
    """Columns that may be left out go first; the end of a path, which tells rows apart, stays whole if it can."""

    def net(size):
        layer = nn.ModuleDict({"feed_forward_projection": nn.Linear(size, size)})
        return nn.ModuleDict({"encoder_of_the_first_stage": nn.ModuleDict({"layers": nn.ModuleList([layer])})})

    diff = Statistics(net(4)).diff(Statistics(net(5)))
    for width in (60, 70, 80):
        assert "feed_forward_projection" in diff._report().text(Screen(width))


def test_a_wrapped_model():
    diff = Statistics(mlp(), (3, 4)).diff(Statistics(nn.ModuleDict({"model": mlp()})))
    assert found(diff)[:2] == [("added", None, "", ()), ("renamed", "", "model", ())]
    assert [status for status, *_ in found(diff)] == ["added", *["renamed"] * 4]
    shown = str(diff)
    assert ">   (model) -> model Sequential" in shown.replace("  S", " S")
    assert "model.0" not in shown  # it has another name because the one around it has
    assert "model.0" in diff.table(all=True)
    assert "MACs and shapes are not compared, as they need an input" in shown


def test_without_an_input():
    bare = Statistics(mlp())
    diff = bare.diff(Statistics(mlp(), (3, 4)))
    assert not diff
    assert diff.totals["macs"] == (None, 144, None)
    assert "--" in str(diff)
    neither = bare.diff(Statistics(mlp(out=3)))
    assert "MACs:" not in str(neither)
    assert found(neither) == [("changed", "2", "2", ("parameters",))]


def test_what_only_follows_is_hidden():
    diff = Statistics(mlp(), (3, 4)).diff(Statistics(mlp(), (6, 4)))
    assert "ReLU" not in str(diff)
    assert "ReLU" in diff.table(all=True)
    assert "; 2 of them only in input and output shapes" in str(diff)


def test_frozen_half_and_tied():
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    assert found(Statistics(mlp()).diff(Statistics(frozen))) == [("changed", "0", "0", ("trainable",))]
    half = Statistics(mlp().half())
    assert found(Statistics(mlp()).diff(half))[0] == ("changed", "0", "0", ("params_bytes",))
    square = [nn.Linear(4, 4), nn.Linear(4, 4)]
    untied = Statistics(nn.Sequential(*square))
    square[1].weight = square[0].weight
    tied = untied.diff(Statistics(nn.Sequential(*square)))
    assert found(tied) == [("changed", "1", "1", ("trainable", "params", "params_bytes"))]
    assert tied.totals["params"] == (40, 24, -16)


def test_settings_and_buffers():
    one, two = (
        Statistics(nn.Sequential(nn.Dropout(p), nn.BatchNorm1d(4, track_running_stats=keeps)), (3, 4))
        for p, keeps in ((0.1, True), (0.2, False))
    )
    assert found(one.diff(two)) == [
        ("changed", "0", "0", ("settings",)),
        ("changed", "1", "1", ("buffer_bytes", "settings")),
    ]
    # Running mean and variance, of 4 floats each, and the 8 bytes of the number of batches are gone.
    assert one.diff(two).totals["bytes"] == (72, 32, -40)
    assert "Bytes: 72 -> 32" in str(one.diff(two))
    assert one.diff(two).totals["params_bytes"] == (32, 32, 0)
    pickled = pickle.loads(pickle.dumps(one))  # without live modules their settings are not known
    assert found(pickled.diff(two)) == [("changed", "1", "1", ("buffer_bytes",))]


def test_another_root_and_calls():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    one, two = (Statistics(cls(nn.Linear(4, 4)), (3, 4)) for cls in (nn.Sequential, Twice))
    diff = one.diff(two)
    assert found(diff) == [("changed", "", "", ("class_name",)), ("changed", "0", "0", ("macs", "calls"))]
    assert diff.rows[1].change("macs") == (48, 96, 48)


def test_latency_is_shown_and_is_no_difference():
    one, two = (Statistics(mlp(), (3, 4)).measure_latency(runs=1, warmup=0) for _ in range(2))
    diff = one.diff(two)
    assert not diff
    before, after, change = diff.totals["latency_ms"]
    assert (before, after, change) == (one.root.latency_ms, two.root.latency_ms, after - before)
    assert "Latency (ms)" in str(diff)
    assert sum(row.change("latency_ms")[2] for row in diff.rows) == pytest.approx(change)


def test_it_is_plain_data():
    diff = Statistics(mlp(), (3, 4)).diff(Statistics(mlp(out=5)))
    assert pickle.loads(pickle.dumps(diff)) == diff
    as_dict = json.loads(json.dumps(diff.to_dict()))
    assert as_dict["totals"]["params"] == {"before": 58, "after": 85, "change": 27}
    assert as_dict["changed"] is True
    record = diff.to_records()[-1]
    assert record["fqn_before"] == record["fqn_after"] == "2"
    assert (record["status"], record["differs"]) == ("changed", ["parameters"])
    assert (record["macs_before"], record["macs_after"], record["macs_change"]) == (48, None, None)


def test_hostile_names_stay_on_their_line():
    model = nn.Sequential()
    model.add_module('a\nb"<script>', nn.Linear(2, 2))
    text = str(Statistics(nn.Sequential(), (1, 2)).diff(Statistics(model, (1, 2))))
    assert '+   a b"<script>  Linear' in text


def test_errors():
    with pytest.raises(InputError, match="other must be the Statistics of a model, got Sequential"):
        Statistics(mlp()).diff(mlp())


LAYERS = [lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 3), nn.ReLU, lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())]
MODELS = st.lists(st.sampled_from(range(len(LAYERS))), max_size=7)
MIRRORED = {"added": "removed", "removed": "added"}


def row_of(numbers):
    return Statistics(nn.Sequential(*(LAYERS[number]() for number in numbers))).root


@settings(deadline=None)
@given(MODELS)
def test_a_model_does_not_differ_from_itself(numbers):
    assert not diff_trees(row_of(numbers), row_of(numbers))


@settings(deadline=None)
@given(MODELS, MODELS)
def test_the_other_way_round_it_is_the_mirror_image(numbers, others):
    one, other = row_of(numbers), row_of(others)
    there, back = diff_trees(one, other), diff_trees(other, one)
    mirrored = [(MIRRORED.get(row.status, row.status), row.after, row.before, row.differs) for row in back.rows]
    forth = [(row.status, row.before, row.after, row.differs) for row in there.rows]
    assert sorted(map(str, forth)) == sorted(map(str, mirrored))
    assert there.changed == back.changed == (numbers != others)
    for side, root in (("before", one), ("after", other)):
        fqns = [getattr(row, side).fqn for row in there.rows if getattr(row, side) is not None]
        assert sorted(fqns) == sorted(row.fqn for row in root.walk())
    assert sum(row.change("params")[2] for row in there.rows) == there.totals["params"][2]


def test_many_modules_are_quick():
    def blocks(count, width):
        return [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, width)) for _ in range(count)]

    before, after = (nn.Sequential(*blocks(700, 3)), nn.ModuleDict({"model": nn.Sequential(*blocks(700, 4))}))
    diff = Statistics(before).diff(Statistics(after))
    renamed = [row for row in diff.rows if row.status == "renamed"]
    assert len(renamed) == 1 + 3 * 700
    assert all(row.after.fqn == f"model.{row.before.fqn}".rstrip(".") for row in renamed)
    changed = [row for row in diff.rows if row.status == "changed"]
    assert [(row.before.fqn, row.after.fqn) for row in changed] == [(f"{n}.2", f"model.{n}.2") for n in range(700)]
    assert len(diff.rows) == 1 + len(renamed) + len(changed)


def test_what_cannot_be_compared_is_said():
    one = Statistics(nn.Sequential(nn.Dropout(0.1)), (2, 4))
    other = Statistics(nn.Sequential(nn.Dropout(0.5)), (2, 4))
    assert one.diff(other)
    loaded = ModelStatistics.from_json(one.to_json())
    assert "settings of modules are not compared, as they need the live models" in " ".join(
        str(loaded.diff(other)).split()
    )
