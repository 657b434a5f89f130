"""Split matrix products of PyTorch layers and ONNX models into tiles."""

from modelsummary.tiling.matmul import TiledLinear, tile_linear

__all__ = ["TiledLinear", "tile_linear"]
