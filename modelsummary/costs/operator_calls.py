"""``OperatorCall``: one distinct call of an operator as plain data: its arguments and its cost.

A model calls the same few operators over and over. Calls with equal operator, shapes, strides, dtypes and constants are
one object, and an ``OperatorLog`` notes each of its runs. A time predicted or measured once holds for all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelsummary.costs.operators import OpCost, OpRule, op_cost, op_rule, tensors_in

__all__ = ["OperatorCall", "OperatorLog", "OperatorRun", "TensorSpec", "specs_in"]

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
        dense = self.stride == _contiguous(self.shape)
        strides = "" if dense else "/" + "x".join(map(str, self.stride))
        name = _DTYPES.get(self.dtype) or str(self.dtype).removeprefix("torch.")
        return f"{name}[{'x'.join(map(str, self.shape))}{strides}]{'p' if self.is_param else ''}"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


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

    def __repr__(self) -> str:
        return self.key


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
        return [spec for each in value for spec in specs_in(each)]
    return []


class OperatorRun(NamedTuple):
    """One run of an operator call, with the storages that it read and made.

    Attributes:
        call: the operator call.
        reads, makes: identities of the storages behind its arguments, and behind its results.
    """

    call: OperatorCall
    reads: tuple[int, ...]
    makes: tuple[int, ...]


class OperatorLog:
    """A log of operator runs, with one object per distinct call.

    Args:
        identify: returns a number that identifies the storage behind a tensor.
        is_param: returns True if a tensor lies in the storage of a parameter.

    >>> log = OperatorLog(id, lambda tensor: False)
    >>> a, b = torch.ones(2, 3), torch.ones(3, 4)
    >>> log.note(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    >>> log.runs[0].call.key, log.runs[0].call.cost.macs
    ('aten.mm.default(f32[2x3], f32[3x4])', 24)
    """

    def __init__(self, identify: Callable[[Tensor], int], is_param: Callable[[Tensor], bool]) -> None:
        self.runs: list[OperatorRun] = []
        self._identify, self._is_param = identify, is_param
        self._calls: dict[Any, OperatorCall] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note one run of an operator with its result ``out``."""
        reads: list[int] = []
        specs = tuple([self._spec(each, reads) for each in args])
        named = {name: self._spec(each, reads) for name, each in kwargs.items()}
        makes = [self._identify(tensor) for tensor in tensors_in(out) if tensor.layout is torch.strided]
        key = (func, specs, tuple(named.items()))
        call = self._calls.get(key)
        if call is None:
            rule = op_rule(func)
            outputs = tuple(_spec_of(each, False) for each in tensors_in(out) if each.layout is torch.strided)
            call = OperatorCall(func, rule, specs, named, outputs, op_cost(rule, args, kwargs, out))
            self._calls[key] = call
        self.runs.append(OperatorRun(call, tuple(reads), tuple(makes)))

    def _spec(self, value: Any, reads: list[int]) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_nested:
                return str(value.layout)
            reads.append(self._identify(value))
            return _spec_of(value, self._is_param(value))
        if type(value) in (tuple, list):
            return tuple([self._spec(each, reads) for each in value])
        return value if type(value) in _CONSTANTS else f"<{type(value).__name__}>"


def _spec_of(tensor: Tensor, is_param: bool) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.stride(), tensor.dtype, is_param)
