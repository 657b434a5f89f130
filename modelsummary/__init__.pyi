from . import fx, onnx, tiling
from .costs.devices import DeviceSpec
from .costs.formulas import register_op_cost
from .errors import (
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
    TraceError,
)
from .files.loading import load
from .fx import (
    CommunicationProfiler,
    FlopProfiler,
    GraphProfiler,
    MeshSpec,
    MetaInfo,
    MetaTensorMode,
    ShapeProp,
    TensorSet,
    checkpoint_graph,
    flop_count,
    register_flop_count_impl,
    register_leaf_module,
    register_leaf_module_impl,
    register_non_leaf_module,
    register_profile_impl,
    register_shape_impl,
    register_tracer_impl,
    sim_env,
    symbolic_profile,
    symbolic_trace,
)
from .layer_info import LayerInfo
from .memory.checkpointing import CheckpointPlan, apply_checkpoint
from .memory.estimate import MemoryEstimate
from .profiler import Profiler, TIDSProfiler, profile
from .split import Stages
from .statistics import ModelStatistics, Statistics, measure_memory
from .torchinfo import summary
from .torchinfo.enums import ColumnSettings, Mode, RowSettings, Units, Verbosity

__all__ = [
    "CheckpointPlan",
    "ColumnSettings",
    "CommunicationProfiler",
    "DataDependentError",
    "DeviceSpec",
    "FlopProfiler",
    "ForwardError",
    "GraphProfiler",
    "InputError",
    "LayerInfo",
    "LayerNotFoundError",
    "MemoryEstimate",
    "MeshSpec",
    "MetaInfo",
    "MetaTensorMode",
    "MissingExtraError",
    "Mode",
    "ModelFileError",
    "ModelStatistics",
    "ModelSummaryError",
    "Profiler",
    "ProfilerError",
    "RegistrationError",
    "RowSettings",
    "ShapeProp",
    "SplitError",
    "Stages",
    "Statistics",
    "TIDSProfiler",
    "TensorSet",
    "TraceError",
    "Units",
    "Verbosity",
    "apply_checkpoint",
    "checkpoint_graph",
    "flop_count",
    "fx",
    "load",
    "measure_memory",
    "onnx",
    "profile",
    "register_flop_count_impl",
    "register_leaf_module",
    "register_leaf_module_impl",
    "register_non_leaf_module",
    "register_op_cost",
    "register_profile_impl",
    "register_shape_impl",
    "register_tracer_impl",
    "sim_env",
    "summary",
    "symbolic_profile",
    "symbolic_trace",
    "tiling",
]

__version__: str
