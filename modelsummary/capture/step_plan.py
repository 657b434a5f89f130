"""The plan of one observed step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from modelsummary.errors import InputError

__all__ = ["MakeOptimizer", "ParameterGroup", "StageShare", "StepPlan", "check_loss"]

MakeOptimizer: TypeAlias = Callable[[Any], torch.optim.Optimizer]
"""A function of parameters, or of groups of them, as the classes of ``torch.optim``."""
ParameterGroup: TypeAlias = tuple[list[str], Mapping[str, Any]]
"""The names of the parameters that an optimizer steps with the same settings, and these settings."""


class StageShare(NamedTuple):
    """The part of a step that one stage of a pipeline runs.

    Attributes:
        actions: kind of each of its actions, in order: ``"F"`` forward, ``"B"`` backward, or its halves: ``"I"``,
            gradients of inputs, and ``"W"``, gradients of weights.
        is_first: the stage takes the input of the model.
        is_last: the stage computes the loss.
        keeps_results: results are kept until the end of the step, as they are sent or returned.
        keeps_gradients: gradients of inputs are kept until the end of the step, as they are sent.
        shares_results: the next stage is on the same rank, and takes the result itself instead of a copy.
    """

    actions: str
    is_first: bool
    is_last: bool
    keeps_results: bool = False
    keeps_gradients: bool = False
    shares_results: bool = False

    @property
    def microbatches(self) -> int:
        """Micro-batches in the step."""
        return self.actions.count("F")


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step.

    Attributes:
        train: True: forward, backward and optimizer step; False: a forward without gradients.
        make_optimizer: makes the optimizer of the trained parameters; None: no optimizer step.
        device, dtype, loss, autocast, accumulates, block_bytes, workspaces: see ``memory.step_options.StepOptions``.
        checkpoint: modules that run under activation checkpointing, each with the results that it keeps, as
            ``apply_checkpoint`` takes them.
        offload: modules, each with the numbers of the saved tensors that move to the host, likewise.
        stage: what a stage of a pipeline runs; None: the model is not a stage.
        compiled: the model runs as ``torch.compile`` compiles it; loss and optimizer step do not.
        optimized_ids: of the optimizer that ``make_optimizer`` is made of, the ids of the parameters in each group, and
            its settings; empty if it is made of a class or a name.
    """

    train: bool = True
    make_optimizer: MakeOptimizer | None = None
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    loss: Callable[[Any], Tensor] | None = None
    checkpoint: tuple[tuple[str, tuple[str, ...]], ...] = ()
    offload: tuple[tuple[str, tuple[int, ...]], ...] = ()
    autocast: torch.dtype | None = None
    accumulates: bool = False
    block_bytes: int | None = None
    workspaces: bool = True
    stage: StageShare | None = None
    compiled: bool = False
    # Plans are kept with what they traced: no optimizer, no states. ``make_optimizer`` tells two optimizers apart.
    optimized_ids: tuple[tuple[list[int], Mapping[str, Any]], ...] = field(default=(), compare=False)

    def groups_of(self, model: nn.Module) -> list[ParameterGroup]:
        """Return the trained parameters that the optimizer holds, which it steps, in its groups.

        An optimizer that holds no parameter of the model, such as one of another copy, steps all.
        """
        trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        groups = [([trained[key] for key in ids if key in trained], settings) for ids, settings in self.optimized_ids]
        return [group for group in groups if group[0]] or [(list(trained.values()), {})]

    def optimizer_of(
        self, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer of parameters by name; None if nothing is optimized.

        Raises:
            InputError: the user's function returns something else.
        """
        if self.make_optimizer is None or not any(names for names, _ in groups):
            return None
        chosen = [{**settings, "params": [parameters[name] for name in names]} for names, settings in groups]
        optimizer = self.make_optimizer(chosen if self.optimized_ids else chosen[0]["params"])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"optimizer must return a torch.optim.Optimizer of its parameters, got {optimizer!r:.80}")
        return optimizer


def check_loss(loss: Any) -> None:
    """Raise ``InputError`` if a loss is neither a function nor None."""
    if loss is not None and not callable(loss):
        raise InputError(f"loss must be a function from the model's result to a scalar, got {loss!r:.80}")
