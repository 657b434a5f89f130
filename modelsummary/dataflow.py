"""Names under which stages pickled by version 0.1.0 find their parts."""

from modelsummary.capture.templates import Attribute, BatchSize, ModeChoice, OwnDevice, Unknown
from modelsummary.record.events import TorchFunction, Value, _named

__all__ = ["Attribute", "BatchSize", "ModeChoice", "OwnDevice", "TorchFunction", "Unknown", "Value", "_named"]
