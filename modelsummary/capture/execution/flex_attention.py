"""``torch.nn.attention.flex_attention``: shapes, and a call that does not compile.

It is a higher-order operator. Called outside ``torch.compile`` it compiles itself, so that a dispatch mode cannot see
its operators, and it refuses tensors on meta. Computing its shapes needs neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor

from modelsummary._torch import flex_attention, flex_attention_backward

__all__ = ["FLEX_RULES", "plain_flex_attention"]

_META = torch.device("meta")
_MODULE = "torch.nn.attention.flex_attention"
_STOPS_COMPILING = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # since torch 2.9
_RESULTS: Any = type(flex_attention).__call__.__annotations__.get("return")
_HAS_MAX_SCORES = len(get_args(_RESULTS)) == 3  # since torch 2.10


@contextmanager
def plain_flex_attention() -> Iterator[None]:
    """Run the body with a ``flex_attention`` that calls its operator without compiling, on tensors of any device."""
    module = sys.modules.get(_MODULE)
    changes: dict[str, Any] = {_STOPS_COMPILING: True, "_validate_device": _accept}
    before = {name: vars(module)[name] for name in changes if module is not None and name in vars(module)}
    try:
        for name in before:
            setattr(module, name, changes[name])
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _accept(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Replace the check that refuses tensors on meta, and gradients on a CPU."""


def _forward(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return the output, logsumexp and, in newer versions, the maximum of the scores."""
    out = _laid_out_like(query, (*query.shape[:3], value.shape[-1]))
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    statistics = (torch.empty(query.shape[:3], dtype=dtype, device=_META) for _ in range(1 + _HAS_MAX_SCORES))
    return out, *statistics


def _backward(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Any, ...] | None:
    """Return the gradients of query, key and value; None if tensors that ``score_mod`` captures may have gradients."""
    score_mod_buffers = others[9] if len(others) > 9 else ()
    if score_mod_buffers or query.shape[0] != key.shape[0]:
        return None
    return *(_laid_out_like(each, each.shape) for each in (query, key, value)), ()


def _laid_out_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a dense tensor with the dimension order of ``tensor``, except that the last is innermost."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
    last = tensor.dim() - 1
    strides, step = [0] * tensor.dim(), 1
    for dim in (last, *(dim for dim in order if dim != last)):
        strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(tuple(shape), strides, dtype=tensor.dtype, device=_META)


FLEX_RULES: dict[Any, Callable[..., Any]] = {
    flex_attention: _forward,
    flex_attention_backward: _backward,
}
