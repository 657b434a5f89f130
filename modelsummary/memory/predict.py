"""Run one step on shapes, or for real if it needs values, and write its memory into the rows.

What happens within the step is followed in ``step``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from modelsummary.capture.devices import device_of
from modelsummary.capture.execution.cuda_autocast import cuda_autocast
from modelsummary.capture.execution.fused_attention import fused_attention
from modelsummary.capture.execution.recurrent import fused_lstm
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operator_mode import Operators, Uncounted
from modelsummary.capture.run import EVEN_ROUTES, no_collection, obstacle_of, running
from modelsummary.costs.kernels import StepOperator
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.checkpointing import apply_checkpoint, recomputed_macs
from modelsummary.memory.estimate import MemoryEstimate
from modelsummary.memory.stage_step import StageActions, StageRun
from modelsummary.memory.step import RowMemory, StepRun
from modelsummary.memory.step_error import NeedsValuesError, as_step_error, remedies_for
from modelsummary.memory.step_plan import StepPlan
from modelsummary.memory.workspaces import workspaces_on

__all__ = [
    "CUDA_BLOCK",
    "check_initialized",
    "predict",
    "run_step",
    "simulate",
    "simulate_step",
    "stage_actions",
    "step_operators",
]

CUDA_BLOCK = 512


def predict(live: LiveModel, root: LayerInfo, plan: StepPlan) -> MemoryEstimate:
    """Predict the memory of a step, and write the memory of each call into the rows below ``root``.

    Raises:
        InputError: a parameter is not initialised, no result requires a gradient, or the step needs values that the
            model or its input lacks.
    """
    check_initialized(live)
    estimate, by_call = simulate(live, root, plan)
    rows = list(root.walk()) if plan.train else []
    for row in rows:
        found = by_call.get((row.fqn, row.call_index)) if row.executed else None
        row.self_activation_bytes = found.activation_bytes if found is not None else 0
        row.activation_bytes = row.self_activation_bytes
        row.peak_bytes = found.peak_bytes if found is not None else None
    for row in reversed(rows):
        if row.parent_info is not None:
            row.parent_info.activation_bytes += row.activation_bytes  # type: ignore[operator]
    return estimate


def simulate(
    live: LiveModel, root: LayerInfo, plan: StepPlan
) -> tuple[MemoryEstimate, dict[tuple[str, int], RowMemory]]:
    """Predict the memory of a step without writing into the rows; see ``simulate_step``."""
    estimate, by_call = simulate_step(live.model, live.call, plan)
    again = recomputed_macs(root, plan.checkpoint) if plan.train else 0
    return replace(estimate, recomputed_macs=again), by_call


def check_initialized(live: LiveModel) -> None:
    """Raise ``InputError`` if a parameter has no shape yet, or the forward adds a module."""
    if live.uninitialized is not None:
        raise InputError(f"predicting memory: {live.uninitialized}; run the model once")


def simulate_step(
    model: nn.Module, call: CallArguments, plan: StepPlan
) -> tuple[MemoryEstimate, dict[tuple[str, int], RowMemory]]:
    """Predict the memory of a step of ``model``, which stays untouched.

    A step that needs values runs for real, on the model's own device.

    Returns:
        The estimate, and the memory of each call of a module by FQN and call index.

    Raises:
        InputError: no result requires a gradient, or the loss is not a scalar.
        StepError: the step raised.
    """
    return run_step(model, call, plan, lambda run, how: (run.estimate(*how), run.by_call()))


def stage_actions(model: nn.Module, call: CallArguments, plan: StepPlan) -> StageActions:
    """Return the memory of each kind of action of a stage of a pipeline; ``plan`` says which stage it is.

    Raises:
        InputError: as for ``simulate_step``.
        StepError: the step raised.
    """

    def read(run: StepRun, how: _How) -> StageActions:
        assert isinstance(run, StageRun)
        return run.actions(*how)

    return run_step(model, call, plan, read)


def step_operators(model: nn.Module, call: CallArguments, plan: StepPlan) -> tuple[list[StepOperator], list[str]]:
    """Return the operators of a step in the order in which they run, and notes on assumptions.

    Raises:
        InputError: as for ``simulate_step``.
    """
    return run_step(model, call, plan, lambda run, how: (run.operators(), how.notes), notes_operators=True)


class _How(NamedTuple):
    """The circumstances of a step: the device whose kernels were chosen, the execution, and notes on assumptions."""

    device: str
    execution: str
    notes: list[str]


_R = TypeVar("_R")


def run_step(
    model: nn.Module,
    call: CallArguments,
    plan: StepPlan,
    read: Callable[[StepRun, _How], _R],
    *,
    notes_operators: bool = False,
    counts_bytes: bool = False,
    routes_evenly: bool = False,
) -> _R:
    """Run a step, on shapes if possible, and return the result of ``read``, called before the model is restored.

    Args:
        notes_operators: note each operator with its arguments; bytes are then followed only if ``counts_bytes`` is set.
        routes_evenly: choices of experts fall on all experts in turn, as without values they are not known.
    """
    own = device_of(tensors_of_modules(modules_of(model)))
    wanted = plan.device or (own if own.type != "meta" else torch.device("cpu"))
    notes, device = [], wanted
    if wanted.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")
        notes.append(
            "No CUDA device here: attention runs as on CUDA; for other operators, the kernels of the CPU are assumed"
            " (its norms keep similar tensors)"
        )
    if routes_evenly:
        notes.append(EVEN_ROUTES)
    given = (*tensors_of_modules(modules_of(model)), *call.tensors())
    is_absent = wanted != device
    has_recurrent = any(isinstance(module, nn.RNNBase) for module in modules_of(model))
    has_values = own.type != "meta" and not any(tensor.is_meta for tensor in given)
    can_run = has_values and plan.dtype is None and plan.stage is None and (wanted == own or notes_operators)
    forward_only = "backward=False" if notes_operators else "mode='inference'"
    remedies = remedies_for(train=plan.train, forward_only=forward_only, converted=plan.dtype is not None)
    options: dict[str, Any] = {
        "block_bytes": plan.block_bytes or (CUDA_BLOCK if wanted.type == "cuda" else 1),
        "notes_operators": notes_operators,
        "counts_bytes": counts_bytes,
        "workspaces": workspaces_on(wanted) if plan.workspaces and not notes_operators else None,
    }
    with (
        no_collection(),
        running(modules_of(model), call, on_shapes=True, grad=plan.train, device=device, dtype=plan.dtype) as running_,
        fused_lstm(is_absent=is_absent) if has_recurrent else nullcontext(),  # it costs time at each operator
        fused_attention() if is_absent else nullcontext(),
        cuda_autocast() if is_absent and plan.autocast is not None else nullcontext(),
    ):
        shapes, args, kwargs = running_
        assert isinstance(shapes, ShapeOnly)
        shapes.routes_evenly = routes_evenly
        kind = StepRun if plan.stage is None else StageRun
        run = kind(model, args, kwargs, plan, device, **options)
        with as_step_error(lambda: run.doing, remedies):
            reason = _step(run, shapes, can_run)
        if reason is None:
            return read(run, _How(str(wanted), "shape", notes))
    if not can_run:
        if not has_values and not routes_evenly and shapes.needs_values:
            with suppress(NeedsValuesError):
                notes_what = {"notes_operators": notes_operators, "counts_bytes": counts_bytes}
                return run_step(model, call, plan, read, **notes_what, routes_evenly=True)
        raise NeedsValuesError(reason, own, run.doing)
    # Optimizers compile their steps; a dispatch mode cannot be compiled.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    real = running(modules_of(model), call, on_shapes=False, grad=plan.train, as_is=True)
    with eager, real as (execution, args, kwargs):
        run = StepRun(model, args, kwargs, plan, own, on_shapes=False, **options)
        resizes, layers = run.allocations.following_resizes(), run.allocations.following_layers()
        with as_step_error(lambda: run.doing, remedies), Operators(Uncounted(), execution), resizes, layers:
            apply_checkpoint(model, plan.checkpoint)
            run.step()
        return read(run, _How(str(wanted), "real", [f"The step ran for real: {reason}"]))


def _step(run: StepRun, shapes: ShapeOnly, can_run: bool) -> str | None:
    """Run a step on shapes; return the reason why it needs real execution, or None.

    An error is raised again if the step cannot run for real (``can_run``), which would show the cause, and if either no
    operator raised it, or an operator refused its operands in a dtype that is not the model's own.
    """
    allocations = run.allocations
    operators = Operators(Uncounted(), allocations.around(shapes))
    with operators, allocations.following_resizes(), allocations.following_layers():
        apply_checkpoint(run.model, run.plan.checkpoint)
        try:
            run.step()
        except Exception as error:
            is_of_dtype = run.plan.dtype is not None and not shapes.needs_values
            is_final = shapes.obstacle is None or (is_of_dtype and not isinstance(error, NotImplementedError))
            if isinstance(error, InputError) or (is_final and not can_run):
                raise
            return obstacle_of(shapes, error)
    return obstacle_of(shapes, None)
