"""Models stored as files: readers for ONNX, exported programs and TorchScript, and their statistics."""
