"""Predict the memory of an observed step, and write it into the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.observe import observe, observed
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.equality import kinds_of
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.first_steps import first_steps
from modelsummary.memory.reserve import AllocatorReserve, AllocatorSettings
from modelsummary.memory.saved import saved_of
from modelsummary.memory.stage_actions import StageActions, actions_of
from modelsummary.memory.timeline import Workspaces, by_call, estimate_of, workspaces_on
from modelsummary.subject import subject_of
from modelsummary.units import number_of

__all__ = ["memory_of", "predict", "simulate", "simulate_step", "stage_actions"]


def predict(
    live: LiveModel, root: LayerInfo, plan: StepPlan, allocator: AllocatorSettings | None = None
) -> MemoryEstimate:
    """Predict the memory of a step, and write the memory of each call into the rows below ``root``.

    Args:
        live, root, plan: what runs.
        allocator: settings of the allocator whose reserve is predicted; None: it is not.

    Raises:
        InputError: a parameter is not initialised, no result requires a gradient, the step needs values that the
            model or its input lacks, or no tensor of a module is saved that is to move to the host.
    """
    trace = _observed(live, plan)
    memory = by_call(trace, _workspaces(trace, plan))
    rows = list(root.walk()) if plan.train and not plan.compiled else []  # a compiled step has no calls of layers
    for row in rows:
        row_memory = memory.get(row.key) if row.executed else None
        row.self_activation_bytes = row_memory.activation_bytes if row_memory is not None else 0
        row.activation_bytes = row.self_activation_bytes
        row.peak_bytes = row_memory.peak_bytes if row_memory is not None else None
    for row in reversed(rows):
        if row.parent_info is not None:
            row.parent_info.activation_bytes += row.activation_bytes  # type: ignore[operator]
    kinds = kinds_of(root)
    reserve = None if allocator is None else reserve_of(trace, plan, allocator)
    subject = subject_of(root, plan.dtype, plan.autocast)
    saved = saved_of(trace, {row.key: kinds[id(row)] for row in root.walk()}, subject)
    return replace(memory_of(trace, plan), saved=saved, reserve=reserve, subject=subject)


def _observed(live: LiveModel, plan: StepPlan) -> Trace:
    """Return the trace of a step. Raise ``InputError`` if a module saves none of the tensors that it is to move."""
    trace = observed(live, plan, storages=True)
    if plan.offload:
        _check_numbers(plan.offload, observed(live, replace(plan, offload=()), storages=True))
    return trace


def _check_numbers(offload: Sequence[tuple[str, Sequence[int]]], trace: Trace) -> None:
    rows = [f"{save.row[0]}." for save in trace.saves if save.row is not None]
    for fqn, numbers in offload:
        n_saved = sum(row.startswith(f"{fqn}." if fqn else "") for row in rows)
        if min(numbers, default=-1) >= n_saved:
            raise InputError(
                f"offload names the saved tensor {min(numbers)} of {fqn!r}, which saves {number_of(n_saved, 'tensor')} "
                "in this step; numbers hold for the device, dtypes and sizes of the plan that they come from"
            )


def reserve_of(trace: Trace, plan: StepPlan, settings: AllocatorSettings) -> AllocatorReserve:
    """Return what torch's allocator takes from the device for the first steps of a loop that repeats a step.

    Raises:
        InputError: the device is not a CUDA device.
    """
    if torch.device(trace.device).type != "cuda":
        raise InputError(
            f"torch's allocator is replayed for CUDA devices, but the step is on {trace.device}; pass device='cuda', "
            "or leave out reserve and expandable_segments"
        )
    return AllocatorReserve.of(first_steps(trace, _workspaces(trace, plan)), settings)


def simulate(live: LiveModel, plan: StepPlan) -> MemoryEstimate:
    """Predict the memory of a step without writing into the rows; see ``simulate_step``."""
    return memory_of(_observed(live, plan), plan)


def memory_of(trace: Trace, plan: StepPlan) -> MemoryEstimate:
    """Return the memory of a step from its trace."""
    return estimate_of(trace, _workspaces(trace, plan))


def simulate_step(
    model: nn.Module, call: CallArguments, plan: StepPlan, *, routes_evenly: bool = False
) -> MemoryEstimate:
    """Predict the memory of a step of ``model``, which stays untouched.

    A step that needs values runs for real, on the model's own device.

    Args:
        model, call, plan: what runs.
        routes_evenly: as for ``observe``.

    Raises:
        InputError: no result requires a gradient, or the loss is not a scalar.
        StepError: the step raised.
    """
    return memory_of(observe(model, call, plan, storages=True, routes_evenly=routes_evenly), plan)


def stage_actions(model: nn.Module, call: CallArguments, plan: StepPlan) -> StageActions:
    """Return the memory of each kind of action of a stage of a pipeline; ``plan`` says which stage it is.

    Raises:
        InputError: as for ``simulate_step``.
        StepError: the step raised.
    """
    assert plan.stage is not None
    trace = observe(model, call, plan, storages=True)
    return actions_of(trace, plan.stage, _workspaces(trace, plan))


def _workspaces(trace: Trace, plan: StepPlan) -> Workspaces | None:
    """Return the workspaces of operators on the device of a trace; None if they do not count."""
    return workspaces_on(torch.device(trace.device)) if plan.workspaces else None
