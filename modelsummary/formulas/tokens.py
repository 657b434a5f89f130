"""``FlopsPerToken``: the FLOPs that a model spends per token, in a forward and in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of
from modelsummary.capture.run import no_collection, running
from modelsummary.capture.step_error import as_step_error
from modelsummary.capture.step_plan import check_loss
from modelsummary.errors import check_integers
from modelsummary.formulas.routing import RoutedWatch, active_params
from modelsummary.formulas.scores import HiddenScores
from modelsummary.layer_info import LayerInfo, ledger
from modelsummary.subject import dtype_name, dtype_of
from modelsummary.tables import Printed, Report
from modelsummary.units import grouped, scaled

__all__ = ["FlopsPerToken", "flops_per_token"]

_LARGEST_MASK = 2**25  # elements of a mask whose values are followed
_LOSS = "pass loss=, a function from the model's result to the scalar that you train on"


@dataclass(frozen=True, repr=False)
class FlopsPerToken(Printed):
    """The model FLOPs of a call per token: 2 x multiply-adds, without recomputation.

    Attributes:
        unit: ``"token"``, or ``"sample"`` for a model without token ids.
        count: number of tokens (samples) in the call.
        forward_flops, training_flops: FLOPs of the whole call: of the forward; of forward, loss and backward. Dense:
            scores that a mask hides count.
        hidden_forward_flops, hidden_training_flops: the part of these for attention scores that causal masks, windows
            and padding hide.
        params: elements of all parameters.
        active_params: elements that one token's forward touches: of experts, as many as the router chooses.
        notes: what is not known.
        subject: the model and its dtype.

    >>> import torch
    >>> from torch import nn
    >>> from modelsummary import Statistics
    >>> model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    >>> flops = Statistics(model, (2, 5), dtypes=torch.long).flops_per_token()
    >>> flops.forward, flops.training, flops.count, flops.active_params
    (256.0, 768.0, 10, 272)
    """

    unit: str
    count: int
    forward_flops: int
    training_flops: int
    hidden_forward_flops: int
    hidden_training_flops: int
    params: int
    active_params: int
    notes: tuple[str, ...] = ()
    subject: str = ""

    @property
    def forward(self) -> float:
        """Dense FLOPs of the forward per token."""
        return self.forward_flops / self.count

    @property
    def training(self) -> float:
        """Dense FLOPs of forward and backward per token."""
        return self.training_flops / self.count

    @property
    def masked_forward(self) -> float:
        """FLOPs of the forward per token, without scores that a mask hides."""
        return (self.forward_flops - self.hidden_forward_flops) / self.count

    @property
    def masked_training(self) -> float:
        """FLOPs of forward and backward per token, without scores that a mask hides."""
        return (self.training_flops - self.hidden_training_flops) / self.count

    def _report(self) -> Report:
        n = self.active_params
        rows = [
            ("Dense", self.forward, self.training),
            ("Without hidden scores", self.masked_forward, self.masked_training),
            ("2 and 6 x active parameters", 2.0 * n, 6.0 * n),
        ]
        cells = [(name, *(scaled(round(figure), "FLOPs") for figure in figures)) for name, *figures in rows]
        counts = f"Parameters: {grouped(self.params)}, active: {grouped(n)}; {grouped(self.count)} {self.unit}s"
        above = [f"FLOPs of {self.subject}"] if self.subject else []
        headers = [f"Per {self.unit}", "Forward", "Training"]
        return Report(cells, headers, "lrr", above=above, below=[counts, *self.notes])


def flops_per_token(
    live: LiveModel,
    root: LayerInfo,
    call: CallArguments,
    tokens: int | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> FlopsPerToken:
    """Count a forward and a backward of a call; see ``Statistics.flops_per_token``."""
    unit, count = _tokens(call, live.batch_dim or 0) if tokens is None else ("token", tokens)
    check_integers(tokens=count)
    check_loss(loss)
    on_shapes, watch = live.execution == "shape", None
    with (
        as_step_error(lambda: "forward" if watch is None else watch.phase, {"loss": _LOSS, "backward": _LOSS}),
        no_collection(),
        running(modules_of(live.model), call, on_shapes=on_shapes, grad=True) as (execution, args, kwargs),
    ):
        if isinstance(execution, ShapeOnly):
            execution.follow_values(_LARGEST_MASK)
        scores = HiddenScores(partial(_values, execution))
        watch = RoutedWatch(live.model, execution, scores.note)
        with scores.watched():
            output = watch.forward(args, kwargs)
        forward, skipped, has_unknown_masks = watch.macs, watch.skipped_macs, watch.has_unknown_masks
        active = active_params(live.model, watch.choices())
        training, has_backward = forward, loss is not None or any(tensor.requires_grad for tensor in tensors_of(output))
        if has_backward:
            watch.backward(output, loss)
            training = watch.macs - watch.recomputed_macs
    hidden = skipped + scores.hidden_macs
    notes = []
    if scores.unknown or has_unknown_masks:
        notes.append("Masks whose values are not known count as dense")
    if not has_backward:
        notes.append("Nothing in the result requires a gradient, so training has no backward")
    if uncounted := ledger(root):
        notes.append(f"Not counted: {', '.join(uncounted)}")
    return FlopsPerToken(
        unit,
        count,
        2 * forward,
        2 * training,
        2 * hidden,
        (6 if has_backward else 2) * hidden,
        root.num_params,
        active,
        tuple(notes),
        f"{root.class_name}, {dtype_name(dtype_of(root.module))}",
    )


def _values(execution: Any, mask: Tensor) -> Tensor | None:
    return execution.known_value(mask) if isinstance(execution, ShapeOnly) else mask


def _tokens(call: CallArguments, batch_dim: int) -> tuple[str, int]:
    """Return the unit and its number: elements of the first token ids, else the size of the batch."""
    for tensor in call.described():
        if not tensor.is_floating and len(tensor.shape) == 2:
            return "token", tensor.shape[0] * tensor.shape[1]
    return "sample", call.size_along(batch_dim) or 1
