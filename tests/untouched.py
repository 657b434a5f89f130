"""``untouched(model)``: compare all state that a run must not change, before and after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from modelsummary.capture.state.process_state import process_states

_CONTAINERS = (dict, list, set)


def _contents(value: Any) -> Any:
    """Return the identity of a value and, for a container, of its items."""
    if isinstance(value, dict):
        return id(value), [(key, _contents(inner)) for key, inner in value.items()]
    if isinstance(value, (list, set)):
        return id(value), [_contents(inner) for inner in value]
    return id(value)


def plain(value: Any) -> Any:
    """Return an object that compares by value, for states of generators, which are tensors and arrays."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _global_state() -> dict[str, Any]:
    return {
        **{state.name: plain(state.read()) for state in process_states()},
        "inference mode": torch.is_inference_mode_enabled(),
    }


def _module_state(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for fqn, module in model.named_modules():
        state[f"{fqn}: class"] = type(module)
        for name, value in vars(module).items():
            state[f"{fqn}: {name}"] = _contents(value)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state[f"{name}: flags"] = (id(tensor), tensor.device, tensor.requires_grad, id(tensor.grad), is_lazy(tensor))
    return state


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    values = {name: tensor.detach().clone() for name, tensor in tensors if not is_lazy(tensor) and not tensor.is_meta}
    grads = {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                values[f"{fqn}: {name}"] = value.detach().clone()
    return values | grads


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Bit-equal: NaN equals NaN, 0.0 and -0.0 differ."""
    if before.dtype != after.dtype or before.shape != after.shape:
        return False
    if is_traceable_wrapper_subclass(before):
        inner = ((getattr(before, name), getattr(after, name)) for name in before.__tensor_flatten__()[0])
        return all(_same(*pair) for pair in inner if isinstance(pair[0], torch.Tensor))  # others describe the sharding
    if before.is_quantized:
        before, after = before.int_repr(), after.int_repr()
    if before.layout is not torch.strided:
        before, after = before.to_dense(), after.to_dense()
    raw = (tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in (before, after))
    return torch.equal(*raw)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Fail if the block changed the model or torch's global state, also if it raised."""
    state, values, everywhere = _module_state(model), _values(model), _global_state()
    try:
        yield
    finally:
        everywhere_after = _global_state()
        assert [name for name in everywhere if everywhere[name] != everywhere_after[name]] == []
        after = _module_state(model)
        assert after == state, {name for name in after.keys() | state.keys() if after.get(name) != state.get(name)}
        values_after = _values(model)
        assert values_after.keys() == values.keys()
        changed = [name for name, value in values.items() if not _same(value, values_after[name])]
        assert not changed
