"""Checkpoints that ``torch.save`` wrote: names, shapes and dtypes without running the pickle."""

from __future__ import annotations

import random
import zipfile

import pytest
import torch
from torch import nn

from benchmarks.fuzz_files import mutated_archive, outcome
from modelsummary import FormulaError, InputError, ModelFileError, load


def tied_net():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False).half())
    net.append(nn.Linear(4, 4, bias=False))
    net[3].weight = net[0].weight
    return net


def saved(value, path, **options):
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("ending", [".pth", ".pt", ".ckpt", ".bin", ".pth.tar"])
def test_a_state_dict(tmp_path, ending):
    net = tied_net()
    state = net.state_dict()
    stats = load(saved(state, tmp_path / f"net{ending}"))
    assert {name: (tensor.shape, tensor.dtype, tensor.nbytes) for name, tensor in stats.tensors.items()} == {
        name: (tuple(value.shape), str(value.dtype).removeprefix("torch."), value.nbytes)
        for name, value in state.items()
    }
    assert stats.total_params == sum(parameter.numel() for parameter in net.parameters())  # the tied one once
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in state.values()}
    assert stats.stored_bytes == sum(storages.values())


def test_nested_checkpoints_have_dotted_names(tmp_path):
    net = tied_net().float()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    contents = {"state_dict": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "losses": [0.5, None]}
    stats = load(saved(contents, tmp_path / "last.ckpt"))
    names = {f"state_dict.{name}" for name in net.state_dict()}
    states = optimizer.state_dict()["state"]
    assert stats.tensors.keys() == names | {f"optimizer.state.{key}.{name}" for key in states for name in states[key]}


def test_parameters_views_and_dtypes_without_storage_types(tmp_path):
    parameter = nn.Parameter(torch.rand(2, 3))
    values = [parameter, torch.rand(5, 1)[2:].expand(3, 7), torch.zeros(4).to(torch.float8_e4m3fn), parameter]
    stats = load(saved(values, tmp_path / "list.pt"))
    shapes = [(tensor.shape, tensor.dtype) for tensor in stats.tensors.values()]
    assert shapes == [((2, 3), "float32"), ((3, 7), "float32"), ((4,), "float8_e4m3fn"), ((2, 3), "float32")]
    assert stats.total_params == 6 + 21 + 4
    assert stats.stored_bytes == 24 + 20 + 4
    assert list(load(saved(parameter, tmp_path / "one.pt")).tensors) == ["0"]


def test_the_lines_of_a_refusal_convert_the_file(tmp_path):
    net = tied_net()
    path, converted = saved(net, tmp_path / "net.pth"), tmp_path / "weights.pt"
    with pytest.raises(
        ModelFileError, match=r"Sequential', which is neither .* torch\.save\(checkpoint\.state_dict\(\)"
    ):
        load(path)
    torch.save(torch.load(path, weights_only=False).state_dict(), converted)
    assert load(converted).tensors.keys() == net.state_dict().keys()
    legacy = saved(net.state_dict(), tmp_path / "legacy.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(ModelFileError, match=r"format before 1\.6.*weights_only=True\), 'new\.pt'\)"):
        load(legacy)
    torch.save(torch.load(legacy, weights_only=True), converted)
    assert load(converted).tensors.keys() == net.state_dict().keys()


def test_weights_have_no_forward(tmp_path):
    path = saved(tied_net().state_dict(), tmp_path / "net.pt")
    for options in ({"input": (1, 4)}, {"input": (1, 4), "run": True}):
        with pytest.raises(InputError, match="the weights in the file do not have"):
            load(path, **options)


def test_storages_that_are_cut_off_and_long_names(tmp_path):
    path, short = saved({"fc": torch.rand(9)}, tmp_path / "net.pth"), tmp_path / "short.pth"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(short, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, b"1234" if entry.filename.endswith("data/0") else old.read(entry))
    with pytest.raises(ModelFileError, match="'fc' needs 36 bytes by its size, and has 4"):
        load(short)
    with pytest.raises(ModelFileError, match="at most 1000 characters and 100 dots"):
        load(saved({"a" * 1001: {"b": torch.rand(1)}}, path))
    with pytest.raises(ModelFileError, match=r"two tensors have the name 'a\.b'"):
        load(saved({"a": {"b": torch.rand(1)}, "a.b": torch.rand(1)}, path))


def test_mutants_end_with_a_result_or_a_refusal(tmp_path):
    data = saved({"state_dict": tied_net().state_dict(), "epoch": 3}, tmp_path / "net.pth").read_bytes()
    outcomes = set()
    for number in range(200):
        path = tmp_path / "mutant.pth"
        path.write_bytes(mutated_archive(data, random.Random(number)))
        outcomes.add(outcome(path, None))
    assert outcomes == {"read", "ModelFileError"}


@pytest.mark.parametrize("contents", [{}, {"epoch": 3}])
def test_a_checkpoint_without_tensors_is_refused(tmp_path, contents):
    with pytest.raises(ModelFileError, match=r"empty.pth holds no tensor; pass a file of a state_dict"):
        load(saved(contents, tmp_path / "empty.pth"))


def test_weights_have_no_formula_of_a_forward(tmp_path):
    stats = load(saved({"weight": torch.rand(3, 4)}, tmp_path / "net.pth"))
    assert stats.formula("params") == 12
    for figure in ("macs", "flops", "output_bytes"):
        with pytest.raises(FormulaError, match=f"no formula of {figure}: the file has no forward"):
            stats.formula(figure)
