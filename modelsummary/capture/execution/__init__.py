"""How operators run: on shapes, or really."""
