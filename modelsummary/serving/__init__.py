"""Memory and time of serving a model: its cache, what fits, prefill and decode."""

from modelsummary.serving.estimate import ServingOptions, estimate_serving
from modelsummary.serving.report import ServingEstimate, Throughput

__all__ = ["ServingEstimate", "ServingOptions", "Throughput", "estimate_serving"]
