"""Everything about a PyTorch model in one call: layers, shapes, parameters, MACs, bytes.

::

    stats = modelsummary.Statistics(model, input_data=(1, 3, 224, 224))
    print(stats)
"""

from importlib.metadata import PackageNotFoundError, version

import lazy_loader

# __init__.pyi says which module each public name is in; a module is imported when a name of it is used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

try:
    __version__ = version("torch-modelsummary")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"
