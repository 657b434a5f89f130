"""``ModelStatistics`` is what is known of a model, as data; ``Statistics`` is that of a live model."""

from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.statistics.shortcuts import as_live, measure_memory
from modelsummary.statistics.statistics import Statistics

__all__ = ["ModelStatistics", "Statistics", "as_live", "measure_memory"]
