"""Collectives that activation checkpointing runs again.

In the backward, torch runs the forward of a checkpointed module again, up to the last tensor that it keeps for the
backward. What comes behind, such as the last all-reduce of a block whose result is added to the residual, runs once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from modelsummary.parallel.layer_plans import merged
from modelsummary.parallel.plan import Collective, LayerPlan
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.rules import DROPOUT_LAYERS
from modelsummary.record.events import Event, attributes_in, values_in

__all__ = ["with_recomputation"]

# Functions whose backward needs sizes and numbers alone.
_KEEPS_NOTHING = frozenset(
    """
add sub radd rsub iadd isub neg negative view reshape view_as reshape_as flatten unflatten transpose swapaxes swapdims
permute t T mT mH squeeze unsqueeze expand expand_as broadcast_to repeat cat concat concatenate stack split chunk
tensor_split split_with_sizes unbind select narrow to type type_as float half bfloat16 double contiguous clone detach
sum mean movedim flip roll pad
""".split()
)
_KEEPS_TENSORS_ONLY = frozenset("mul rmul imul multiply div truediv itruediv divide getitem".split())


def with_recomputation(calls: Calls, layers: Sequence[LayerPlan], checkpointed: Sequence[str]) -> list[LayerPlan]:
    """Return plans that count the collectives of the forward which the backward runs again, too.

    Args:
        checkpointed: FQNs of modules that run under activation checkpointing.
    """
    spans = [(event.fqn, *span) for event, span in calls.entered.items() if event.fqn in checkpointed]
    kept = {begin: _last_kept(calls, begin, end) for _, begin, end in spans}
    plans = []
    for layer in layers:
        call_spans = list(_call_spans(calls, layer.fqn))
        around = [span for span in spans if not span[0] or layer.fqn.startswith(f"{span[0]}.")]
        more = []
        for collective in layer.collectives if call_spans else ():
            if collective.phase == "forward":
                at = 0 if _comes_before(layer, collective) else 1
                again = sum(
                    begin <= call_span[0] < end and call_span[at] <= kept[begin]
                    for _, begin, end in around
                    for call_span in call_spans
                )
                more.append(_part(collective, again, len(call_spans)))
        plans.append(
            replace(
                layer,
                collectives=merged([*layer.collectives, *(collective for collective in more if collective.count)]),
            )
        )
    return plans


def _part(collective: Collective, again: int, n_calls: int) -> Collective:
    count, nbytes = (total * again // n_calls for total in (collective.count, collective.nbytes))
    return replace(collective, phase="backward", count=count, nbytes=nbytes)


def _comes_before(layer: LayerPlan, collective: Collective) -> bool:
    """Return True if a collective gathers what a module takes, False if it gathers or sums what the module returns."""
    gathers_input = layer.role == "input" or "Shard" in str(layer.options.get("input_layouts", ""))
    return gathers_input and collective.operation == "all_gather"


def _call_spans(calls: Calls, fqn: str) -> Iterator[tuple[int, int]]:
    """Yield the position at which each call of a module begins, and the position behind it."""
    for position in calls.places.get(fqn, ()):
        yield position, position + 1
    for event, (begin, end) in calls.entered.items():
        if event.fqn == fqn or (not calls.n_calls[fqn] and event.fqn.rpartition(".")[0] == fqn):  # a list of experts
            yield begin, end


def _last_kept(calls: Calls, begin: int, end: int) -> float:
    """Return the position of the last event, of those between two positions, that keeps a tensor for the backward."""
    return next(
        (position for position in reversed(range(begin, end)) if _keeps(calls, calls.events[position])), -math.inf
    )


def _keeps(calls: Calls, event: Event) -> bool:
    """Return True if a call keeps a tensor for the backward."""
    if event.is_decision or not any(value.requires_grad for value in values_in(event.result)):
        return False
    if event.is_module:
        module: Any = calls.modules[event.fqn]
        if isinstance(module, DROPOUT_LAYERS):
            return bool(module.training and module.p > 0)
        return not isinstance(module, (nn.Identity, nn.Flatten, nn.Unflatten))
    assert event.function is not None
    name = event.function.short_name
    if name == "dropout":
        arguments = {**dict(zip(("input", "p", "training"), event.args, strict=False)), **event.kwargs}
        return arguments.get("p") != 0 and arguments.get("training") is not False
    tensors = [*values_in((event.args, event.kwargs)), *attributes_in((event.args, event.kwargs))]
    return name not in _KEEPS_NOTHING and not (name in _KEEPS_TENSORS_ONLY and len(tensors) == 1)
