"""Forms of one model side by side, and the command that reads files."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics, load
from modelsummary.cli import run
from modelsummary.files.comparing import Comparison, compare
from tests.files.test_torch import exported
from tests.files.torchscript import run_here, scripted
from tests.onnx_models import distinct_values, export


def block():
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    folder, x = tmp_path_factory.mktemp("forms"), torch.rand(1, 3, 8, 8)
    model = distinct_values(block())
    return {
        "live": Statistics(model, x),
        "onnx": load(export(model, x, folder / "block.onnx")),
        "pt2": load(exported(model, x, folder / "block.pt2")),
        "pt": run_here(scripted(model, folder / "block.pt"), (1, 3, 8, 8)),
    }


def test_figures_and_reasons(forms):
    found = compare(forms)
    live, file, program, script = found.forms
    assert {form.macs for form in found.forms} == {36 * 108}
    assert [form.params for form in found.forms] == [108 + 8, 108 + 4, 116, 116]
    assert [form.param_bytes for form in found.forms] == [464, 448, 464, 464]
    assert [form.norms for form in found.forms] == [1, 0, 1, 1]
    assert [form.in_place for form in found.forms] == [1, 0, 1, 1]
    # convolution, norm, ReLU; in ONNX the norm is folded, and the flattening is an operator
    assert [form.operators for form in found.forms] == [3, 3, 3, 3]
    result = 4 * 144
    assert (live.activation_bytes, file.activation_bytes) == (4 * result, 3 * result)
    assert live.bandwidth_bytes == script.bandwidth_bytes
    # image, weights and biases, the result; ReLU; Reshape, with the two integers of its shape
    assert file.bandwidth_bytes == 4 * 192 + 448 + result + 4 * result + 16
    assert program.bandwidth_bytes == 4 * (192 + 108) + result + (2 * result + 4 * 16) + 2 * result
    assert found.reasons[:2] == [
        "onnx: 1 batch norms are in the weights and biases of layers next to them",
        "onnx: 1 operators that work in place in live have results of their own",
    ]
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["Params", "Params", "(B)"]
    assert lines[1].split()[0] == "live"
    assert found.to_records()[0]["macs"] == 3888
    with pytest.raises(InputError, match="live was made without an input; pass the size"):
        compare({"live": Statistics(block())})
    for models in ([Statistics(block())], Statistics(block()), {"live": block()}):
        with pytest.raises(InputError, match="models must be a dict of names and Statistics, or results of load, got"):
            compare(models)
    with pytest.raises(InputError, match="at least one model to compare, got none"):
        compare({})


def test_reasons_without_folded_norms(tmp_path):
    """The exporter writes a norm behind a linear layer as other operators, or with all of its parameters."""
    model, x = distinct_values(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))), torch.rand(2, 4)
    first = compare({"live": Statistics(model, x), "half": Statistics(deepcopy(model).half(), x.half())})
    assert first.reasons == ["half: parameters have other dtypes: 112 bytes, not 224"]  # 32 + 8 + 16 of 2 bytes
    live, other = first.forms[0], first.forms[0]._replace(name="other", norms=0)
    assert Comparison([live, other]).reasons == ["other: 1 batch norms are written as other operators"]
    added = live._replace(name="added", params=live.params + 4)
    assert Comparison([live, added]).reasons == [
        "added: parameters differ by 4: constants may be merged or added, or be buffers"
    ]


def test_files_of_weights_say_what_differs(tmp_path):
    weights = {"fc.weight": torch.zeros(4, 3), "fc.bias": torch.zeros(4), "head.weight": torch.zeros(8, 4)}
    other = {"fc.weight": torch.zeros(4, 3).half(), "fc.bias": torch.zeros(5), "out.weight": torch.zeros(8, 4)}
    for name, tensors in (("before", weights), ("after", other)):
        torch.save(tensors, tmp_path / f"{name}.pth")
    files = {name: load(tmp_path / f"{name}.pth") for name in ("before", "after")}
    assert compare(files).reasons == [
        "after: 1 tensors of before are missing: 'head.weight'",
        "after: 1 tensors of the file are not in before: 'out.weight'",
        "after: 1 tensors have other shapes: 'fc.bias' is [5] in the file, [4] in before",
        "after: 1 tensors are float16 in the file and float32 in before",
    ]


@pytest.mark.slow
def test_command_that_runs_torchscript(capsys, tmp_path):
    script = str(scripted(distinct_values(block()), tmp_path / "m.pt"))
    assert run([script, "--input", "1,3,8,8", "--format", "json", "--run"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["macs"] == 36 * 108


def test_commands(capsys, tmp_path):
    model, x = distinct_values(block()), torch.rand(1, 3, 8, 8)
    paths = [str(export(model, x, tmp_path / "m.onnx")), str(exported(model, x, tmp_path / "m.pt2"))]
    assert run(["compare", "tests.files.test_comparing:block", *paths, "--input", "1,3,8,8"]) == 0
    said = capsys.readouterr().out
    assert "m.onnx: 1 batch norms are in the weights" in said
    assert run(["compare", *paths, "--format", "json"]) == 0
    assert [form["macs"] for form in json.loads(capsys.readouterr().out)["forms"]] == [3888, 3888]
    assert run([paths[0], "--input", "images=2,3,8,8", "--depth", "0"]) == 2
    assert "the model has no input 'images'" in capsys.readouterr().err
    assert run([paths[0], "--depth", "1", "--columns", "macs"]) == 0
    assert "3,888" in capsys.readouterr().out
    script = str(scripted(model, tmp_path / "m.pt"))
    assert run([script, "--input", "1,3,8,8"]) == 2
    assert "pass run=True (--run)" in capsys.readouterr().err
    for arguments, text in {
        (paths[0], "--split", "2"): "live model",
        (paths[0], "--mode", "train"): "leave out --mode train",
        (paths[0], "--kwargs", '{"a": 1}'): "is made already",
        ("compare",): "the following arguments are required: MODEL",
    }.items():
        assert run(list(arguments)) == 2
        assert text in capsys.readouterr().err
