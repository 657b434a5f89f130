"""The devices that a model, its inputs and this machine have; their peaks are in ``devices.device_spec``."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from modelsummary._torch import is_xpu_built
from modelsummary.errors import InputError

__all__ = [
    "available_device",
    "device_of",
    "device_of_inputs",
    "is_there",
    "named_device",
    "takes_gradients",
    "with_index",
]


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of the first tensor; the CPU if there is none."""
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: autograd finds its thread for tensors of a device by it.

    >>> with_index(torch.device("cuda")), with_index(torch.device("cpu"))
    (device(type='cuda', index=0), device(type='cpu'))
    """
    has_none = device.index is None and device.type not in ("cpu", "meta")
    return torch.device(device.type, 0) if has_none else device


def is_there(device: torch.device) -> bool:
    """Return True if this machine has a device of this type; the CPU and meta are everywhere."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device.type in ("cpu", "meta") or (accelerator is not None and accelerator.type == device.type)


def takes_gradients(device: torch.device) -> bool:
    """Return True if autograd can record operators on a device.

    It aborts the process in a build of torch without support for the device; before torch 2.11 also if the device is
    not present.

    >>> takes_gradients(torch.device("cpu"))
    True
    """
    if is_there(device):
        return True
    built = {"cuda": torch.backends.cuda.is_built, "mps": torch.backends.mps.is_built, "xpu": is_xpu_built}
    return torch.__version__ >= "2.11" and device.type in built and bool(built[device.type]())


def named_device(device: torch.device | str) -> torch.device:
    """Return the device of this name, which may be absent. Raise ``InputError`` if no device has the name.

    >>> named_device("cuda:1")
    device(type='cuda', index=1)
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(
            f"device must name a torch device, got {device!r:.80}; pass one such as 'cpu', 'cuda' or 'cuda:1'"
        ) from None


def available_device(device: torch.device | str) -> torch.device:
    """Return a device of this machine. Raises ``InputError`` if it does not exist.

    >>> available_device("cpu")
    device(type='cpu')
    """
    requested = named_device(device)
    if not is_there(requested):
        raise InputError(
            f"device={str(requested)!r} is not available on this machine; leave device out: the model's own is used"
        )
    return requested


def device_of_inputs(
    device_types: Collection[str], device: torch.device | str | None, tensors: Iterable[Tensor]
) -> torch.device | None:
    """Return the device that the inputs are moved to; None if they stay, as none was requested.

    Args:
        device_types: types of the devices that the model is on.

    Raises:
        InputError: the device does not exist, or the model is on another one; or none was requested, the model is on
            one device, and an input is on another one.

    >>> device_of_inputs({"cpu"}, "cpu", []), device_of_inputs({"cpu"}, None, [torch.ones(2)])
    (device(type='cpu'), None)
    """
    expected = next(iter(device_types)) if len(device_types) == 1 and "meta" not in device_types else None
    if device is not None:
        requested = available_device(device)
        if expected is not None and requested.type not in (expected, "meta"):
            raise InputError(
                f"device mismatch: device={str(requested)!r}, but the model is on {expected}; "
                f"call model.to({str(requested)!r}) first, or leave device out"
            )
        return requested
    for tensor in tensors if expected is not None else ():
        if tensor.device.type not in (expected, "meta"):
            raise InputError(
                f"device mismatch: the model is on {expected}, an input of shape {list(tensor.shape)} on "
                f"{tensor.device}; pass device={expected!r} to move the inputs"
            )
    return None
