"""``OperatorCall``: one distinct call of an operator as plain data: its arguments and its cost.

A model calls the same few operators over and over. Calls with equal operator, shapes, strides, dtypes and constants are
one object, and an ``OperatorLog`` notes each of its runs. A time predicted or measured once holds for all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from threading import get_ident
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from modelsummary._torch import group_name, next_node_number
from modelsummary.operators.operator_rules import NO_COST, OpCost, OpRule, op_cost, op_rule, tensors_in
from modelsummary.operators.shape_rules import contiguous_strides
from modelsummary.operators.table import Arguments
from modelsummary.operators.tensor_bytes import nbytes_of

__all__ = ["DistinctCall", "Line", "OperatorCall", "OperatorLog", "OperatorRun", "TensorSpec", "spec_of", "specs_in"]


class Line(NamedTuple):
    """A line of Python code.

    Attributes:
        file: path of the file.
        number: number of the line, from 1.
    """

    file: str
    number: int


_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}

_CONSTANTS = frozenset(
    {int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class TensorSpec(NamedTuple):
    """Shape, strides and dtype of a tensor; ``is_param`` marks a parameter of the model."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_param: bool = False

    @property
    def numel(self) -> int:
        """The number of elements.

        >>> TensorSpec((2, 3), (3, 1), torch.float32).numel
        6
        """
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        dense = self.stride == contiguous_strides(self.shape)
        strides = "" if dense else "/" + "x".join(map(str, self.stride))
        name = _DTYPES.get(self.dtype) or str(self.dtype).removeprefix("torch.")
        return f"{name}[{'x'.join(map(str, self.shape))}{strides}]{'p' if self.is_param else ''}"


class OperatorCall:
    """A distinct call of an operator.

    Attributes:
        func: the operator, such as ``torch.ops.aten.addmm.default``.
        rule: properties of the operator.
        args, kwargs: its arguments, with a ``TensorSpec`` for each tensor.
        outputs: specs of the tensors in its result.
        cost: multiply-adds, element-wise operations and bytes.
    """

    __slots__ = ("__dict__", "args", "cost", "func", "kwargs", "outputs", "rule")

    def __init__(
        self,
        func: Any,
        rule: OpRule,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: tuple[TensorSpec, ...],
        cost: OpCost,
    ) -> None:
        self.func, self.rule, self.args, self.kwargs = func, rule, args, kwargs
        self.outputs, self.cost = outputs, cost

    @property
    def name(self) -> str:
        """The name of the operator without its overload, such as ``aten.addmm``."""
        return self.rule.name

    @cached_property
    def key(self) -> str:
        """The call as text; equal calls have equal keys, also in other processes."""
        named = [f"{name}={_text(value)}" for name, value in self.kwargs.items()]
        return f"{self.func}({', '.join([*map(_text, self.args), *named])})"

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors among the arguments."""
        return tuple(specs_in((self.args, tuple(self.kwargs.values()))))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors among arguments and results, one in both counted twice."""
        return sum(spec.nbytes for spec in (*self.tensors, *self.outputs))

    @property
    def bound(self) -> Arguments:
        """The arguments by the names of the operator's schema, with defaults."""
        return self.rule.signature.bind(self.args, self.kwargs, self.outputs)

    def __repr__(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:  # operators themselves cannot be pickled
        return _call_of, (str(self.func), self.args, dict(self.kwargs), self.outputs, self.cost)


def _call_of(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[TensorSpec, ...], cost: OpCost
) -> OperatorCall:
    """Return the call of the operator of a name, such as ``"aten.mm.default"``."""
    parts = name.split(".") if "." in name else ["higher_order", name]
    func = reduce(getattr, parts, torch.ops)
    return OperatorCall(func, op_rule(func), args, kwargs, outputs, cost)


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return str(value)
    if type(value) in (tuple, list):
        return f"[{', '.join(map(_text, value))}]"
    return str(value) if isinstance(value, (int, float, bool, str, torch.dtype, torch.device)) else repr(value)[:80]


def specs_in(value: Any) -> list[TensorSpec]:
    """Return the tensor specs in nested tuples and lists.

    >>> x = TensorSpec((2,), (1,), torch.float32)
    >>> len(specs_in((x, [x, 3])))
    2
    """
    if isinstance(value, TensorSpec):
        return [value]
    if type(value) in (tuple, list):
        return [spec for inner in value for spec in specs_in(inner)]
    return []


class OperatorRun(NamedTuple):
    """One run of an operator call, with the storages that it read and made.

    Attributes:
        call: the operator call.
        reads, makes: identities of the storages behind its arguments, and behind its results.
        nodes: autograd nodes that were made for it.
        with_grad: whether gradients were enabled. A backward computes without; what runs with them there is the forward
            of a checkpoint.
        offsets: where each argument begins in its storage, in elements. Views of one storage differ in them alone.
        line: file and line of the model's code that asked for it, if storages are followed; None for torch's own code.
    """

    call: OperatorCall
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    nodes: int = 0
    with_grad: bool = False
    offsets: tuple[int, ...] = ()
    line: Line | None = None

    @property
    def is_view(self) -> bool:
        """True if its results have the storages of its arguments, and nothing is written."""
        rule = self.call.rule
        return rule.is_view or (bool(self.makes) and not rule.may_write and set(self.makes) <= set(self.reads))

    @property
    def writes(self) -> tuple[int, ...]:
        """The identities of the storages that it writes in place."""
        call = self.call
        if not call.rule.may_write:
            return ()
        specs = specs_in((call.args, tuple(call.kwargs.values())))
        storages = {id(spec): storage for spec, storage in zip(specs, self.reads, strict=False)}
        written = specs_in(call.rule.written(call.args, call.kwargs))
        return tuple([storages[id(spec)] for spec in written if id(spec) in storages])


DistinctCall: TypeAlias = "tuple[object, Sequence[Tensor]]"
"""An object that all equal calls of an execution share, and the tensors among the arguments of the one that ran."""


class OperatorLog:
    """A log of operator runs, with one object per distinct call.

    Args:
        identify: returns a number that identifies the storage behind a tensor.
        params: numbers of the storages of parameters.

    >>> log = OperatorLog(id, set())
    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> log.note(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    >>> log.runs[0].call.key, log.runs[0].call.cost.macs
    ('aten.mm.default(f32[2x3], f32[3x4])', 24)
    """

    def __init__(self, identify: Callable[[Tensor], int], params: Container[int]) -> None:
        self.runs: list[OperatorRun] = []
        self._identify, self._params = identify, params
        self._calls: dict[Any, OperatorCall] = {}
        self._bare_runs: dict[Any, OperatorRun] = {}  # without arguments and autograd nodes
        self._next_node = {get_ident(): next_node_number()}  # autograd runs a backward on CUDA in a thread of its own

    def note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        rule: OpRule | None = None,
        cost: OpCost = NO_COST,
        distinct: DistinctCall | None = None,
        line: Line | None = None,
    ) -> None:
        """Note one run of an operator with its result ``out``; its rule and cost are found unless they are given."""
        call: OperatorCall | None = None
        key: Any = None
        reads: tuple[int, ...] = ()
        offsets: tuple[int, ...] = ()
        if distinct is not None:
            strided = [tensor for tensor in distinct[1] if tensor.layout is torch.strided]
            reads = tuple([self._identify(tensor) for tensor in strided])
            offsets = tuple([int(tensor.storage_offset()) for tensor in strided])
            key = id(distinct[0]), *[storage in self._params for storage in reads]
            call = self._calls.get(key)
        if call is None:
            call, reads, offsets = self._call(func, args, kwargs, out, op_rule(func) if rule is None else rule, cost)
            if key is not None:
                self._calls[key] = call
        results = (out,) if isinstance(out, Tensor) else tensors_in(out)
        makes = tuple([self._identify(tensor) for tensor in results if tensor.layout is torch.strided])
        self.runs.append(OperatorRun(call, reads, makes, self._new_nodes(), torch.is_grad_enabled(), offsets, line))

    def note_cost(self, func: Any, rule: OpRule, cost: OpCost) -> None:
        """Note one run of an operator without its arguments: of a view, which runs no kernel, or if costs suffice."""
        key = id(func) if cost is NO_COST else (id(func), cost)  # operators live as long as the process
        run = self._bare_runs.get(key)
        if run is None:
            run = self._bare_runs[key] = OperatorRun(OperatorCall(func, rule, (), {}, (), cost), (), ())
        nodes = self._new_nodes()
        self.runs.append(run._replace(nodes=nodes) if nodes else run)

    def _new_nodes(self) -> int:
        """Return the number of autograd nodes that were made since the last operator of this thread."""
        thread, node_number = get_ident(), next_node_number()  # each thread has its own numbers
        nodes: int = node_number - self._next_node.get(thread, node_number)
        self._next_node[thread] = node_number
        return nodes

    def _call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, rule: OpRule, cost: OpCost
    ) -> tuple[OperatorCall, tuple[int, ...], tuple[int, ...]]:
        """Return the call, the same object for equal ones, and the storages that it reads: identities and offsets."""
        reads: list[tuple[int, int]] = []
        specs = tuple(self._specs(args, reads))
        named = dict(zip(kwargs, self._specs(kwargs.values(), reads), strict=True)) if kwargs else {}
        cost = op_cost(rule, args, kwargs, out) if cost is NO_COST else cost
        # the specs hold neither packed weights, nor the values of a block mask, nor sizes of sparse and nested tensors
        key = (func, specs, tuple(named.items()), cost)
        call = self._calls.get(key)
        if call is None:
            outputs = tuple(spec_of(tensor) for tensor in tensors_in(out) if _is_dense(tensor))
            call = self._calls[key] = OperatorCall(func, rule, specs, named, outputs, cost)
        return call, tuple([storage for storage, _ in reads]), tuple([offset for _, offset in reads])

    def _specs(self, values: Iterable[Any], reads: list[tuple[int, int]]) -> list[Any]:
        specs: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in _CONSTANTS:
                specs.append(value)
            elif isinstance(value, Tensor):
                if not _is_dense(value):
                    specs.append(f"{value.layout}[{value.dtype}, {nbytes_of(value)} bytes]")
                    continue
                storage = self._identify(value)
                reads.append((storage, int(value.storage_offset())))
                specs.append(spec_of(value, storage in self._params))
            elif kind is tuple or kind is list:
                specs.append(tuple(self._specs(value, reads)))
            else:
                specs.append(group_name(value) or f"<{kind.__name__}>")
        return specs


def _is_dense(tensor: Tensor) -> bool:
    """Return True for a tensor with sizes and strides; a sparse or nested one has none that say what it stores."""
    return tensor.layout is torch.strided and not tensor.is_nested


def spec_of(tensor: Tensor, is_param: bool = False) -> TensorSpec:
    """Return the spec of a strided tensor.

    >>> spec_of(torch.ones(2, 3))
    TensorSpec(shape=(2, 3), stride=(3, 1), dtype=torch.float32, is_param=False)
    """
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, is_param)
