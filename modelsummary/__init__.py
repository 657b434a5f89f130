"""Everything about a PyTorch model in one call: layers, shapes, parameters, MACs, bytes.

::

    stats = modelsummary.Statistics(model, input_data=(1, 3, 224, 224))
    print(stats)
"""

from importlib.metadata import PackageNotFoundError, version

from modelsummary.device_spec import DeviceSpec
from modelsummary.errors import (
    DataDependentError,
    ForwardError,
    InputError,
    LayerNotFoundError,
    MissingExtraError,
    ModelFileError,
    ModelSummaryError,
    ProfilerError,
    RegistrationError,
    SplitError,
)
from modelsummary.layer_info import LayerInfo
from modelsummary.loading import load
from modelsummary.memory_estimate import MemoryEstimate
from modelsummary.model_statistics import ModelStatistics
from modelsummary.op_formulas import register_op_cost
from modelsummary.profiler import Profiler, TIDSProfiler, profile
from modelsummary.recompute import CheckpointPlan, apply_checkpoint
from modelsummary.split import Stages
from modelsummary.statistics import Statistics, measure_memory

__all__ = [
    "CheckpointPlan",
    "DataDependentError",
    "DeviceSpec",
    "ForwardError",
    "InputError",
    "LayerInfo",
    "LayerNotFoundError",
    "MemoryEstimate",
    "MissingExtraError",
    "ModelFileError",
    "ModelStatistics",
    "ModelSummaryError",
    "Profiler",
    "ProfilerError",
    "RegistrationError",
    "SplitError",
    "Stages",
    "Statistics",
    "TIDSProfiler",
    "apply_checkpoint",
    "load",
    "measure_memory",
    "profile",
    "register_op_cost",
]

try:
    __version__ = version("torch-modelsummary")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
