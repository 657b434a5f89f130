"""Everything about a PyTorch model in one call: layers, shapes, parameters, MACs, bytes.

::

    stats = modelsummary.Statistics(model, input_data=(1, 3, 224, 224))
    print(stats)
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lazy_loader

# __init__.pyi says which module each public name is in; a module is imported when a name of it is used.
_getattr, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


# All names of modelsummary.fx were listed here in version 0.1.0; they still answer.
_OF_FX = frozenset(
    "CommunicationProfiler FlopProfiler GraphProfiler MeshSpec MetaInfo MetaTensorMode ShapeProp TensorSet"
    " checkpoint_graph flop_count register_flop_count_impl register_leaf_module register_leaf_module_impl"
    " register_non_leaf_module register_profile_impl register_shape_impl register_tracer_impl sim_env"
    " symbolic_profile".split()
)


def __getattr__(name: str) -> Any:
    """Return a public name."""
    return getattr(import_module("modelsummary.fx"), name) if name in _OF_FX else _getattr(name)


try:
    __version__ = version("torch-modelsummary")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
