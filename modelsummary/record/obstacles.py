"""Reasons why a module cannot be replaced by the calls that its forward makes, found from one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from modelsummary.capture.templates import Unknown, leaves_of, objects_in, same_constant, taken_apart
from modelsummary.record.events import TorchFunction
from modelsummary.record.tensors import Token, is_tainted
from modelsummary.record.torch_functions import HOOKS_TENSORS, READS_FACTS, READS_SIZE, TAKES_APART, is_question

__all__ = [
    "is_decision",
    "obstacle_of_function",
    "obstacle_of_module",
    "obstacle_of_objects",
    "obstacle_of_reading",
    "reads_size",
]


def obstacle_of_module(module: nn.Module, kwargs: dict[str, Any]) -> str:
    """Return why a module cannot be replaced by its calls; empty if it can.

    >>> obstacle_of_module(nn.ReLU(), {})
    ''
    """
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript"
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "has hooks, which run only if it is called"
    if isinstance(module, nn.TransformerEncoder) and kwargs.get("src_key_padding_mask") is not None:
        return "may run on nested tensors in evaluation"
    return ""


def obstacle_of_function(function: TorchFunction, inputs: list[Any]) -> str:
    """Return why a function that made tensors cannot be in a list of calls; empty if it can."""
    name = function.short_name
    unknown = next((leaf.reason for leaf in inputs if isinstance(leaf, Unknown)), None)
    if unknown is not None:
        return f"passes {unknown} to {name}()"
    if name in TAKES_APART and _any_is_dynamic(inputs):
        return "takes apart a tensor whose size depends on values"
    return f"iterates over {name}()" if function.kind == "list" else ""


def obstacle_of_reading(name: str, inputs: list[Any]) -> str:
    """Return why a function that returned no tensor cannot be in a list of calls; empty if it read a known fact."""
    if name == "__set__":
        return "assigns an attribute of a tensor"
    if name in HOOKS_TENSORS:
        return f"calls {name}() of a tensor, which has an effect outside the forward"
    if name in READS_FACTS:
        return "reads a size that depends on values" if name in READS_SIZE and _any_is_dynamic(inputs) else ""
    return f"decides by values of tensors: it calls {name.strip('_')}()" if any(map(is_tainted, inputs)) else ""


def obstacle_of_objects(objects: Sequence[tuple[Any, Any]], out: Any, template: Callable[[Any], Any]) -> str:
    """Return why a call that changes an object among its arguments cannot be repeated; empty if it returns the object.

    Args:
        objects: the objects, each with its template before the call.
        template: function that makes a template.
    """
    returned = {id(result) for result in objects_in(out)} if objects else set()
    for owner, before in objects:
        leaves = leaves_of(before), leaves_of(template(taken_apart(owner)))
        is_changed = len(leaves[0]) != len(leaves[1]) or not all(map(same_constant, *leaves))
        if is_changed and id(owner) not in returned:
            return f"changes a {type(owner).__name__} that it does not return"
    return ""


def is_decision(name: str, inputs: list[Any], out: Any) -> bool:
    """Return True if a function on shapes reads values; they follow from integers of the input and from buffers."""
    reads = is_question(name) and any(map(is_tainted, inputs))
    return reads and all(type(leaf) in (bool, int, float) for leaf in leaves_of(out))


def reads_size(name: str, inputs: list[Any]) -> bool:
    """Return True if a function read the size of a tensor of the run."""
    return name in READS_SIZE and any(isinstance(leaf, (Token, Unknown)) for leaf in inputs)


def _any_is_dynamic(inputs: list[Any]) -> bool:
    return any(isinstance(leaf, Token) and leaf.is_dynamic for leaf in inputs)
