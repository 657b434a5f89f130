"""The memory of a step, predicted and measured, and activation checkpointing."""

from modelsummary.memory.fit import max_batch_size, suggest_checkpoint
from modelsummary.memory.measure import measure
from modelsummary.memory.predict import predict

__all__ = ["max_batch_size", "measure", "predict", "suggest_checkpoint"]
