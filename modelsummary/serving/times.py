"""The time of one forward of a request on a device, by the time model of ``latency``."""

from __future__ import annotations

from collections.abc import Callable

from modelsummary.capture.live import LiveModel
from modelsummary.devices.target import Target
from modelsummary.latency.predict import time_operators
from modelsummary.operators.collective_calls import collective_of
from modelsummary.operators.kernels import StepOperator
from modelsummary.serving.merged import with_merged_products
from modelsummary.serving.number_formats import NumberFormats
from modelsummary.serving.run import Phase, PhaseTime, times_of

__all__ = ["Communicate", "phase_time"]

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
