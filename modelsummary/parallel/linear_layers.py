"""Linear layers by what they do: modules that multiply one tensor by one weight, and add a bias.

``nn.Linear`` is one by its class. Another module is one if its forward calls a product of its input and its weight, and
beside that only views, casts and the sum with its bias, as ``Conv1D`` of transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modelsummary.capture.templates import Attribute, leaves_of
from modelsummary.parallel.function_names import ELEMENTWISE, SIZED
from modelsummary.parallel.rank_model import LocalAttribute, model_of_rank
from modelsummary.record.events import Event, Record, Value

__all__ = ["LinearLayer", "is_embedding", "is_linear", "linear_layers", "local_sizes", "numbers_in"]


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
    """

    weight: str
    bias: str
    dim: int
    is_torch: bool


def linear_layers(record: Record, modules: Mapping[str, nn.Module]) -> dict[str, LinearLayer]:
    """Return FQN -> linear layer, for each module that is one in all its calls."""
    layers: dict[str, LinearLayer | None] = {}
    for event in record.root.walk():
        if event.is_module and event.parent is not None:
            module = modules[event.fqn]
            layer = _of_class(module) if is_linear(module) else _of_functions(event, module)
            layers[event.fqn] = layer if layers.get(event.fqn, layer) == layer else None
    return {fqn: layer for fqn, layer in layers.items() if layer is not None}


def _of_class(module: nn.Module) -> LinearLayer:
    return LinearLayer("weight", "" if module._parameters.get("bias") is None else "bias", 0, True)


def _of_functions(event: Event, module: nn.Module) -> LinearLayer | None:
    """Return the linear layer that a call computes; None if it computes anything else."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    by_dim = {parameter.dim(): name for name, parameter in parameters.items() if parameter.dtype.is_floating_point}
    if not parameters or len(parameters) != len(by_dim) or not {2} <= set(by_dim) <= {1, 2} or not event.children:
        return None
    (value,) = event.args if len(event.args) == 1 and not event.kwargs else (None,)
    if not isinstance(value, Value) or not isinstance(event.result, Value):
        return None
    walk = _Walk(event.fqn, value, by_dim[2], by_dim.get(1, ""))
    if not all(walk.follows(child) for child in event.children):
        return None
    state = walk.states.get(event.result)
    features = parameters[by_dim[2]].shape[walk.dim]
    if state != ("sum" if 1 in by_dim else "product") or event.result.shape != (*value.shape[:-1], features):
        return None
    return LinearLayer(by_dim[2], by_dim.get(1, ""), walk.dim, False)


_VIEWS = frozenset("view reshape flatten unflatten squeeze unsqueeze".split())
_CASTS = frozenset("to type type_as float half bfloat16 double contiguous clone".split())
_TRANSPOSES = frozenset("t T mT transpose swapaxes adjoint".split())


class _Walk:
    """Follows the functions of one module.

    Attributes:
        states: tensor -> ``"input"``, ``"weight"``, ``"transposed"`` for the transposed weight, ``"bias"``,
            ``"product"`` of input and weight, or its ``"sum"`` with the bias.
        dim: dimension of the weight with the features of the product.
    """

    def __init__(self, fqn: str, value: Value, weight: str, bias: str) -> None:
        self.states: dict[Any, str] = {value: "input", Attribute(f"{fqn}.{weight}"): "weight"}
        if bias:
            self.states[Attribute(f"{fqn}.{bias}")] = "bias"
        self.dim = 0

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
        state = state or self._of_product(name, states, len(event.args), event.kwargs)
        self.states[event.result] = state
        return bool(state)

    def _of_one(self, name: str, state: str, keeps_last: bool) -> str:
        """Return the state of what a function makes of one tensor and numbers; empty if it does not belong here."""
        if state in ("weight", "transposed"):
            if name in _TRANSPOSES:
                return "transposed" if state == "weight" else "weight"
            return state if name in ELEMENTWISE else ""
        return state if name in _CASTS or (name in _VIEWS and keeps_last) else ""

    def _of_product(self, name: str, states: list[str], n_args: int, kwargs: Any) -> str:
        """Return the state of a product or a sum; empty if it is neither."""
        if (
            name == "linear"
            and states[:1] == ["input"]
            and states[1:2] in (["weight"], ["transposed"])
            and states[2:] in ([], ["bias"])
        ):
            self.dim = 0 if states[1] == "weight" else 1
            return "sum" if len(states) == 3 else "product"
        if kwargs:  # such as alpha and beta
            return ""
        if name in ("matmul", "mm") and states in (["input", "weight"], ["input", "transposed"]):
            self.dim = 1 if states[1] == "weight" else 0
            return "product"
        if name == "addmm" and n_args == 3 and states in (["bias", "input", "weight"], ["bias", "input", "transposed"]):
            self.dim = 1 if states[2] == "weight" else 0
            return "sum"
        is_sum = name in ("add", "radd") and n_args == 2 and sorted(states) == ["bias", "product"]
        return "sum" if is_sum else ""


def numbers_in(name: str, arguments: Any) -> list[float]:
    """Return the numbers that a function computes elements with: floats, and integers other than sizes."""
    if name in ("full", "new_full"):
        (_, *arguments), kwargs = arguments
        arguments = (arguments[-1:], kwargs.get("fill_value"))
        name = ""
    kinds = (float,) if name in SIZED else (int, float)
    return [leaf for leaf in leaves_of(arguments) if type(leaf) in kinds]


def _is_constant(leaf: Any) -> bool:
    return not isinstance(leaf, (Value, Attribute, torch.Tensor)) and not hasattr(leaf, "tensor")


# ------------------------------------------------------------------------------------- attributes of a layer


def local_sizes(
    module: nn.Module, layer: LinearLayer, calls: Sequence[Event], n_ranks: int, *, by_rows: bool
) -> tuple[str, ...] | None:
    """Return the integer attributes that a split layer needs divided, such as ``nf`` of ``Conv1D``.

    None if its forward does not do the same on the shards of its parameters, whatever is divided.

    Args:
        by_rows: the weight is split along the features of the input; else along the features of the result.
    """
    weight = module.get_parameter(layer.weight)
    dim = 1 - layer.dim if by_rows else layer.dim
    features = weight.shape[dim]
    inputs = [call.args[0] for call in calls]

    def shape_of(parameter: nn.Parameter) -> list[int]:
        cut = dim if parameter is weight else None if by_rows else 0
        return [size // n_ranks if axis == cut else size for axis, size in enumerate(parameter.shape)]

    whole = _results(model_of_rank(module, lambda parameter: parameter.shape, (), {}, 1), inputs, 1)
    expected = [(shape if by_rows else (*shape[:-1], features // n_ranks), numbers) for shape, numbers in whole]
    names = [name for name, value in vars(module).items() if type(value) is int and value == features]
    for subset in chain.from_iterable(combinations(names, size) for size in range(len(names) + 1)):
        attributes = [LocalAttribute("", name, features, features // n_ranks) for name in subset]
        twin = model_of_rank(module, shape_of, attributes, {}, n_ranks)
        if len(expected) == len(inputs) and expected == _results(twin, inputs, n_ranks if by_rows else 1):
            return subset
    return None


def _results(module: nn.Module, inputs: Sequence[Value], cut: int) -> list[tuple[tuple[int, ...], list[float]]]:
    """Return the shape of each result, and the numbers that it is computed with; nothing if a shape does not fit.

    Args:
        module: a copy of a layer on meta.
        inputs: what the layer takes.
        cut: number of chunks of the features of the inputs, of which the copy takes one.
    """
    results = []
    for value in inputs:
        tensor = torch.empty((*value.shape[:-1], value.shape[-1] // cut), dtype=value.dtype, device="meta")
        try:
            with _Numbers() as mode:
                result = module.forward(tensor)
        except Exception:
            return []
        results.append((tuple(result.shape), mode.numbers))
    return results


class _Numbers(TorchFunctionMode):
    """Notes the numbers that functions compute elements with."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.numbers += numbers_in(getattr(func, "__name__", "").strip("_"), (args, kwargs))
        return func(*args, **(kwargs or {}))
