"""Linear layers by what they do: modules that multiply one tensor by one weight, and add a bias.

``nn.Linear`` is one by its class. Another module is one if its forward calls a product of its input and its weight, and
apart from that only views or casts and the sum with its bias, as ``Conv1D`` of transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from modelsummary.capture.templates import Attribute, leaves_of
from modelsummary.parallel.function_names import Families
from modelsummary.record.events import Event, Record, Value

__all__ = ["LinearLayer", "is_embedding", "is_linear", "linear_layers"]


def is_linear(module: nn.Module | None) -> bool:
    """Return True if torch's styles can split a module as a ``Linear``."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and _is_plain(module, 2)


def is_embedding(module: nn.Module | None) -> bool:
    """Return True if torch's styles can split a module as an ``Embedding``."""
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.sparse
        and _is_plain(module, 2)
    )


def _is_plain(module: nn.Module, ndim: int) -> bool:
    """Return True if the weight is a parameter of the module itself: not quantised, not parametrised."""
    weight = module._parameters.get("weight")
    has_no_others = set(module._parameters) <= {"weight", "bias"}
    return weight is not None and has_no_others and weight.dim() == ndim and weight.dtype.is_floating_point


@dataclass(frozen=True)
class LinearLayer:
    """The parameters of a linear layer.

    Attributes:
        weight, bias: their names; ``bias`` is empty if there is none.
        dim: dimension of the weight with the features of the result: 0 in ``nn.Linear``, 1 in ``Conv1D``.
        is_torch: torch's styles can split the layer.
        reshapes: its forward reshapes tensors, and may write sizes of the whole layer. A rank computes the product of
            input and weight instead of running it.
    """

    weight: str
    bias: str
    dim: int
    is_torch: bool
    reshapes: bool = False

    def product(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer computes with the parameters that a module holds."""
        weight, bias = module.get_parameter(self.weight), module.get_parameter(self.bias) if self.bias else None
        return F.linear(x, weight.t() if self.dim else weight, bias)


def linear_layers(record: Record, modules: Mapping[str, nn.Module]) -> dict[str, LinearLayer]:
    """Return FQN -> linear layer, for each module that is one in all its calls."""
    layers: dict[str, LinearLayer | None] = {}
    calls = [event for event in record.root.walk() if event.is_module and event.parent is not None]
    named = {event.fqn for event in calls if event.kwargs}  # torch's styles look for the input among the positions
    for event in calls:
        if event.fqn not in layers or layers[event.fqn] is not None:
            module = modules[event.fqn]
            is_torch = event.fqn not in named
            layer = _of_class(module, is_torch=is_torch) if is_linear(module) else _of_functions(event, module)
            layers[event.fqn] = layer if layers.get(event.fqn, layer) == layer else None
    return {fqn: layer for fqn, layer in layers.items() if layer is not None}


def _of_class(module: nn.Module, *, is_torch: bool) -> LinearLayer:
    return LinearLayer("weight", "" if module._parameters.get("bias") is None else "bias", 0, is_torch)


def _of_functions(event: Event, module: nn.Module) -> LinearLayer | None:
    """Return the linear layer that a call computes; None if it computes anything else."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    by_dim = {parameter.dim(): name for name, parameter in parameters.items() if parameter.dtype.is_floating_point}
    if not parameters or len(parameters) != len(by_dim) or not {2} <= set(by_dim) <= {1, 2} or not event.children:
        return None
    arguments = [*event.args, *event.kwargs.values()]
    value = arguments[0] if len(arguments) == 1 else None
    if not isinstance(value, Value) or not isinstance(event.result, Value):
        return None
    walk = _Walk(event.fqn, value, by_dim[2], by_dim.get(1, ""))
    if not all(walk.follows(child) for child in event.children):
        return None
    state = walk.states.get(event.result)
    features = parameters[by_dim[2]].shape[walk.dim]
    if state != ("sum" if 1 in by_dim else "product") or event.result.shape != (*value.shape[:-1], features):
        return None
    if walk.reshapes and walk.computes:
        return None
    return LinearLayer(by_dim[2], by_dim.get(1, ""), walk.dim, False, walk.reshapes)


_VIEWS = frozenset("view reshape flatten unflatten squeeze unsqueeze".split())
_CASTS = frozenset("to type type_as float half bfloat16 double contiguous clone".split())
_TRANSPOSES = frozenset("t T mT transpose swapaxes adjoint".split())
# A function and the states of what it takes -> the state of its result, and the dimension of the weight with the
# features of a product.
_RESULTS: dict[tuple[str, ...], tuple[str, int | None]] = {
    ("linear", "input", "weight"): ("product", 0),
    ("linear", "input", "weight", "bias"): ("sum", 0),
    ("matmul", "input", "weight"): ("product", 1),
    ("mm", "input", "weight"): ("product", 1),
    ("addmm", "bias", "input", "weight"): ("sum", 1),
    ("linear", "input", "transposed"): ("product", 1),
    ("linear", "input", "transposed", "bias"): ("sum", 1),
    ("matmul", "input", "transposed"): ("product", 0),
    ("mm", "input", "transposed"): ("product", 0),
    ("addmm", "bias", "input", "transposed"): ("sum", 0),
    ("add", "bias", "product"): ("sum", None),
    ("add", "product", "bias"): ("sum", None),
    ("radd", "bias", "product"): ("sum", None),
    ("radd", "product", "bias"): ("sum", None),
}


class _Walk:
    """Follows the functions of one module.

    Attributes:
        states: tensor -> ``"input"``, ``"weight"``, ``"transposed"`` for the transposed weight, ``"bias"``,
            ``"product"`` of input and weight, or its ``"sum"`` with the bias.
        dim: dimension of the weight with the features of the product.
        reshapes: a function reshapes a tensor.
        computes: a function computes with one of these tensors alone, or casts it to another dtype.
    """

    def __init__(self, fqn: str, value: Value, weight: str, bias: str) -> None:
        self.states: dict[Any, str] = {value: "input", Attribute(f"{fqn}.{weight}"): "weight"}
        if bias:
            self.states[Attribute(f"{fqn}.{bias}")] = "bias"
        self.dim = 0
        self.reshapes = self.computes = False

    def follows(self, event: Event) -> bool:
        """Note the state of a function's result; return False if the function does not belong to a linear layer."""
        if event.is_module or event.function is None or event.is_decision or any(event.writes):
            return False
        name = event.function.short_name
        taken = [leaf for leaf in leaves_of((event.args, event.kwargs)) if not _is_constant(leaf)]
        states = [self.states.get(leaf, "") for leaf in taken]
        if isinstance(event.result, Attribute):  # a cast to the same dtype returns what it takes
            return taken == [event.result] and bool(states[0])
        if not isinstance(event.result, Value):
            return False
        before = taken[0].shape[-1:] if taken and isinstance(taken[0], Value) else ()
        state = self._of_one(name, states[0], before == event.result.shape[-1:]) if len(states) == 1 else None
        if state:
            self.reshapes |= name in _VIEWS
            is_same = name in _CASTS and isinstance(taken[0], Value) and taken[0].dtype is event.result.dtype
            self.computes |= not is_same and name not in _VIEWS | _TRANSPOSES
        state = state or self._of_product(name, states, len(event.args), event.kwargs)
        self.states[event.result] = state
        return bool(state)

    def _of_one(self, name: str, state: str, keeps_last: bool) -> str:
        """Return the state of what a function makes of one tensor and numbers; empty if it does not belong here."""
        if state in ("weight", "transposed"):
            if name in _TRANSPOSES:
                return "transposed" if state == "weight" else "weight"
            return state if name in Families.ELEMENTWISE else ""
        return state if name in _CASTS or (name in _VIEWS and keeps_last) else ""

    def _of_product(self, name: str, states: list[str], n_args: int, kwargs: Any) -> str:
        """Return the state of a product or a sum; empty if it is neither."""
        is_plain = name == "linear" or (not kwargs and len(states) == n_args)  # without alpha and beta
        state, dim = _RESULTS.get((name, *states), ("", None)) if is_plain else ("", None)
        self.dim = self.dim if dim is None else dim
        return state


def _is_constant(leaf: Any) -> bool:
    return not isinstance(leaf, (Value, Attribute, torch.Tensor)) and not hasattr(leaf, "tensor")
