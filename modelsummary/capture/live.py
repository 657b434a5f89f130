"""A live model and how it is called: what everything that runs a model again takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.inputs import CallArguments

__all__ = ["LiveModel"]


@dataclass(frozen=True)
class LiveModel:
    """What functions of the other packages take, with the rows of its tree, to run a model again.

    Attributes:
        model: without the wrappers of ``torch.compile`` and of data parallelism.
        call: its arguments.
        execution: ``"shape"`` or ``"real"``, whichever is known to work.
        batch_dim: dimension of the inputs that is the batch; None: not told.
        compiled: the compiled model that was passed, to be timed in its place; None without one.
    """

    model: nn.Module
    call: CallArguments
    execution: str
    batch_dim: int | None = None
    compiled: nn.Module | None = None

    @property
    def uninitialized(self) -> str | None:
        """The FQN of a parameter that has no shape yet; None if all have one."""
        return next((fqn for fqn, parameter in self.model.named_parameters() if is_lazy(parameter)), None)
