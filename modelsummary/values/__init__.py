"""What flows through a model: statistics of its values, the first NaN, and where two models differ."""

from modelsummary.values.divergence import CallDifference, Divergence, compare_values
from modelsummary.values.one_step import step_values
from modelsummary.values.origins import BadValue, OperandValues
from modelsummary.values.tensor_statistics import TensorStatistics
from modelsummary.values.watch import Watching
from modelsummary.values.watched import CallValues, ParameterValues, StepValues, Values

__all__ = [
    "BadValue",
    "CallDifference",
    "CallValues",
    "Divergence",
    "OperandValues",
    "ParameterValues",
    "StepValues",
    "TensorStatistics",
    "Values",
    "Watching",
    "compare_values",
    "step_values",
]
