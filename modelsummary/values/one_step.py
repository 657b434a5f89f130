"""The values of one step of a live model, which stays untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.input_data import call_arguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import ModelParts
from modelsummary.capture.run import running
from modelsummary.capture.step import loss_of
from modelsummary.capture.step_error import as_step_error, remedies_for
from modelsummary.capture.step_plan import check_loss
from modelsummary.errors import InputError, check_flags
from modelsummary.values.watch import Watching
from modelsummary.values.watched import Values

__all__ = ["step_values"]

_UNTIL_THEN = "call the model in a with block of watch() to see the values until then, or pass another batch"


def step_values(
    live: LiveModel,
    batch: Any = None,
    others: tuple[Any, ...] = (),
    *,
    backward: bool = True,
    loss: Callable[[Any], Tensor] | None = None,
) -> Values:
    """Run a step of a live model for real and return its values; see ``Statistics.values``."""
    check_flags(backward=backward)
    if isinstance(batch, (bool, int, float, complex, str, bytes)):
        raise InputError(f"batch must hold the tensors that the forward takes, got {batch!r:.80}; pass a saved batch")
    check_loss(loss)
    parts, call = ModelParts.of(live.model), live.call
    if batch is not None or others:
        call = call_arguments(parts, batch, others, {}, batch_dim=live.batch_dim, device=call.device) or call
    if any(tensor.is_meta for tensor in (*parts.tensors, *call.tensors())):
        raise InputError(
            "values need a model and an input with values, but a tensor is on meta; load weights with "
            "model.to_empty(device='cpu') and load_state_dict, and pass a batch"
        )
    doing = "forward"
    remedies = {**remedies_for(train=backward, forward_only="backward=False"), "forward": _UNTIL_THEN}
    with (
        running(parts.modules, call, on_shapes=False, grad=backward) as (execution, args, kwargs),
        as_step_error(lambda: doing, remedies),
        Watching(live.model, execution) as values,
    ):
        output = live.model(*args, **kwargs)
        if backward and (loss is not None or any(tensor.requires_grad for tensor in tensors_of(output))):
            doing = "loss"
            scalar = loss_of(output, loss)
            for parameter in live.model.parameters():
                parameter.grad = None  # gradients of this step alone; ``running`` restores them
            doing = "backward"
            scalar.backward()
    return values
