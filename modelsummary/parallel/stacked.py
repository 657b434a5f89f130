"""Modules whose functions take their own parameters, such as experts that are stacked in one tensor.

Each rank holds a chunk of every parameter, and what the module returns is summed over the ranks. A value is then whole,
sharded, or partial: the ranks' tensors sum up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import nn

from modelsummary.parallel.function_names import Families
from modelsummary.parallel.placements import Blocked, FunctionCall, Partial, Placement, Shard, WrongPlacement
from modelsummary.parallel.propagation import first_complete
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.regions import Region
from modelsummary.parallel.rules import terms_of
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["grow_stacked", "is_stack", "summed_arguments"]


def is_stack(module: nn.Module) -> bool:
    """Return True for a module with stacked weights; a stack of one has several, unlike embeddings of positions."""
    weights = [weight for weight in module._parameters.values() if weight is not None and weight.dim() >= 3]
    return any(weight.shape[0] > 1 for weight in weights) or sum(min(weight.shape[1:]) > 1 for weight in weights) > 1


def grow_stacked(calls: Calls, fqn: str) -> Region:
    """Return the region of a module with stacked parameters. Raises ``Blocked`` if it cannot be sharded."""
    event, begin, end = calls.spans[fqn][0]
    taken: dict[str, list[Event]] = {}
    for inner in calls.events[begin:end]:
        for attribute in attributes_in((inner.args, inner.kwargs)):
            taken.setdefault(attribute.fqn, []).append(inner)
    stacked = [name for name in taken if name in calls.parameters and calls.parameters[name].dim() >= 3]
    stacked = stacked or [
        name
        for name, takers in taken.items()
        if any(not taker.is_module and taker.name in Families.PRODUCTS for taker in takers)
    ]
    if not stacked:
        raise Blocked("no product takes its parameters; matrix products and einsum work")
    if calls.n_calls[fqn] != 1:
        raise Blocked(f"it is called {calls.n_calls[fqn]} times; one call works")
    if calls.users.get(fqn) != {fqn} or calls.holders[fqn] != {fqn}:
        raise Blocked("its parameters are used elsewhere, too; parameters of its own work")
    first = calls.parameters[stacked[0]]
    reason = ""
    for dim in (*range(1, first.dim()), 0):  # the first dimension of stacked experts is their number
        for outer in (outer for outer in (1, 2, 3) if first.shape[dim] % outer == 0):
            chunks = first_complete(_Chunks(calls, event, {stacked[0]: Shard(dim, outer)}))
            others = [name for name in chunks.parameters if name.rpartition(".")[0] != fqn]
            if chunks.refused is not None:
                reason = reason or str(chunks.refused)
            elif others:
                reason = f"{others[0]} is a parameter of another module; parameters of {fqn} itself work"
            else:
                return chunks
    raise Blocked(reason)


class _Chunks(Region):
    """Chunks of the parameters of a module, through its calls.

    Args:
        parameters: FQN -> how it is sharded; ``Partial``: one rank adds it.
    """

    sums: ClassVar[bool] = True

    def __init__(self, calls: Calls, module: Event, parameters: Mapping[str, Placement]) -> None:
        super().__init__(calls, [], parameters)
        self.module, self._module = module.fqn, module
        for fqn, placement in parameters.items():
            if isinstance(placement, Shard):
                self.sizes.add(calls.parameters[fqn].shape[placement.dim] // placement.outer)

    def run(self) -> None:
        """Follow the calls of the module. Raises ``Blocked``."""
        module, (begin, end) = self._module, self.calls.entered[self._module]
        self.summed = tuple(summed_arguments(module))
        self.follow(begin, end)
        for value in values_in(module.result):
            if value.dtype.is_floating_point and not isinstance(self.placement(value), Partial):
                raise Blocked(
                    f"{module.fqn} returns no sum over the ranks; a result that is linear in its last weight works"
                )
        for event in self.calls.events[begin:end]:
            for attribute in attributes_in((event.args, event.kwargs)):
                if self.calls.needs_grad(attribute) and attribute not in self.placements:
                    raise Blocked(
                        f"each rank would have a part of the gradient of {attribute.fqn}; parameters as wide work"
                    )

    def begins_or_ends(self, event: Event) -> bool:
        """Refuse layers with parameters."""
        if event.is_module and any(True for _ in self.calls.modules[event.fqn].parameters()):
            raise Blocked(f"{event.fqn} has parameters; layers without parameters work")
        return False

    def call_of(self, event: Event, reduced: Iterable[Any] = ()) -> FunctionCall:
        """Return a call; the style of the module sums all gradients."""
        taken = {*values_in((event.args, event.kwargs)), *attributes_in((event.args, event.kwargs))}
        return super().call_of(event, {*taken, *reduced})

    def others(self, refused: Blocked) -> Iterator[_Chunks]:
        """Yield propagations in which the parameter that a whole tensor is made of is sharded, too."""
        if not isinstance(refused, WrongPlacement) or not refused.of_whole:
            return
        leaf, placement = refused.value, refused.placement
        fqn = self.calls.parameter_behind(self._factor(leaf, placement.dim) if isinstance(placement, Shard) else leaf)
        if fqn is None or fqn in self.parameters:
            return
        if not isinstance(placement, Shard):
            yield _Chunks(self.calls, self._module, {**self.parameters, fqn: Partial()})
            return
        shape = self.calls.shape_of(leaf)
        for dim, size in enumerate(self.calls.parameters[fqn].shape):
            if shape is not None and size == shape[placement.dim]:
                yield _Chunks(self.calls, self._module, {**self.parameters, fqn: Shard(dim, placement.outer)})

    def _factor(self, leaf: Any, dim: int) -> Any:
        """Return the factor of a product that a dimension of its result comes from; any other tensor as it is."""
        event = self.calls.maker.get(leaf) if isinstance(leaf, Value) else None
        if event is None or event.is_module or event.name not in Families.PRODUCTS:
            return leaf
        terms, result = terms_of(self.call_of(event))
        n_factors = len(terms) if event.name == "einsum" else 2
        factors = [operand.leaf for operand, term in terms[:n_factors] if result[dim] in term]
        return factors[0] if len(factors) == 1 else leaf


def summed_arguments(module: Event) -> Iterable[int | str]:
    """Yield the arguments of a module that are floating point tensors. Raises ``Blocked`` for tensors in containers."""
    for position, argument in (*enumerate(module.args), *module.kwargs.items()):
        if isinstance(argument, Value):
            if argument.dtype.is_floating_point:
                yield position
        elif any(value.dtype.is_floating_point for value in values_in(argument)):
            raise Blocked(f"{module.fqn} takes tensors in a container; tensors that are arguments of their own work")
