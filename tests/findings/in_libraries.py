"""Defects that are planted in any model: in wrappers around its modules, and in the values of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DEFECTS", "IN_HALF", "plant", "plant_values"]


class Wrapper(nn.Module):
    """A module that changes the result of another one; its own parameters and layers are made for ``width`` channels.

    Args:
        change: takes the wrapper and the tensor ``[batch, length, width]``, and returns one of this shape.
    """

    def __init__(self, layer: nn.Module, width: int, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.width, self.change = layer, width, change

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.layer(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        rows = first.flatten(2).transpose(1, 2) if first.dim() == 4 else first
        changed = self.change(self, rows)
        changed = changed.transpose(1, 2).view(first.shape) if first.dim() == 4 else changed
        return (changed, *result[1:]) if isinstance(result, tuple) else changed


def _gain(wrapper: Wrapper) -> None:
    wrapper.gain = nn.Parameter(torch.ones(wrapper.width))


def _spare(wrapper: Wrapper) -> None:
    wrapper.spare = nn.Linear(64, 64)


def _buffer(wrapper: Wrapper) -> None:
    wrapper.register_buffer("mask", torch.ones(256, 256))


def _matrix(wrapper: Wrapper) -> None:
    wrapper.matrix = nn.Parameter(torch.ones(wrapper.width, wrapper.width))


def _table(wrapper: Wrapper) -> None:
    wrapper.table = nn.Parameter(torch.ones(4096, 4096))


def _biased(wrapper: Wrapper) -> None:
    wrapper.conv = nn.Conv1d(wrapper.width, wrapper.width, 1)
    wrapper.norm = nn.BatchNorm1d(wrapper.width)


def _norm(wrapper: Wrapper) -> None:
    wrapper.norm = nn.BatchNorm1d(wrapper.width)


def _frozen(wrapper: Wrapper) -> None:
    _norm(wrapper)
    wrapper.norm.requires_grad_(False)


def _sharing(wrapper: Wrapper) -> None:
    wrapper.first, wrapper.second = nn.Parameter(torch.ones(wrapper.width)), nn.Parameter(torch.ones(wrapper.width))
    wrapper.second.data = wrapper.first.data


def _hooked(wrapper: Wrapper) -> None:
    wrapper.register_forward_hook(lambda *_: None)


def _nothing(wrapper: Wrapper) -> None:
    pass


def _same(_: Wrapper, x: Tensor) -> Tensor:
    return x


def _under_no_grad(wrapper: Wrapper, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = x * wrapper.gain
    return x + shift


def _many(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Return a change of 64 copies of a tensor, as what costs less than a thousandth of the step is left out."""
    return lambda _, x: change(x.expand(64, *x.shape)).mean(0)


def _attention(_: Wrapper, x: Tensor) -> Tensor:
    y = x[:, None, :128, :64].expand(-1, 64, -1, -1)
    attended = (y @ y.transpose(-1, -2) / 8).softmax(-1) @ y
    return x + attended.mean()


def _norms(wrapper: Wrapper, x: Tensor) -> Tensor:
    return x + wrapper.norm(x.mean(1)).unsqueeze(1)


def _unread(_: Wrapper, x: Tensor) -> Tensor:
    x.expand(64, *x.shape).exp()
    return x


def _unread_gain(wrapper: Wrapper, x: Tensor) -> Tensor:
    x * wrapper.gain
    return x


def _float32(wrapper: Wrapper, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return (x.float() @ wrapper.matrix.float()).to(x.dtype)


# name -> code, what the wrapper gets, what it does, and the module that the finding names, relative to the wrapper
DEFECTS: dict[str, tuple[str, Callable[[Wrapper], None], Callable[[Any, Tensor], Tensor], str]] = {
    "unused parameter": ("G101", _gain, _same, ""),
    "parameter under no_grad": ("G102", _gain, _under_no_grad, ""),
    "detached parameter": ("G103", _gain, lambda w, x: x + (x * w.gain).detach().mean(), ""),
    "result that is not in the loss": ("G104", _gain, _unread_gain, ""),
    "parameter behind a comparison": ("G105", _gain, lambda w, x: x * (x * w.gain > 0), ""),
    "module that never runs": ("U201", _spare, _same, "spare"),
    "buffer that is never read": ("U202", _buffer, _same, ""),
    "result that is never read": ("U203", _nothing, _unread, ""),
    "computed twice": ("R301", _nothing, _many(lambda x: torch.sigmoid(x) * x + torch.sigmoid(x)), ""),
    "clone": ("R302", _nothing, _many(lambda x: x.tanh().clone() * 2), ""),
    "float64": ("D401", _nothing, _many(lambda x: x.double().exp().to(x.dtype)), ""),
    "cast and back": ("D403", _nothing, _many(lambda x: (x * 2).half().float() + 1), ""),
    "weight cast": ("D404", _table, lambda w, x: x + w.table.bfloat16().sum(), ""),
    "bias before a norm": ("N601", _biased, lambda w, x: w.norm(w.conv(x.transpose(1, 2))).transpose(1, 2), "conv"),
    "norm of two values": ("N602", _norm, _norms, "norm"),
    "frozen norm": ("N603", _frozen, lambda w, x: w.norm(x.relu().transpose(1, 2)).transpose(1, 2), "norm"),
    "attention in parts": ("S503", _nothing, _attention, ""),
    "shared memory": ("T801", _sharing, lambda w, x: x * w.first + w.second, ""),
    "hook": ("T802", _hooked, _same, ""),
}
IN_HALF = {"float32 under autocast": ("D402", _matrix, _float32, "")}


def plant(
    model: nn.Module, fqns: Iterable[str], width: Callable[[nn.Module], int], defects: dict[str, Any]
) -> set[tuple[str, str]]:
    """Plant one defect after each module of a model on meta; return codes and modules of the findings that are due.

    Args:
        width: returns the channels of the result of a module.
    """
    due = set()
    for fqn, (code, prepare, change, inner) in zip(fqns, defects.values(), strict=True):
        layer = model.get_submodule(fqn)
        wrapper = Wrapper(layer, width(layer), change)
        with torch.device("meta"):
            prepare(wrapper)
        model.set_submodule(fqn, wrapper)
        due.add((code, f"{fqn}.{inner}".removesuffix(".")))
    return due


def plant_values(model: nn.Module, constant: str, large: str, zeros: tuple[str, str]) -> set[tuple[str, str]]:
    """Plant values with which a model does not train; return codes and modules of the findings that are due.

    Args:
        constant, large: layers whose weights are to be equal, and far too large.
        zeros: two layers in succession.
    """
    with torch.no_grad():
        model.get_submodule(constant).weight.fill_(0.1)
        model.get_submodule(large).weight.mul_(300)
        for parameter in (parameter for fqn in zeros for parameter in model.get_submodule(fqn).parameters()):
            parameter.zero_()
    return {("P701", constant), ("P703", large), ("P702", zeros[1])}
