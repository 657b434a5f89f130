"""Loss parallelism: logits stay sharded by the vocabulary, and ``loss_parallel`` of torch takes their cross-entropy.

Logits are then a ``DTensor``, and so is what the model makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from modelsummary.errors import InputError
from modelsummary.parallel.derive import Derivation
from modelsummary.parallel.placements import Blocked, Shard
from modelsummary.parallel.propagation import Propagation
from modelsummary.parallel.record_calls import Calls
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
    logits = _Logits(derivation.calls, heads)
    try:
        logits.run()
    except Blocked as blocked:
        raise InputError(f"loss_parallel=True: the logits cannot stay sharded: {blocked}") from None
    for fqn in heads:
        derivation.layers[fqn] = replace(derivation.layers[fqn], options={"use_local_output": False})


class _Logits(Propagation):
    """The logits, from the heads to the end of the model, or to the cross-entropy that the model takes of them."""

    def __init__(self, calls: Calls, heads: Sequence[str]) -> None:
        super().__init__(calls, {})
        self._heads = heads
        self._dtensors: set[Value] = set()

    def run(self) -> None:
        """Follow the logits. Raises ``Blocked``."""
        self.follow(0, len(self.calls.events))

    def begins_or_ends(self, event: Event) -> bool:
        """Begin at the heads, and end at the losses."""
        values = values_in(event.result)
        if event.is_module and event.fqn in self._heads:
            self._dtensors.update(values)
            self.placements |= {value: Shard(len(value.shape) - 1) for value in values}
            return True
        if self._dtensors.isdisjoint(values_in((event.args, event.kwargs))):
            return True
        self._dtensors.update(values)
        call = self.call_of(event)
        if call.name == "cross_entropy":
            self._check_loss(call.argument(0, "input"), call.argument(7, "label_smoothing", 0.0))
            return True
        if any(operand.leaf not in self._dtensors and math.prod(operand.shape) > 1 for operand in call.operands):
            raise Blocked(
                f"{call.at} takes them beside a tensor that is not a DTensor, which torch refuses; numbers work"
            )
        return False

    def _check_loss(self, logits: Any, label_smoothing: Any) -> None:
        if self.placement(logits) != Shard(min(1, len(logits.shape) - 1)):
            raise Blocked(
                f"cross_entropy() takes logits of shape {logits.shape} whose second dimension is not the vocabulary; "
                "flatten the tokens first"
            )
        if label_smoothing != 0.0:
            raise Blocked(
                f"cross_entropy() has label_smoothing={label_smoothing}, which loss_parallel of torch lacks; use 0"
            )
