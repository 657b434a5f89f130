"""The live model behind ``ModelStatistics``, for what runs it again."""

from __future__ import annotations

from torch import nn

from modelsummary.capture.inputs import CallArguments
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo

__all__ = ["Live"]


class Live:
    """Knows the model and how it was called, unless it was pickled since."""

    root: LayerInfo
    batch_dim: int | None
    _call: CallArguments | None

    def _live(self, what: str) -> tuple[nn.Module, CallArguments]:
        """The model and its input, for what runs it again."""
        model = self.root.module
        if model is None or self._call is None:
            raise InputError(
                f"{what} needs the live model and an input: pass input_data to Statistics; what was pickled, loaded or "
                "cut short by an error has none"
            )
        return model, self._call
