"""Check an ONNX model before it is used: its tensors have data of the right length, its operators are ordered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.onnx.dtypes import element_of
from modelsummary.files.onnx.reading import LONGEST_KEPT, LeftOut, import_onnx

__all__ = [
    "check_model",
    "check_texts",
    "constants_of",
    "graphs_inside",
    "graphs_of",
    "inputs_of",
    "quoted",
    "subgraphs_of",
    "tensors_of",
    "walk_graphs",
]

_MOST_DIMENSIONS = 256  # of one tensor: libraries have 64 at the most
_REMARKS = frozenset({"doc_string", "metadata_props", "producer_name", "producer_version"})  # fields that name nothing
_SIZES = (6, 7)  # int32 and int64, which shape inference reads of any length

Names = tuple[set[str], ...]


def check_model(
    model: Any,
    path: Path,
    budget: Budget,
    *,
    left_out: Mapping[int, LeftOut] | None = None,
    drop_weights: bool = False,
) -> set[str]:
    """Check tensors, names and order of operators in all graphs of a model.

    Args:
        path: the model's file; external weights must lie in its directory.
        left_out: position of an initializer -> place of its data in the file, for data that were not read.
        drop_weights: drop long values other than sizes and indices after checking their length, and make sparse weights
            dense, as runtimes do.

    Returns:
        The names of the files that hold external weights.

    Raises:
        ModelFileError: the model contradicts itself.
    """
    files: set[str] = set()
    graph = model.graph
    if not model.HasField("graph") or not (graph.node or graph.output):
        raise ModelFileError("the model has no graph")
    for inner, around in walk_graphs(graph):
        budget.spend(len(inner.node))
        budget.check_depth(len(around))
        places = left_out or {} if inner is graph else {}
        for position, tensor in enumerate(tensors_of(inner)):  # initializers come first
            _check_tensor(tensor, path, places.get(position), drop_weights)
            files.update(entry.value for entry in tensor.external_data if entry.key == "location")
        for value in (*inner.input, *inner.output, *inner.value_info):
            _check_rank(value.name, value.type.tensor_type.shape.dim)
        _check_order(inner, around)
        if drop_weights:
            _make_dense(inner)
    return files


def _make_dense(graph: Any) -> None:
    """Replace sparse weights by dense ones without values: shape inference gives sparse ones another type."""
    for sparse in graph.sparse_initializer:
        if any(dim < 0 for dim in sparse.dims):
            raise ModelFileError(f"tensor {quoted(sparse.values.name)} has the negative shape {list(sparse.dims[:8])}")
        graph.initializer.add(name=sparse.values.name, data_type=sparse.values.data_type, dims=sparse.dims)
    del graph.sparse_initializer[:]


def check_texts(model: Any) -> None:
    """Raise ``ModelFileError`` if a name is not valid text: Protocol Buffers return such names as bytes."""
    pending = [model]
    while pending:
        for field, value in pending.pop().ListFields():
            if field.name in _REMARKS:
                continue
            values = [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value
            if field.message_type is not None:
                pending.extend(values)
            elif field.type == field.TYPE_STRING:
                for text in values:
                    if type(text) is not str:
                        raise ModelFileError(f"names must be text in UTF-8, got {text[:80]!r}")


def quoted(name: Any) -> str:
    """Return a name from a file, shortened and quoted for a message."""
    return repr(str(name)[:80])


def walk_graphs(graph: Any) -> Iterator[tuple[Any, Names]]:
    """Yield the graph and all graphs inside it, each with the names visible from the graphs around it."""
    pending: list[tuple[Any, Names]] = [(graph, ())]
    while pending:
        graph, around = pending.pop()
        yield graph, around
        inner = [sub for node in graph.node for sub in subgraphs_of(node).values()]
        if inner:
            names = {value.name for value in (*graph.input, *graph.initializer)}
            names.update(name for node in graph.node for name in node.output)
            pending.extend((sub, (*around, names)) for sub in inner)


def graphs_of(model: Any) -> Iterator[Any]:
    """Yield the graph of a model, and all graphs inside it and inside its functions."""
    yield model.graph
    yield from graphs_inside(chain(model.graph.node, *(function.node for function in model.functions)))


def graphs_inside(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield all graphs in the attributes of nodes, and the graphs inside these."""
    pending = [nodes]
    while pending:
        for node in pending.pop():
            for graph in chain.from_iterable(map(_graphs_in, node.attribute)):
                yield graph
                pending.append(graph.node)


def inputs_of(graph: Any) -> dict[str, Any]:
    """Return the inputs of a graph by name, without the weights, which older versions list among them."""
    weights = {weight.name for weight in graph.initializer}
    return {value.name: value for value in graph.input if value.name not in weights}


def subgraphs_of(node: Any) -> dict[str, Any]:
    """Return attribute -> graph for an operator that runs graphs, such as ``If``; empty for others."""
    return {
        f"{attribute.name}.{position}" if attribute.graphs else attribute.name: graph
        for attribute in node.attribute
        for position, graph in enumerate(_graphs_in(attribute))
    }


def _graphs_in(attribute: Any) -> Sequence[Any]:
    """Return the graphs of an attribute, whatever type it declares."""
    return (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs


def tensors_of(graph: Any) -> Iterator[Any]:
    """Yield the ``TensorProto`` of a graph, initializers before constants; inner graphs are left out."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from constants_of(graph.node)


def constants_of(nodes: Any) -> Iterator[Any]:
    """Yield the ``TensorProto`` in the attributes of nodes; inner graphs are left out."""
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _check_tensor(tensor: Any, path: Path, left_out: LeftOut | None, drop: bool) -> None:
    """Check that the data of a tensor are as long as its type and shape require."""
    name, onnx = quoted(tensor.name), import_onnx()
    _check_rank(tensor.name, tensor.dims)
    if any(dim < 0 for dim in tensor.dims):
        raise ModelFileError(f"tensor {name} has the negative shape {list(tensor.dims[:8])}")
    element = element_of(tensor.data_type)
    if element is None:
        raise ModelFileError(f"tensor {name} has the unknown type {tensor.data_type}")
    numel = prod(tensor.dims)
    needed = (numel * element.bits + 7) // 8
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external(tensor, needed, path)
    elif left_out is not None or tensor.HasField("raw_data"):
        length = len(tensor.raw_data) if left_out is None else left_out.length  # copies the data
        if length != needed:
            raise ModelFileError(f"tensor {name} needs {needed:,} bytes by its shape, and has {length:,}")
        if drop and length > LONGEST_KEPT and tensor.data_type not in _SIZES:
            tensor.ClearField("raw_data")
    else:
        data = getattr(tensor, onnx.helper.tensor_dtype_to_field(tensor.data_type))
        parts = 2 if element.name.startswith("complex") else 1
        if len(data) not in (numel * parts, needed):  # elements of less than a byte may be packed
            raise ModelFileError(f"tensor {name} needs {numel:,} elements by its shape, and has {len(data):,}")


def _check_rank(name: str, dims: Any) -> None:
    if len(dims) > _MOST_DIMENSIONS:
        raise ModelFileError(f"tensor {quoted(name)} has {len(dims):,} dimensions; at most {_MOST_DIMENSIONS} are read")


def _check_external(tensor: Any, needed: int, path: Path) -> None:
    """Check that external data lie in the model's directory and suffice; they may be missing, and are never read."""
    facts = {entry.key: entry.value for entry in tensor.external_data}
    name, location = quoted(tensor.name), facts.get("location", "")
    folder = path.resolve().parent
    try:
        file = (folder / location).resolve()
        offset, length = int(facts.get("offset", 0)), int(facts.get("length", needed))
        size = file.stat().st_size if file.exists() else None
    except (ValueError, OSError, RuntimeError):
        raise ModelFileError(f"tensor {name}: external data cannot be at {facts!s:.120}") from None
    if not location or not file.is_relative_to(folder) or file.is_dir():
        raise ModelFileError(f"tensor {name}: external data must lie in the model's directory, got {quoted(location)}")
    if offset < 0 or length != needed:
        there = f"{length:,} at {offset:,}"
        raise ModelFileError(f"tensor {name} needs {needed:,} bytes by its shape; its external data have {there}")
    if size is not None and size < offset + length:
        raise ModelFileError(f"tensor {name}: external data {quoted(location)} end before byte {offset + length:,}")


def _check_order(graph: Any, around: Names) -> None:
    """Check that every operator follows the operators it reads from, and that every name is defined once."""
    defined = {value.name for value in (*graph.input, *graph.initializer)} | {""}  # "": an optional input left out
    defined.update(sparse.values.name for sparse in graph.sparse_initializer)
    later = {name for node in graph.node for name in node.output}
    for position, node in enumerate(graph.node):
        who = quoted(node.name or position)
        for name in node.input:
            if name in defined or any(name in names for names in around):
                continue
            why = "is defined after it: the graph has a cycle or no order" if name in later else "is not defined"
            raise ModelFileError(f"operator {who} reads {quoted(name)}, which {why}")
        for name in filter(None, node.output):
            if name in defined:
                raise ModelFileError(f"operator {who} defines {quoted(name)}, which is defined already")
            defined.add(name)
    for value in graph.output:
        if value.name not in defined and not any(value.name in names for names in around):
            raise ModelFileError(f"the result {quoted(value.name)} is not defined")
