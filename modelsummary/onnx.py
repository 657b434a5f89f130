"""ONNX models: graphs of tiled products, linear layers cut into tiles, and comparison of two models on onnxruntime.

``modelsummary.load`` reads ONNX files.
"""

from modelsummary.tiling.onnx_graphs import linear_graph, tiled_matmul_graph
from modelsummary.tiling.onnx_linear import not_tiled, tile_linear
from modelsummary.tiling.onnx_verify import Verification, verify

__all__ = ["Verification", "linear_graph", "not_tiled", "tile_linear", "tiled_matmul_graph", "verify"]
