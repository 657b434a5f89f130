"""Run a model once and record its calls as a tree of ``LayerInfo``.

The tree has one row per call, for tables and costs. The package ``record`` also stores functions and values, from
several runs, for stages and graphs.
"""

from modelsummary.capture.run import Recording, capture, check_execution, list_layers

__all__ = ["Recording", "capture", "check_execution", "list_layers"]
