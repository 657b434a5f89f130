"""Files for Google's Model Explorer: the graph, and figures as node data.

The format is described by the classes of ``graph_builder`` and ``node_data_builder`` of the package
``ai-edge-model-explorer``.
"""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.file_contents import saved
from modelsummary.units import scaled
from modelsummary.views.explorer.data import Explored, model_data

__all__ = ["graph_of", "node_data_of", "write_files"]

_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e2701f"}]


def write_files(model: Explored, path: str | PathLike[str]) -> list[Path]:
    """Write the graph to ``path``, and beside it one file per figure; return all paths, the graph first.

    Raises:
        InputError: a file cannot be written.
    """
    target = saved(json.dumps(graph_of(model)), path)
    figures = node_data_of(model).items()
    return [target, *(saved(json.dumps(data), target.with_suffix(f".{name}.json")) for name, data in figures)]


def graph_of(model: Explored) -> dict[str, Any]:
    """Return a collection with one graph: its nodes are the smallest calls, their namespaces the modules around them.

    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> stats = Statistics(nn.Sequential(nn.Sequential(nn.Linear(2, 3)), nn.ReLU()), (1, 2))
    >>> graph = graph_of(Explored(stats.root, stats._dataflow()))["graphs"][0]
    >>> [(node["namespace"], node["label"]) for node in graph["nodes"]]
    [('', 'input'), ('0', '0: Linear'), ('', '1: ReLU'), ('', 'output')]
    """
    return {"label": model.nodes[0].name, "graphs": [_Graph(model).graph()]}


def node_data_of(model: Explored) -> dict[str, dict[str, Any]]:
    """Return name of each figure -> its node data: the own figure of each node that has some."""
    data = model_data(model)
    shown = {node.index for node in model.nodes if _is_shown(model, node.index)}
    return {
        figure["name"]: {
            model.nodes[0].name: {
                "name": figure["title"],
                "results": {
                    str(index): {"value": value}
                    for index, value in enumerate(figure["own"])
                    if value and index in shown
                },
                "gradient": _GRADIENT,
            }
        }
        for figure in data["figures"]
    }


class _Graph:
    """Builder of the graph of one model."""

    def __init__(self, model: Explored) -> None:
        self._model = model
        self._data = data = model_data(model)
        self._texts: list[str] = data["texts"]
        self._parents: list[int] = data["nodes"]["parent"]
        self._namespaces: list[str] = []
        for node in model.nodes:
            parent = self._parents[node.index]
            self._namespaces.append("" if parent < 0 else self._inside(parent))

    def _inside(self, index: int) -> str:
        """Return the namespace of the nodes inside a module."""
        if self._parents[index] < 0:
            return ""
        return "/".join(part for part in (self._namespaces[index], _part(self._model.nodes[index].name)) if part)

    def graph(self) -> dict[str, Any]:
        nodes = [node for node in self._model.nodes if _is_shown(self._model, node.index)]
        incoming: dict[int, list[dict[str, str]]] = {}
        edges = self._data["edges"]
        for source, target in zip(edges["source"], edges["target"], strict=True):
            arriving = incoming.setdefault(target, [])
            arriving.append(
                {"sourceNodeId": str(source), "sourceNodeOutputId": "0", "targetNodeInputId": str(len(arriving))}
            )
        return {
            "id": self._model.nodes[0].name,
            "nodes": [
                {
                    "id": str(node.index),
                    "label": f"{node.name}: {node.type}" if node.type and node.type != node.name else node.name,
                    "namespace": self._namespaces[node.index],
                    "incomingEdges": incoming.get(node.index, []),
                    "attrs": [{"key": key, "value": value} for key, value in self._attributes(node.index).items()],
                    "outputsMetadata": self._outputs(node.index),
                }
                for node in nodes
            ],
            "groupNodeAttributes": {
                self._inside(node.index): self._attributes(node.index) for node in self._model.nodes if node.children
            },
        }

    def _attributes(self, index: int) -> dict[str, str]:
        facts = {title: self._texts[places[index]] for title, places in self._data["facts"].items()}
        row = self._model.nodes[index].row
        if row is not None:
            counts = {"Multiply-adds": row.macs, "Parameters (count)": row.num_params}
            facts |= {title: scaled(count) for title, count in counts.items() if count}
        return {title: text for title, text in facts.items() if text}

    def _outputs(self, index: int) -> list[dict[str, Any]]:
        shape = self._data["facts"].get("Output")
        text = self._texts[shape[index]] if shape else ""
        return [{"id": "0", "attrs": [{"key": "shape", "value": text}]}] if text else []


def _is_shown(model: Explored, index: int) -> bool:
    """Return True for an operator, or the smallest known call of a module that was called."""
    node = model.nodes[index]
    if node.step is not None:
        return True
    return not node.children and node.row is not None and (node.row.executed or not model.root.executed)


def _part(name: str) -> str:
    """Return a name without the separator of namespaces."""
    return name.replace("/", "\N{DIVISION SLASH}")
