"""What a file stores and what the model has: copies, shared data, constants. Expected numbers are derived by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from modelsummary import ModelFileError, Statistics, load
from tests.files.test_torch import exported
from tests.files.torchscript import run_here, scripted
from tests.models import Call
from tests.onnx_models import TensorProto, distinct_values, export, helper, model, onnx, saved, value

node = helper.make_node


def matrix(name, values, *, raw=True):
    if raw:
        return onnx.numpy_helper.from_array(np.ascontiguousarray(values), name)
    return helper.make_tensor(name, TensorProto.FLOAT, values.shape, values.ravel())


def tied(copy, head="onnx::MatMul_7", *, rows=50, raw=True, other=None):
    """An embedding of rows x 8, and a product with ``copy``, which has the name ``head``."""
    words = np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)
    second = copy(words) if other is None else other
    return model(
        [node("Gather", ["words.weight", "x"], ["h"], name="words"), node("MatMul", ["h", head], ["y"], name="head")],
        [value("x", 2, 3, kind=TensorProto.INT64)],
        [value("y", 2, 3, rows)],
        [matrix("words.weight", words, raw=raw), matrix(head, second, raw=raw)],
    )


@pytest.mark.parametrize(("rows", "raw"), [(50, True), (50, False), (20, True)])  # 20 x 8 floats stay in the model
def test_a_transposed_copy_is_the_same_parameter(tmp_path, rows, raw):
    stats = load(saved(tied(np.transpose, rows=rows, raw=raw), tmp_path))
    assert (stats.total_params, stats.stored_elements, stats.stored_bytes) == (rows * 8, 2 * rows * 8, 8 * rows * 8)
    assert (stats["words"].self_params, stats["head"].self_params, stats["head"].num_params) == (rows * 8, 0, rows * 8)
    assert f"1 weights with {rows * 8} elements repeat others, which count once" in stats.root.note
    assert f"Stored in the file: {2 * rows * 8} elements" in str(stats)
    assert stats["head"].bytes_read == 4 * (2 * 3 * 8 + rows * 8)  # it is read like any other


def changed(words):
    copy = words.T.copy()
    copy[-1, -2] += 1
    return copy


@pytest.mark.parametrize(
    ("copy", "head"),
    [
        (changed, "onnx::MatMul_7"),
        (np.transpose, "head.weight"),  # layers may begin with equal values
        (lambda words: np.zeros((8, 50), np.float32), "onnx::MatMul_7"),
    ],
)
def test_other_weights_are_other_parameters(tmp_path, copy, head):
    stats = load(saved(tied(copy, head), tmp_path))
    assert stats.total_params == stats.stored_elements == 800
    assert stats.root.note == ""


def test_external_data(tmp_path):
    onnx.save(tied(np.transpose), tmp_path / "net.onnx", save_as_external_data=True, size_threshold=0, location="data")
    stats = load(tmp_path / "net.onnx")
    assert (stats.total_params, stats.stored_elements) == (400, 800)
    (tmp_path / "data").unlink()
    assert load(tmp_path / "net.onnx").total_params == 800  # nothing to compare


def test_two_names_for_the_same_external_data_are_one_parameter(tmp_path):
    weights = [TensorProto(name=name, data_type=1, dims=[50, 8], data_location=1) for name in ("a.weight", "b.weight")]
    for each in weights:
        each.external_data.add(key="location", value="data")
    nodes = [node("Gather", ["a.weight", "x"], ["a"]), node("Gather", ["b.weight", "x"], ["b"])]
    nodes += [node("Add", ["a", "b"], ["y"])]
    stats = load(saved(model(nodes, [value("x", 2, kind=TensorProto.INT64)], [value("y", 2, 8)], weights), tmp_path))
    assert (stats.total_params, stats.stored_elements) == (400, 400)


def test_an_exported_language_model(tmp_path):
    words = nn.Embedding(50, 8)
    head = nn.Linear(8, 50, bias=False)
    head.weight = words.weight
    modules = {"words": words, "norm": nn.LayerNorm(8), "head": head}
    net = distinct_values(Call(lambda self, x: self.head(self.norm(self.words(x))), **modules))
    x = torch.zeros(2, 3, dtype=torch.long)
    assert Statistics(net, x).total_params == 50 * 8 + 16
    old = load(export(net, x, tmp_path / "old.onnx", dynamo=False))
    assert old.total_params == 50 * 8 + 16
    assert old.stored_elements >= 2 * 50 * 8 + 16
    program = load(exported(net, x, tmp_path / "net.pt2"))
    assert program.total_params == program.stored_elements == 50 * 8 + 16


def test_constants_are_stored_but_are_no_parameters(tmp_path):
    ramp = torch.arange(36.0).reshape(3, 3, 2, 2)
    net = Call(lambda self, x: self.norm(x * ramp), norm=nn.BatchNorm2d(3)).eval()
    x = torch.rand(3, 3, 2, 2)
    program = load(exported(net, x, tmp_path / "net.pt2"))
    assert program.total_params == 6
    path = scripted(net, tmp_path / "net.pt", x)
    for stats in (load(path), run_here(path, (3, 3, 2, 2))):
        assert stats.total_params == 6
    assert load(path).stored_elements == 6 + 6 + 1 + 36  # the norm's counter, and the constant
    assert load(path).total_param_bytes == 24


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty; download or save it again"),
        (b"<!DOCTYPE html><html>404</html>", "it is a page of the web; download the file itself"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "it is a pointer of Git LFS; fetch its content with git lfs pull",
        ),
    ],
)
@pytest.mark.parametrize("ending", [".onnx", ".pt", ".pt2", ".safetensors", ".gguf"])
def test_no_model(tmp_path, content, said, ending):
    path = tmp_path / f"model{ending}"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=said):
        load(path)


@pytest.mark.parametrize("ending", [".onnx", ".safetensors", ".gguf"])
def test_archive_of_torch_by_another_name(tmp_path, ending):
    path = tmp_path / f"model{ending}"
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(ModelFileError, match=r"begins like an archive of torch; rename it to \.pt"):
        load(path)
    assert load(path.rename(tmp_path / "model.pt")).total_params == 2
