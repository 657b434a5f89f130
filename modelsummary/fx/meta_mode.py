"""``MetaTensorMode``: build and move models without allocating memory, also on devices that are not present."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelsummary._torch import FakeTensorMode, swapped
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.devices import takes_gradients, with_index

__all__ = ["MetaTensorMode"]

# They write into their arguments or return them; on tensors without data there is nothing to write.
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
    """A context in which tensors have shapes and devices but no data: a ``FakeTensorMode`` that can build models.

    Factories, ``.cuda()`` and ``.to(device)`` allocate nothing and report the requested device, present or not.
    ``nn.Module.to`` and initialisers that read values work. Collectives of ``torch.distributed`` do nothing.
    A backward needs the device; a build of torch without support for it records no gradients there. Without the device,
    a forward after the context needs torch 2.11: before, autograd aborts the process.

    >>> with MetaTensorMode():
    ...     model = nn.Linear(100_000, 100_000).cuda()  # 40 GB
    ...     x = torch.rand(8, 100_000).cuda()
    ...     y = model(x)
    >>> y.device, y.shape
    (device(type='cuda', index=0), torch.Size([8, 100000]))
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._entered: list[ExitStack] = []

    def __enter__(self) -> MetaTensorMode:
        stack = ExitStack()
        stack.enter_context(self.mode)
        stack.enter_context(_NumberedDevices())
        stack.enter_context(swapped(nn.Module, "_apply", _applying()))
        stack.enter_context(swapped(nn.init, "trunc_normal_", _leave))
        stack.enter_context(swapped(nn.RNNBase, "flatten_parameters", _leave))
        for name in _COLLECTIVES if dist.is_available() else ():
            if hasattr(dist, name):
                stack.enter_context(swapped(dist, name, _nothing))
        self._entered.append(stack)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


class _NumberedDevices(TorchFunctionMode):
    """A mode that reads ``"cuda"`` as ``"cuda:0"``, because torch cannot ask for the current device without a GPU."""

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


def _numbered(value: Any) -> Any:
    """Return a device, also one that is given by name, with its index; return anything else unchanged."""
    device = torch.device(value) if isinstance(value, str) else value
    return with_index(device) if isinstance(device, torch.device) else value


def _leave(whatever: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Return the first argument unchanged: without data there is nothing to initialise or lay out in memory."""
    return whatever


class _Done:
    """A finished asynchronous collective."""

    def wait(self, *_args: Any) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def _nothing(*_args: Any, async_op: bool = False, **_kwargs: Any) -> _Done | None:
    return _Done() if async_op else None


def _applying() -> Callable[..., nn.Module]:
    """Return a replacement for ``nn.Module._apply``, which swaps tensor data and fails for tensors without data.

    A parameter or buffer that several modules share stays shared.
    """
    # The objects of the ids are held, so that they stay alive.
    replaced: dict[tuple[int, int], tuple[Any, Tensor, Tensor]] = {}

    def applied(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Any:
        key = id(fn), id(tensor)
        if key not in replaced:
            new = fn(tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[key] = fn, tensor, nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return replaced[key][2]

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = applied(fn, tensor)
        return module

    return apply
