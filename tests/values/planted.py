"""Forty defects that make NaN or Inf, each with the operator, the phase and the line that must be named."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

NAN, INF = float("nan"), float("inf")


class Defect(NamedTuple):
    """A forward of a part of a model, and what it makes."""

    forward: object
    operator: str
    phase: str = "forward"
    kind: str = "nan"
    dtype: torch.dtype = torch.float32
    node: str = ""


class Scale(torch.autograd.Function):
    """A function whose backward divides by zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (x * 0)  # planted


class Root(torch.autograd.Function):
    """A function whose forward takes the root of negative numbers."""

    @staticmethod
    def forward(ctx, x):
        return torch.sqrt(-x.abs() - 1)  # planted

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _masked(x):
    scores = x @ x.transpose(-1, -2)
    hidden = torch.ones_like(scores, dtype=torch.bool)  # every row is masked as a whole
    return scores.masked_fill(hidden, -INF).softmax(-1) @ x  # planted


def _added_mask(x):
    scores = x @ x.transpose(-1, -2)
    mask = torch.full_like(scores, -INF)
    return (scores + mask).softmax(-1) @ x  # planted


def _mask_times(x):
    scores = x @ x.transpose(-1, -2)
    keep = torch.tril(torch.ones_like(scores))
    return ((1 - keep) * -INF + scores).softmax(-1) @ x  # planted


def _sound_mask_then_log(x):
    scores = x @ x.transpose(-1, -2)
    causal = torch.tril(torch.ones_like(scores)) == 0
    attended = scores.masked_fill(causal, -INF).softmax(-1)
    return attended.log() @ x  # planted


def _fp16_mask_then_root(x):
    scores = (x @ x.transpose(-1, -2)).half() - 100
    causal = torch.triu(torch.full_like(scores, torch.finfo(torch.float16).min), 1)
    attended = (scores + causal).softmax(-1).to(x.dtype)
    return torch.sqrt(-attended - 1) @ x  # planted


def _loop(x):
    for number in range(5):
        x = x / (number - 3)  # planted
    return x


def _growing_loop(x):
    for _ in range(300):
        x = x.abs() * 10 + 1  # planted
    return x


def _recurrence(x):
    state = x[:, 0]
    for position in range(x.shape[1]):
        state = torch.where(x[:, position] > 0, state, state) / (position - 2.0)  # planted
    return state.unsqueeze(1) + x


def _checkpointed(x):
    return checkpoint(lambda y: torch.log(y * 0), x, use_reentrant=False)  # planted


def _reentrant(x):
    return checkpoint(lambda y: torch.log(y * 0), x, use_reentrant=True)  # planted


def _checkpointed_gradient(x):
    return checkpoint(lambda y: torch.sqrt(y * 0), x, use_reentrant=False)  # planted


def _reentrant_gradient(x):
    return checkpoint(lambda y: torch.sqrt(y * 0), x, use_reentrant=True)  # planted


def _in_place(x):
    y = x.clone()
    y[:, 0].div_(0.0)  # planted
    return y


def _written_part(x):
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, 1:]
    y[:, :1] = torch.log(-x[:, :1].abs() - 1)  # planted
    return y


def _unfilled(x):
    y = torch.empty_like(x)
    y.copy_(x)
    return y.sub(y.mean()).div(y.sum() * 0)  # planted


def _norm(x):
    return x / (x * 0).norm(dim=-1, keepdim=True)  # planted


def _norm_gradient(x):
    return x + (x * 0).pow(0.5)  # planted


def _where_gradient(x):
    y = x * 0
    return torch.where(y > 1, y.sqrt(), x)  # planted


def _cosine(x):
    return torch.acos(x.abs() + 2)  # planted


def _half_product(x):
    wide = (x.abs() + 300).half()
    return (wide @ wide.transpose(-1, -2)).softmax(-1).to(x.dtype) @ x  # planted


def _half_cast(x):
    return (x.abs() + 1e5).half().to(x.dtype)  # planted


def _half_square(x):
    return ((x.half() + 300) ** 2).to(x.dtype)  # planted


def _complex(x):
    return (torch.complex(x, x) / torch.complex(x * 0, x * 0)).real  # planted


def _mean_of_nothing(x):
    return x + x[:0].mean()  # planted


def _constant(x):
    return x * NAN  # planted


def _default(x):
    return x.masked_fill(x > 0, NAN)  # planted


def _scattered(x):
    return x.index_fill(1, torch.tensor([0]), 0.0).reciprocal()  # planted


def _cumulative(x):
    return (x.abs() + 1e30).cumprod(1)  # planted


def _double_in(x):
    return x.double().mul(0).log().to(x.dtype)  # planted


def _entropy(x):
    p = x.softmax(-1) * 0
    return (p * p.log()) + x  # planted


def _exponential(x):
    return torch.exp(x.abs() * 100 + 100)  # planted


def _squared_gradient(x):
    return (x.abs() * 0).pow(0.25) + x  # planted


def _batch_norm(x):
    return F.batch_norm(x * 0, None, None, training=True, eps=0.0)  # planted


def _root(x):
    return torch.sqrt(x * 0)  # planted


def _cosine_gradient(x):
    absorbed = torch.atan2(x * 0, x * 0)  # its gradient is 0, by way of 1 / 0
    return torch.acos(x * 0 + 1) + absorbed  # planted


DEFECTS = {
    "root of negatives": Defect(lambda x: torch.sqrt(-x.abs() - 1), "aten.sqrt"),  # planted
    "log of zero": Defect(lambda x: torch.log(x * 0), "aten.log", kind="inf"),  # planted
    "log of negatives": Defect(lambda x: torch.log(-x.abs() - 1), "aten.log"),  # planted
    "division by zero": Defect(lambda x: x / 0, "aten.div", kind="inf"),  # planted
    "zero over zero": Defect(lambda x: (x * 0) / (x * 0), "aten.div"),  # planted
    "reciprocal": Defect(lambda x: torch.reciprocal(x * 0), "aten.reciprocal", kind="inf"),  # planted
    "exponential": Defect(_exponential, "aten.exp", kind="inf"),
    "whole rows masked": Defect(_masked, "aten._softmax"),
    "a mask of -inf is added": Defect(_added_mask, "aten._softmax"),
    "a mask times -inf": Defect(_mask_times, "aten.mul"),
    "log of masked weights": Defect(_sound_mask_then_log, "aten.log", kind="inf"),
    "after a mask in float16": Defect(_fp16_mask_then_root, "aten.sqrt"),
    "loop": Defect(_loop, "aten.div", kind="inf"),
    "growing loop": Defect(_growing_loop, "aten.mul", kind="inf"),
    "recurrence": Defect(_recurrence, "aten.div", kind="inf"),
    "checkpointed": Defect(_checkpointed, "aten.log", kind="inf"),
    "re-entrant checkpoint": Defect(_reentrant, "aten.log", kind="inf"),
    "custom function": Defect(Root.apply, "aten.sqrt"),
    "in place": Defect(_in_place, "aten.div_", kind="inf"),
    "written in parts": Defect(_written_part, "aten.log"),
    "after empty": Defect(_unfilled, "aten.div", kind="inf"),
    "norm of zeros": Defect(_norm, "aten.div", kind="inf"),
    "arc cosine": Defect(_cosine, "aten.acos"),
    "product in float16": Defect(_half_product, "aten.bmm", kind="inf"),
    "cast to float16": Defect(_half_cast, "aten._to_copy", kind="inf"),
    "square in float16": Defect(_half_square, "aten.pow", kind="inf"),
    "complex division": Defect(_complex, "aten.div", kind="inf"),
    "mean of nothing": Defect(_mean_of_nothing, "aten.mean"),
    "constant": Defect(_constant, "aten.mul"),
    "filled with NaN": Defect(_default, "aten.masked_fill"),
    "reciprocal of a filled part": Defect(_scattered, "aten.reciprocal", kind="inf"),
    "cumulative product": Defect(_cumulative, "aten.cumprod", kind="inf"),
    "float64 inside": Defect(_double_in, "aten.log", kind="inf"),
    "entropy": Defect(_entropy, "aten.log", kind="inf"),
    "gradient of a root": Defect(_root, "aten.div", "backward", "inf", node="SqrtBackward0"),
    "gradient of a power": Defect(_norm_gradient, "aten.pow", "backward", "inf", node="PowBackward0"),
    "gradient of a fourth root": Defect(_squared_gradient, "aten.pow", "backward", "inf", node="PowBackward0"),
    "gradient behind where": Defect(_where_gradient, "aten.div", "backward", "nan", node="SqrtBackward0"),
    "gradient of a cosine": Defect(_cosine_gradient, "aten.rsqrt", "backward", "inf", node="AcosBackward0"),
    "gradient of a custom function": Defect(Scale.apply, "aten.div", "backward", "inf"),
    "checkpointed gradient": Defect(_checkpointed_gradient, "aten.div", "backward", "inf", node="SqrtBackward0"),
    "re-entrant gradient": Defect(_reentrant_gradient, "aten.div", "backward", "inf", node="SqrtBackward0"),
}


class Part(nn.Module):
    """A module that runs a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Model(nn.Module):
    """Sound layers around a defect: causal attention with -inf in its mask, a norm, dropout."""

    def __init__(self, function, width=8):
        super().__init__()
        self.before, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.part = Part(function)
        self.after, self.drop = nn.Linear(width, 4), nn.Dropout(0.1)

    def forward(self, x):
        x = self.norm(self.before(x))
        scores = x @ x.transpose(-1, -2)
        hidden = torch.triu(torch.ones_like(scores, dtype=torch.bool), 1)
        x = x + scores.masked_fill(hidden, -INF).softmax(-1) @ x
        return self.drop(self.after(self.part(x)))
