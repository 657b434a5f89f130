"""Memory and time of serving a model: its cache, what fits, prefill and decode, and a server under load."""

from modelsummary.serving.estimate import ServingOptions, estimate_serving
from modelsummary.serving.load import Load, LogNormal, ServedLengths, Uniform
from modelsummary.serving.report import ServingEstimate, Throughput
from modelsummary.serving.scheduler import Engine, ServedRequest, Timeline
from modelsummary.serving.simulation import ServingSimulation, Spread

__all__ = [
    "Engine",
    "Load",
    "LogNormal",
    "ServedLengths",
    "ServedRequest",
    "ServingEstimate",
    "ServingOptions",
    "ServingSimulation",
    "Spread",
    "Throughput",
    "Timeline",
    "Uniform",
    "estimate_serving",
]
