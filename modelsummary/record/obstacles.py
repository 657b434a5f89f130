"""Reasons why a module cannot be replaced by the calls that its forward makes, found from one call.

What a function of torch does follows from its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from modelsummary import _torch
from modelsummary.capture.templates import Unknown, leaves_of, objects_in, same_constant, taken_apart
from modelsummary.record.events import TorchFunction
from modelsummary.record.tensors import Token, is_tainted

__all__ = [
    "ASKS_GRADIENTS",
    "TAKES_SHAPE",
    "is_decision",
    "keeps_first",
    "obstacle_of_function",
    "obstacle_of_module",
    "obstacle_of_objects",
    "obstacle_of_reading",
    "reads_size",
]

_PROPERTIES = frozenset(
    name for name, value in vars(_torch.TensorBase).items() if type(value).__name__ == "getset_descriptor"
)
# The result has the shape of the argument and does not depend on its values.
TAKES_SHAPE = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full".split()
)
_READS_SIZE = frozenset("shape size __len__ numel nelement stride storage_offset nbytes".split())
_FACTS = (
    "dim ndimension get_device is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_inference"
    " is_pinned is_same_size is_set_to is_shared is_tensor is_storage element_size type result_type can_cast"
    " promote_types has_names dim_order is_distributed broadcast_shapes is_coalesced"
    " __hash__ __repr__ __str__ __format__ __dir__"  # code that prints a tensor does not decide by its values
)
# They return properties of a tensor other than its values.
_READS_FACTS = _READS_SIZE | _PROPERTIES | frozenset(_FACTS.split())
ASKS_GRADIENTS = frozenset("requires_grad grad_fn is_leaf retains_grad".split())
_HOOKS_TENSORS = frozenset("register_hook register_post_accumulate_grad_hook retain_grad".split())
_SHAPED_BY_FIRST = frozenset(
    "index_add index_copy index_fill index_put scatter scatter_add scatter_reduce masked_fill masked_scatter".split()
)
_TAKES_APART = frozenset("__iter__ unbind split chunk tensor_split split_with_sizes".split())


def obstacle_of_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why a module cannot be replaced by its calls; empty if it can.

    >>> obstacle_of_module(nn.ReLU(), (), {})
    ''
    """
    if isinstance(module, torch.jit.ScriptModule):
        return "is TorchScript"
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "has hooks, which run only if it is called"
    if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if arguments.get("src_key_padding_mask") is not None:
            return "may run on nested tensors in evaluation"
    return ""


def obstacle_of_function(function: TorchFunction, inputs: list[Any]) -> str:
    """Return why a function that made tensors cannot be in a list of calls; empty if it can."""
    name = function.short_name
    unknown = next((leaf.reason for leaf in inputs if isinstance(leaf, Unknown)), None)
    if unknown is not None:
        return f"passes {unknown} to {name}()"
    if name in _TAKES_APART and _any_is_dynamic(inputs):
        return "takes apart a tensor whose size depends on values"
    return f"iterates over {name}()" if function.kind == "list" else ""


def obstacle_of_reading(name: str, inputs: list[Any]) -> str:
    """Return why a function that returned no tensor cannot be in a list of calls; empty if it read a known fact."""
    if name == "__set__":
        return "assigns an attribute of a tensor"
    if name in _HOOKS_TENSORS:
        return f"calls {name}() of a tensor, which has an effect outside the forward"
    if name in _READS_FACTS:
        return "reads a size that depends on values" if name in _READS_SIZE and _any_is_dynamic(inputs) else ""
    return f"decides by values of tensors: it calls {name.strip('_')}()" if any(map(is_tainted, inputs)) else ""


def obstacle_of_objects(objects: Sequence[tuple[Any, Any]], out: Any, template: Callable[[Any], Any]) -> str:
    """Return why a call that changes an object among its arguments cannot be repeated; empty if it returns the object.

    Args:
        objects: the objects, each with its template before the call.
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
    asks = name not in _READS_FACTS and name not in _HOOKS_TENSORS and name != "__set__"
    return asks and any(map(is_tainted, inputs)) and all(type(leaf) in (bool, int, float) for leaf in leaves_of(out))


def reads_size(name: str, inputs: list[Any]) -> bool:
    """Return True if a function read the size of a tensor of the run."""
    return name in _READS_SIZE and any(isinstance(leaf, (Token, Unknown)) for leaf in inputs)


def _any_is_dynamic(inputs: list[Any]) -> bool:
    return any(isinstance(leaf, Token) and leaf.is_dynamic for leaf in inputs)


def keeps_first(name: str) -> bool:
    """Return True if the result of a function always has the shape of its first argument.

    >>> keeps_first("add_"), keeps_first("add")
    (True, False)
    """
    return name in _SHAPED_BY_FIRST or (name.endswith("_") and not name.startswith("__"))
