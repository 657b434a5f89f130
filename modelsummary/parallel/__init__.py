"""Spread a model over devices: plans that are derived from what its forward does."""

from modelsummary.parallel.plan import Collective, LayerPlan, ParallelPlan

__all__ = ["Collective", "LayerPlan", "ParallelPlan"]
