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
    ModelFileError,
    ModelSummaryError,
    ProfilerError,
    RegistrationError,
    SplitError,
    TraceError,
)
from modelsummary.fx import (
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
from modelsummary.layer_info import LayerInfo
from modelsummary.loading import load
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
    "load",
    "measure_memory",
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
]

try:
    __version__ = version("torch-modelsummary")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
