"""Loss parallelism: logits stay sharded by the vocabulary, and ``loss_parallel`` of torch takes their cross-entropy.

Logits are then a ``DTensor``, and so is what the model makes of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import nn

from modelsummary.errors import InputError
from modelsummary.parallel.derive import Derivation
from modelsummary.parallel.layouts import Blocked, FunctionCall, Needs, Sharded
from modelsummary.parallel.record_calls import ELEMENTWISE_LAYERS, Calls
from modelsummary.parallel.rules import layout_after
from modelsummary.record.events import Event, Value, values_in

__all__ = ["shard_logits"]


def shard_logits(derivation: Derivation) -> None:
    """Leave the results of the output heads sharded.

    Raises:
        InputError: no output head is split, or the model does something with logits that needs all of them.
    """
    heads = [fqn for fqn, layer in derivation.layers.items() if layer.role == "head"]
    if not heads:
        name = type(derivation.calls.model).__name__
        raise InputError(
            f"loss_parallel=True: no output head of {name} is split by the vocabulary; a Linear with as many outputs "
            "as an embedding of tokens has rows can be, else use loss_parallel=False"
        )
    walk = _Walk(derivation.calls, heads)
    try:
        walk.run()
    except (Blocked, Needs) as blocked:
        raise InputError(f"loss_parallel=True: the logits cannot stay sharded: {blocked}") from None
    for fqn in heads:
        derivation.layers[fqn] = replace(derivation.layers[fqn], gathers=False)
    derivation.losses = walk.losses


class _Walk:
    """Follows the logits from the heads to the end of the model.

    Attributes:
        losses: the logits of which the model itself takes the cross-entropy.
    """

    def __init__(self, calls: Calls, heads: list[str]) -> None:
        self._calls, self._heads = calls, heads
        self._layouts: dict[Value, Sharded | None] = {}  # of each DTensor; None: whole
        self.losses: list[Value] = []

    def run(self) -> None:
        """Fill ``losses``. Raises ``Blocked`` or ``Needs``."""
        for event in self._calls.events:
            if event.is_module and event.fqn in self._heads:
                self._layouts |= {value: Sharded(len(value.shape) - 1) for value in values_in(event.result)}
            elif any(value in self._layouts for value in values_in((event.args, event.kwargs))):
                layout = self._layer(event) if event.is_module else self._function(event)
                self._layouts |= dict.fromkeys(values_in(event.result), layout)

    def _layer(self, event: Event) -> Sharded | None:
        module = self._calls.modules[event.fqn]
        value = event.args[0] if event.args else None
        if isinstance(module, nn.CrossEntropyLoss):
            self._add_loss(value, module.label_smoothing)
            return None
        if not isinstance(module, ELEMENTWISE_LAYERS) or value not in self._layouts:
            raise Blocked(
                f"{event.fqn} ({type(module).__name__}) needs whole logits; elementwise layers and cross-entropy do not"
            )
        return self._layouts[value]

    def _function(self, event: Event) -> Sharded | None:
        if event.is_decision:
            raise Blocked(f"{event.fqn or 'the model'} decides by the values of logits; decide after the loss")
        call = FunctionCall(event, lambda leaf: self._calls.operand(leaf, self._layouts.get), set())
        if call.name == "cross_entropy":
            self._add_loss(call.argument(0, "input"), call.argument(7, "label_smoothing", 0.0))
            return None
        if any(operand.leaf not in self._layouts and math.prod(operand.shape) > 1 for operand in call.operands):
            raise Blocked(
                f"{call.at} takes them beside a tensor that is not a DTensor, which torch refuses; numbers work"
            )
        return layout_after(call) if any(operand.layout is not None for operand in call.operands) else None

    def _add_loss(self, logits: Any, label_smoothing: Any) -> None:
        layout = self._layouts.get(logits)
        if layout != Sharded(min(1, len(logits.shape) - 1)):
            raise Blocked(
                f"cross_entropy() takes logits of shape {logits.shape} whose second dimension is not the vocabulary; "
                "flatten the tokens first"
            )
        if label_smoothing != 0.0:
            raise Blocked(
                f"cross_entropy() has label_smoothing={label_smoothing}, which loss_parallel of torch lacks; use 0"
            )
        self.losses.append(logits)
