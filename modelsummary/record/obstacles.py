"""Reasons why a module cannot be replaced by the calls that its forward makes, found from one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelsummary.capture.templates import Unknown
from modelsummary.record.events import TorchFunction
from modelsummary.record.tensors import Token, is_tainted
from modelsummary.record.torch_functions import HOOKS_TENSORS, READS_FACTS, READS_SIZE, TAKES_APART

__all__ = ["obstacle_of_function", "obstacle_of_module", "obstacle_of_reading", "reads_size"]


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
    unknown = next((each.reason for each in inputs if isinstance(each, Unknown)), None)
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


def reads_size(name: str, inputs: list[Any]) -> bool:
    """Return True if a function read the size of a tensor of the run."""
    return name in READS_SIZE and any(isinstance(each, (Token, Unknown)) for each in inputs)


def _any_is_dynamic(inputs: list[Any]) -> bool:
    return any(isinstance(each, Token) and each.is_dynamic for each in inputs)
