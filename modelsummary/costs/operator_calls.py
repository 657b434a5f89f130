"""``OperatorCall``: one distinct call of an operator, as plain data: what it was called with, and what it costs.

A model calls the same few operators over and over: calls that are equal in operator, shapes, strides, dtypes and
constants are one object, which an ``OperatorLog`` notes each time it runs. What is predicted or measured of it holds
for all of them.
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
    """A tensor without its values; ``is_param``: it is a parameter of the model."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_param: bool = False

    @property
    def numel(self) -> int:
        """Number of elements.

        >>> TensorSpec((2, 3), (3, 1), torch.float32).numel
        6
        """
        product = 1
        for size in self.shape:
            product *= size
        return product

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
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
        rule: what is known of the operator.
        args, kwargs: its arguments, a ``TensorSpec`` in the place of each tensor.
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
        """Name of the operator without its overload: ``aten.addmm``."""
        return self.rule.name

    @cached_property
    def key(self) -> str:
        """The call as text, equal for equal calls also in other processes."""
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
    """One run of an operator call: where it ran, and which storages it read and made.

    Attributes:
        call: what ran.
        reads, makes: identities of the storages of its arguments, and of its results.
    """

    call: OperatorCall
    reads: tuple[int, ...]
    makes: tuple[int, ...]


class OperatorLog:
    """Notes the operators of a run, equal calls as one object.

    Args:
        identify: a number for the storage behind a tensor, equal as long as it is the same storage.
        is_param: tells whether a tensor lies in the storage of a parameter.
    """

    def __init__(self, identify: Callable[[Tensor], int], is_param: Callable[[Tensor], bool]) -> None:
        self.runs: list[OperatorRun] = []
        self._identify, self._is_param = identify, is_param
        self._calls: dict[Any, OperatorCall] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note one operator that ran."""
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
