"""``MetaTensorMode``: build and move models without allocating anything, on devices that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelsummary._torch import FakeTensorMode
from modelsummary.capture.values import tensors_of

__all__ = ["MetaTensorMode", "takes_gradients"]

# They write into what they are given, or return it; on tensors without data nothing is left to do.
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)


class MetaTensorMode:
    """Context in which tensors have shapes and devices, and no data: ``FakeTensorMode`` with what models need besides.

    Factories, ``.cuda()`` and ``.to(device)`` allocate nothing and keep the device that was meant, whether it is there
    or not; ``nn.Module.to`` and initialisers that look at values work; collectives of ``torch.distributed`` do nothing.
    A backward needs the device; a build of torch without it notes no gradients there.

    ::

        with MetaTensorMode():
            model = resnet18().cuda()
            sample = torch.rand(100, 3, 224, 224).cuda()
        graph = symbolic_trace(model, meta_args={"x": sample})
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entered: list[ExitStack] = []

    def __enter__(self) -> MetaTensorMode:
        stack = ExitStack()
        stack.enter_context(self.mode)
        stack.enter_context(_NumberedDevices())
        stack.enter_context(patch.object(nn.Module, "_apply", _applying()))
        stack.enter_context(patch.object(nn.init, "trunc_normal_", _leave))
        stack.enter_context(patch.object(nn.RNNBase, "flatten_parameters", _leave))
        for name in _COLLECTIVES if dist.is_available() else ():
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, _nothing))
        self._entered.append(stack)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


class _NumberedDevices(TorchFunctionMode):
    """Moves to ``"cuda"`` go to ``"cuda:0"``: a build without that device asks it for the current one, and fails."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            device = kwargs.get("device", args[1] if len(args) > 1 else None)
            return args[0].to(_numbered(torch.device("cuda", device) if isinstance(device, int) else device or "cuda"))
        if func is Tensor.to:
            args = tuple(map(_numbered, args))
            kwargs = {name: _numbered(value) for name, value in kwargs.items()}
        if not all(takes_gradients(tensor.device) for tensor in tensors_of((args, kwargs))):
            with torch.no_grad():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def takes_gradients(device: torch.device) -> bool:
    """Autograd can note what is done on a device.

    In a build of torch without it that would end the process, and before torch 2.11 also where there is no such device.
    """
    if device.type in ("cpu", "meta"):
        return True
    built = {"cuda": torch.backends.cuda.is_built, "mps": torch.backends.mps.is_built, "xpu": torch.xpu._is_compiled}
    if device.type not in built or not built[device.type]():
        return False
    return torch.__version__ >= "2.11" or bool(getattr(torch, device.type).is_available())


def _numbered(value: Any) -> Any:
    """A device with a number, if it is one that may have several; anything else as it is."""
    device = torch.device(value) if isinstance(value, str) else value
    if isinstance(device, torch.device) and device.index is None and device.type not in ("cpu", "meta"):
        return torch.device(device.type, 0)
    return value


def _leave(whatever: Any, *_args: Any, **_kwargs: Any) -> Any:
    """There are no values to initialise, and nothing to lay out in memory."""
    return whatever


class _Done:
    """A finished piece of work."""

    def wait(self, *_args: Any) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


def _nothing(*_args: Any, async_op: bool = False, **_kwargs: Any) -> _Done | None:
    return _Done() if async_op else None


def _applying() -> Callable[..., nn.Module]:
    """``nn.Module._apply``, which swaps what lies in tensors; those without data do not take that.

    A parameter or buffer that several modules share is one afterwards, too.
    """
    made: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}  # by ids, with what they are of: it stays alive

    def applied(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Any:
        key = id(fn), id(tensor)
        if key not in made:
            new = fn(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            made[key] = fn, tensor, nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return made[key][2]

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = applied(fn, tensor)
        return module

    return apply
