"""A live model with the arguments of its call, from which it can be run again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.inputs import CallArguments

__all__ = ["LiveModel"]


@dataclass(frozen=True)
class LiveModel:
    """A model and the arguments of its call; functions of other packages take it to run the model again.

    Attributes:
        model: the model without the wrappers of ``torch.compile`` and data parallelism.
        call: arguments of its forward.
        execution: ``"shape"`` or ``"real"``, whichever is known to work.
        batch_dim: batch dimension of the inputs; None if it was not given.
        compiled: the compiled model that was passed, which is timed instead; None if there is none.
        added: FQN of a module that the forward adds to the model; None if there is none.
    """

    model: nn.Module
    call: CallArguments
    execution: str
    batch_dim: int | None = None
    compiled: nn.Module | None = None
    added: str | None = None

    @property
    def uninitialized(self) -> str | None:
        """What the first forward makes: the shape of a lazy parameter, or a module; None if all are there."""
        if self.added is not None:
            return f"the forward adds module {self.added!r}"
        lazy = next((fqn for fqn, parameter in self.model.named_parameters() if is_lazy(parameter)), None)
        return None if lazy is None else f"parameter {lazy!r} is not initialised"
