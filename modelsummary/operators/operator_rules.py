"""What is known of an operator, and what one call of it costs.

``op_rule`` derives the rules of an operator from its schema, tags and name; ``op_cost`` adds the shapes of one
call. An operator that looks like a matrix product and has no formula is reported as uncounted, never as a silent zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary._torch import OpOverload
from modelsummary.operators.names import COLLECTIVES, class_by_name, counted_by_name, launches_nothing, may_multiply
from modelsummary.operators.table import NO_FACTS, NO_SIGNATURE, Count, OperatorFacts, Signature, facts_of
from modelsummary.operators.tensor_bytes import inner_tensors, nbytes_of, unpacked

__all__ = ["NO_COST", "OpCost", "OpRule", "op_cost", "op_rule", "tensors_in"]


class OpCost(NamedTuple):
    """Cost of one call of an operator; ``uncounted`` is its name if it has no MAC formula.

    ``skipped_macs`` is the part of ``macs`` that a block mask skips; None if the values of the mask are not known.
    """

    macs: int
    elementwise_ops: int
    bytes_read: int
    bytes_written: int
    uncounted: str | None
    skipped_macs: int | None = 0


_ATOMS = frozenset({int, float, bool, type(None), str, torch.dtype})
NO_COST = OpCost(0, 0, 0, 0, None)

# Namespaces whose operators on tensors only look at metadata if they return plain values, except for some.
_ASKING_NAMESPACES = frozenset({"aten", "prim"})
_READS_ELEMENTS = frozenset({"aten::equal", "aten::allclose", "aten::is_nonzero"})

_MOVES_DATA = frozenset("clone _to_copy copy lift_fresh_copy equal".split())
# Tagged with a dynamic shape, which they have for some arguments only (a boolean mask, a LAPACK driver).
_SOMETIMES_DYNAMIC = frozenset({"index", "linalg_lstsq"})
# Not tagged, but the size of their result depends on values.
_UNTAGGED_DYNAMIC = frozenset("nms _to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc".split())


@dataclass(slots=True)
class OpRule:
    """Properties of an operator, whatever its arguments.

    Attributes:
        name: name without the overload, such as ``aten.addmm``.
        facts: what the table of operators adds: multiply-adds and kernels.
        signature: names and defaults of its arguments.
        matrix_like: a call without a formula is listed in the ledger of uncounted operators.
        returns_alias: the result shares storage with an argument.
        writes: positions (names of keyword-only ones) of the arguments that are written in place.
        may_write: writes arguments, declared or, as the running statistics of a normalisation, not declared.
        keeps_shape: works in place on its first argument, whose shape stays, and returns it.
        moves_shape: changes the shape or the storage of its first argument in place.
        is_random: draws random numbers.
        is_collective: other processes take part; the result does not follow from the arguments.
        needs_values: shape or value of the result depends on the values of tensors.
        makes_tensor: has a ``device`` argument.
        per_element: elements that count as element-wise operations: "in" (input), "out" (result) or "" (none).
        overwrites: does not read its first argument, which it writes, or whose shape it takes.
        is_composite: consists of other operators; runs undecomposed only under ``torch.inference_mode``.
        launches_kernel: a device runs a kernel for it. A view, an allocation, a question about metadata and bookkeeping
            launch none; the time of a collective is the network's.
        is_pointwise: computes each element of the result from one element of each argument.
        is_builtin: an operator of torch itself without a formula of the user: shapes and cost of its result follow from
            its arguments in every run.
    """

    name: str
    facts: OperatorFacts = NO_FACTS
    signature: Signature = NO_SIGNATURE
    matrix_like: bool = False
    returns_alias: bool = False
    writes: tuple[int | str, ...] = ()
    may_write: bool = False
    keeps_shape: bool = False
    moves_shape: bool = False
    is_random: bool = False
    is_collective: bool = False
    needs_values: bool = False
    makes_tensor: bool = False
    per_element: str = ""
    overwrites: bool = False
    is_composite: bool = False
    launches_kernel: bool = True
    is_pointwise: bool = False
    is_builtin: bool = False

    @property
    def gathers(self) -> bool:
        """True if it reads only the rows it returns."""
        return bool(self.facts.gathers_from)

    @property
    def op_class(self) -> str:
        """The class of its kernel without multiply-adds, by the table or by its name.

        >>> op_rule(torch.ops.aten.relu_.default).op_class, op_rule(torch.ops.aten.linalg_qr.default).op_class
        ('elementwise', 'other')
        """
        if self.facts.op_class:
            return self.facts.op_class
        if self.matrix_like and self.facts.macs is None:
            return "other"
        namespace, _, base = self.name.rpartition(".")
        by_name = class_by_name(namespace, base)
        if by_name is None:  # a conversion, by its name, or unknown
            return "elementwise" if self.is_pointwise or not self.matrix_like else "other"
        return by_name or ("elementwise" if self.is_pointwise or self.per_element else "other")

    @property
    def is_view(self) -> bool:
        """True if nothing is computed: the result is another view of an argument."""
        return self.returns_alias and not self.writes

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call that it writes, declared or not."""
        written = [args[key] for key in self.writes if isinstance(key, int) and key < len(args)]
        written += [kwargs[key] for key in self.writes if isinstance(key, str) and key in kwargs]
        if self.facts.writes_in_training and self._argument("training", args, kwargs, True):
            written += [self._argument(name, args, kwargs) for name in self.facts.writes_in_training]
        return written

    def _argument(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any = None) -> Any:
        """Return one argument of a call, without binding the others."""
        names = self.signature.names
        position = names.index(name) if name in names else len(args)
        return args[position] if position < len(args) else kwargs.get(name, default)

    def macs(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Count:
        """Return the multiply-adds of a call; raise ``NotImplementedError`` without a formula for it."""
        if self.facts.macs is None:
            raise NotImplementedError
        return self.facts.macs(self.signature.bind(args, kwargs, out))


def op_rule(func: Any) -> OpRule:
    """Return the properties of an operator, from its schema, tags, name and registered formula.

    >>> op_rule(torch.ops.aten.relu_.default).writes
    (0,)
    """
    return _classify(func, facts_of(func))  # a formula may be registered at any time


@lru_cache(maxsize=4096)
def _classify(func: Any, facts: OperatorFacts) -> OpRule:
    if not isinstance(func, OpOverload):
        return OpRule(str(func), facts, Signature(facts.arguments), matrix_like=True)
    namespace, _, base = func._schema.name.partition("::")
    arguments = func._schema.arguments
    writes: tuple[int | str, ...] = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    moves_shape = torch.Tag.inplace_view in func.tags or base in {"set_", "resize_", "resize_as_"}
    name = f"{namespace}.{base}"
    is_pointwise = _is_pointwise(func, namespace, base)
    return OpRule(
        name=name,
        facts=facts,
        signature=Signature(
            tuple(argument.name for argument in arguments),
            {argument.name: argument.default_value for argument in arguments if argument.has_default_value()},
        ),
        matrix_like=may_multiply(namespace, base),
        returns_alias=any(result.alias_info is not None for result in func._schema.returns),
        writes=writes if namespace != "c10d" else (0,),  # its schemas do not mark what they write
        may_write=bool(writes) or namespace == "c10d" or bool(facts.writes_in_training),
        moves_shape=moves_shape,
        keeps_shape=writes == (0,) and base.endswith("_") and not moves_shape and bool(func._schema.returns),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_collective=namespace in COLLECTIVES,
        needs_values=base in _UNTAGGED_DYNAMIC
        or (
            base not in _SOMETIMES_DYNAMIC
            and (torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags)
        ),
        makes_tensor=any(argument.name == "device" for argument in arguments),
        per_element=_per_element(func, base, is_pointwise=is_pointwise)
        if facts.macs is None or facts.depends_on_views
        else "",
        overwrites=facts.overwrites or base.startswith("new_") or base.endswith("_like"),
        is_composite=_is_composite(func, namespace),
        launches_kernel=not (
            moves_shape or namespace in COLLECTIVES or _has_no_kernel(func, namespace, writes=bool(writes))
        ),
        is_pointwise=is_pointwise,
        is_builtin=namespace == "aten" and facts.is_own,
    )


def _is_pointwise(func: OpOverload, namespace: str, base: str) -> bool:
    """Return True for an operator with the tag; the in-place variants of some lack it."""
    variants: list[Any] = [func]
    if base.endswith("_"):
        packet = getattr(getattr(torch.ops, namespace), base.removesuffix("_"), None)
        variants.append(getattr(packet, func._overloadname, None))
    return any(torch.Tag.pointwise in getattr(variant, "tags", ()) for variant in variants)


def _has_no_kernel(func: OpOverload, namespace: str, *, writes: bool) -> bool:
    """Return True for views, allocations, and operators that neither return nor write elements of tensors."""
    schema = func._schema
    if launches_nothing(schema.name):
        return True
    if writes:
        return False
    if any(result.alias_info is not None for result in schema.returns):
        return True
    if any("Tensor" in str(result.type) for result in schema.returns):
        return False
    if not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return True
    return namespace in _ASKING_NAMESPACES and schema.name not in _READS_ELEMENTS  # foreign ones may read elements


def _is_composite(func: Any, namespace: str) -> bool:
    """Return True if an operator decomposes. ``aten.silu_backward`` does so only on devices without its kernel."""
    name = func.name()
    if not _torch.has_kernel(name):  # some are known to Python only
        return False
    has_kernel = namespace == "aten" and _torch.has_kernel_for(name, "CPU")  # others may multiply in theirs
    return bool(_torch.has_kernel_for(name, "CompositeImplicitAutograd") and not has_kernel)


def _per_element(func: OpOverload, base: str, *, is_pointwise: bool) -> str:
    is_binary = is_pointwise and any(argument.name == "other" for argument in func._schema.arguments)
    computes = is_pointwise and base.removesuffix("_") not in _MOVES_DATA
    return counted_by_name(base, is_binary=is_binary) or ("out" if computes else "")


def op_cost(rule: OpRule, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpCost:
    """Return the cost of one call, from the shapes of its arguments and its result. Views cost nothing.

    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> op_cost(op_rule(torch.ops.aten.mm.default), (a, b), {}, a @ b)[:4]
    (24, 0, 72, 32)
    """
    if rule.is_view:
        return NO_COST
    macs, uncounted = 0, rule.name if rule.facts.macs is None and rule.matrix_like else None
    if rule.facts.macs is not None:
        try:
            result = rule.macs(args, kwargs, out)
            macs = int(result)
            if macs != result or macs < 0:
                raise ValueError(f"it must return an integer >= 0, got {result!r:.80}")
        except Exception as error:  # a formula that does not know these arguments must not break the summary
            macs, uncounted = 0, rule.name
            if not rule.facts.is_own and not isinstance(error, NotImplementedError):
                reason = f"{type(error).__name__}: {error}"
                warnings.warn(f"the formula of {rule.name} failed, the call is not counted: {reason}", stacklevel=2)
    written = _bytes_of((out, rule.written(args, kwargs)) if rule.writes else out)
    read = _bytes_read(rule, args, kwargs, written)
    return OpCost(macs, 0 if macs else _elementwise_ops(rule, args, out), read, written, uncounted)


def _bytes_read(rule: OpRule, args: Sequence[Any], kwargs: dict[str, Any], written: int) -> int:
    if rule.overwrites:
        return _bytes_of((args[1:], kwargs))
    facts = rule.facts
    if facts.packed_itemsize:
        weight, bias = unpacked((*args, *kwargs.values()))
        return _bytes_of((args, kwargs, bias)) + weight.numel() * facts.packed_itemsize
    if not facts.gathers_from and facts.scores_per_target is None:
        return _bytes_of((args, kwargs))
    call: dict[str, Any] = rule.signature.bind(args, kwargs)
    if facts.gathers_from:
        return min(written, _bytes_of(call.pop(facts.gathers_from))) + _bytes_of(call)
    score_bytes: int = (facts.scores_per_target or 0) * call["target"].numel() * call.pop("self").element_size()
    return score_bytes + _bytes_of(call)


def _elementwise_ops(rule: OpRule, args: Sequence[Any], out: Any) -> int:
    if not rule.per_element:
        return 0
    tensor = next(tensors_in(args if rule.per_element == "in" else out), None)
    return 0 if tensor is None else tensor.numel()


def _bytes_of(value: Any) -> int:
    """Return the bytes in memory behind the tensors in ``value``, each tensor object once."""
    tensors = {id(inner): inner for tensor in tensors_in(value) for inner in inner_tensors(tensor)}
    return sum(map(_touched_bytes, tensors.values()))


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes in memory behind a tensor: an expanded dimension repeats one element."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        return nbytes_of(tensor)
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel() * tensor.element_size()
    distinct = (size for size, stride in zip(tensor.shape, strides, strict=True) if stride or not size)
    return tensor.element_size() * prod(distinct)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments: in nested lists, tuples and dicts only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            if type(inner) not in _ATOMS:
                yield from tensors_in(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
