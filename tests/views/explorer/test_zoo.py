"""The pages of models of torchvision and timm, and their files for Model Explorer."""

from __future__ import annotations

import importlib

import pytest

from modelsummary import Statistics
from modelsummary.views.explorer.data import Explored, model_data
from modelsummary.views.model_explorer import graph_of
from tests.zoo.catalogues import CATALOGUES, REQUIRES, SWEEPS_ALL
from tests.zoo.fixed import FIXED

KINDS = {"module", "function", "input", "output", "range"}
UNITS = {"count", "bytes", "ms"}


def check(stats):
    """One entry per node; references to nodes and texts that exist; figures that add up to the totals."""
    explored = Explored(stats.root, stats._dataflow())
    assert explored.flow.steps, explored.flow.remarks
    data = model_data(explored)
    nodes, texts = data["nodes"], data["texts"]
    count = len(nodes["parent"])
    columns = [*nodes.values(), *data["facts"].values(), *(figure["own"] for figure in data["figures"])]
    assert {len(column) for column in columns} == {count}
    assert all(parent < number for number, parent in enumerate(nodes["parent"]))
    assert {texts[place] for place in nodes["kind"]} <= KINDS
    assert {figure["unit"] for figure in data["figures"]} <= UNITS
    assert all(0 <= place < len(texts) for column in data["facts"].values() for place in column)
    assert all(0 <= node < count for ends in ("source", "target") for node in data["edges"][ends])
    figures = {figure["name"]: sum(figure["own"]) for figure in data["figures"]}
    assert figures.get("macs", 0) == stats.total_macs
    assert figures.get("params", 0) == stats.total_params
    graph = graph_of(explored)["graphs"][0]
    known = {node["id"] for node in graph["nodes"]}
    assert all(edge["sourceNodeId"] in known for node in graph["nodes"] for edge in node["incomingEdges"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_pages(library):
    for module in REQUIRES[library]:
        pytest.importorskip(module, exc_type=(ImportError, RuntimeError))
    catalogue = importlib.import_module(CATALOGUES[library])
    for name in catalogue.names() if SWEEPS_ALL else FIXED[library]:
        example = catalogue.make(name)
        check(Statistics(example.model, example.args, **example.kwargs))
