"""Graphs of one matrix product, whole and in tiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from modelsummary.errors import InputError
from modelsummary.files.onnx.reading import import_onnx

__all__ = ["IR_VERSION", "OPSET", "Tiles", "check_sizes", "linear_graph", "parts_of", "tiled_matmul_graph"]

OPSET, IR_VERSION = 20, 10  # read by every onnxruntime since 1.17


def linear_graph(m: int, k: int, n: int) -> Any:
    """A model of one product: ``A`` (m x k) by ``B`` (k x n) is ``Y``, all float32.

    Raises:
        InputError: a size is no integer >= 1.
        MissingExtraError: onnx is not installed.
    """
    check_sizes(m=m, k=k, n=n)
    node = import_onnx().helper.make_node("MatMul", ["A", "B"], ["Y"], name="matmul")
    return _model([node], m, k, n)


def tiled_matmul_graph(m: int, k: int, n: int, tile: int) -> Any:
    """The same product in tiles of at most ``tile`` x ``tile``, for a machine that multiplies no larger ones.

    Both operands are split along both dimensions, products of tiles along ``k`` are summed, results put together. The
    last tile of a dimension has what remains.

    Raises:
        InputError: a size is no integer >= 1.
        MissingExtraError: onnx is not installed.
    """
    check_sizes(m=m, k=k, n=n, tile=tile)
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
    """Nodes under construction, with the weights that say how they split.

    Args:
        prefix: of the names of all of them.
        opset: of the model; sizes of parts are an input of ``Split`` since 13, and an attribute before.
    """

    def __init__(self, prefix: str = "", opset: int = 13) -> None:
        self.prefix = prefix
        self.opset = opset
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}

    def add(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add an operator that makes ``output``; returns the full name of that."""
        name = self.prefix + output
        self.nodes.append(import_onnx().helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def join(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """The same, for what a single input needs no operator for."""
        return inputs[0] if len(inputs) == 1 else self.add(op_type, inputs, output, **attributes)

    def split(self, name: str, sizes: list[int], axis: int) -> list[str]:
        """Names of the parts of a tensor."""
        if len(sizes) == 1:
            return [name]
        onnx = import_onnx()
        own = f"{self.prefix}{name.removeprefix(self.prefix)}"
        outputs = [f"{own}_{number}" for number in range(len(sizes))]
        if self.opset < 13:
            split = onnx.helper.make_node("Split", [name], outputs, name=f"{own}_split", axis=axis, split=sizes)
            self.nodes.append(split)
            return outputs
        parts = f"{self.prefix}parts_{len(sizes)}_{sizes[0]}_{sizes[-1]}"
        self.weights[parts] = onnx.helper.make_tensor(parts, onnx.TensorProto.INT64, [len(sizes)], sizes)
        self.nodes.append(onnx.helper.make_node("Split", [name, parts], outputs, name=f"{own}_split", axis=axis))
        return outputs

    def rename(self, output: str, name: str) -> None:
        """Give the result of a node another name; none reads it yet."""
        for node in self.nodes:
            node.output[:] = [name if each == output else each for each in node.output]


def check_sizes(**sizes: Any) -> None:
    """Raise ``InputError`` unless all are integers >= 1."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise InputError(f"{name}={size!r}; expected an integer >= 1")


def parts_of(size: int, tile: int) -> list[int]:
    """Sizes of the tiles along a dimension; the last has what remains."""
    return [min(tile, size - start) for start in range(0, size, tile)]


def _model(nodes: list[Any], m: int, k: int, n: int, weights: Iterable[Any] = ()) -> Any:
    onnx = import_onnx()
    sizes = {"A": [m, k], "B": [k, n], "Y": [m, n]}
    a, b, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, size) for name, size in sizes.items())
    graph = onnx.helper.make_graph(nodes, "product", [a, b], [y], list(weights))
    opset = onnx.helper.make_opsetid("", OPSET)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION)
