"""Exported programs that are made to do harm."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from modelsummary import ModelFileError, load

pytestmark = pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 writes pickles, which are refused")


@pytest.fixture(scope="module")
def entries(tmp_path_factory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("program") / "net.pt2"
    sizes = {"input": {0: Dim("batch", min=1, max=64)}}
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.rand(2, 3),), dynamic_shapes=sizes), path)
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def saved(entries: dict[str, bytes], path: Any, change: Any) -> Any:
    name = next(name for name in entries if name.endswith("models/model.json"))
    facts = json.loads(entries[name])
    change(facts)
    with zipfile.ZipFile(path, "w") as archive:
        for other, data in entries.items():
            archive.writestr(other, json.dumps(facts) if other == name else data)
    return path


@pytest.mark.parametrize(
    "formula",
    [
        "Mod(" + "*".join(f"(s{n} + {n})" for n in range(40)) + ", s1*s2*s3 + s4)",
        f"Max({', '.join(f's{n}' for n in range(900))})",
        "Piecewise((s1, And(" + ", ".join(f"Or(s{n} > 3, s{n + 1} < s{n})" for n in range(60)) + ")), (s2, True))",
        "(" * 90 + "s77" + ")" * 90,
        "*".join(["9" * 19] * 450),
    ],
)
def test_formulas_end_with_a_result_or_an_error(entries, tmp_path, formula) -> None:
    def change(facts: Any) -> None:
        facts["graph_module"]["graph"]["tensor_values"]["input"]["sizes"][0]["as_expr"]["expr_str"] = formula

    with suppress(ModelFileError):
        load(saved(entries, tmp_path / "net.pt2", change))


def test_ranges_of_unknown_symbols_are_left_out(entries, tmp_path) -> None:
    def change(facts: Any) -> None:
        more = {f"s{n}": {"min_val": 0, "max_val": 9} for n in range(1000, 51_000)}
        facts["range_constraints"].update(more)

    assert load(saved(entries, tmp_path / "net.pt2", change)).total_params == 3 * 2 + 2


def test_an_operator_on_files_is_not_run(entries, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def change(facts: Any) -> None:
        texts = [("filename", "as_string", "made"), ("shared", "as_bool", True), ("size", "as_int", 10)]
        facts["graph_module"]["graph"]["nodes"][0] |= {
            "target": "torch.ops.aten.from_file.default",
            "inputs": [{"name": name, "arg": {kind: value}, "kind": 1} for name, kind, value in texts],
        }

    assert load(saved(entries, tmp_path / "net.pt2", change)).operators() == {"aten.from_file": 1}
    assert not (tmp_path / "made").exists()
