"""Predict the latency of a step from its kernels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from torch import nn

from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import named_modules
from modelsummary.capture.observe import observed
from modelsummary.capture.run import no_collection
from modelsummary.capture.step_plan import StepPlan
from modelsummary.devices.target import Target, host_calls, timing_on
from modelsummary.latency.estimate import LatencyEstimate
from modelsummary.latency.row_times import with_inner
from modelsummary.layer_info import CallKey, LayerInfo
from modelsummary.memory.checkpointing import under_policy
from modelsummary.operators.kernels import Kernel, StepOperator, WorkFormats, check_mode, kernels_of
from modelsummary.operators.recurrent_layers import join_recurrent
from modelsummary.subject import subject_of

__all__ = ["TABLE_ERROR", "estimate", "step_subject", "time_operators"]

_PHASES = ("forward", "backward", "step")
# Kernels per time step of cuDNN's LSTM, as profiled on an H100: forward a product, the cell and a filling with zeros;
# backward five, two of them products.
_LAUNCHES_PER_STEP = {False: 3, True: 5}
_OUTSIDE = ("", 0)  # row of work outside of the model's modules
# Mean error of benchmarks/latency_truth.py where a model runs minutes after its calls were visited (0.083): about the
# difference between two runs of a model (0.082). In the same minute, it was smaller (0.045).
TABLE_ERROR = 0.08


def time_operators(
    live: LiveModel, operators: Sequence[StepOperator], target: Target, mode: str, formats: WorkFormats | None = None
) -> list[Kernel]:
    """Return the kernels that a device runs for some operators, with their predicted seconds.

    Args:
        mode: ``"eager"`` or ``"compiled"``.
        formats: as for ``kernels_of``.
    """
    check_mode(mode)
    timing = timing_on(target)
    whole_calls = target.table is not None  # they were measured as a whole
    kernels = kernels_of(
        operators, mode, foreach=not target.is_cpu, whole_calls=whole_calls, timing=timing, formats=formats
    )
    if target.model is None:
        return kernels
    recurrent = {fqn for fqn, module in named_modules(live.model) if isinstance(module, nn.RNNBase)}
    return join_recurrent(kernels, recurrent, timing) if recurrent else kernels


def estimate(live: LiveModel, root: LayerInfo, target: Target, mode: str, plan: StepPlan) -> LatencyEstimate:
    """Predict the latency of a step, and of each call in the rows below ``root``."""
    with no_collection():
        trace = observed(live, plan)
        operators = trace.operators
        kernels = time_operators(live, operators, target, mode)
        parameters = dict(live.model.named_parameters())
        trained = {
            id(parameter)
            for name, parameter in parameters.items()
            if parameter.requires_grad and name not in trace.without_gradient
        }
        optimized = trained & {id(parameters[name]) for names, _ in plan.groups_of(live.model) for name in names}
        asks_policy = under_policy(dict(plan.checkpoint), live.model)
        calls_of_host = _dispatches(kernels, target, mode)
        calls_of_host += _calls_beside_kernels(operators, asks_policy, root, trained, optimized, mode)
        row_seconds, phase_seconds, limited_by = _own_seconds(kernels, calls_of_host, target)
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
        model = target.model
        source, error = f"fit: {model.fit}", model.compiled_error if mode == "compiled" else model.typical_error
    else:
        source, error = f"kernel table of {target.name}", TABLE_ERROR
    phases = {phase: 1e3 * phase_seconds[phase] for phase in _PHASES}
    unknown = _uncounted(kernels, operators)
    subject = step_subject(root, plan, trace.optimizer)
    return LatencyEstimate(
        phases, target.name, mode, source, error, shares, limited_by, unknown, calls, columns, subject
    )


def step_subject(root: LayerInfo, plan: StepPlan, optimizer: str | None = None) -> str:
    """Return the model, the sizes of its inputs, its dtype, and the step that is predicted."""
    step = f"training step{f' with {optimizer}' if optimizer else ''}" if plan.train else "forward"
    return f"{subject_of(root, plan.dtype, plan.autocast)}, {step}"


def _uncounted(kernels: Sequence[Kernel], operators: Sequence[StepOperator]) -> Counter[str]:
    """Return the runs of operators whose time is not known: not measured, of unknown work, or the network's."""
    counts = Counter(kernel.name for kernel in kernels if kernel.op_class == "other" and kernel.source != "measured")
    counts.update(operator.run.call.name for operator in operators if operator.run.call.rule.is_collective)
    return counts


RowSeconds = dict[tuple[str, CallKey], float]  # phase and row -> seconds


_Calls = Counter[tuple[tuple[str, CallKey], str]]  # phase and row, and kind of call


def _own_seconds(kernels: Sequence[Kernel], calls: _Calls, target: Target) -> tuple[RowSeconds, dict[str, float], str]:
    """Return the own seconds of each row, the seconds of each phase, and the limit: device or host.

    Args:
        kernels: kernels of the step, with their seconds.
        calls: what the host is asked for.
    """
    device: defaultdict[tuple[str, CallKey], float] = defaultdict(float)
    host: defaultdict[tuple[str, CallKey], float] = defaultdict(float)
    for kernel in kernels:
        device[kernel.phase, kernel.row or _OUTSIDE] += kernel.seconds or 0.0
    costs = target.times.host_seconds
    for (key, kind), count in calls.items():
        (device if target.is_cpu else host)[key] += count * costs[kind]  # a CPU dispatches and computes in turns
    phase_seconds, row_seconds = {}, {}
    for phase in _PHASES:
        on_device = sum(seconds for key, seconds in device.items() if key[0] == phase)
        on_host = sum(seconds for key, seconds in host.items() if key[0] == phase)
        phase_seconds[phase] = max(on_device, on_host)
        row_seconds.update(_with_waiting(device, host, phase))
    return row_seconds, phase_seconds, "host" if sum(host.values()) > sum(device.values()) else "device"


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


def _dispatches(kernels: Sequence[Kernel], target: Target, mode: str) -> _Calls:
    """Return the operators that the host dispatches, in compiled mode the kernels that it launches.

    The optimizer runs eagerly in both modes. cuDNN launches kernels for each step of a recurrent layer. Kernels of a
    CPU were measured with their dispatch, and what compiled kernels of this machine take is not known.
    """
    counts: _Calls = Counter()
    if target.is_cpu or (mode == "compiled" and target.model is None):
        return counts
    for kernel in kernels:
        key, is_backward = (kernel.phase, kernel.row or _OUTSIDE), kernel.phase == "backward"
        if mode == "compiled" and kernel.phase != "step":
            counts[key, "compiled kernel"] += 1
        else:
            counts[key, "backward operator" if is_backward else "operator"] += kernel.n_operators
        if kernel.op_class == "rnn":
            counts[key, "launch"] += kernel.sizes[0] * _LAUNCHES_PER_STEP[is_backward]
    return counts


def _calls_beside_kernels(
    operators: Sequence[StepOperator],
    asks_policy: Callable[[StepOperator], bool],
    root: LayerInfo,
    trained: set[int],
    optimized: set[int],
    mode: str,
) -> _Calls:
    """Return how often the host is asked beside kernels, by phase, row and kind of call.

    A parameter has a node that adds up its gradient, and the optimizer handles it in Python. If its module was not
    called, a module around it read it. Compiled code calls no modules, takes no views and records no nodes; parameters
    have theirs.

    Args:
        asks_policy: tells at which operators a checkpoint asks whether it keeps their results.
        trained: ids of the parameters that get a gradient.
        optimized: ids of the parameters among these that the optimizer steps.
        mode: ``"eager"`` or ``"compiled"``.
    """
    counts: _Calls = Counter()
    phases = {operator.phase for operator in operators}
    for operator in operators if mode == "eager" else ():
        row = operator.row or _OUTSIDE
        # a custom autograd.Function makes a node without gradients, too, which no backward runs
        counts.update(((phase, row), kind) for phase, kind in host_calls(operator) if phase in phases)
        if asks_policy(operator):
            counts[(operator.phase, row), "policy"] += 1
    accumulated: set[int] = set()
    for row_info in root.walk():
        counts[("forward", row_info.key), "module"] += row_info.executed and mode == "eager"
        if "backward" not in phases or row_info.module is None:
            continue
        new = ({*map(id, row_info.module.parameters(recurse=False))} & trained) - accumulated
        accumulated |= new
        reader = row_info
        while not reader.executed and reader.parent_info is not None:
            reader = reader.parent_info
        counts[("backward", reader.key), "node"] += len(new)
        if "step" in phases:
            counts[("step", reader.key), "parameter"] += len(new & optimized)
    return counts


def _columns(root: LayerInfo, row_seconds: RowSeconds) -> dict[str, dict[CallKey, float]]:
    """Return the columns of the forward and of the backward, in milliseconds."""
    columns: dict[str, dict[CallKey, float]] = {}
    for phase, name in (("forward", "estimated_latency_ms"), ("backward", "estimated_backward_latency_ms")):
        self_ms = {
            row.key: 1e3 * row_seconds.get((phase, row.key), 0.0) if row.executed else 0.0 for row in root.walk()
        }
        columns |= {f"self_{name}": self_ms, name: with_inner(root, self_ms)}
    return columns
