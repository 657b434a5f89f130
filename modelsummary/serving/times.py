"""The time of one forward of a request on a device, by the time model of ``latency``.

A compiled forward computes products of one input with several weights as one: queries, keys and values; gate and up.
Engines keep such weights in one matrix when they load a model: one launch, one reading of the input, and more columns,
which fill the units of a device better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelsummary.capture.live import LiveModel
from modelsummary.devices.target import Target
from modelsummary.latency.predict import time_operators
from modelsummary.operators.collective_calls import collective_of
from modelsummary.operators.kernels import StepOperator
from modelsummary.operators.operator_calls import OperatorCall, OperatorRun, TensorSpec
from modelsummary.serving.number_formats import NumberFormats
from modelsummary.serving.run import Phase, PhaseTime, times_of

__all__ = ["Communicate", "phase_time", "with_merged_products"]

Communicate = Callable[[str, int], float]
"""Function from a collective's name, such as ``"all_reduce"``, and its bytes to seconds."""


def phase_time(
    live: LiveModel,
    phase: Phase,
    target: Target,
    mode: str,
    communicate: Communicate | None = None,
    formats: NumberFormats | None = None,
) -> PhaseTime:
    """Return the time of a forward on the device of ``target``.

    Args:
        live: the live model.
        phase: the forward, run on shapes.
        target: a named device, or this machine.
        mode: ``"eager"`` or ``"compiled"``; a compiled step is replayed from a CUDA graph, so that, unlike in
            ``estimate_latency``, the host does not limit it; it writes new keys and values into the cache in place,
            where an eager one copies a growing cache; on a named device, products of one input with several weights are
            one product.
        communicate: returns the seconds of collectives; None: there are none.
        formats: how weights and caches are kept; None: as the model has them.
    """
    operators = (
        phase.operators
        if mode == "eager"
        else [operator for operator in phase.operators if not _grows(operator, phase)]
    )
    if mode == "compiled" and target.model is not None:
        operators = with_merged_products(operators)
    works = None if formats is None else formats.works_in(phase)
    kernels = time_operators(live, operators, target, mode, works)
    device = sum(times_of(kernel) * (kernel.seconds or 0.0) for kernel in kernels)
    computing = launching = waiting = host = 0.0
    costs = target.times.host_seconds
    views = sum(times_of(operator) * operator.run.call.rule.is_view for operator in phase.operators)
    beside_kernels = views * costs["view"] + phase.n_calls * costs["module"]
    if target.model is not None:
        spec = target.model.spec
        fastest = max(spec.peak_flops.values(), default=float("inf"))
        for kernel in kernels:
            seconds = times_of(kernel) * (kernel.seconds or 0.0)
            if max(kernel.flops / fastest, kernel.moved_bytes / spec.bandwidth) < target.model.launch:
                launching += seconds  # it would take as long with less work
            elif kernel.flops and target.model.computing(kernel.work) > target.model.moving(kernel.work):
                computing += seconds
        if mode == "eager":
            launched = sum(times_of(kernel) * kernel.n_operators for kernel in kernels)
            host = launched * costs["operator"] + beside_kernels
    elif (table := target.table) is not None:
        waiting = beside_kernels  # the kernels wait for it
        device += waiting
        for kernel in kernels:
            flops, moved = table.computing(kernel.work), table.moving(kernel.work)
            seconds = times_of(kernel) * (kernel.seconds or 0.0)
            if max(flops, moved) < table.host:
                waiting += seconds  # it would take as long with less work
            elif flops > moved:
                computing += seconds
    links = 0.0
    if communicate is not None:
        sent = ((times_of(operator), collective_of(operator.run.call)) for operator in phase.operators)
        links = sum(times * communicate(call.operation, call.nbytes) for times, call in sent if call is not None)
    limits = {"compute": computing, "memory": device - computing - launching - waiting, "launches": launching}
    limits["host"] = host if host > device else waiting
    limited_by = "links" if links > max(device, host) else max(limits, key=limits.__getitem__)
    return PhaseTime(max(device, host) + links, links, limited_by)


def _grows(operator: StepOperator, phase: Phase) -> bool:
    """Return True if an operator joins a cache and new tokens in a new storage, which the cache keeps."""
    return operator.run.call.rule.facts.joins and not phase.cache_storages.isdisjoint(operator.run.makes)


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
