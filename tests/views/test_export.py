"""Data and documents made from the tree: round trips, and texts checked by hand."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from modelsummary import InputError, MissingExtraError, ModelStatistics, Statistics
from modelsummary.views.columns import COLUMNS
from tests.models import Call
from tests.zoo.torchvision_models import swept


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2, bias=False)))


def nested():
    """Shapes of all kinds: a tuple, a dict, none, a scalar, an uninitialised and a shared parameter."""
    lazy = nn.LazyLinear(2)
    tied = nn.Linear(3, 3)
    return Call(
        lambda self, x, flag: ({"a": self.tied(x), "b": (self.again(x).sum(), flag)}, None),
        tied=tied,
        again=tied,
        lazy=lazy,
    )


def test_records():
    records = Statistics(small(), (2, 4)).to_records()
    assert [(each["fqn"], each["class_name"], each["depth"]) for each in records] == [
        ("", "Sequential", 0), ("0", "Linear", 1), ("1", "Sequential", 1), ("1.0", "ReLU", 2), ("1.1", "Linear", 2),
    ]  # fmt: skip
    # 4 * 3 + 3 and 3 * 2 parameters; two samples
    assert [each["total_params"] for each in records] == [21, 15, 6, 0, 6]
    assert [each["self_macs"] for each in records] == [0, 24, 0, 0, 12]
    assert [each["output_size"] for each in records] == [[2, 2], [2, 3], [2, 2], [2, 3], [2, 2]]
    assert records[1]["inner_layers"] == {"weight": [3, 4], "bias": [3]}
    assert "latency_ms" not in records[0]  # not measured
    assert set(records[0]) <= set(COLUMNS)


def test_columns_depth_and_units():
    stats = Statistics(small(), (2, 4), depth=1)
    # as in the table, a row at the deepest level stands for what is below it
    assert stats.to_records(["fqn", "num_params", "params_bytes"], units="K") == [
        {"fqn": "", "num_params (K)": 0.0, "params_bytes (kB)": 0.084},
        {"fqn": "0", "num_params (K)": 0.015, "params_bytes (kB)": 0.06},
        {"fqn": "1", "num_params (K)": 0.006, "params_bytes (kB)": 0.024},
    ]
    assert len(stats.to_records(depth=None)) == 5
    for call, message in [
        (lambda: stats.to_records(["nope"]), "unknown column 'nope'"),
        (lambda: stats.to_csv(depth=-1), "depth must be an integer .* got -1"),
        (lambda: stats.to_markdown(units="Q"), "unknown unit prefix 'Q'"),
    ]:
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize(
    "stats",
    [
        Statistics(small(), (2, 4)),
        Statistics(small()),
        Statistics(nested(), torch.randn(2, 3), "flag"),
        Statistics(small(), (4,), batch_dim=0, depth=1, branching=False),
        Statistics(small(), (2, 4), latency=True),
    ],
)
def test_json_round_trip(stats, tmp_path):
    text = stats.to_json(tmp_path / "model.json", indent=1)
    for source in (text, tmp_path / "model.json", str(tmp_path / "model.json")):
        again = ModelStatistics.from_json(source)
        assert type(again) is ModelStatistics
        assert str(again) == str(stats)
        assert again.to_records() == stats.to_records()
        assert again.to_dict() == stats.to_dict()
        assert [row.input_size for row in again] == [row.input_size for row in stats]
        assert again.root.children[0].parent_info is again.root
    assert json.loads(text)["version"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", r"not a document of modelsummary: .* got list: \[\]; pass a file of to_json\(\), or of modelsummary"),
        ('{"format": "other"}', "not a document of modelsummary"),
        ('{"format": "modelsummary", "version": 7}', "has version 7; this release reads version 1"),
        ('{"format": "modelsummary", "version": 1}', "has execution=None and batch_dim=None; expected 'shape'"),
        ('{"format": "modelsummary", "version": true}', "has version True"),
        ('{"format": "modelsummary", "version": 1, "execution": "none"}', "has no rows"),
        (
            '{"format": "modelsummary", "version": 1, "execution": "none", "rows": [{}]}',
            "row 0 of the document is incomplete: KeyError",
        ),
    ],
)
def test_documents_that_cannot_be_read(text, message):
    with pytest.raises(InputError, match=message):
        ModelStatistics.from_json(text)
    document = Statistics(small()).to_dict()
    del document["options"]
    with pytest.raises(InputError, match="incomplete: KeyError 'options'"):
        ModelStatistics.from_json(json.dumps(document))
    for name, value in {"num_params": "many", "fqn": None, "inner_layers": 3}.items():
        document = Statistics(small()).to_dict()
        document["rows"][1][name] = value
        with pytest.raises(InputError, match=f"row 1 of the document has {name}="):
            ModelStatistics.from_json(json.dumps(document))
    with pytest.raises(InputError, match=r"source must be JSON text .* got None"):
        ModelStatistics.from_json(None)
    with pytest.raises(InputError, match="is not valid JSON"):
        ModelStatistics.from_json("[" * 100_000)
    for name, value, reason in (
        ("macs", 10**38, "integers have at most 38 digits"),
        ("latency_ms", float("nan"), "NaN, which is not finite"),
        ("latency_ms", float("-inf"), "-Infinity, which is not finite"),
        ("input_size", deep_size(60), "containers of shapes are nested more than 50 deep"),
    ):
        document = Statistics(small()).to_dict()
        document["rows"][1][name] = value
        with pytest.raises(InputError, match=reason):
            ModelStatistics.from_json(json.dumps(document))
    document = Statistics(small()).to_dict()
    with pytest.raises(InputError, match="1e999, which is not finite"):
        ModelStatistics.from_json(json.dumps(document | {"remarks": [0.5]}).replace("0.5", "1e999"))
    with pytest.raises(InputError, match="batch_dim=18446744073709551616"):
        ModelStatistics.from_json(json.dumps(document | {"batch_dim": 2**64}))
    with pytest.raises(InputError, match=r"version 'a{38}"):
        ModelStatistics.from_json(json.dumps(document | {"version": "a" * 10**6}))
    row = document["rows"][1]
    document["rows"] = [document["rows"][0], *({**row, "parent": n, "depth": n + 1} for n in range(300))]
    with pytest.raises(InputError, match="rows of the document are nested more than 200 deep"):
        ModelStatistics.from_json(json.dumps(document))
    with pytest.raises(InputError, match=r"'nowhere.json' cannot be read: No such file .*; pass a file of to_json\(\)"):
        ModelStatistics.from_json("nowhere.json")


def test_files_that_cannot_be_written(tmp_path):
    stats, nowhere = Statistics(small(), (2, 4)), str(tmp_path / "nowhere" / "x.svg")
    for write in (stats.to_json, stats.to_csv, stats.to_markdown, stats.to_latex, stats.to_html, stats.graph().save):
        with pytest.raises(InputError, match=r"^path=.*x\.svg'\)? cannot be written: .*No such file"):
            write(nowhere)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes in folders are a thing of Unix")
def test_paths_that_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    for path in (tmp_path, tmp_path / "pipe.json", tmp_path / "device.json"):
        with pytest.raises(InputError, match="is not a file"):
            ModelStatistics.from_json(path)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(InputError, match="has 268,435,457 bytes; a document has at most 268,435,456"):
        ModelStatistics.from_json(tmp_path / "large.json")


def deep_size(depth):
    """Return a packed size that is nested so deep."""
    size = [1]
    for _ in range(depth):
        size = {"items": [size]}
    return size


def test_byte_order_mark(tmp_path):
    stats = Statistics(small(), (2, 4))
    (tmp_path / "model.json").write_text(stats.to_json(), encoding="utf-8-sig")
    assert str(ModelStatistics.from_json(tmp_path / "model.json")) == str(stats)
    (tmp_path / "model.json").write_text(stats.to_json(), encoding="utf-16")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        ModelStatistics.from_json(tmp_path / "model.json")


def test_csv(tmp_path):
    stats = Statistics(small(), (2, 4))
    text = stats.to_csv(tmp_path / "model.csv", columns=["fqn", "input_size", "macs"])
    rows = [
        "fqn,input_size,macs",
        ',"[2, 4]",36',
        '0,"[2, 4]",24',
        '1,"[2, 3]",12',
        '1.0,"[2, 3]",0',
        '1.1,"[2, 3]",12',
    ]
    assert text == "".join(f"{row}\r\n" for row in rows)
    assert (tmp_path / "model.csv").read_bytes().decode() == text


def test_pandas(monkeypatch):
    pandas = pytest.importorskip("pandas")
    stats = Statistics(small(), (2, 4))
    frame = stats.to_pandas()
    assert frame["self_macs"].sum() == 36
    assert frame["macs"].dtype == "int64"
    assert frame.to_dict("records") == stats.to_records()
    read = pandas.read_csv(io.StringIO(stats.to_csv()), keep_default_na=False)
    assert list(read["total_params"]) == list(frame["total_params"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch-modelsummary\[pandas\]'"):
        stats.to_pandas()


def odd():
    model = nn.Module()
    model.forward = lambda x: x
    model.add_module("a|b`c*_<i>\n\\", nn.Linear(2, 2))
    return Statistics(model)


def test_markdown(tmp_path):
    stats = Statistics(small(), (2, 4))
    text = stats.to_markdown(tmp_path / "model.md", columns=["output_size", "mult_adds"], depth=1)
    space = "\N{NO-BREAK SPACE}"
    rows = [[cell.strip(" ") for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert [cell.replace("-", "") for cell in rows.pop(1)] == [":", ":", ":"]
    assert rows == [
        ["Layer (type:depth-idx)", "Output Shape", "Mult-Adds"],
        ["Sequential", f"\\[2,{space}2\\]", "--"],
        [f"├─Linear:{space}1-1", f"\\[2,{space}3\\]", "24"],
        [f"├─Sequential:{space}1-2", f"\\[2,{space}2\\]", "12"],
    ]
    assert (tmp_path / "model.md").read_text(encoding="utf-8") == text
    lines = odd().to_markdown(columns=["fqn"]).splitlines()
    assert len(lines) == 4
    assert f"a\\|b\\`c\\*\\_\\<i\\>{space}\\\\" in lines[-1]


def test_latex(tmp_path):
    text = Statistics(small(), (2, 4)).to_latex(tmp_path / "model.tex", columns=["params_percent"], depth=1)
    lines = [line.strip() for line in text.splitlines()]
    assert lines[:2] == [r"\begin{tabular}{lr}", r"\toprule"]
    assert [line.split() for line in lines[4:7]] == [
        ["Sequential", "&", "--", r"\\"],
        ["0", "(Linear)", "&", r"71.43\%", r"\\"],
        ["1", "(Sequential)", "&", r"28.57\%", r"\\"],
    ]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    assert r"\_\ensuremath{<}i\ensuremath{>}" in odd().to_latex()


def test_html():
    class Cells(HTMLParser):
        def __init__(self, text):
            super().__init__()
            self.cells = []
            self.tags = set()
            self.feed(text)

        def handle_starttag(self, tag, attrs):
            self.tags.add(tag)

        def handle_data(self, data):
            self.cells += [data.strip()] if data.strip() else []

    page = Cells(Statistics(small(), (2, 4)).to_html(columns=["mult_adds"], depth=0))
    assert page.cells == ["Layer (type:depth-idx)", "Mult-Adds", "Sequential", "36"]
    assert "i" not in Cells(odd().to_html()).tags


def on_meta(models, name):
    settings = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    try:
        with torch.device("meta"):
            return models.get_model(name, weights=None, **settings)
    except NotImplementedError:  # some compute with their tensors
        return models.get_model(name, weights=None, **settings)


def test_a_mark_for_no_value_is_the_same_in_a_csv():
    stats = Statistics(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (1, 2))
    relu = list(csv.DictReader(io.StringIO(stats.to_csv())))[2]
    assert relu["trainable"] == stats.to_records()[2]["trainable"] == "--"


@pytest.mark.slow
def test_torchvision():
    models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))
    pandas = pytest.importorskip("pandas")
    for name in swept(models.list_models(models)):
        model = on_meta(models, name)
        stats = Statistics(model, (2, 3, 299, 299) if name == "inception_v3" else (2, 3, 224, 224))
        again = ModelStatistics.from_json(stats.to_json())
        assert str(again) == str(stats)
        records = stats.to_records()
        assert again.to_records() == records
        read = list(csv.DictReader(io.StringIO(stats.to_csv())))
        assert [{key: "" if value is None else str(value) for key, value in each.items()} for each in records] == read
        frame = stats.to_pandas()
        again = pandas.read_csv(io.StringIO(stats.to_csv()), keep_default_na=False)
        for column in ("fqn", "total_params", "self_params", "macs", "flops", "bytes_read", "output_bytes"):
            assert [each[column] for each in records] == list(frame[column])
            assert [each[column] for each in records] == list(again[column].astype(frame[column].dtype))


def test_tables_for_documents_fold_equal_siblings():
    stats = Statistics(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)), nn.ReLU()), (1, 2))
    for text in (stats.to_markdown(fold=True), stats.to_latex(fold=True), stats.to_html(fold=True)):
        assert "3 x Linear" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert stats.to_markdown(columns="class_name").count("Linear") == 6


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("rows", 1, "input_size"), 3),
        (("rows", 1, "output_size"), {"items": [1.5]}),
        (("rows", 1, "depth"), 2**70),
        (("rows", 0, "depth"), -1),
        (("options", "sort"), ["macs"]),
        (("latency_overhead",), [1]),
    ],
)
def test_documents_with_wrong_types(place, value):
    facts = json.loads(Statistics(nn.Sequential(nn.Linear(2, 3)), (1, 2)).to_json())
    target = facts
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    with pytest.raises(InputError, match=r"document|sort must be"):
        ModelStatistics.from_json(json.dumps(facts))
