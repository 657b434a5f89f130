"""Modules whose functions take their own parameters, such as experts that are stacked in one tensor.

Each rank holds a chunk of every parameter, and what the module returns is summed over the ranks. A value is then whole,
sharded, or partial: the ranks' tensors sum up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from modelsummary.capture.templates import Attribute
from modelsummary.parallel.layouts import Blocked, FunctionCall, Needs, Operand, Sharded
from modelsummary.parallel.record_calls import ELEMENTWISE_LAYERS, Calls
from modelsummary.parallel.regions import Region
from modelsummary.parallel.rules import FACTORIES, layout_after, terms_of
from modelsummary.record.events import Event, Value, attributes_in, values_in

__all__ = ["PARTIAL", "follow_partial", "grow_stacked", "is_stack"]

PARTIAL = Sharded(-1)

_PASSES = frozenset(
    """
view reshape view_as reshape_as flatten unflatten transpose permute t T mT movedim unsqueeze squeeze expand expand_as
contiguous clone to type type_as float half bfloat16 double neg negative sum mean getitem select narrow index_select
gather take_along_dim chunk split split_with_sizes unbind cat stack concat repeat_interleave flip
""".split()
)
_JOINS = frozenset("cat stack concat concatenate vstack hstack".split())
_PRODUCTS = frozenset("linear grouped_mm grouped_mm_fallback matmul bmm mm addmm baddbmm einsum".split())


class _Wants(Exception):
    """A parameter has to be sharded, too, in one of these layouts; ``PARTIAL``: one rank adds it."""

    def __init__(self, fqn: str, options: list[Sharded]) -> None:
        super().__init__(f"{fqn} has to be sharded, too")
        self.fqn, self.options = fqn, options


def is_stack(module: nn.Module) -> bool:
    """Return True for a module with stacked weights; a stack of one has several, unlike embeddings of positions."""
    weights = [weight for weight in module._parameters.values() if weight is not None and weight.dim() >= 3]
    return any(weight.shape[0] > 1 for weight in weights) or sum(min(weight.shape[1:]) > 1 for weight in weights) > 1


def grow_stacked(calls: Calls, fqn: str) -> Region:
    """Return the region of a module with stacked parameters; ``blocked`` says why it cannot be sharded."""
    event, (begin, end) = next((event, span) for event, span in calls.entered.items() if event.fqn == fqn)
    used = dict.fromkeys(
        attribute.fqn for inner in calls.events[begin:end] for attribute in attributes_in((inner.args, inner.kwargs))
    )
    factors = {
        attribute.fqn
        for inner in calls.events[begin:end]
        if inner.function is not None and inner.function.short_name in _PRODUCTS
        for attribute in attributes_in((inner.args, inner.kwargs))
    }
    stacked = [name for name in used if name in calls.parameters and calls.parameters[name].dim() >= 3]
    stacked = stacked or [name for name in used if name in factors]
    if not stacked or calls.users.get(fqn) != {fqn} or calls.n_calls[fqn] != 1 or calls.holders[fqn] != {fqn}:
        return Region([], blocked="its parameters are used elsewhere, too")
    search = _Search(calls, event, begin, end)
    first = calls.parameters[stacked[0]]
    for dim in (*range(1, first.dim()), 0):  # the first dimension of stacked experts is their number
        for outer in (1, 2, 3):
            region = search.run({stacked[0]: Sharded(dim, outer)}) if first.shape[dim] % outer == 0 else None
            if region is None:
                continue
            others = [name for name in (*region.parameters, *region.once) if name.rpartition(".")[0] != fqn]
            if not others:
                return region
            search.reason = f"{others[0]} is a parameter of another module; parameters of {fqn} itself work"
    return Region([], blocked=search.reason)


class _Search:
    """Tries layouts of the parameters of a module, one after the other."""

    def __init__(self, calls: Calls, module: Event, begin: int, end: int) -> None:
        self._calls, self._module, self._begin, self._end = calls, module, begin, end
        self.reason = ""

    def run(self, parameters: Mapping[str, Sharded]) -> Region | None:
        """Return the region with at least these parameters sharded; None if there is none."""
        walk = _Walk(self._calls, parameters)
        try:
            walk.run(self._module, self._begin, self._end)
        except _Wants as wants:
            for layout in wants.options if wants.fqn not in parameters else ():
                region = self.run({**parameters, wants.fqn: layout})
                if region is not None:
                    return region
            return None
        except (Blocked, Needs) as blocked:
            self.reason = str(blocked)
            return None
        return walk.region


class _Walk:
    """Follows shards of parameters through the calls of one module."""

    def __init__(self, calls: Calls, parameters: Mapping[str, Sharded]) -> None:
        self._calls = calls
        self._states: dict[Any, Sharded] = {Attribute(fqn): layout for fqn, layout in parameters.items()}
        shards = {fqn: layout for fqn, layout in parameters.items() if layout != PARTIAL}
        self.region = Region([], parameters=shards, once=dict.fromkeys(parameters.keys() - shards.keys()))
        for fqn, layout in shards.items():
            self.region.sizes.add(calls.parameters[fqn].shape[layout.dim] // layout.outer)

    def run(self, module: Event, begin: int, end: int) -> None:
        """Fill the region. Raises ``Blocked`` or ``_Wants``."""
        self.region.module = module.fqn
        self.region.summed = tuple(summed_arguments(module))
        for event in self._calls.events[begin:end]:
            if event.is_module:
                self._layer(event)
            else:
                self._function(event)
        for value in values_in(module.result):
            if value.dtype.is_floating_point and self._states.get(value) != PARTIAL:
                raise Blocked(
                    f"{module.fqn} returns no sum over the ranks; a result that is linear in its last weight works"
                )
        for event in self._calls.events[begin:end]:
            for attribute in attributes_in((event.args, event.kwargs)):
                if self._calls.needs_grad(attribute) and attribute not in self._states:
                    raise Blocked(
                        f"each rank would have a part of the gradient of {attribute.fqn}; parameters as wide work"
                    )
        self.region.layouts = {
            leaf: layout for leaf, layout in self._states.items() if isinstance(leaf, Value) and layout != PARTIAL
        }

    def _layer(self, event: Event) -> None:
        module = self._calls.modules[event.fqn]
        if any(True for _ in module.parameters()):
            raise Blocked(f"{event.fqn} has parameters; layers without parameters work")
        values = [value for value in values_in((event.args, event.kwargs)) if value in self._states]
        if not values:
            return
        (value,) = values
        if not isinstance(module, ELEMENTWISE_LAYERS):
            raise Blocked(f"{event.fqn} takes no sharded tensor; elementwise layers do")
        if self._states[value] == PARTIAL and not isinstance(module, nn.Identity):
            raise Blocked(f"{event.fqn} takes a sum over the ranks; linear functions of it work")
        self._states.update(dict.fromkeys(values_in(event.result), self._states[value]))

    def _function(self, event: Event) -> None:
        taken = {*values_in((event.args, event.kwargs)), *attributes_in((event.args, event.kwargs))}
        call = FunctionCall(event, self._operand, set(), taken)  # the style of the module sums all gradients
        layouts = [operand.layout for operand in call.operands if operand.layout is not None]
        if not layouts:
            return
        if event.is_decision:
            raise Blocked(f"{event.fqn} decides by values that are sharded; values of whole tensors work")
        if call.name in FACTORIES and layouts == [PARTIAL]:  # zeros of the same shape
            return
        layout: Sharded | None
        if PARTIAL in layouts and not _adds_partial(call):
            layout = self._partial(call)
        else:
            try:
                layout = _product(call) if call.name in _PRODUCTS else layout_after(call)
            except Needs as needs:
                raise self._wants(needs.value, needs.layout) from None
        if PARTIAL in layouts and layout != PARTIAL:
            raise Blocked(f"{call.at} adds a sum over the ranks to a sharded tensor; one kind works")
        self.region.sizes |= call.sizes
        self.region.functions.append(event)
        assert layout is not None
        self._states.update(dict.fromkeys(values_in(event.result), layout))
        is_sum = layout == PARTIAL and PARTIAL not in layouts and call.name in _PRODUCTS - {"einsum"}
        for bias in call.operands if is_sum else ():
            if bias.layout is None and _is_float(bias.leaf):
                raise self._wants(bias.leaf, PARTIAL)

    def _operand(self, leaf: Any) -> Operand | None:
        operand = self._calls.operand(leaf, self._states.get)
        if operand is None or not isinstance(leaf, Attribute):
            return operand
        return replace(operand, layout=self._states.get(leaf))

    def _partial(self, call: FunctionCall) -> Sharded:
        """Follow a function that takes a partial tensor; it must be linear in it."""
        if call.name in _JOINS and all(
            operand.layout == PARTIAL or self._calls.is_zeros(operand.leaf) for operand in call.operands
        ):
            return PARTIAL
        follow_partial(call)
        for operand in call.operands if call.name in ("add", "iadd", "sub", "isub") else ():
            if operand.layout is None and not self._calls.is_zeros(operand.leaf):
                raise self._wants(operand.leaf, PARTIAL)
        if (
            call.name in ("index_add", "scatter_add")
            and call.first.layout is None
            and not self._calls.is_zeros(call.first.leaf)
        ):
            raise Blocked(f"{call.at} adds a sum over the ranks to a whole tensor; zeros work")
        return PARTIAL

    def _wants(self, leaf: Any, layout: Sharded) -> Exception:
        """Return the request to shard the parameter that a tensor is made of."""
        fqn = self._calls.parameter_behind(leaf if layout == PARTIAL else self._factor(leaf, layout.dim))
        if fqn is None:
            return Blocked(
                f"a whole tensor meets a sharded one in {self.region.module}; one made of one parameter works"
            )
        if layout == PARTIAL:
            return _Wants(fqn, [PARTIAL])
        shape = self._calls.shape_of(leaf)
        assert shape is not None
        sizes = self._calls.parameters[fqn].shape
        return _Wants(fqn, [Sharded(d, layout.outer) for d, size in enumerate(sizes) if size == shape[layout.dim]])

    def _factor(self, leaf: Any, dim: int) -> Any:
        """Return the factor of a product that a dimension of its result comes from; any other tensor as it is."""
        event = self._calls.maker.get(leaf) if isinstance(leaf, Value) else None
        if event is None or event.is_module or event.name not in _PRODUCTS:
            return leaf
        call = FunctionCall(event, self._operand, set())
        if event.name != "einsum":
            is_last = dim == len(call.result_shape) - 1 and event.name not in ("addmm", "baddbmm")
            return call.operand(1, "weight").leaf if is_last else leaf
        terms, result = terms_of(call)
        factors = [operand.leaf for operand, term in terms if result[dim] in term]
        return factors[0] if len(factors) == 1 else leaf


def _adds_partial(call: FunctionCall) -> bool:
    """Return True for a product to which a bias is added that one rank holds, and whose factors are whole or chunks."""
    names = {"linear": (2, "bias"), "addmm": (0, "input"), "baddbmm": (0, "input")}
    if call.name not in names or call.argument(*names[call.name]) is None:
        return False
    bias = call.operand(*names[call.name])
    return bias.layout == PARTIAL and all(
        operand.layout != PARTIAL for operand in call.operands if operand.leaf != bias.leaf
    )


def follow_partial(call: FunctionCall) -> None:
    """Check that a function is linear in the partial tensors that it takes. Raises ``Blocked``."""
    partial = [operand for operand in call.operands if operand.layout == PARTIAL]
    if any(operand.layout not in (None, PARTIAL) for operand in call.operands):
        raise Blocked(f"{call.at} takes a sharded tensor and a sum over the ranks; one kind works")
    name = call.name
    if name in ("cat", "stack", "concat"):
        fits = len(partial) == len(call.operands)
    elif name in _PASSES or name in ("div", "truediv", "itruediv"):
        fits = len(partial) == 1 and call.first is partial[0]
    elif name in ("mul", "imul", "rmul", "multiply", *_PRODUCTS - {"addmm", "baddbmm"}):
        fits = len(partial) == 1 and (name not in _PRODUCTS - {"einsum"} or len(call.operands) == 2)
    elif name in ("index_add", "scatter_add"):
        fits = call.operands[-1] is partial[-1]
    elif name in ("masked_fill",):
        fits = call.argument(2, "value") == 0
    else:
        fits = name in ("add", "iadd", "sub", "isub")
    if not fits:
        raise Blocked(f"{call.at} takes a sum over the ranks; linear functions of it work")


def summed_arguments(module: Event) -> Iterable[int | str]:
    """Yield the arguments of a module that are floating point tensors. Raises ``Blocked`` for tensors in containers."""
    for position, argument in (*enumerate(module.args), *module.kwargs.items()):
        if isinstance(argument, Value):
            if argument.dtype.is_floating_point:
                yield position
        elif any(value.dtype.is_floating_point for value in values_in(argument)):
            raise Blocked(f"{module.fqn} takes tensors in a container; tensors that are arguments of their own work")


def _product(call: FunctionCall) -> Sharded | None:
    """Return the layout of a product with a parameter."""
    if call.name == "einsum":
        return _summed(call) or layout_after(call)
    first = 1 if call.name in ("addmm", "baddbmm") else 0
    factor = call.operand(first)
    weight = call.operand(first + 1, "weight")
    ndim = len(weight.shape)
    summed, free = (1, 0) if call.name == "linear" else (ndim - 2, ndim - 1)
    last = len(factor.shape) - 1
    for (one, dim), (other, other_dim) in (((factor, last), (weight, summed)), ((weight, summed), (factor, last))):
        if one.layout is None or one.layout.dim != dim:
            continue
        if other.layout is None:
            raise Needs(other.leaf, Sharded(other_dim, one.layout.outer))
        if other.layout != Sharded(other_dim, one.layout.outer):
            raise Blocked(call.differ)
        return PARTIAL
    if weight.layout is None or weight.layout.dim != free or factor.layout is not None:
        return layout_after(call)
    result = Sharded(len(call.result_shape) - 1, weight.layout.outer)
    for bias in call.operands:
        wanted = Sharded(len(bias.shape) - 1, result.outer)
        if bias not in (factor, weight) and _is_float(bias.leaf) and bias.layout != wanted:
            raise Needs(bias.leaf, wanted)
    return result


def _summed(call: FunctionCall) -> Sharded | None:
    """Return ``PARTIAL`` for an ``einsum`` over the sharded dimension, which has to be sharded in all its terms."""
    terms, result = terms_of(call)
    labels = {(term[operand.layout.dim], operand.layout.outer) for operand, term in terms if operand.layout is not None}
    if len(labels) != 1:
        return None
    ((label, outer),) = labels
    if label in result:
        return None
    for operand, term in terms:
        if label in term and operand.layout is None:
            raise Needs(operand.leaf, Sharded(term.index(label), outer))
    return PARTIAL


def _is_float(leaf: Any) -> bool:
    return not isinstance(leaf, Value) or leaf.dtype.is_floating_point
