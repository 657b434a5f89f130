"""``Target``: the device whose time is predicted: a named accelerator, or this machine as it was calibrated."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from modelsummary.devices.device_spec import DeviceSpec
from modelsummary.devices.kernel_table import KernelTable, device_here, table_of
from modelsummary.devices.kernel_time import DeviceModel, device_model
from modelsummary.errors import InputError
from modelsummary.operators.kernels import StepOperator, Timing, kernels_of
from modelsummary.operators.operator_calls import OperatorCall, OperatorRun
from modelsummary.operators.operator_work import Work

__all__ = ["Target", "host_calls", "names_own_device", "seconds_of_calls", "target_of", "timing_on"]

_HERE = re.compile(r"(cpu|cuda)(:\d+)?")


@dataclass(frozen=True)
class Target:
    """The device of a prediction.

    Attributes:
        name: name of the device.
        times: time model of a named device, or kernel table of this machine.
    """

    name: str
    times: DeviceModel | KernelTable

    @property
    def model(self) -> DeviceModel | None:
        """The time model; None for this machine."""
        return self.times if isinstance(self.times, DeviceModel) else None

    @property
    def table(self) -> KernelTable | None:
        """The kernel table of this machine; None for a named device."""
        return self.times if isinstance(self.times, KernelTable) else None

    @property
    def is_cpu(self) -> bool:
        """True for this machine's CPU, where one thread dispatches the operators and computes them."""
        return isinstance(self.times, KernelTable) and self.times.machine.threads > 0

    def seconds(self, work: Work, key: str | None) -> tuple[float, str]:
        """Return the seconds of a kernel and their source; ``key`` names the call that it is, None for several."""
        if isinstance(self.times, KernelTable):
            return self.times.seconds(key, work)
        return self.times.seconds(work), "fit"


def target_of(
    device: DeviceSpec | torch.device | str | None, *, tf32: bool = False, attention: str | None = None
) -> Target:
    """Return the target for a spec, the name of an accelerator, or a device of this machine.

    Float32 work of a named device runs on tensor cores if ``tf32`` or torch's switches say so: by default, convolutions
    and recurrent layers do (``torch.backends.cudnn.allow_tf32``), and products do not
    (``torch.set_float32_matmul_precision``).

    Raises:
        InputError: the device is unknown, the speed of the kernels of ``attention`` on it is not known, or this machine
            was never calibrated.

    >>> target_of("T4").name
    'T4'
    """
    if not names_own_device(device):
        spec = device if isinstance(device, DeviceSpec) else DeviceSpec(str(device))
        in_cublas, in_cudnn = tf32 or _rounds_in_cublas(), tf32 or _rounds_in_cudnn()
        model = device_model(spec, tf32=in_cublas, tf32_in_cudnn=in_cudnn, attention=attention)
        return Target(spec.name, model)
    local_device = device_here(device)  # type: ignore[arg-type]
    table = table_of(local_device)
    if not table.entries:
        raise InputError(
            f"this machine's {local_device} was never calibrated; call calibrate(), or name a device such as 'A100'"
        )
    return Target(f"this machine's {local_device}", table)


def _rounds_in_cublas() -> bool:
    """Return True if float32 products run on tensor cores, as they do not unless one of torch's switches is turned on.

    Once a precision was set for one library, torch refuses to tell one for all.
    """
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # since torch 2.9
    return torch.get_float32_matmul_precision() != "highest" if precision is None else precision == "tf32"


def _rounds_in_cudnn() -> bool:
    """Return True if float32 convolutions run on tensor cores, as they do unless torch's switch is turned off."""
    cudnn = torch.backends.cudnn
    conv = getattr(cudnn, "conv", None)  # since torch 2.9
    return bool(cudnn.allow_tf32 if conv is None else conv.fp32_precision == "tf32")


def timing_on(target: Target) -> Timing:
    """Return a function from a kernel to its seconds on a device and their source, which times equal kernels once."""
    times: dict[tuple[Work, str | None], tuple[float, str]] = {}

    def timing(work: Work, call: OperatorCall | None) -> tuple[float, str]:
        key = None if call is None or target.table is None else call.key
        if (work, key) not in times:
            times[work, key] = target.seconds(work, key)
        return times[work, key]

    return timing


def seconds_of_calls(target: Target) -> Callable[[OperatorCall], float]:
    """Return a function from an operator call, run eagerly, to the seconds of its kernels on a device."""
    timing, whole_calls = timing_on(target), target.table is not None
    seconds_by_id: dict[int, tuple[OperatorCall, float]] = {}

    def seconds(call: OperatorCall) -> float:
        if id(call) not in seconds_by_id:
            alone = [StepOperator(OperatorRun(call, (), ()), "forward", None)]
            kernels = kernels_of(alone, whole_calls=whole_calls, timing=timing)
            seconds_by_id[id(call)] = call, sum(kernel.seconds or 0.0 for kernel in kernels)
        return seconds_by_id[id(call)][1]

    return seconds


def host_calls(operator: StepOperator) -> Iterator[tuple[str, str]]:
    """Yield what the host does for an operator beside its dispatch, as phase and kind of call, one of ``HOST_CALLS``.

    A node of autograd is recorded in the forward and runs in the backward.
    """
    run, phase, _ = operator
    if phase != "step" and run.call.rule.is_view:
        yield phase, "view"
    for _ in range(run.nodes):
        yield phase, "node"
        yield "backward", "node"


def names_own_device(device: DeviceSpec | torch.device | str | None) -> bool:
    """Return True for a device of this machine; False for a spec, or the name of an accelerator.

    >>> names_own_device("cuda:0"), names_own_device("A100")
    (True, False)
    """
    return device is None or isinstance(device, torch.device) or _HERE.fullmatch(str(device)) is not None
