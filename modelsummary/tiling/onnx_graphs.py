"""Make ONNX graphs of one matrix product, whole and in tiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from modelsummary.errors import check_integers
from modelsummary.files.onnx.reading import import_onnx

__all__ = ["IR_VERSION", "OPSET", "Tiles", "linear_graph", "parts_of", "tiled_matmul_graph"]

OPSET, IR_VERSION = 20, 10  # supported by every onnxruntime since 1.17


def linear_graph(m: int, k: int, n: int) -> Any:
    """Return an ``onnx.ModelProto`` that multiplies ``A`` (m, k) by ``B`` (k, n) to ``Y`` (m, n), all float32.

    Raises:
        InputError: a size is not an integer >= 1.
        MissingExtraError: onnx is not installed.

    >>> [node.op_type for node in linear_graph(64, 128, 32).graph.node]
    ['MatMul']
    """
    check_integers(m=m, k=k, n=n)
    node = import_onnx().helper.make_node("MatMul", ["A", "B"], ["Y"], name="matmul")
    return _model([node], m, k, n)


def tiled_matmul_graph(m: int, k: int, n: int, tile: int) -> Any:
    """Return the product of ``linear_graph`` in tiles of at most ``tile`` x ``tile``.

    Both operands are split along both dimensions. Products of tiles along ``k`` are summed, and the sums concatenated.
    The last tile of a dimension may be smaller.

    Args:
        m, k, n: sizes of ``A`` (m, k), ``B`` (k, n) and ``Y`` (m, n).
        tile: largest side of a tile, in elements.

    Raises:
        InputError: a size is not an integer >= 1.
        MissingExtraError: onnx is not installed.

    >>> nodes = tiled_matmul_graph(64, 128, 32, tile=64).graph.node
    >>> [node.op_type for node in nodes]
    ['Split', 'Split', 'MatMul', 'MatMul', 'Sum']
    """
    check_integers(m=m, k=k, n=n, tile=tile)
    tiles = Tiles()
    rows, inner, columns = (parts_of(size, tile) for size in (m, k, n))
    left = [tiles.split(band, inner, 1) for band in tiles.split("A", rows, 0)]
    right = [tiles.split(band, columns, 1) for band in tiles.split("B", inner, 0)]
    bands = []
    for i in range(len(rows)):
        cells = []
        for j in range(len(columns)):
            products = [
                tiles.add("MatMul", [left[i][p], right[p][j]], f"product_{i}_{j}_{p}") for p in range(len(inner))
            ]
            cells.append(tiles.join("Sum", products, f"sum_{i}_{j}"))
        bands.append(tiles.join("Concat", cells, f"row_{i}", axis=1))
    tiles.rename(tiles.join("Concat", bands, "Y", axis=0), "Y")
    return _model(tiles.nodes, m, k, n, tiles.weights.values())


class Tiles:
    """Nodes of tiles under construction, with the weights that hold the sizes of parts.

    Args:
        prefix: start of the names of all nodes.
        opset: opset of the model. From 13 on the sizes of parts are an input of ``Split``, before an attribute.
    """

    def __init__(self, prefix: str = "", opset: int = 13) -> None:
        self.prefix = prefix
        self.opset = opset
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}

    def add(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add an operator that makes ``output``; return the full name of ``output``."""
        name = self.prefix + output
        self.nodes.append(import_onnx().helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def join(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add an operator that joins several inputs; return a single input unchanged."""
        return inputs[0] if len(inputs) == 1 else self.add(op_type, inputs, output, **attributes)

    def split(self, name: str, sizes: list[int], axis: int) -> list[str]:
        """Add a split of a tensor; return the names of its parts."""
        if len(sizes) == 1:
            return [name]
        onnx = import_onnx()
        stem = f"{self.prefix}{name.removeprefix(self.prefix)}"
        outputs = [f"{stem}_{index}" for index in range(len(sizes))]
        if self.opset < 13:
            split = onnx.helper.make_node("Split", [name], outputs, name=f"{stem}_split", axis=axis, split=sizes)
            self.nodes.append(split)
            return outputs
        parts = f"{self.prefix}parts_{len(sizes)}_{sizes[0]}_{sizes[-1]}"
        self.weights[parts] = onnx.helper.make_tensor(parts, onnx.TensorProto.INT64, [len(sizes)], sizes)
        self.nodes.append(onnx.helper.make_node("Split", [name, parts], outputs, name=f"{stem}_split", axis=axis))
        return outputs

    def rename(self, output: str, name: str) -> None:
        """Rename the result of a node; no node may read it yet."""
        for node in self.nodes:
            node.output[:] = [name if result == output else result for result in node.output]


def parts_of(size: int, tile: int) -> list[int]:
    """Return the sizes of the tiles along a dimension; the last may be smaller.

    >>> parts_of(150, 64)
    [64, 64, 22]
    """
    return [min(tile, size - start) for start in range(0, size, tile)]


def _model(nodes: list[Any], m: int, k: int, n: int, weights: Iterable[Any] = ()) -> Any:
    onnx = import_onnx()
    sizes = {"A": [m, k], "B": [k, n], "Y": [m, n]}
    a, b, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, size) for name, size in sizes.items())
    graph = onnx.helper.make_graph(nodes, "product", [a, b], [y], list(weights))
    opset = onnx.helper.make_opsetid("", OPSET)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)
