"""Save the state that a forward may change besides values of tensors, and restore it.

A forward can assign attributes (caches, counters, lazily made parameters), fill containers and objects, change
``requires_grad`` or modes, and draw random numbers. Everything reachable from the model and the arguments is restored,
whether the run returned or raised, and only changed state is written. Shape-only execution cannot write values. After
real execution, ``real.RealExecution`` restores the values of the tensors that ``unchanged`` found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from modelsummary import _torch
from modelsummary.capture.state.held import Held
from modelsummary.capture.state.process_state import process_states

__all__ = ["unchanged"]

Undo = Callable[[], object]


@contextmanager
def unchanged(modules: Sequence[nn.Module], arguments: Any, *, lazy_device: torch.device | None) -> Iterator[Held]:
    """Return a context in which a model may run, and which restores it, its arguments and torch's global state.

    Args:
        arguments: arguments of its forward, including objects that the forward may change.
        lazy_device: device on which lazy modules initialise their parameters; None: the device of each.

    Yields:
        The tensors and modules reachable from ``modules`` and ``arguments``, registered or not.
    """
    held = Held()
    held.save([*modules, arguments])
    steps = (held.put_back, _flags(held.tensors), _modes(), *(state.saved() for state in process_states()))
    try:
        _replace_uninitialized(modules, lazy_device)
        yield held
    finally:
        try:
            _run_all(steps)
        except KeyboardInterrupt:  # at any step; a step that was done may run again
            _run_all(steps)
            raise


def _run_all(steps: Sequence[Undo]) -> None:
    """Run every step, even if an earlier one raised."""
    with ExitStack() as undo:
        for step in steps:
            undo.callback(step)


# ------------------------------------------------------------------------------------- flags, lazy tensors


def _flags(tensors: Sequence[Tensor]) -> Undo:
    """Return the step that restores ``requires_grad`` and ``grad``. Lazy tensors are replaced during the run."""
    leaves = (tensor for tensor in tensors if not is_lazy(tensor) and tensor.is_leaf and not tensor.is_inference())
    saved = [(tensor, tensor.requires_grad, tensor.grad) for tensor in leaves]

    def put_back() -> None:
        for tensor, requires_grad, grad in saved:
            if not tensor.is_leaf:  # the forward wrote a tensor with a graph into it
                tensor.detach_()
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad

    return put_back


def _replace_uninitialized(modules: Sequence[nn.Module], device: torch.device | None) -> None:
    """Give lazy modules copies of their parameters to initialise, as initialised ones cannot be made lazy again."""
    for module in modules:
        registries: tuple[Any, Any] = (module._parameters, module._buffers)
        for tensors in registries:
            for name, tensor in tensors.items():
                if is_lazy(tensor):
                    tensors[name] = _uninitialized_like(tensor, device or tensor.device)


def _uninitialized_like(tensor: Any, device: torch.device) -> Tensor:
    kind: Any = UninitializedParameter if isinstance(tensor, UninitializedParameter) else UninitializedBuffer
    copy: Tensor = kind(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
    return copy


# -------------------------------------------------------------------------------------------- global state


def _modes() -> Undo:
    """Return the step that ends modes of torch left behind by a Ctrl-C that came right after they began."""
    dispatch, function = len(_torch.dispatch_modes()), _torch.number_of_function_modes()

    def put_back() -> None:
        while len(_torch.dispatch_modes()) > dispatch:
            _torch.pop_dispatch_mode()
        while _torch.number_of_function_modes() > function:
            _torch.pop_function_mode()

    return put_back
