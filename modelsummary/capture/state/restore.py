"""Leave no trace: save what a forward run may change besides values of tensors, and put it back.

A forward can assign attributes (caches, counters, lazily made parameters), fill containers and objects, flip
``requires_grad`` or modes, and draw random numbers. What can be reached from the model and the arguments is put back,
whether the run returned or raised, and only what changed is written. Shape-only execution cannot write values; for real
execution ``real.RealExecution`` puts them back, for the tensors that ``unchanged`` met on its way.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from modelsummary import _torch
from modelsummary.capture.state.reachable import Held

__all__ = ["unchanged"]

Undo = Callable[[], object]


@contextmanager
def unchanged(modules: Sequence[nn.Module], arguments: Any, *, lazy_device: torch.device | None) -> Iterator[Held]:
    """Context in which a model may run, after which it, its arguments and torch's global state are as before.

    Args:
        modules: all modules of the model.
        arguments: what its forward gets; objects in there may be changed by it, too.
        lazy_device: where a lazy module initialises its parameters meanwhile; None: on their own device.

    Yields:
        What the modules and the arguments hold: tensors, and modules that are not registered.
    """
    held = Held()
    held.save([*modules, arguments])
    steps = (held.put_back, *_flags(held.tensors), *_global_state())
    try:
        _replace_uninitialized(modules, lazy_device)
        yield held
    finally:
        try:
            _run_all(steps)
        except KeyboardInterrupt:  # anywhere in there; what is as before stays so
            _run_all(steps)
            raise


def _run_all(steps: Sequence[Undo]) -> None:
    """Run every step, also after one that raised."""
    with ExitStack() as undo:
        for step in steps:
            undo.callback(step)


# ------------------------------------------------------------------------------------- flags, lazy tensors


def _flags(tensors: Sequence[Tensor]) -> list[Undo]:
    """Lazy tensors are left out: others take their place during the run."""
    leaves = (each for each in tensors if not is_lazy(each) and each.is_leaf and not each.is_inference())
    saved = [(each, each.requires_grad, each.grad) for each in leaves]

    def put_back() -> None:
        for tensor, requires_grad, grad in saved:
            if not tensor.is_leaf:  # the forward wrote what has a graph into it
                tensor.detach_()
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad

    return [put_back]


def _replace_uninitialized(modules: Sequence[nn.Module], device: torch.device | None) -> None:
    """Give lazy modules other parameters to initialise; their own could not be made uninitialised again."""
    for module in modules:
        own: tuple[Any, Any] = (module._parameters, module._buffers)
        for tensors in own:
            for name, tensor in tensors.items():
                if is_lazy(tensor):
                    tensors[name] = _uninitialized_like(tensor, device or tensor.device)


def _uninitialized_like(tensor: Any, device: torch.device) -> Tensor:
    kind: Any = UninitializedParameter if isinstance(tensor, UninitializedParameter) else UninitializedBuffer
    copy: Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
    return copy


# -------------------------------------------------------------------------------------------- global state


def _global_state() -> list[Undo]:
    """Random number generators and the switches of torch that a forward may turn."""
    undo: list[Undo] = [
        _modes(),
        _later(torch.set_grad_enabled, torch.is_grad_enabled()),
        _later(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()),
        _later(_set_default_device, _default_device()),
        _later(torch.set_default_dtype, torch.get_default_dtype()),
        _later(torch.set_rng_state, torch.get_rng_state()),
        _later(random.setstate, random.getstate()),
        _later(_set_switches, _switches()),
    ]
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            undo.append(_later(accelerator.set_rng_state_all, accelerator.get_rng_state_all()))
    if torch.backends.mps.is_available():
        undo.append(_later(torch.mps.set_rng_state, torch.mps.get_rng_state()))
    if (numpy := sys.modules.get("numpy")) is not None:
        undo.append(_later(numpy.random.set_state, numpy.random.get_state()))
    return undo


def _modes() -> Undo:
    """Ctrl-C may come when a mode has begun, and before anybody knows that it is to be ended."""
    dispatch, function = len(_get_current_dispatch_mode_stack()), _torch.number_of_function_modes()

    def put_back() -> None:
        while len(_get_current_dispatch_mode_stack()) > dispatch:
            _pop_mode()
        while _torch.number_of_function_modes() > function:
            _torch.pop_function_mode()

    return put_back


def _later(function: Callable[..., object], *args: Any) -> Undo:
    return lambda: function(*args)


def _default_device() -> torch.device | None:
    """The default device; None where none was set, which is not the same as the CPU: no mode is active then."""
    context = getattr(_torch.GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_default_device(device: torch.device | None) -> None:
    if _default_device() != device:
        torch.set_default_device(device)
        if device is None:  # before torch 2.7, get_default_device() fails on what this leaves
            del _torch.GLOBAL_DEVICE_CONTEXT.device_context


def _switches() -> tuple[Any, ...]:
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        torch.is_anomaly_enabled(),
    )


def _set_switches(saved: tuple[Any, ...]) -> None:
    if _switches() == saved:
        return
    deterministic, warn_only, precision, cudnn, anomaly = saved
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    torch.autograd.set_detect_anomaly(anomaly)
