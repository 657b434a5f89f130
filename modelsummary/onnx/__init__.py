"""ONNX files: read them, and change them."""

from modelsummary.onnx.loading import load_onnx

__all__ = ["load_onnx"]
