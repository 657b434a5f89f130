"""Matrix products in tiles: of PyTorch layers, and of ONNX models."""

from modelsummary.tiling.matmul import TiledLinear, tile_linear

__all__ = ["TiledLinear", "tile_linear"]
