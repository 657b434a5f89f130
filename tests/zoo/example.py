"""``Example``: a small model and its inputs; every catalogue makes these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["CannotBuild", "Example"]


class CannotBuild(Exception):
    """A model that a catalogue cannot build by its rule; the text is the reason that the table shows."""


@dataclass
class Example:
    """A model with random weights, and how it is called.

    Attributes:
        model: the model, in evaluation mode.
        args, kwargs: arguments of its forward, with a batch of two where the model takes batches.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        """Run the forward."""
        return self.model(*self.args, **self.kwargs)
