"""Predict the memory of a step of a model of fake tensors, which FSDP2 takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from modelsummary._torch import FakeTensor
from modelsummary.capture.execution.recurrent import fused_lstm
from modelsummary.capture.run import no_collection
from modelsummary.memory.checkpointing import apply_checkpoint
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.predict import CUDA_BLOCK
from modelsummary.memory.stage_step import run_of
from modelsummary.memory.step_error import as_step_error, remedies_for
from modelsummary.memory.step_plan import StepPlan
from modelsummary.memory.workspaces import workspaces_on

__all__ = ["simulate_on_fakes"]


def simulate_on_fakes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: StepPlan, device: torch.device
) -> MemoryEstimate:
    """Predict the memory of a step of a model of fake tensors; call it in their ``FakeTensorMode``.

    Storages may be resized: FSDP2 frees gathered parameters like that.
    """
    block = plan.block_bytes or (CUDA_BLOCK if device.type == "cuda" else 1)
    make_optimizer = None if plan.make_optimizer is None else partial(_optimizer_of_fakes, plan.make_optimizer)
    plan = replace(plan, make_optimizer=make_optimizer)
    workspaces = workspaces_on(device) if plan.workspaces else None
    run = run_of(model, args, kwargs, plan, device, block, counts_fakes=True, workspaces=workspaces)
    with no_collection(), fused_lstm(), run.allocations.following_resizes():
        apply_checkpoint(model, plan.checkpoint)
        with as_step_error(lambda: run.doing, remedies_for(train=plan.train)):
            run.step()
    return run.estimate(str(device), "shape", [])


def _optimizer_of_fakes(
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer whose step asks for the number of steps, which a fake tensor does not know."""
    optimizer = make_optimizer(parameters)
    step: Any = optimizer.step

    def with_numbers(*args: Any, **kwargs: Any) -> Any:
        with patch.object(FakeTensor, "item", lambda _: 1.0):
            return step(*args, **kwargs)

    optimizer.step = with_numbers  # type: ignore[method-assign]
    return optimizer
