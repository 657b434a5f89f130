"""The memory of a step, predicted and measured, and activation checkpointing."""

from modelsummary.memory.fit import max_batch_size
from modelsummary.memory.measure import measure
from modelsummary.memory.planning import memory_curve, memory_plan
from modelsummary.memory.predict import predict

__all__ = ["max_batch_size", "measure", "memory_curve", "memory_plan", "predict"]
