"""Measured and predicted latency of every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelsummary.capture.observe import observed
from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.kernel_table import device_here, machine_of
from modelsummary.devices.target import Target, target_of
from modelsummary.errors import InputError
from modelsummary.keywords import choice_of
from modelsummary.latency.calibrate import Calibration, calibrate_calls, calibrate_grid
from modelsummary.latency.estimate import LatencyEstimate
from modelsummary.latency.kernel_list import Kernels
from modelsummary.latency.options import TimeOptions, precision_of, time_plan
from modelsummary.latency.predict import estimate, step_subject, time_operators
from modelsummary.latency.row_times import show
from modelsummary.memory.optimizers import AdamW8bit
from modelsummary.operators.kernels import MODES

if TYPE_CHECKING:
    import torch

    from modelsummary.capture.live import LiveModel
    from modelsummary.capture.step_plan import StepPlan
    from modelsummary.layer_info import LayerInfo
    from modelsummary.memory.step_options import OptimizerLike

__all__ = [
    "Calibration",
    "Kernels",
    "LatencyEstimate",
    "TimeOptions",
    "bound_dtype",
    "calibrate",
    "calibrate_grid",
    "kernels",
    "predicted",
    "show",
    "target",
    "time_plan",
]


def predicted(
    live: LiveModel,
    root: LayerInfo,
    device: DeviceSpec | torch.device | str | None,
    mode: str,
    backward: bool,
    optimizer: OptimizerLike | None,
    options: TimeOptions,
) -> LatencyEstimate:
    """Return the predicted latency of a step, which can be asked for other devices, too."""
    mode = choice_of(mode, MODES, "mode")

    def on(other: DeviceSpec | torch.device | str | None) -> LatencyEstimate:
        plan = _timed(time_plan(backward, optimizer, options, root, other))
        result = estimate(live, root, target(other, options), mode, plan)
        result.predict_on = on
        return result

    return on(device)


def kernels(
    live: LiveModel,
    root: LayerInfo,
    device: DeviceSpec | torch.device | str | None,
    mode: str,
    plan: StepPlan,
    options: TimeOptions,
) -> Kernels:
    """Return the kernels of a step with their predicted seconds."""
    mode = choice_of(mode, MODES, "mode")
    prediction_target = target(device, options)
    listed = time_operators(live, observed(live, _timed(plan)).operators, prediction_target, mode)
    step = f"{step_subject(root, plan)}, {mode}", prediction_target.name
    return Kernels(listed, tf32=options.get("dtype") == "tf32", attention=options.get("attention"), step=step)


def _timed(plan: StepPlan) -> StepPlan:
    """Return a plan whose time can be predicted. Raise ``InputError`` for an optimizer whose kernel is not known."""
    if plan.make_optimizer is AdamW8bit:
        raise InputError(
            "the kernel of bitsandbytes' 8-bit optimizers is not known, so memory() predicts their states, but nothing "
            "predicts their time; pass optimizer='adamw', which takes longer"
        )
    return plan


def target(device: DeviceSpec | torch.device | str | None, options: TimeOptions) -> Target:
    """Return the target of a prediction. Raise ``InputError`` for an unknown device, or a dtype that it lacks."""
    prediction_target = target_of(device, tf32=options.get("dtype") == "tf32", attention=options.get("attention"))
    for name in ("dtype", "autocast"):
        dtype = precision_of(options, name)
        if dtype is not None and prediction_target.model is not None:
            prediction_target.model.spec.peak(dtype, name)
    return prediction_target


def calibrate(
    live: LiveModel, device: torch.device | str | None, plan: StepPlan, *, grid: bool, again: bool, forget: bool
) -> Calibration:
    """Measure the operator calls of a step that this machine's table lacks, and with ``grid`` the standard grid.

    With ``forget``, delete the table first, once it is certain that the step can be measured.
    """
    local_device = device_here(device)
    calls = [operator.run.call for operator in observed(live, plan).operators]
    if forget:
        machine_of(local_device).path.unlink(missing_ok=True)
    if grid:
        calibrate_grid(local_device, again=again)
    return calibrate_calls(calls, local_device, again=again)


def bound_dtype(
    device: Any, mode: str, backward: bool, optimizer: Any, options: TimeOptions
) -> torch.dtype | str | None:
    """Return the dtype of the roofline's bound of a forward, for statistics without a live model.

    Raises:
        InputError: the arguments ask for more than an eager forward on a named device.
    """
    if backward or optimizer is not None or mode != "eager" or set(options) - {"dtype"} or device is None:
        raise InputError(
            "statistics without a live model know only the bound of an eager forward: pass a device name and dtype only"
        )
    return precision_of(options)
