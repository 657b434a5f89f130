"""The model of one rank: a copy of a model with the parameters that the rank holds, which runs on shapes.

The checks observe it while a plan is made; memory, serving and the simulation of a cluster observe a copy to which the
plan was applied (``modelsummary.parallel.applied_rank``). The model is left alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelsummary._torch import CustomOpDef
from modelsummary.errors import InputError

if TYPE_CHECKING:
    from modelsummary.parallel.plan_entries import LayerPlan

__all__ = ["copied", "local_shapes", "on_meta"]


def local_shapes(model: nn.Module, layers: Sequence[LayerPlan], ranks: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
    """Return id of a parameter -> its shape on the first rank of tensor and expert parallelism.

    Args:
        layers: how modules are sharded.
        ranks: dimension of the mesh -> its size.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    cut: dict[int, dict[int, int]] = {}  # id of a parameter -> its sharded dimensions, and the shards along each
    absent: set[int] = set()  # of experts in lists that other ranks hold
    for layer in layers:
        for name, dim in layer.shards.items():
            parameter = parameters[f"{layer.fqn}.{name}" if layer.fqn else name]
            if dim is not None:
                cut.setdefault(id(parameter), {})[dim] = ranks[layer.mesh]
        if layer.is_list:
            experts = list(model.get_submodule(layer.fqn).children())
            absent |= {
                id(parameter)
                for expert in experts[len(experts) // ranks["expert"] :]
                for parameter in expert.parameters()
            }
    shapes = {}
    for parameter in model.parameters():
        shards = cut.get(id(parameter), {})
        shape = tuple(-(-size // shards.get(dim, 1)) for dim, size in enumerate(parameter.shape))
        shapes[id(parameter)] = (0,) if id(parameter) in absent else shape
    return shapes


# ------------------------------------------------------------------------------------------------------ copies


def copied(
    model: nn.Module, like: Callable[[nn.Parameter], Tensor], others: Mapping[int, Tensor] | None = None
) -> nn.Module:
    """Return a copy of a model with other parameters, and the same buffers.

    Functions that the model holds, and that hold parts of it, hold the copies of these in the copy: minGPT calls its
    layers through such a ``lambda``, and a forward that replaces another one calls it. Operators are shared.

    Args:
        model: the model, or a module of it.
        like: returns the tensor that takes the place of a parameter.
        others: id of a further tensor, such as a buffer -> the tensor that takes its place.

    Raises:
        InputError: the model cannot be copied.

    >>> layer = nn.Linear(4, 4)
    >>> layer.twice = lambda x, layer=layer: layer(layer(x))
    >>> copied(layer, torch.zeros_like).twice(torch.ones(1, 4)).tolist()
    [[0.0, 0.0, 0.0, 0.0]]
    """
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()} | dict(others or {})
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(like(parameter).detach(), requires_grad=parameter.requires_grad)
    memo |= {id(operator): operator for operator in _operators(model)}
    try:
        twin = copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(f"{type(model).__name__} cannot be copied, which a plan needs: {error!r:.200}") from error
    copies = _Copies(memo)
    for module in twin.modules():
        module.__dict__.update({name: copies.of(value) for name, value in vars(module).items()})
    return twin


def on_meta(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of the same shape without data, of which floating point may have another dtype."""
    return torch.empty_like(tensor, device="meta", dtype=dtype if tensor.is_floating_point() else None)


class _Copies:
    """What stands for the parts of a model in its copy: ``deepcopy`` leaves functions, and what they hold, as they are.

    Args:
        memo: id of a part of the model -> its copy.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo

    def of(self, value: Any) -> Any:
        """Return the copy of a part of the model, or of a function or container that holds parts; else the value."""
        if id(value) in self._memo or not self._holds(value, set()):
            return self._memo.get(id(value), value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, partial):
            arguments = {name: self.of(argument) for name, argument in value.keywords.items()}
            return partial(self.of(value.func), *map(self.of, value.args), **arguments)
        if isinstance(value, tuple):
            return tuple(map(self.of, value))
        twin = copy.copy(value)
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            twin[key] = self.of(item)
        return twin

    def _holds(self, value: Any, seen: set[int]) -> bool:
        """Return True for a part of the model that has a copy, and for what holds one."""
        if id(value) in self._memo or id(value) in seen:
            return self._memo.get(id(value), value) is not value
        seen.add(id(value))
        return any(self._holds(part, seen) for part in _parts(value))

    def _function(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__ or ()
        closure = tuple(CellType() if self._holds(cell, set()) else cell for cell in cells)
        twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure or None)
        self._memo[id(function)] = twin  # it may hold itself
        for cell, other in zip(cells, closure, strict=True):
            if cell is not other:
                other.cell_contents = self.of(cell.cell_contents)
        twin.__defaults__, twin.__kwdefaults__ = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        twin.__dict__.update({name: self.of(value) for name, value in vars(function).items()})
        return twin


def _operators(model: nn.Module) -> Iterator[CustomOpDef]:
    """Yield the operators in attributes that ``torch.library.custom_op`` made: they refuse to be copied."""
    pending = [value for module in model.modules() for value in vars(module).values()]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) not in seen and not isinstance(value, (nn.Module, Tensor)):
            seen.add(id(value))
            pending += _parts(value)
            if isinstance(value, CustomOpDef):
                yield value


def _parts(value: Any) -> Iterable[Any]:
    """Return what a function, a method, a cell of a closure or a container holds."""
    if isinstance(value, CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # of a variable that is not bound yet
            return ()
    if isinstance(value, FunctionType):
        return (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, vars(value))
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, partial):
        return value.func, value.args, value.keywords
    return value.values() if type(value) in (dict, OrderedDict) else value if type(value) in (list, tuple) else ()
