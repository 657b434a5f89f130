from . import fx, onnx, tiling
from .capture.checkpoints import apply_checkpoint
from .devices.device_spec import DeviceSpec
from .errors import (
    DataDependentError,
    FormulaError,
    ForwardError,
    InputError,
    LayerNotFoundError,
    MissingExtraError,
    ModelFileError,
    ModelSummaryError,
    NotLiveError,
    ProfilerError,
    RegistrationError,
    SplitError,
    StepError,
    TraceError,
)
from .files.loading import load
from .fx import symbolic_trace
from .layer_info import LayerInfo
from .memory.checkpointing import CheckpointPlan
from .memory.estimate import MemoryEstimate
from .operators.table import register_op_cost
from .profiler import Profiler, TIDSProfiler, profile
from .split import Stages
from .statistics import ModelStatistics, Statistics, measure_memory
from .torchinfo import summary
from .torchinfo.enums import ColumnSettings, Mode, RowSettings, Units, Verbosity
from .values.divergence import compare_values

__all__ = [
    "CheckpointPlan",
    "ColumnSettings",
    "DataDependentError",
    "DeviceSpec",
    "FormulaError",
    "ForwardError",
    "InputError",
    "LayerInfo",
    "LayerNotFoundError",
    "MemoryEstimate",
    "MissingExtraError",
    "Mode",
    "ModelFileError",
    "ModelStatistics",
    "ModelSummaryError",
    "NotLiveError",
    "Profiler",
    "ProfilerError",
    "RegistrationError",
    "RowSettings",
    "SplitError",
    "Stages",
    "Statistics",
    "StepError",
    "TIDSProfiler",
    "TraceError",
    "Units",
    "Verbosity",
    "apply_checkpoint",
    "compare_values",
    "fx",
    "load",
    "measure_memory",
    "onnx",
    "profile",
    "register_op_cost",
    "summary",
    "symbolic_trace",
    "tiling",
]

__version__: str
