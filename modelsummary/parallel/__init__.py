"""Spread a model over devices: plans that are derived from what its forward does."""

from modelsummary.operators.collective_calls import Collective
from modelsummary.parallel.plan import LayerPlan, ParallelPlan

__all__ = ["Collective", "LayerPlan", "ParallelPlan"]
