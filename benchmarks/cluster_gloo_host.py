"""Calibrate what the host does for each engine of distributed training, on layers so small that nothing else counts.

``cluster_gloo.py`` runs it in two processes before it predicts. Every figure is CPU time of the thread that runs the
step, so waiting for the other process and for gloo's threads, whose time is measured with the collectives, is not part
of it. Each cost is the slope of the time between a small number of the events and a larger one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from modelsummary import Statistics

__all__ = ["HostCosts", "calibrate_host", "optimizer_of"]

WIDTH, FEW, MANY = 16, 2, 10


class HostCosts(NamedTuple):
    """CPU seconds of the host.

    Attributes:
        operator: of autograd and modules around an operator, beside the operator itself.
        layer: of a linear layer whose weight is a distributed tensor, for a forward, a backward and the optimizer.
        unit: of a unit of FSDP, for a forward and a backward.
        parameter: of a parameter of FSDP, with its optimizer.
        action: of a forward or a backward of one micro-batch in a stage of a pipeline.
    """

    operator: float
    layer: float
    unit: float
    parameter: float
    action: float


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW in fused kernels, which take either sharded tensors or plain ones."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for each in module.parameters():
        kinds.setdefault(type(each.data), []).append(each)
    return torch.optim.AdamW([{"params": each} for each in kinds.values()], foreach=False, fused=True)


class Pairs(nn.Sequential):
    """Blocks of two linear layers, or of more."""

    def __init__(self, number: int, layers: int = 2) -> None:
        super().__init__(
            *(nn.Sequential(*(each for _ in range(layers // 2) for each in _pair())) for _ in range(number))
        )


def _pair() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False)]


def cpu_seconds(step: Callable[[], Any], count: int = 25) -> float:
    """Return the median CPU seconds of this thread in a function that all processes call."""
    used = []
    for _ in range(count + 3):
        dist.barrier()
        begin = time.thread_time()
        step()
        used.append(time.thread_time() - begin)
    return sorted(used[3:])[count // 2]


def seconds_of_step(number: int, layers: int = 2, **parallel: int) -> float:
    """Return the CPU seconds of a step of small blocks."""
    torch.manual_seed(0)
    model, x = Pairs(number, layers), torch.randn(4, WIDTH)
    if parallel:
        plan = Statistics(model, x).parallel_plan(**parallel)
        plan.apply(model, plan.device_mesh("cpu"))
    optimizer = optimizer_of(model)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return cpu_seconds(step)


def seconds_of_pipeline(microbatches: int) -> float:
    """Return the CPU seconds of a step of a pipeline of two stages."""
    from torch.distributed.pipelining import Schedule1F1B

    torch.manual_seed(0)
    model, x = Pairs(2), torch.randn(microbatches, WIDTH)
    plan = Statistics(model, x[:1]).parallel_plan(pipeline=2)
    stage = plan.apply(model, plan.device_mesh("cpu"))
    engine = Schedule1F1B(stage, microbatches, loss_fn=lambda y, _: y.sum())

    def step() -> None:
        if stage.is_first:
            engine.step(x)
        else:
            engine.step(target=x)
        stage.submod.zero_grad()

    return cpu_seconds(step)


def seconds_of_operators() -> float:
    """Return the CPU seconds of the products and activations of one layer's step, outside of autograd and modules."""
    x, weight = torch.randn(4, WIDTH), torch.randn(WIDTH, WIDTH)

    def run() -> None:
        for _ in range(100):
            torch.mm(x, weight)
            torch.mm(x, weight)
            torch.mm(x.t(), x)

    with torch.no_grad():
        return cpu_seconds(run) / 100


def calibrate_host() -> HostCosts:
    """Return the costs of the host; all of two processes call it."""

    def slope(seconds: Callable[[int], float]) -> float:
        return max((seconds(MANY) - seconds(FEW)) / (MANY - FEW), 0.0)

    plain = slope(seconds_of_step)  # two layers and an activation
    tensor = slope(lambda number: seconds_of_step(number, tensor=2))
    small = slope(lambda number: seconds_of_step(number, shard=2))
    large = slope(lambda number: seconds_of_step(number, layers=6, shard=2))
    plain_large = slope(lambda number: seconds_of_step(number, layers=6))
    parameter = max(((large - plain_large) - (small - plain)) / 4, 0.0)
    microbatch = slope(seconds_of_pipeline)
    operators = 8  # two layers of three products, and two kernels of the activation
    return HostCosts(
        operator=max(plain - 2 * seconds_of_operators(), 0.0) / operators,
        layer=max(tensor - plain, 0.0) / 2,
        unit=max(small - plain - 2 * parameter, 0.0),
        parameter=parameter,
        action=max(microbatch - plain, 0.0) / 2,
    )
