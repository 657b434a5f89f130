"""Models as ``torch.fx`` graphs: traced from a record of their forward, and profiled without running them."""

from modelsummary.fx.checkpoint import checkpoint_graph
from modelsummary.fx.communication import CommunicationProfiler, MeshSpec
from modelsummary.fx.meta_info import MetaInfo, TensorSet, sim_env
from modelsummary.fx.meta_mode import MetaTensorMode
from modelsummary.fx.profiling import FlopProfiler, GraphProfiler, flop_count, symbolic_profile
from modelsummary.fx.registry import (
    register_flop_count_impl,
    register_leaf_module,
    register_leaf_module_impl,
    register_non_leaf_module,
    register_profile_impl,
    register_shape_impl,
    register_tracer_impl,
)
from modelsummary.fx.shape_prop import ShapeProp
from modelsummary.fx.tracing import symbolic_trace

__all__ = [
    "CommunicationProfiler",
    "FlopProfiler",
    "GraphProfiler",
    "MeshSpec",
    "MetaInfo",
    "MetaTensorMode",
    "ShapeProp",
    "TensorSet",
    "checkpoint_graph",
    "flop_count",
    "register_flop_count_impl",
    "register_leaf_module",
    "register_leaf_module_impl",
    "register_non_leaf_module",
    "register_profile_impl",
    "register_shape_impl",
    "register_tracer_impl",
    "sim_env",
    "symbolic_profile",
    "symbolic_trace",
]
