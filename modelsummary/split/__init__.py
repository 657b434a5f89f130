"""Cut a recorded model into stages that run."""

from modelsummary.split.call_costs import By
from modelsummary.split.choose import Wishes
from modelsummary.split.schedule import Simulation, StageLoad, simulate
from modelsummary.split.stages import Stages

__all__ = ["By", "Simulation", "StageLoad", "Stages", "Wishes", "simulate"]
