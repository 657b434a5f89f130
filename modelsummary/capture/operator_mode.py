"""The dispatch mode that runs every operator of a model and counts its cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from modelsummary import _torch
from modelsummary._torch import TorchDispatchMode
from modelsummary.capture.execution.shape_tensor import ShapeTensor
from modelsummary.layer_info import total
from modelsummary.operators.operator_rules import NO_COST, OpCost, OpRule, op_rule
from modelsummary.operators.tensor_bytes import is_distributed

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Costs", "Execution", "Operators"]


class Execution(Protocol):
    """The way in which operators run: on shapes or for real."""

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and return its result and cost."""


# Questions that a tensor subclass asks the modes above it. It answers them itself (as in torch's FlopCounterMode).
_QUESTIONS = frozenset(
    f"aten.{name}"
    for name in "sym_is_contiguous is_contiguous is_strides_like_format is_non_overlapping_and_dense size sym_size"
    " stride sym_stride storage_offset sym_storage_offset numel sym_numel dim".split()
) | {"prim.layout", "prim.device"}


def _is_nested(args: tuple[Any, ...]) -> bool:
    """Return True for an operator on a nested tensor, which has kernels where others are decomposed."""
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_nested


def _cond(predicate: Any, if_true: Any, if_false: Any, operands: Any = ()) -> Any:
    return (if_true if predicate else if_false)(*operands)


def _while_loop(goes_on: Any, body: Any, carried: Any, others: Any = (), **_: Any) -> Any:
    while goes_on(*carried, *others):
        carried = tuple(body(*carried, *others))
    return carried


def _map(function: Any, rows: Any, others: Any = (), **_: Any) -> Any:
    return _stacked([function(*row, *others) for row in zip(*rows, strict=True)])


def _scan(combine: Any, carried: Any, rows: Any, others: Any = (), **_: Any) -> Any:
    outputs = []
    for row in zip(*rows, strict=True):
        result = combine(*carried, *row, *others)
        carried, output = result[: len(carried)], result[len(carried) :]
        outputs.append(output)
    return (*carried, *_stacked(outputs))


def _stacked(results: list[Any]) -> Any:
    """Return equal containers of tensors as one, whose tensors have a new first dimension."""
    return _torch.tree_map(lambda *rows: torch.stack(rows) if isinstance(rows[0], Tensor) else rows[0], *results)


# Higher-order operators that run functions of the model, which then runs itself: its operators count, not the call, and
# autograd sees them. Torch's own gradients of these operators trace the functions, in which parameters are constants.
_CONTROL_FLOW: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "map_impl": _map,
    "scan": _scan,
}


@contextmanager
def _control_flow_runs() -> Iterator[None]:
    """Return a context in which the functions of control flow run as other code of the model does.

    The class is changed, not its operators: to ask torch for one of them imports all, which takes a second.
    """
    dispatch: Any = _torch.HigherOrderOperator.dispatch

    def dispatched(operator: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        run = _CONTROL_FLOW.get(operator.name())
        return dispatch(operator, key, *args, **kwargs) if run is None else run(*args, **kwargs)

    with _torch.swapped(_torch.HigherOrderOperator, "dispatch", dispatched):
        yield


class Costs:
    """The summed costs of operators: the figures of ``OpCost``, and the runs of each operator without a formula."""

    __slots__ = ("bytes_read", "bytes_written", "elementwise_ops", "macs", "skipped_macs", "uncounted")

    def __init__(self) -> None:
        self.macs = self.elementwise_ops = self.bytes_read = self.bytes_written = 0
        self.skipped_macs: int | None = 0
        self.uncounted: dict[str, int] = {}

    def add(self, cost: OpCost) -> None:
        """Add the cost of one operator."""
        self.macs += cost.macs
        self.elementwise_ops += cost.elementwise_ops
        self.bytes_read += cost.bytes_read
        self.bytes_written += cost.bytes_written
        if cost.skipped_macs != 0:
            self.skipped_macs = total(self.skipped_macs, cost.skipped_macs)
        if cost.uncounted is not None:
            self.uncounted[cost.uncounted] = self.uncounted.get(cost.uncounted, 0) + 1


class Operators(TorchDispatchMode):
    """A mode that runs every operator through ``execution``.

    Args:
        count: gets the cost of each operator, such as ``Costs().add``; None: costs are not added up.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled during the run, and guarding against it would import torch._dynamo

    def __init__(self, execution: Execution, count: Callable[[OpCost], object] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._execution = execution
        self._count = count
        self._fake_mode = _torch.fake_mode()
        self._rules: dict[int, OpRule] = {}
        self._entered: list[ExitStack] = []  # the mode enters itself again for operators that it decomposes

    def __enter__(self) -> Self:
        stack = ExitStack()
        if not self._entered:
            stack.enter_context(_control_flow_runs())
        self._entered.append(stack)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = self._rules.get(id(func))  # operators live as long as the process
        if rule is None:
            rule = op_rule(func)
            if rule.name in _QUESTIONS:
                return NotImplemented
            self._rules[id(func)] = rule
        kwargs = kwargs or {}
        if len(types) != 1 or types[0] is not ShapeTensor:  # spares most operators these checks
            # A distributed tensor replaces an operator by collectives and by operators on the shard of this process.
            if "torch.distributed.tensor" in sys.modules and any(map(is_distributed, types)):
                return NotImplemented
            # A lazy module looks at its own parameter; a distributed tensor infers shapes of results with fake tensors.
            if (args and is_lazy(args[0])) or _torch.fake_mode() is not self._fake_mode:
                return func(*args, **kwargs)
        if rule.is_composite and rule.facts.macs is None and not _is_nested(args):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out, cost = self._execution.run(func, rule, args, kwargs)
        if self._count is not None and cost is not NO_COST:
            self._count(cost)
        return out
