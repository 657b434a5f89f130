"""``ModelStatistics`` is what is known of a model, as data; ``Statistics`` is that of a live model."""

from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.statistics.statistics import Statistics, as_live, measure_memory

__all__ = ["ModelStatistics", "Statistics", "as_live", "measure_memory"]
