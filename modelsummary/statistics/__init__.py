"""``Statistics`` captures a model; ``ModelStatistics`` holds what is known of one, and everything made from it.

``ModelStatistics`` is put together from parts, a module each: what it measures, sizes, exports, shows, cuts and traces.
"""

from modelsummary.statistics.captured import Statistics, measure_memory
from modelsummary.statistics.model_statistics import ModelStatistics

__all__ = ["ModelStatistics", "Statistics", "measure_memory"]
