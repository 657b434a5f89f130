"""ONNX models: graphs of products in tiles, linear layers cut into tiles, and two models compared on onnxruntime.

``modelsummary.load`` reads the files.
"""

from modelsummary.onnx.surgery import tile_linear
from modelsummary.onnx.tiles import linear_graph, tiled_matmul_graph
from modelsummary.onnx.verify import Verification, verify

__all__ = ["Verification", "linear_graph", "tile_linear", "tiled_matmul_graph", "verify"]
