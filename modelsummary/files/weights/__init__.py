"""Files that hold the weights of a model alone: safetensors and GGUF."""
