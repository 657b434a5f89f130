"""Observe one step, on shapes, or for real if it needs values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from modelsummary import _torch
from modelsummary.capture.checkpoints import apply_checkpoint, check_kept
from modelsummary.capture.compiled import OperatorsOfGraphs
from modelsummary.capture.devices import device_of, with_index
from modelsummary.capture.execution.cuda_autocast import cuda_autocast
from modelsummary.capture.execution.cuda_kernels import cuda_kernels
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.execution.recurrent import fused_recurrent
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import ModelParts
from modelsummary.capture.observer import Level
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import EVEN_ROUTES, no_collection, obstacle_of, running
from modelsummary.capture.stage_step import StageRun
from modelsummary.capture.step import StepRun
from modelsummary.capture.step_error import NeedsValuesError, as_step_error, remedies_for
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.trace import Trace
from modelsummary.errors import InputError, StepError

__all__ = ["CUDA_BLOCK", "check_initialized", "eager_optimizers", "observe", "observed"]

CUDA_BLOCK = 512
_CPU = torch.device("cpu")


def observed(live: LiveModel, plan: StepPlan, *, storages: bool = False, forward_only: str | None = None) -> Trace:
    """Return the trace of a step of a live model: the one that it keeps, if the same step ran before.

    Args:
        storages, forward_only: as for ``observe``.

    Raises:
        InputError: a parameter is not initialised; see also ``observe``.
    """
    check_initialized(live)
    step = _key_of(plan, device_of(ModelParts.of(live.model).tensors))
    traces = live.kept(step)
    trace = traces.get("storages") or (None if storages else traces.get("arguments"))
    if trace is None:
        trace = observe(live.model, live.call, plan, storages=storages, forward_only=forward_only)
        live.kept(step)[trace.level] = trace  # asked again: the run may have changed what ``kept`` compares
    return trace


def _key_of(plan: StepPlan, model_device: torch.device) -> tuple[Any, ...]:
    """Return what a trace is kept under: the plan, and what decides how it compiles.

    Which workspaces count is asked when the trace is read.
    """
    default = _kernels_of(model_device)
    is_default = plan.device is None or plan.device.type == default.type
    step = replace(plan, workspaces=True, device=default if is_default else plan.device)
    return (step, *_torch.compiler_settings()) if plan.compiled else (step,)


def _kernels_of(model_device: torch.device) -> torch.device:
    """Return the device whose kernels a model runs unless another one is wanted: on meta, as on the CPU."""
    return _CPU if model_device.type == "meta" else model_device


def check_initialized(live: LiveModel) -> None:
    """Raise ``InputError`` if a parameter has no shape yet, or the forward adds a module."""
    if live.uninitialized is not None:
        raise InputError(f"predicting memory: {live.uninitialized}; run the model once")


def observe(
    model: nn.Module,
    call: CallArguments,
    plan: StepPlan,
    *,
    storages: bool,
    forward_only: str | None = None,
    note: Callable[[], Any] = lambda: None,
    routes_evenly: bool = False,
) -> Trace:
    """Run a step, on shapes if possible, and return what was observed. The model stays untouched.

    Args:
        storages: follow storages until they are freed, for the memory of the step. Without, only operators are noted;
            a step that needs values may then run on another device than ``plan`` wants.
        forward_only: argument with which the caller runs the forward alone, for errors; empty if it has none. Default:
            ``mode`` with storages, ``backward`` without.
        note: called before the model is restored; its result is ``Trace.noted``.
        routes_evenly: assume values that are not known, as ``ShapeOnly.assume_values`` does: choices of experts fall on
            all experts in turn.

    Raises:
        InputError: no result requires a gradient, the loss is not a scalar, or the step needs values that are missing.
        StepError: the step raised.
    """
    parts = ModelParts.of(model)  # the forward may replace modules
    model_device = device_of(parts.tensors)
    wanted = plan.device or _kernels_of(model_device)
    notes, is_absent = [], wanted.type == "cuda" and not torch.cuda.is_available()
    device = _CPU if is_absent else with_index(wanted)
    if is_absent:
        notes.append(
            "No CUDA device here: attention, dropout, RMS norms and recurrent layers run as on CUDA; for other"
            " operators, the kernels of the CPU are assumed, which keep similar tensors"
        )
    if routes_evenly:
        notes.append(EVEN_ROUTES)
    has_values = not (parts.are_on_meta or any(tensor.is_meta for tensor in call.tensors()))
    is_elsewhere = is_absent or device != with_index(model_device)
    can_run = has_values and plan.dtype is None and plan.stage is None and not (is_elsewhere and storages)
    usual = "mode='inference'" if storages else "backward=False"
    remedies = remedies_for(
        train=plan.train,
        forward_only=usual if forward_only is None else forward_only,
        converted=plan.dtype is not None,
        checkpointed=bool(plan.checkpoint),
    )
    groups = plan.groups_of(model)
    block = plan.block_bytes or (CUDA_BLOCK if wanted.type == "cuda" else 1)
    has_recurrent = any(isinstance(module, nn.RNNBase) for module in parts.modules)
    with (
        no_collection(),
        running(
            parts.modules,
            call,
            on_shapes=True,
            grad=plan.train,
            as_is=plan.compiled,
            device=device,
            dtype=plan.dtype,
        ) as begun,
        fused_recurrent(is_absent=is_absent) if has_recurrent else nullcontext(),  # it costs time at each operator
        cuda_kernels() if is_absent else nullcontext(),
        cuda_autocast() if is_absent and plan.autocast is not None else nullcontext(),
    ):
        shapes, args, kwargs = begun
        assert isinstance(shapes, ShapeOnly)
        if routes_evenly:
            shapes.assume_values((args, kwargs))
        kind = StepRun if plan.stage is None else StageRun
        level: Level = "storages" if storages else "arguments"
        run = kind(model, args, kwargs, plan, device, block, level=level, groups=groups)
        run.observer.host_is_apart = wanted.type != "cpu"
        with as_step_error(lambda: run.doing, remedies):
            reason = _step(run, shapes, can_run)
        if reason is None:
            trace = run.trace(parts.names, device=str(wanted), execution="shape", notes=notes, noted=note())
            check_kept(plan.checkpoint, trace)
            return trace
    if not can_run:
        if not has_values and not routes_evenly and shapes.needs_values:
            with suppress(NeedsValuesError):
                asked: dict[str, Any] = {"storages": storages, "forward_only": forward_only, "note": note}
                return observe(model, call, plan, **asked, routes_evenly=True)
        raise NeedsValuesError(reason, model_device, run.doing)
    real = running(parts.modules, call, on_shapes=False, grad=plan.train, as_is=True)
    with nullcontext() if plan.compiled else eager_optimizers(), real as (execution, args, kwargs):
        # storages that are not followed would all stay alive
        run = StepRun(model, args, kwargs, plan, model_device, block, level="storages", groups=groups)
        run.observer.host_is_apart = wanted.type != "cpu"
        with as_step_error(lambda: run.doing, remedies), _operators(run, execution, on_shapes=False):
            apply_checkpoint(model, dict(plan.checkpoint), offload=dict(plan.offload))
            run.step()
        notes = [f"The step ran for real: {reason}"]
        trace = run.trace(parts.names, device=str(wanted), execution="real", notes=notes, noted=note())
        check_kept(plan.checkpoint, trace)
        return trace


def eager_optimizers() -> AbstractContextManager[Any]:
    """Return a context in which optimizers that compile their steps do not, as a dispatch mode cannot be compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _step(run: StepRun, shapes: ShapeOnly, can_run: bool) -> str | None:
    """Run a step on shapes; return the reason why it needs real execution, or None.

    An error is raised again if the step cannot run for real (``can_run``), which would show the cause, and if either no
    operator raised it, or an operator refused its operands in a dtype that is not the model's own.
    """
    with _operators(run, shapes, on_shapes=True):
        apply_checkpoint(run.model, dict(run.plan.checkpoint), offload=dict(run.plan.offload))
        try:
            run.step()
        except Exception as error:
            is_of_dtype = run.plan.dtype is not None and not shapes.needs_values
            is_final = shapes.obstacle is None or (is_of_dtype and not isinstance(error, NotImplementedError))
            if isinstance(error, (InputError, StepError)) or (is_final and not can_run):
                raise
            return obstacle_of(shapes, error)
    return obstacle_of(shapes, None)


@contextmanager
def _operators(run: StepRun, execution: ShapeOnly | RealExecution, *, on_shapes: bool) -> Iterator[None]:
    """Return a context in which the operators of a step are run by ``execution`` and observed."""
    observed = run.observer.around(execution)
    if run.graphs is None:
        with Operators(observed), run.observer.following():
            yield
        return
    with _torch.quiet(), run.graphs.compiling(on_shapes=on_shapes), OperatorsOfGraphs(observed):
        yield
