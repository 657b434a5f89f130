"""Products of one input with several weights, which servers compute as one: queries, keys and values; gate and up.

Engines keep such weights in one matrix when they load a model: one launch, one reading of the input, and more columns,
which fill the units of a device better.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import OperatorCall, OperatorRun, TensorSpec

__all__ = ["with_merged_products"]


def with_merged_products(operators: Sequence[StepOperator]) -> list[StepOperator]:
    """Return operators in which products of one input with weights of the same height are one product.

    >>> import torch
    >>> x, w = TensorSpec((4, 8), (8, 1), torch.float16), TensorSpec((8, 6), (1, 8), torch.float16, is_param=True)
    >>> mm = torch.ops.aten.mm.default
    >>> from modelsummary.operators.operator_rules import OpCost, op_rule
    >>> out = (TensorSpec((4, 6), (6, 1), torch.float16),)
    >>> call = OperatorCall(mm, op_rule(mm), (x, w), {}, out, OpCost(4 * 6 * 8, 0, 0, 0, None))
    >>> pair = [StepOperator(OperatorRun(call, (1, weight), (weight + 10,)), "forward", None) for weight in (2, 3)]
    >>> (merged,) = with_merged_products(pair)
    >>> merged.run.call.outputs[0].shape, merged.run.call.cost.macs, merged.run.makes
    ((4, 12), 384, (12, 13))
    """
    groups: dict[object, list[int]] = {}
    versions: dict[int, int] = {}  # storage -> how often an operator wrote into it
    for position, operator in enumerate(operators):
        key = _key(operator.run, versions)
        if key is not None:
            groups.setdefault(key, []).append(position)
        for storage in operator.run.writes:
            versions[storage] = versions.get(storage, 0) + 1
    merged: list[StepOperator | None] = list(operators)
    calls: dict[tuple[int, ...], OperatorCall] = {}
    for positions in groups.values():
        if len(positions) < 2:
            continue
        runs = [operators[position].run for position in positions]
        key = tuple([id(run.call) for run in runs])
        if key not in calls:
            calls[key] = _joined([run.call for run in runs])
        first = operators[positions[0]]
        reads = tuple(dict.fromkeys(storage for run in runs for storage in run.reads))
        makes = tuple(storage for run in runs for storage in run.makes)
        merged[positions[0]] = first._replace(run=OperatorRun(calls[key], reads, makes))
        for position in positions[1:]:
            merged[position] = None
    return [operator for operator in merged if operator is not None]


def _key(run: OperatorRun, versions: dict[int, int]) -> object | None:
    """Return what products have in common that become one; None for other operators."""
    call = run.call
    if call.rule.facts.multiplies != "matrices" or call.kwargs:
        return None
    if not all(isinstance(spec, TensorSpec) for spec in call.args):
        return None
    *_, x, weight = call.args
    if x.is_param or not weight.is_param or not all(spec.is_param for spec in call.args[:-2]):
        return None
    storage, offset = run.reads[-2], run.offsets[-2] if run.offsets else 0
    return call.func, storage, offset, versions.get(storage, 0), x, weight.dtype, len(call.args)


def _joined(calls: Sequence[OperatorCall]) -> OperatorCall:
    """Return the product of the input with all weights next to each other."""
    first = calls[0]
    *biases, x, weight = first.args
    columns = sum(call.outputs[0].shape[-1] for call in calls)
    rows, height = x.shape
    out = TensorSpec((rows, columns), (columns, 1), first.outputs[0].dtype)
    wide = weight._replace(shape=(height, columns), stride=(1, height))
    bias = tuple(spec._replace(shape=(columns,), stride=(1,)) for spec in biases)
    cost = first.cost._replace(
        macs=sum(call.cost.macs for call in calls),
        bytes_read=sum(call.cost.bytes_read for call in calls) - (len(calls) - 1) * x.nbytes,
        bytes_written=sum(call.cost.bytes_written for call in calls),
    )
    return OperatorCall(first.func, first.rule, (*bias, x, wide), {}, (out,), cost)
