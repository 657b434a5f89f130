"""Compare two forwards by the operators that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelsummary.capture.containers import sizes_of, tensors_of
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of
from modelsummary.capture.operator_mode import Execution, Operators
from modelsummary.capture.run import running
from modelsummary.layer_info import Sizes

if TYPE_CHECKING:
    from modelsummary.record.events import Record

__all__ = ["Fingerprint", "compared", "difference", "fingerprint", "fingerprint_of"]


@dataclass(frozen=True)
class Fingerprint:
    """The operators or results of a forward, for comparison.

    Attributes:
        operators: each operator with its shapes and constants; empty for a real run.
        sizes: sizes of the result.
        values: tensors of the result of a real run; empty for a run on shapes.
    """

    operators: list[Any]
    sizes: Sizes
    values: list[Tensor]

    def differs_from(self, other: Fingerprint) -> str:
        """Return the first difference; empty if there is none.

        >>> Fingerprint([], [2, 3], []).differs_from(Fingerprint([], [2, 4], []))
        'a result of the sizes [2, 3] instead of [2, 4]'
        """
        for index, (operator, other_operator) in enumerate(zip(self.operators, other.operators, strict=False)):
            if operator != other_operator:
                return f"operator {index} is {operator[0]} instead of {other_operator[0]}, or has other arguments"
        if len(self.operators) != len(other.operators):
            return f"{len(self.operators)} operators instead of {len(other.operators)}"
        if self.sizes != other.sizes:
            return f"a result of the sizes {self.sizes} instead of {other.sizes}"
        is_close = all(torch.allclose(*pair, equal_nan=True) for pair in zip(self.values, other.values, strict=True))
        return "" if is_close else "other values"


def fingerprint(
    forward: Callable[..., Any],
    modules: Sequence[nn.Module],
    call: CallArguments,
    execution: str,
    *,
    grad: bool = False,
    other_mode: bool = False,
) -> Fingerprint:
    """Run ``forward`` on shapes or for real, leaving everything untouched, and return its fingerprint.

    Args:
        other_mode: whether to switch every module to the other mode, train or eval.
    """
    with running(modules, call, on_shapes=execution == "shape", grad=grad) as (executes, args, kwargs):
        for module in modules if other_mode else ():
            module.training = not module.training
        if isinstance(executes, ShapeOnly):
            executes.log = []
        with Operators(executes):
            out = forward(*args, **kwargs)
        return fingerprint_of(executes, out)


def fingerprint_of(execution: Execution, out: Any) -> Fingerprint:
    """Return the fingerprint of a run that ends, whose operators were logged if it ran on shapes."""
    if isinstance(execution, ShapeOnly):
        return Fingerprint(execution.log or [], sizes_of(out), [])
    return Fingerprint([], sizes_of(out), [tensor.clone() for tensor in tensors_of(out)])


def difference(
    model: nn.Module,
    other: Callable[..., Any],
    modules: Iterable[nn.Module],
    call: CallArguments,
    execution: str,
    *,
    grad: bool,
    other_mode: bool = False,
    other_call: CallArguments | None = None,
    observed: Fingerprint | None = None,
) -> str:
    """Return how ``other`` differs from the model; empty if both run the same, or the model cannot run this way.

    Args:
        modules: roots of all modules that ``other`` calls.
        other_call: arguments of ``other``; None: the arguments of the model.
        grad, other_mode: see ``fingerprint``. A forward that computes gradients does not run without them.
        observed: what the model ran in such a run before. It runs again only if ``other`` differs from that.
    """
    all_modules = list({id(module): module for root in (model, *modules) for module in modules_of(root)}.values())

    def run(forward: Callable[..., Any], arguments: CallArguments) -> Fingerprint:
        return fingerprint(forward, all_modules, arguments, execution, grad=grad, other_mode=other_mode)

    if observed is not None:
        other_fingerprint = run(other, other_call or call)
        if not other_fingerprint.differs_from(observed):
            return ""
    try:
        model_fingerprint = run(model, call)
    except RuntimeError:
        if grad:
            raise
        return ""
    return (other_fingerprint if observed is not None else run(other, other_call or call)).differs_from(
        model_fingerprint
    )


def compared(record: Record, call: CallArguments, differs: Callable[..., str]) -> tuple[str, bool]:
    """Compare what was made of a record with the model, in the ways of running that the record is for.

    On shapes, it is compared with the runs of the record: at a large batch, and in the other mode. The model runs again
    where these do not show what it does: for real; if no run confirmed what was inferred from the batch sizes; if a
    number depends on the mode; and without gradients if the forward asks whether they are computed.

    Args:
        call: the recorded arguments.
        differs: ``difference`` of the model and what was made of the record; takes ``call`` and its options by name.

    Returns:
        The first difference, empty if there is none; and whether it is there without gradients alone.
    """

    def at_batch(batch: int | None) -> CallArguments:
        if record.batch_size is None or batch is None:
            return call
        return call.with_batch(record.batch_dim, record.batch_size, batch)

    other = at_batch(3 * (record.batch_size or 0) + 2)
    operators = ""
    for batch, other_mode, observed in record.observed:
        operators = operators or differs(call=at_batch(batch), grad=True, other_mode=other_mode, observed=observed)
    own_sizes = {batch for batch, other_mode, _ in record.observed if other_mode}
    is_confirmed = bool(record.observed) and (record.batch_size is None or bool(own_sizes - {record.batch_size}))
    if not is_confirmed:
        operators = operators or differs(call=other, grad=True)
    if (not record.observed or record.asks_gradients) and not operators:
        operators = differs(call=call, grad=False)
        if operators and not differs(call=call, grad=True):
            return operators, True
    # The other mode ran at one batch size, which a number that depends on the mode may depend on, too.
    has_numbers = any(type(value) is not bool for choice in record.mode_choices() for value in choice)
    if not record.no_other_mode and (not record.observed or record.asks_gradients or has_numbers):
        operators = operators or differs(call=other, grad=False, other_mode=True)
    return operators, False
