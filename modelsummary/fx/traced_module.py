"""``TracedModule``: a ``GraphModule`` that holds the model's own modules and tensors, and pickles with its graph."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.package.importer import sys_importer

from modelsummary._torch import format_imports
from modelsummary.capture.templates import map_template
from modelsummary.fx.builder import Apply
from modelsummary.fx.codegen import CheckpointCodeGen
from modelsummary.record.events import TorchFunction, torch_function

__all__ = ["FunctionModule", "TracedModule", "graph_module"]


class FunctionModule(nn.Module):
    """A function as a module. The owner of a bound method becomes a submodule if it is a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        owner = getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            self.owner = owner


class TracedModule(GraphModule):
    """A graph module that pickles node by node.

    ``GraphModule`` pickles its code and traces it again on loading, which turns the mode and sizes into constants.
    """

    def to_folder(self, folder: str | os.PathLike[str], module_name: str = "FxModule") -> None:
        """Write the graph as a package: ``from folder import module_name``, then ``module_name()`` loads it.

        ``module.py`` has the code. ``state.pt`` has the layers with shared parameters, hooks, modes and dtypes, which
        ``GraphModule.to_folder`` does not keep.

        Args:
            folder: folder of the package; created if needed.
            module_name: name of the class in it.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._state(), folder / "state.pt")
        code = _CODE.format(imports=_imports(self.graph), code=self.code.strip(), name=module_name)
        (folder / "module.py").write_text(code)
        (folder / "__init__.py").write_text(f"from .module import {module_name}\n")

    def _state(self) -> dict[str, Any]:
        """Return the attributes without the graph, its code and its metadata."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_graph", "_code", "meta")}

    def __reduce__(self) -> Any:
        # nodes are pickled separately: torch.save uses an old protocol that cannot pickle memory formats
        return _restored, (self._state(), pickle.dumps(_nodes_of(self.graph)), type(self).__name__, self.meta)


# forward is defined outside the class, because names with two underscores (``__main___Output``) are mangled inside it
_CODE = """{imports}
from pathlib import Path

import torch


{code}


class {name}(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.__dict__.update(torch.load(Path(__file__).with_name("state.pt"), weights_only=False))

    forward = forward
"""


def _imports(graph: Graph) -> str:
    """Return the import lines for the names in a graph's code; ``apply`` of autograd functions via their class."""
    named = dict(graph.python_code("self").globals)
    applied = {name: named.pop(name).function for name, module in list(named.items()) if isinstance(module, Apply)}
    classes = format_imports({f"_{name}": function for name, function in applied.items()}, sys_importer)
    return "\n".join([format_imports(named, sys_importer), classes, *(f"{name} = _{name}.apply" for name in applied)])


def _nodes_of(graph: Graph) -> list[tuple[Any, ...]]:
    """Return the nodes as plain data, with names for nodes in arguments."""

    def plain(argument: Any) -> Any:
        return map_arg(argument, lambda node: _Name(node.name))

    return [
        (node.op, node.name, _by_name(node.target), plain(node.args), plain(node.kwargs), dict(node.meta))
        for node in graph.nodes
    ]


class _Name(str):
    """The name of a node in pickled arguments."""


def _by_name(target: Any) -> Any:
    """Return a function of torch by name, because it may not be picklable; return other targets unchanged."""
    if callable(target) and str(getattr(target, "__module__", "")).partition(".")[0] == "torch":
        return torch_function(target)
    return target


def _restored(state: dict[str, Any], nodes: bytes, class_name: str, meta: dict[str, Any]) -> TracedModule:
    graph = Graph()
    graph.set_codegen(CheckpointCodeGen())
    by_name: dict[str, Node] = {}

    def real(arguments: Any) -> Any:
        return map_template(lambda leaf: by_name[leaf] if isinstance(leaf, _Name) else leaf, arguments)

    for op, name, target, args, kwargs, own_meta in pickle.loads(nodes):
        called = target.function if isinstance(target, TorchFunction) else target
        by_name[name] = node = graph.create_node(op, called, real(args), real(kwargs), name=name)
        node.meta = own_meta
    root = nn.Module()
    root.__dict__.update(state)
    module = TracedModule(root, graph, class_name=class_name)
    module.__dict__.update(state)
    module.meta = meta
    return module


def graph_module(model: nn.Module, graph: Graph, constants: Mapping[str, Any]) -> TracedModule:
    """Return a graph module with the model's own modules and tensors at their own paths, and its state dict's keys."""
    root = nn.Module()
    for name, value in vars(model).items():
        if name not in ("_modules", "_parameters", "_buffers", "forward"):
            root.__dict__.setdefault(name, value)
    root.training = model.training
    root._modules, root._parameters = model._modules, model._parameters
    root._buffers = dict(model._buffers)
    for name, value in constants.items():
        if isinstance(value, Tensor):
            root._buffers[name] = value
        else:
            root.__dict__[name] = value
    module = TracedModule(root, graph, class_name=type(model).__name__)
    modules = {id(inner) for inner in model.modules() if inner is not model}
    for fqn, scope in module.named_modules():
        if id(scope) in modules:
            continue  # a module of the model itself
        source = model.get_submodule(fqn)
        scope.training = source.training
        persistent = source._buffers.keys() - source._non_persistent_buffers_set
        scope._non_persistent_buffers_set.update(scope._buffers.keys() - persistent)
    return module
