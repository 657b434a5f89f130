"""Run a model once and record its calls as a tree of ``LayerInfo``."""

from modelsummary.capture.run import Recording, capture, check_execution, list_layers

__all__ = ["Recording", "capture", "check_execution", "list_layers"]
