"""Memory and time of serving a model: its cache, what fits, prefill and decode, and a server under load."""

from modelsummary.serving.estimate import estimate_serving
from modelsummary.serving.load import Load, LoadRequest, LogNormal, Uniform
from modelsummary.serving.plan import ServingPlan, ServingPlans, ServingSpace
from modelsummary.serving.report import ServingEstimate, Throughput
from modelsummary.serving.scheduler import Engine, ServedRequest, Timeline
from modelsummary.serving.server import ServingOptions
from modelsummary.serving.simulation import ServingSimulation, Spread

__all__ = [
    "Engine",
    "Load",
    "LoadRequest",
    "LogNormal",
    "ServedRequest",
    "ServingEstimate",
    "ServingOptions",
    "ServingPlan",
    "ServingPlans",
    "ServingSimulation",
    "ServingSpace",
    "Spread",
    "Throughput",
    "Timeline",
    "Uniform",
    "estimate_serving",
]
