"""How operators run: on shapes, on fake tensors, or really."""
