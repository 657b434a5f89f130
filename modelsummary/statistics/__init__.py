"""``ModelStatistics``: facts about a model as data; ``Statistics``: the same with the live model."""

from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.statistics.shortcuts import as_live, measure_memory
from modelsummary.statistics.statistics import Statistics

__all__ = ["ModelStatistics", "Statistics", "as_live", "measure_memory"]
