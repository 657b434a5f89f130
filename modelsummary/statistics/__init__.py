"""``ModelStatistics``: facts about a model as data; ``Statistics``: the same with the live model."""

from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.statistics.statistics import Statistics, as_live, measure_memory

__all__ = ["ModelStatistics", "Statistics", "as_live", "measure_memory"]
