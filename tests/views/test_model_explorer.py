"""Files for Google's Model Explorer: their contents, and whether its own package takes them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return torch.add(self.body(x), x)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    stats = Statistics(Residual(), (2, 4))
    return stats.to_model_explorer(tmp_path_factory.mktemp("files") / "net.json")


def test_the_graph_has_namespaces_and_edges(paths):
    [graph] = json.loads(paths[0].read_text())["graphs"]
    nodes = {node["id"]: node for node in graph["nodes"]}
    found = {
        node["label"]: (
            node["namespace"],
            sorted(nodes[edge["sourceNodeId"]]["label"] for edge in node["incomingEdges"]),
        )
        for node in nodes.values()
    }
    assert found == {
        "input": ("", []),
        "0: Linear": ("body", ["input"]),
        "1: ReLU": ("body", ["0: Linear"]),
        "add": ("", ["1: ReLU", "input"]),
        "output": ("", ["add"]),
    }
    assert graph["groupNodeAttributes"]["body"]["Output"] == "[2, 4]"


def test_figures_are_node_data(paths):
    """The linear layer has 2 * 4 * 4 = 32 multiply-adds."""
    names = [path.name for path in paths]
    assert names[:3] == ["net.json", "net.macs.json", "net.params.json"]
    [data] = json.loads(paths[1].read_text()).values()
    assert [result["value"] for result in data["results"].values()] == [32]
    ids = {node["id"] for node in json.loads(paths[0].read_text())["graphs"][0]["nodes"]}
    assert set(data["results"]) <= ids


def test_model_explorer_takes_both(paths):
    """Its server hands the files to the page as they are; its classes say what the page expects."""
    builder = pytest.importorskip("model_explorer.graph_builder")
    dacite = pytest.importorskip("dacite")
    data = pytest.importorskip("model_explorer.node_data_builder")
    strict = dacite.Config(strict=True, cast=[tuple])
    collection = dacite.from_dict(builder.GraphCollection, json.loads(paths[0].read_text()), strict)
    assert len(collection.graphs[0].nodes) == 5
    for path in paths[1:]:
        for facts in json.loads(path.read_text()).values():
            assert dacite.from_dict(data.GraphNodeData, facts, strict).results


def test_a_path_that_cannot_be_written(tmp_path):
    stats = Statistics(nn.Linear(2, 2), (1, 2))
    with pytest.raises(InputError, match="cannot be written"):
        stats.to_model_explorer(tmp_path / "none" / "net.json")
