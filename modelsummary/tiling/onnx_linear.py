"""Replace products with weights in an ONNX model by products of tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError, ModelFileError, check_integers
from modelsummary.files.budget import Budget
from modelsummary.files.file_errors import reading
from modelsummary.files.onnx.attributes import value_of
from modelsummary.files.onnx.checks import check_model, check_texts
from modelsummary.files.onnx.reading import import_onnx, read_model
from modelsummary.tiling.onnx_graphs import Tiles, parts_of

__all__ = ["ModelLike", "not_tiled", "proto_of", "tile_linear"]

ModelLike = Any
"""An ``onnx.ModelProto``, or the path of an ONNX file."""

_OLDEST = 11  # opset; before it Gemm needs a bias, and axes cannot count from the end
# Metadata that the tree of modules needs; traces and the rest would be repeated for every tile.
_KEPT = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy")


def tile_linear(model: ModelLike, tile: int = 64, nodes: Sequence[str] | None = None) -> Any:
    """Return a copy of a model that computes products with weights in tiles of at most ``tile`` x ``tile``.

    The input is split along its last dimension and the weight along both, each once; the weights themselves and their
    names do not change. Products are summed, the first product of each sum takes the bias, and the sums are joined
    under the name of the node's output. The last tile of a dimension may be smaller. Multiply-adds stay the same.

    Args:
        model: an ``onnx.ModelProto``, which is not changed, or the path of an ONNX file.
        tile: largest side of a tile, in elements. Default: 64.
        nodes: names of the nodes to replace; default: all ``Gemm``, and ``MatMul`` with a 2-d weight, that can be
            tiled. ``not_tiled`` lists the others.

    Returns:
        An ``onnx.ModelProto``.

    Raises:
        InputError: a node does not exist or cannot be tiled, or ``tile`` is not an integer >= 1.
        ModelFileError: the file is broken.
        MissingExtraError: onnx is not installed.

    >>> import onnx
    >>> from modelsummary.onnx import linear_graph, tile_linear
    >>> model = linear_graph(4, 100, 70)
    >>> weight = onnx.helper.make_tensor("B", onnx.TensorProto.FLOAT, [100, 70], [0.5] * 7000)
    >>> model.graph.initializer.extend([weight])
    >>> tiled = tile_linear(model, tile=64)
    >>> sum(node.op_type == "MatMul" for node in tiled.graph.node)
    4
    """
    check_integers(tile=tile)
    result = deepcopy(proto_of(model))
    graph = result.graph
    opset = next((opset_id.version for opset_id in result.opset_import if opset_id.domain in ("", "ai.onnx")), 0)
    if opset < _OLDEST:
        raise InputError(f"the opset must be >= {_OLDEST}, got {opset}; export the model again with a newer opset")
    weights = {tensor.name: tensor for tensor in graph.initializer}
    names = Counter(node.name for node in graph.node)
    wanted = _wanted(nodes, names)
    tiled: list[Any] = []
    for node in graph.node:
        obstacle = _obstacle(node, weights)
        if wanted is not None and node.name in wanted and obstacle:
            raise InputError(f"node {node.name!r} ({node.op_type}) cannot be tiled: {obstacle}")
        if obstacle or (wanted is not None and node.name not in wanted):
            tiled.append(node)
            continue
        prefix = node.name if names[node.name] == 1 and node.name else node.output[0]
        tiles = _tiles(node, weights, tile, Tiles(f"{prefix}/", opset))
        tiled += tiles.nodes or [node]
        graph.initializer.extend(tiles.weights.values())
    copies = [deepcopy(node) for node in tiled]  # clearing the graph ends the nodes in it
    del graph.node[:]
    graph.node.extend(copies)
    return result


def not_tiled(model: ModelLike) -> dict[str, str]:
    """Return the ``Gemm`` and ``MatMul`` that ``tile_linear`` cannot tile, and why.

    Args:
        model: an ``onnx.ModelProto``, or the path of an ONNX file.

    Returns:
        Name of the node, or of its result if the node has no name -> the reason.

    >>> from modelsummary.onnx import linear_graph, not_tiled
    >>> not_tiled(linear_graph(64, 128, 32))  # both operands are inputs
    {'matmul': 'its second operand is not a weight with two dimensions'}
    """
    graph = proto_of(model).graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type in ("Gemm", "MatMul")]
    return {node.name or node.output[0]: why for node in products if (why := _obstacle(node, weights))}


def proto_of(model: ModelLike) -> Any:
    """Return a ``ModelProto`` as it is, or the one in a file, with its weights.

    Raises:
        InputError: ``model`` is neither a ``ModelProto`` nor a path.
        ModelFileError: the file is broken, or its weights are missing.
    """
    onnx = import_onnx()
    if isinstance(model, onnx.ModelProto):
        return model
    if not isinstance(model, (str, PathLike)):
        raise InputError(f"model must be an onnx.ModelProto or a path, got {type(model).__name__}: {model!r:.80}")
    path = Path(model)
    with reading(path):
        proto = read_model(path)
        check_texts(proto)
        check_model(proto, path, Budget.of_size(path.stat().st_size))
        try:
            onnx.external_data_helper.load_external_data_for_model(proto, str(path.resolve().parent))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            raise ModelFileError(f"cannot read its weights: {error}") from None
    return proto


def _wanted(nodes: Any, names: Mapping[str, int]) -> set[str] | None:
    if nodes is None:
        return None
    if not isinstance(nodes, (Sequence, Set)) or isinstance(nodes, str):
        raise InputError(f"nodes must be a list of names of nodes, got {nodes!r:.80}")
    for name in nodes:
        if name not in names:
            raise InputError(f"nodes must be names of nodes of the model, got {name!r:.80}")
    return set(nodes)


def _obstacle(node: Any, weights: dict[str, Any]) -> str:
    """Return the reason why a node cannot be tiled; empty if it can."""
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Gemm", "MatMul"):
        return "only Gemm and MatMul can be tiled"
    weight = weights.get(node.input[1])
    if weight is None or len(weight.dims) != 2:
        return "its second operand is not a weight with two dimensions"
    attributes = {attribute.name: value_of(attribute) for attribute in node.attribute}
    if attributes.get("transA"):
        return "its first operand is transposed"
    if node.input[0] == node.input[1]:
        return "both operands are the same tensor"
    bias = weights.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    columns = weight.dims[0 if attributes.get("transB") else 1]
    if len(node.input) > 2 and node.input[2] and (bias is None or list(bias.dims) not in ([columns], [1, columns])):
        return "its bias is not a weight with one element per column"
    return ""


def _tiles(node: Any, weights: dict[str, Any], tile: int, tiles: Tiles) -> Tiles:
    """Add the nodes that replace one node to ``tiles``; none if the node fits in a tile."""
    attributes = {attribute.name: value_of(attribute) for attribute in node.attribute}
    weight = weights[node.input[1]]
    axis = 0 if attributes.get("transB") else 1  # axis of the weight's columns
    columns, inner = parts_of(weight.dims[axis], tile), parts_of(weight.dims[1 - axis], tile)
    if len(columns) == len(inner) == 1:
        return tiles
    left = tiles.split(node.input[0], inner, -1)
    right = [tiles.split(band, inner, 1 - axis) for band in tiles.split(node.input[1], columns, axis)]
    bias = tiles.split(node.input[2], columns, -1) if len(node.input) > 2 and node.input[2] else []
    rest = {name: attributes[name] for name in ("alpha", "transB") if name in attributes}
    sums = []
    for j in range(len(columns)):
        products = []
        for i in range(len(inner)):
            first = bool(bias) and i == 0
            operands = [left[i], right[j][i], *([bias[j]] if first else [])]
            beta = {"beta": attributes["beta"]} if first and "beta" in attributes else {}
            products.append(tiles.add(node.op_type, operands, f"tile_{j}_{i}", **rest, **beta))
        sums.append(tiles.join("Sum", products, f"sum_{j}"))
    tiles.rename(tiles.join("Concat", sums, "all", axis=-1), node.output[0])
    tiles.nodes[-1].name = f"{tiles.prefix}{'all' if len(columns) > 1 else 'sum_0'}"
    kept = [prop for prop in node.metadata_props if prop.key in _KEPT]
    for tiled in tiles.nodes:
        tiled.metadata_props.extend(kept)
    return tiles
