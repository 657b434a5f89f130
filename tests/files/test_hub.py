"""Repositories of the Hugging Face Hub, whose functions are replaced: nothing here needs a network."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from modelsummary import InputError, MissingExtraError, ModelFileError, load
from tests.files.test_weights import net, sharded

hub = pytest.importorskip("huggingface_hub")
errors = pytest.importorskip("huggingface_hub.errors")
NAME = "hf:org/net"


def metadata_of(folder):
    """Return what the Hub says of two files and their index: the headers, without the data behind them."""
    index = json.loads(sharded(folder).read_text())
    files = {}
    for name in set(index["weight_map"].values()):
        data = (folder / name).read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__", None)
        tensors = {
            fqn: SimpleNamespace(**facts | {"data_offsets": tuple(facts["data_offsets"])})
            for fqn, facts in header.items()
        }
        files[name] = SimpleNamespace(tensors=tensors)
    return SimpleNamespace(metadata=index["metadata"], weight_map=index["weight_map"], files_metadata=files)


def test_headers_equal_those_of_the_files(tmp_path, monkeypatch):
    metadata = metadata_of(tmp_path)
    monkeypatch.setattr(hub, "get_safetensors_metadata", lambda repository: {"org/net": metadata}[repository])
    stats, local = load(NAME), load(tmp_path / "model.safetensors.index.json")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in stats.tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in local.tensors.items()
    }
    assert stats.total_params == sum(parameter.numel() for parameter in net().parameters())
    assert stats.to_records() == local.to_records()
    lost = next(iter(metadata.files_metadata))
    del metadata.files_metadata[lost]
    with pytest.raises(ModelFileError, match=rf"'hf:org/net': the index names the file '{lost}', which the rep"):
        load(NAME)


def raised(kind):
    """Return an error of the Hub; those of answers want the answer, which no line here reads."""
    error = kind.__new__(kind)
    error.args = ("401 Client Error.\nRequest ID: 1",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, "it is gated; ask for access"),
        (errors.RepositoryNotFoundError, "shows no such repository; check the name"),
        (errors.NotASafetensorsRepoError, "it has no weights in safetensors"),
        (errors.LocalEntryNotFoundError, "the Hugging Face Hub cannot be reached; connect, or pass a local file"),
        (errors.EntryNotFoundError, "it has no config.json"),
        (errors.OfflineModeIsEnabled, "cannot be reached; connect, or pass a local file: OfflineModeIsEnabled: 401"),
        (TimeoutError, "cannot be reached; connect, or pass a local file: TimeoutError: 401"),
    ],
)
def test_errors_are_one_line(monkeypatch, error, message):
    def fail(repository):
        raise raised(error)

    monkeypatch.setattr(hub, "get_safetensors_metadata", fail)
    with pytest.raises(InputError, match=message) as caught:
        load(NAME)
    assert str(caught.value).startswith("'hf:org/net': ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_repository_has_no_forward():
    with pytest.raises(InputError, match="input= needs a forward, which the weights"):
        load(NAME, (1, 4))
    with pytest.raises(InputError, match="run=True is for TorchScript only; leave it out for 'hf:org/net'"):
        load(NAME, run=True)


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    with pytest.raises(MissingExtraError, match=r"torch-modelsummary\[hub\]"):
        load(NAME)
