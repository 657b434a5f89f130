"""Replace calls of a model's functions by their bodies; rows of the tree keep the name of the call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from typing import Any, NamedTuple

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.onnx.checks import graphs_inside, subgraphs_of
from modelsummary.files.onnx.reading import NODE_STEPS

__all__ = ["inline_functions"]

Key = tuple[str, str, str]


class _Frame(NamedTuple):
    """The call whose body is expanded.

    Attributes:
        path: names of the calls from the outside in, ending in a slash; empty for the graph of the model.
        names: name of a value in the body -> its name outside; other names get the path in front.
        attributes: attributes of the call, with the function's defaults.
    """

    path: str
    names: dict[str, str]
    attributes: dict[str, Any]

    def renamed(self, name: str) -> str:
        """Return the name outside of a value of the body."""
        return self.names.get(name, self.path + name if name else "")

    def attributes_of(self, node: Any) -> Iterator[Any]:
        """Yield copies of a node's attributes; a reference to the call's attribute gets the value given in the call."""
        for attribute in node.attribute:
            source = self.attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
            if source is not None:
                copy = deepcopy(source)
                copy.name = attribute.name
                yield copy


def inline_functions(model: Any, budget: Budget) -> dict[str, str]:
    """Expand all calls in place; return the path of each call -> the name of its function.

    The inliners of onnx and of onnx-ir do not keep which call a node comes from, refuse functions written for another
    opset, and have no limit on what a file expands to. Here every node that is made is charged to the budget.

    Raises:
        ModelFileError: functions call each other in a cycle, or what they expand to is over the budget.
    """
    functions: dict[Key, Any] = {
        (function.domain, function.name, function.overload): function for function in model.functions
    }
    inliner = _Inliner(functions, budget)
    if functions:
        _check_cycles(functions)
        nodes = list(inliner.expanded(model.graph.node, _Frame("", {}, {})))
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        imported = {opset.domain for opset in model.opset_import}
        model.opset_import.extend(
            opset for function in functions.values() for opset in function.opset_import if opset.domain not in imported
        )
        del model.functions[:]
    return inliner.called


def _check_cycles(functions: Mapping[Key, Any]) -> None:
    calls = {
        key: [called for called in map(_key, _all_nodes(body.node)) if called in functions]
        for key, body in functions.items()
    }
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        circle = " -> ".join(key[1][:40] for key in error.args[1][:5])
        raise ModelFileError(f"functions call each other in a cycle: {circle}") from None


def _key(node: Any) -> Key:
    return node.domain, node.op_type, node.overload


def _all_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    return chain(nodes, *(graph.node for graph in graphs_inside(nodes)))


class _Inliner:
    """An expansion of calls in progress.

    Attributes:
        called: path of each call -> the name of its function.
    """

    def __init__(self, functions: Mapping[Key, Any], budget: Budget) -> None:
        self.functions = functions
        self.budget = budget
        self.called: dict[str, str] = {}

    def expanded(self, nodes: Iterable[Any], frame: _Frame) -> Iterator[Any]:
        """Yield the nodes of a graph or body, with calls replaced by the nodes of their functions."""
        for position, node in enumerate(nodes):
            name = f"{frame.path}{node.name or f'{node.op_type}_{position}'}"
            self.budget.spend(NODE_STEPS)
            function = self.functions.get(_key(node))
            if function is None:
                yield self._copy(node, name, frame)
                continue
            while name in self.called:
                name += "'"
            self.called[name] = function.name
            inputs = [frame.renamed(value_name) for value_name in node.input]
            names = dict(zip(function.input, inputs + [""] * len(function.input), strict=False))
            outputs = zip(function.output, map(frame.renamed, node.output), strict=False)
            names |= {inside: outside for inside, outside in outputs if outside}
            defaults = {attribute.name: attribute for attribute in function.attribute_proto}
            attributes = {attribute.name: attribute for attribute in frame.attributes_of(node)}
            with self.budget.enter():
                yield from self.expanded(function.node, _Frame(f"{name}/", names, defaults | attributes))

    def _copy(self, node: Any, name: str, frame: _Frame) -> Any:
        copy = deepcopy(node)
        copy.name = name
        copy.input[:] = [frame.renamed(value_name) for value_name in node.input]
        copy.output[:] = [frame.renamed(value_name) for value_name in node.output]
        attributes = list(frame.attributes_of(copy))
        del copy.attribute[:]
        copy.attribute.extend(attributes)
        for graph in subgraphs_of(copy).values():
            for value in (*graph.input, *graph.initializer, *graph.output, *graph.value_info):
                value.name = frame.renamed(value.name)
            with self.budget.enter():
                body = list(self.expanded(graph.node, frame))
            del graph.node[:]
            graph.node.extend(body)
        return copy
