"""``measure_memory``, which makes a ``Statistics`` first; ``as_live``, which refuses statistics that are data only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from modelsummary.errors import NotLiveError
from modelsummary.memory.estimate import MemoryMeasurement
from modelsummary.memory.step_plan import StepOptions
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.statistics.statistics import Statistics

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["as_live", "measure_memory"]


def measure_memory(
    model: nn.Module, input_data: Any, mode: str = "train", **options: Unpack[StepOptions]
) -> MemoryMeasurement:
    """Measure the memory of a real step of ``model`` beside its prediction: ``Statistics(...).measure_memory(...)``.

    Args:
        model, input_data: as for ``Statistics``.
        mode: as for ``Statistics.memory``.
        **options: as for ``Statistics.memory``.

    Raises:
        InputError: an argument is unusable, or the model has no values.
    """
    return Statistics(model, input_data).measure_memory(mode, **options)


def as_live(stats: ModelStatistics, what: str) -> Statistics:
    """Return ``stats`` if they have a live model. Raise ``NotLiveError`` if they are data only."""
    if not isinstance(stats, Statistics):
        raise NotLiveError(stats._not_live(what))
    return stats
