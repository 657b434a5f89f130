"""Predict the latency of a step from its kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of, named_modules, tensors_of_modules
from modelsummary.capture.observe import observed
from modelsummary.capture.run import no_collection
from modelsummary.capture.step_plan import StepPlan
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.kernel_table import KernelTable, device_here, table_of
from modelsummary.devices.kernel_time import DeviceModel, device_model
from modelsummary.errors import InputError
from modelsummary.latency.estimate import LatencyEstimate
from modelsummary.latency.options import is_here
from modelsummary.latency.row_times import with_inner
from modelsummary.layer_info import CallKey, LayerInfo
from modelsummary.operators.kernels import Kernel, StepOperator, Timing, check_mode, kernels_of
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import Work
from modelsummary.operators.recurrent_layers import join_recurrent
from modelsummary.operators.tensor_bytes import nbytes_of

__all__ = [
    "TABLE_ERROR",
    "Target",
    "distinct_calls",
    "estimate",
    "predict_kernels",
    "target_of",
    "time_operators",
    "view_seconds",
]

_PHASES = ("forward", "backward", "step")
_OUTSIDE = ("", 0)  # row of work outside of the model's modules
# Mean error of benchmarks/latency_truth.py where a model runs minutes after its calls were visited (0.083): about the
# difference between two runs of a model (0.082). In the same minute, it was smaller (0.045).
TABLE_ERROR = 0.08


@dataclass(frozen=True)
class Target:
    """The device of a prediction.

    Attributes:
        name: name of the device.
        model: time model of a named device; None for this machine.
        table: kernel table of this machine; None for a named device.
    """

    name: str
    model: DeviceModel | None = None
    table: KernelTable | None = None

    @property
    def is_cpu(self) -> bool:
        """True for this machine's CPU, where one thread dispatches the operators and computes them."""
        return self.table is not None and self.table.machine.threads > 0


def target_of(device: DeviceSpec | torch.device | str | None, *, tf32: bool = False) -> Target:
    """Return the target for a spec, the name of an accelerator, or a device of this machine.

    Raises:
        InputError: the device is unknown, or this machine was never calibrated.

    >>> target_of("T4").name
    'T4'
    """
    if not is_here(device):
        spec = device if isinstance(device, DeviceSpec) else DeviceSpec(str(device))
        return Target(spec.name, model=device_model(spec, tf32=tf32))
    local_device = device_here(device)  # type: ignore[arg-type]
    table = table_of(local_device)
    if not table.entries:
        raise InputError(
            f"this machine's {local_device} was never calibrated; call calibrate(), or name a device such as 'A100'"
        )
    return Target(f"this machine's {local_device}", table=table)


def predict_kernels(live: LiveModel, target: Target, mode: str, plan: StepPlan) -> list[Kernel]:
    """Return the kernels of a step with their predicted seconds."""
    return _timed_kernels(live, _operators(live, mode, plan), target, mode)


def _operators(live: LiveModel, mode: str, plan: StepPlan) -> Sequence[StepOperator]:
    check_mode(mode)
    return observed(live, plan).operators


def distinct_calls(live: LiveModel, plan: StepPlan) -> list[OperatorCall]:
    """Return the distinct operator calls of a step."""
    return list({id(operator.run.call): operator.run.call for operator in _operators(live, "eager", plan)}.values())


def _timed_kernels(live: LiveModel, operators: Sequence[StepOperator], target: Target, mode: str) -> list[Kernel]:
    timing = _timing_on_device(target.model) if target.model is not None else _timing_here(live, target.table)
    whole_calls = target.table is not None  # they were measured as a whole
    kernels = kernels_of(operators, mode, foreach=not target.is_cpu, whole_calls=whole_calls, timing=timing)
    if target.model is None:
        return kernels
    recurrent = {fqn for fqn, module in named_modules(live.model) if isinstance(module, nn.RNNBase)}
    return join_recurrent(kernels, recurrent, timing) if recurrent else kernels


def _timing_on_device(model: DeviceModel) -> Timing:
    seconds: dict[Work, float] = {}

    def timing(work: Work, _: OperatorCall | None) -> tuple[float, str]:
        if work not in seconds:
            seconds[work] = model.seconds(work)
        return seconds[work], "fit"

    return timing


def _timing_here(live: LiveModel, table: KernelTable | None) -> Timing:
    assert table is not None
    cold = weights_are_cold(live, table)
    results: dict[int, tuple[float, str]] = {}

    def timing(work: Work, call: OperatorCall | None) -> tuple[float, str]:
        if call is None:
            return table.seconds(None, work, cold=cold)
        if id(call) not in results:
            results[id(call)] = table.seconds(call.key, work, cold=cold)
        return results[id(call)]

    return timing


def time_operators(live: LiveModel, operators: Sequence[StepOperator], target: Target, mode: str) -> list[Kernel]:
    """Return the kernels that a device runs for some operators, with their predicted seconds."""
    check_mode(mode)
    return _timed_kernels(live, operators, target, mode)


def weights_are_cold(live: LiveModel, table: KernelTable) -> bool:
    """Return True if the parameters exceed half of the last level of the cache; activations take the rest."""
    nbytes = sum(nbytes_of(tensor) for tensor in tensors_of_modules(modules_of(live.model)))
    return nbytes > table.facts.get("cache_bytes", 0) / 2


def estimate(live: LiveModel, root: LayerInfo, target: Target, mode: str, plan: StepPlan) -> LatencyEstimate:
    """Predict the latency of a step, and of each call in the rows below ``root``."""
    with no_collection():
        operators = _operators(live, mode, plan)
        kernels = _timed_kernels(live, operators, target, mode)
        row_seconds, phase_seconds, limited_by = _own_seconds(kernels, operators, root, target, mode)
    columns = _columns(root, row_seconds)
    forward_ms, backward_ms = columns["estimated_latency_ms"], columns["estimated_backward_latency_ms"]
    calls = {row.key: (forward_ms[row.key], backward_ms[row.key]) for row in root.walk() if row.executed}
    seconds = sum(kernel.seconds or 0.0 for kernel in kernels) or 1.0
    source_seconds: Counter[str] = Counter()
    for kernel in kernels:
        source_seconds[kernel.source] += kernel.seconds or 0.0  # type: ignore[assignment]
    shares = {
        source: source_seconds[source] / seconds
        for source in ("measured", "interpolated", "fit")
        if source_seconds[source]
    }
    if target.model is not None:
        source, error = f"fit: {target.model.fit}", target.model.typical_error
    else:
        source, error = f"kernel table of {target.name}", TABLE_ERROR
    phases = {phase: 1e3 * phase_seconds[phase] for phase in _PHASES}
    unknown = _uncounted(kernels, operators)
    return LatencyEstimate(phases, target.name, mode, source, error, shares, limited_by, unknown, calls, columns)


def _uncounted(kernels: Sequence[Kernel], operators: Sequence[StepOperator]) -> Counter[str]:
    """Return the runs of operators whose time is not known: not measured, of unknown work, or the network's."""
    counts = Counter(kernel.name for kernel in kernels if kernel.op_class == "other" and kernel.source != "measured")
    counts.update(operator.run.call.name for operator in operators if operator.run.call.rule.is_collective)
    return counts


RowSeconds = dict[tuple[str, CallKey], float]  # phase and row -> seconds


def _own_seconds(
    kernels: Sequence[Kernel], operators: Sequence[StepOperator], root: LayerInfo, target: Target, mode: str
) -> tuple[RowSeconds, dict[str, float], str]:
    """Return the own seconds of each row, the seconds of each phase, and the limit: device or host."""
    device: defaultdict[tuple[str, CallKey], float] = defaultdict(float)
    host: defaultdict[tuple[str, CallKey], float] = defaultdict(float)
    dispatch = _dispatch_seconds(target) if mode == "eager" else 0.0
    for kernel in kernels:
        key = kernel.phase, kernel.row or _OUTSIDE
        device[key] += kernel.seconds or 0.0
        host[key] += kernel.n_operators * dispatch
    if target.table is not None:
        _add_host_work(device if target.is_cpu else host, operators, root, target.table)
    phase_seconds, row_seconds, n_host_bound = {}, {}, 0
    for phase in _PHASES:
        on_device = sum(seconds for key, seconds in device.items() if key[0] == phase)
        on_host = sum(seconds for key, seconds in host.items() if key[0] == phase)
        n_host_bound += on_host > on_device
        phase_seconds[phase] = max(on_device, on_host)
        row_seconds.update(_with_waiting(device, host, phase))
    return (
        row_seconds,
        phase_seconds,
        "host" if n_host_bound and sum(host.values()) > sum(device.values()) else "device",
    )


def _with_waiting(device: RowSeconds, host: RowSeconds, phase: str) -> RowSeconds:
    """Return the seconds of the rows of a phase: on the device, and of waiting for the host if the host limits it.

    The device waits in rows whose dispatch takes longer than their kernels. No row takes less time than its kernels,
    and the rows add up to the time of the host.
    """
    rows = [key for key in {**device, **host} if key[0] == phase]
    delays = {key: host.get(key, 0.0) - device.get(key, 0.0) for key in rows}
    waiting = max(0.0, sum(delays.values()))
    fraction = waiting / sum(delay for delay in delays.values() if delay > 0) if waiting else 0.0
    return {key: device.get(key, 0.0) + fraction * max(0.0, delays[key]) for key in rows}


def _dispatch_seconds(target: Target) -> float:
    """Return the seconds that the host needs to dispatch an operator while the device computes."""
    if target.table is None:
        return target.model.host if target.model is not None else 0.0
    return 0.0 if target.is_cpu else target.table.facts.get("operator", 5e-6)


def _add_host_work(
    seconds: defaultdict[tuple[str, CallKey], float],
    operators: Sequence[StepOperator],
    root: LayerInfo,
    table: KernelTable,
) -> None:
    """Add the host's time for views, for calls of modules, and for autograd."""
    facts = table.facts
    node, engine = facts.get("node", 0.0), facts.get("engine", 0.0)
    for operator, view in zip(operators, view_seconds(operators, table), strict=True):
        call_key = operator.row or _OUTSIDE
        if operator.phase != "step":
            seconds[operator.phase, call_key] += view
        if operator.run.nodes:  # each runs once in the backward
            seconds[operator.phase, call_key] += operator.run.nodes * node
            seconds["backward", call_key] += operator.run.nodes * engine
    has_backward = any(operator.phase == "backward" for operator in operators)
    accumulated: set[int] = set()  # parameters, each with a node that adds up its gradient
    for row in root.walk():
        if not row.executed:
            continue
        key = row.key
        seconds["forward", key] += facts.get("module", 1e-6)
        if has_backward and row.module is not None:
            parameter_ids = {
                id(parameter) for parameter in row.module.parameters(recurse=False) if parameter.requires_grad
            } - accumulated
            seconds["backward", key] += len(parameter_ids) * engine
            accumulated |= parameter_ids


def view_seconds(operators: Sequence[StepOperator], table: KernelTable) -> Iterator[float]:
    """Yield the seconds of the host for each operator if it is a view, else 0.0."""
    first = table.facts.get("view", 1e-6)
    following = table.facts.get("next_view", first)
    after_view = False
    for operator in operators:
        is_view = operator.run.call.rule.is_view
        yield (following if after_view else first) if is_view else 0.0
        after_view = is_view


def _columns(root: LayerInfo, row_seconds: RowSeconds) -> dict[str, dict[CallKey, float]]:
    """Return the columns of the forward and of the backward, in milliseconds."""
    columns: dict[str, dict[CallKey, float]] = {}
    for phase, name in (("forward", "estimated_latency_ms"), ("backward", "estimated_backward_latency_ms")):
        self_ms = {
            row.key: 1e3 * row_seconds.get((phase, row.key), 0.0) if row.executed else 0.0 for row in root.walk()
        }
        columns |= {f"self_{name}": self_ms, name: with_inner(root, self_ms)}
    return columns
