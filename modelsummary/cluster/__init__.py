"""Simulate the training of a model on a cluster, and search for the best plan."""

from modelsummary.cluster.estimate import StepEstimate
from modelsummary.cluster.plan import Plan, Recipe
from modelsummary.cluster.plans import Plans
from modelsummary.cluster.published_errors import PublishedErrors
from modelsummary.cluster.search import SearchOptions
from modelsummary.cluster.step import StepSimulator
from modelsummary.cluster.step_model import StepModel
from modelsummary.cluster.topology import Cluster
from modelsummary.devices.factors import Factors

__all__ = [
    "Cluster",
    "Factors",
    "Plan",
    "Plans",
    "PublishedErrors",
    "Recipe",
    "SearchOptions",
    "StepEstimate",
    "StepModel",
    "StepSimulator",
]
