"""The table of operators: what the library knows of an operator beyond its schema.

Each family of operators has a file, whose rows are registered here by name. A formula takes the arguments by the names
of the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from modelsummary._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from modelsummary.errors import RegistrationError

if TYPE_CHECKING:
    from modelsummary.operators.operator_calls import OperatorCall
    from modelsummary.operators.operator_work import Work

__all__ = [
    "NO_FACTS",
    "NO_SIGNATURE",
    "TABLE",
    "Arguments",
    "Count",
    "OperatorFacts",
    "Signature",
    "facts_of",
    "register",
    "register_op_cost",
]

_OPERATOR_TYPES = (OpOverload, OpOverloadPacket, HigherOrderOperator)
_F = TypeVar("_F", bound=Callable[..., int])


class Arguments(dict[str, Any]):
    """The arguments of a call by their names in the schema, in its order, with defaults; and the result ``out``."""

    __slots__ = ("args", "kwargs", "out")

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any


@dataclass(frozen=True, slots=True)
class Signature:
    """The names of an operator's arguments, and the defaults of optional ones."""

    names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def bind(self, args: Iterable[Any], kwargs: Mapping[str, Any], out: Any = None) -> Arguments:
        """Return the arguments of a call by name.

        >>> Signature(("input", "dim"), {"dim": -1}).bind((3,), {})
        {'input': 3, 'dim': -1}
        """
        bound = Arguments(zip(self.names, args, strict=False))
        bound.update(kwargs)
        for name, value in self.defaults.items():
            bound.setdefault(name, value)
        bound.args, bound.kwargs, bound.out = tuple(args), kwargs, out
        return bound


NO_SIGNATURE = Signature()
Count: TypeAlias = Any  # an integer, or a symbolic one where sizes are open
Macs: TypeAlias = Callable[[Arguments], Count]
Kernels: TypeAlias = "Callable[[OperatorCall, Arguments], list[Work]]"


@dataclass(frozen=True)
class OperatorFacts:
    """What the library knows of an operator beyond its schema.

    Attributes:
        macs: the multiply-adds of a call, or None. It reads shapes only, which may be symbolic.
        kernels: the kernels that a device runs for a call; None: one kernel, from the multiply-adds and bytes.
        multiplies: ``"matrices"`` for the product of two matrices, ``"batches"`` for products of pairs of them.
        depends_on_views: the multiply-adds also depend on what the arguments are views of.
        op_class: the class of its kernel without multiply-adds, where its name does not say it.
        packed_itemsize: bytes of an element of its packed weight, which it reads in addition to its tensors.
        gathers_from: name of the argument of which it reads only the rows it returns.
        overwrites: writes its first argument, or takes its shape, without reading it.
        writes_rows: writes to some places of its first argument.
        scores_per_target: how many of the scores ``self`` it reads for each element of ``target``; None: it reads all.
        chooses: chooses among candidates; their positions are its result, or the second part of it.
        mean: mean of the random numbers that it draws, if that does not depend on its arguments.
        accumulates: autograd adds up gradients with it.
        joins: joins its arguments in a new storage, as a cache that grows.
        copies: makes a copy of its argument, and nothing else.
        casts: makes a copy in another dtype, layout or on another device.
        on_scores: what it does to the scores of attention: ``"softmax"``, or ``"sum"``, ``"fill"`` or ``"where"`` of a
            mask.
        dtypes: device kernels refuse operands of several dtypes, which meta kernels accept: ``"one"``, or ``"norm"``
            for half-precision inputs with float32 weights as well.
        shape: the results of a call on meta, without the meta kernel; None for a call that it does not handle. It takes
            the arguments as the operator does.
        result: the results of a device, where their layout is not the meta kernel's. It takes these results, then the
            positional arguments.
        cpu_result: the same for the CPU: meta kernels follow CUDA's.
        recomputes_scores: a backward of attention that computes the scores again, which the forward did not keep.
        writes_in_training: names of the arguments that it writes in training, which its schema does not declare.
        arguments: names of the arguments of an operator without a schema.
        is_own: from this package or from torch, and not registered by a user.
    """

    macs: Macs | None = None
    kernels: Kernels | None = None
    multiplies: str = ""
    depends_on_views: bool = False
    op_class: str = ""
    packed_itemsize: int = 0
    gathers_from: str = ""
    overwrites: bool = False
    writes_rows: bool = False
    scores_per_target: int | None = None
    chooses: bool = False
    mean: float | None = None
    accumulates: bool = False
    joins: bool = False
    copies: bool = False
    casts: bool = False
    on_scores: str = ""
    dtypes: str = ""
    shape: Callable[..., Any] | None = None
    result: Callable[..., Any] | None = None
    cpu_result: Callable[..., Any] | None = None
    recomputes_scores: bool = False
    writes_in_training: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    is_own: bool = True


NO_FACTS = OperatorFacts()
TABLE: dict[str, OperatorFacts] = {}
"""Facts by name: ``aten.mm``, or ``aten.mul.Tensor`` for one overload."""
_registered: dict[Any, OperatorFacts] = {}  # by users


def register(namespace: str, names: str, overload: str = "", **facts: Any) -> None:
    """Add facts to the table, for operators of one namespace; ``""`` for higher-order operators.

    Facts of one overload hold for it alone, facts of an operator also for its variant in place.

    Raises:
        RegistrationError: the table has one of these facts already.
    """
    for name in names.split():
        key = ".".join(filter(None, (namespace, name, overload)))
        row = TABLE.get(key, NO_FACTS)
        if not facts.keys().isdisjoint(_set_in(row)):
            raise RegistrationError(f"the table has {', '.join(facts)} of {key} already; a fact is registered once")
        TABLE[key] = replace(row, **facts)


def _set_in(row: OperatorFacts) -> dict[str, Any]:
    """Return the facts that a row has."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {name: value for name, value in values.items() if value != getattr(NO_FACTS, name)}


def register_op_cost(op: Any) -> Callable[[_F], _F]:
    """Register a formula for the multiply-adds of one call of an operator.

    The formula gets the operator's arguments, and the result as the keyword ``out``, and returns an integer >= 0. It
    may read shapes only: in shape-only execution the tensors hold no values. It takes precedence over torch's
    ``flop_registry``. If it raises or returns something else, a warning says so and the call is listed as not counted;
    ``NotImplementedError`` lists it without a warning. A device runs one kernel, of these multiply-adds and of the
    bytes of arguments and result.

    Args:
        op: an operator (``torch.ops.mylib.my_op``), one overload of it, or a list of them.

    Raises:
        RegistrationError: the operator has a formula already, or ``op`` is not an operator.

    >>> torch.library.define("mylib::my_matmul", "(Tensor a, Tensor b) -> Tensor")
    >>> @register_op_cost(torch.ops.mylib.my_matmul)
    ... def my_matmul_macs(a, b, *, out):
    ...     return a.shape[0] * a.shape[1] * b.shape[1]
    """
    ops: Iterable[Any] = op if isinstance(op, (list, tuple)) else (op,)

    def register_formula(formula: _F) -> _F:
        if not callable(formula):
            raise RegistrationError(
                f"register_op_cost: expected a function of the operator's arguments and out=, got {formula!r:.80}"
            )
        for operator in ops:
            if not isinstance(operator, _OPERATOR_TYPES):
                raise RegistrationError(
                    f"register_op_cost: expected an operator such as torch.ops.mylib.my_op, got {operator!r}"
                )
            if _registered.get(operator) or TABLE.get(_name_of(operator), NO_FACTS).macs:
                raise RegistrationError(f"register_op_cost: {operator} has a formula already, which cannot be replaced")
        facts = OperatorFacts(lambda call: formula(*call.args, **{**call.kwargs, "out": call.out}), is_own=False)
        _registered.update(dict.fromkeys(ops, facts))
        return formula

    return register_formula


def _name_of(operator: Any) -> str:
    if isinstance(operator, OpOverload):
        return f"{operator._schema.name.replace('::', '.')}.{operator._overloadname}"
    return str(operator)


def facts_of(func: Any) -> OperatorFacts:
    """Return what is known of an operator: of the overload, of the operator, or of torch.

    >>> facts_of(torch.ops.aten.addmm_.default).macs is facts_of(torch.ops.aten.addmm.default).macs  # one in place
    True
    """
    if not isinstance(func, OpOverload):
        return _registered.get(func) or TABLE.get(str(func)) or _torch_facts(func)
    packets = _packets_of(func)
    facts = _in_table(func)
    candidates = (func, *packets)
    registered = next((row for row in map(_registered.get, candidates) if row is not None), None)
    if registered is not None:
        return replace(facts, macs=registered.macs, is_own=False)
    if facts.macs is not None:
        return facts
    torch_facts = next((row for row in map(_torch_facts, candidates) if row.macs is not None), None)
    return facts if torch_facts is None else replace(facts, macs=torch_facts.macs)


@cache
def _packets_of(func: OpOverload) -> list[Any]:
    """Return an operator without its overload, and the one of which it is the variant in place."""
    namespace, _, base = func._schema.name.partition("::")
    in_place = getattr(getattr(torch.ops, namespace), base.removesuffix("_"), None) if base.endswith("_") else None
    return [func._overloadpacket, *([in_place] if in_place is not None else [])]


@cache
def _in_table(func: OpOverload) -> OperatorFacts:
    """Return the facts of the table; the nearest name counts."""
    facts = NO_FACTS
    for key in (*map(str, reversed(_packets_of(func))), _name_of(func)):
        if key in TABLE:
            facts = replace(facts, **_set_in(TABLE[key]))
    return facts


def _torch_facts(operator: Any) -> OperatorFacts:
    from torch.utils.flop_counter import flop_registry  # imports triton, which takes 70 ms

    flops = flop_registry.get(operator)
    return NO_FACTS if flops is None else _from_flops(flops)


@cache
def _from_flops(flops: Callable[..., Any]) -> OperatorFacts:
    return OperatorFacts(lambda call: int(flops(*call.args, **call.kwargs, out_val=call.out)) // 2)
