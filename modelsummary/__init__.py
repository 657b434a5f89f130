"""Everything about a PyTorch model in one call: layers, shapes, parameters, MACs, bytes.

::

    stats = modelsummary.Statistics(model, input_data=(1, 3, 224, 224))
    print(stats)
"""

from importlib.metadata import PackageNotFoundError, version

from modelsummary.device_spec import DeviceSpec
from modelsummary.enums import ColumnSettings, Mode, RowSettings, Units, Verbosity
from modelsummary.errors import (
    DataDependentError,
    ForwardError,
    InputError,
    LayerNotFoundError,
    MissingExtraError,
    ModelSummaryError,
    ProfilerError,
    RegistrationError,
    SplitError,
)
from modelsummary.layer_info import LayerInfo
from modelsummary.memory_estimate import MemoryEstimate
from modelsummary.model_statistics import ModelStatistics
from modelsummary.op_formulas import register_op_cost
from modelsummary.profiler import Profiler, TIDSProfiler, profile
from modelsummary.recompute import CheckpointPlan, apply_checkpoint
from modelsummary.split import Stages
from modelsummary.statistics import Statistics, measure_memory
from modelsummary.torchinfo import summary

__all__ = [
    "CheckpointPlan",
    "ColumnSettings",
    "DataDependentError",
    "DeviceSpec",
    "ForwardError",
    "InputError",
    "LayerInfo",
    "LayerNotFoundError",
    "MemoryEstimate",
    "MissingExtraError",
    "Mode",
    "ModelStatistics",
    "ModelSummaryError",
    "Profiler",
    "ProfilerError",
    "RegistrationError",
    "RowSettings",
    "SplitError",
    "Stages",
    "Statistics",
    "TIDSProfiler",
    "Units",
    "Verbosity",
    "apply_checkpoint",
    "measure_memory",
    "profile",
    "register_op_cost",
    "summary",
]

try:
    __version__ = version("torch-modelsummary")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
