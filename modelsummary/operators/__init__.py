"""What is known of an operator: multiply-adds, bytes, the kernels that a device runs for it."""

# Each family adds its rows to the table.
from modelsummary.operators import (  # noqa: F401
    attention,
    convolutions,
    elementwise,
    indexing,
    norms,
    pooling,
    products,
    recurrent_layers,
)
