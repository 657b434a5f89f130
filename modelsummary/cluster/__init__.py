"""Plan the training of a model on a cluster."""

from modelsummary.cluster.plan import Cluster, Plan, Plans, make_plans

__all__ = ["Cluster", "Plan", "Plans", "make_plans"]
