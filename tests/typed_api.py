"""What a type checker sees of the public API; mypy reads this file, and nothing runs it."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import nn
from torch.fx import GraphModule

import modelsummary
from modelsummary import (
    CheckpointPlan,
    DeviceSpec,
    InputError,
    LayerInfo,
    MemoryEstimate,
    ModelStatistics,
    NotLiveError,
    Stages,
    Statistics,
)
from modelsummary.memory.checkpointing import MemoryCurve


def making(model: nn.Module) -> None:
    assert_type(Statistics(model, (1, 3, 224, 224)), Statistics)
    assert_type(Statistics(model, {"x": (1, 3)}, dtypes="long", depth="auto", execution="shape"), Statistics)
    assert_type(modelsummary.load("net.onnx").total_params, int)
    assert_type(ModelStatistics.from_json(Path("net.json")), ModelStatistics)
    assert_type(modelsummary.symbolic_trace(model, meta_args={"x": torch.rand(1)}), GraphModule)
    modelsummary.load("net.onnx").split(2)  # type: ignore[attr-defined]
    Statistics(model, (1, 3), execution=1)  # type: ignore[arg-type]


def reading(stats: ModelStatistics) -> None:
    assert_type(stats["layer1.0"], LayerInfo)
    assert_type([row.macs for row in stats], list[int])
    assert_type(stats.total_params, int)
    assert_type(stats.root.latency_ms, float | None)
    assert_type(stats.top(3, by="params"), list[LayerInfo])
    assert_type(stats.table(["macs"], depth=None, units="M", sort="macs"), str)
    assert_type(stats.to_csv("net.csv"), str)
    assert_type(bool(stats.diff(stats)), bool)


def predicting(stats: Statistics) -> None:
    assert_type(stats.measure_latency(runs=3, backward=True), Statistics)
    assert_type(stats.estimate_latency("A100", dtype=torch.bfloat16), float)
    assert_type(stats.estimate_latency(DeviceSpec("A100"), "compiled", backward=True), float)
    assert_type(stats.memory(optimizer="adamw"), MemoryEstimate)
    assert_type(stats.memory("inference").peak, int)
    assert_type(stats.max_batch_size("24GB", autocast=torch.bfloat16), int)
    assert_type(stats.suggest_checkpoint(10**9, optimizer="adamw"), CheckpointPlan)
    assert_type(stats.memory_curve(5, device="A100"), MemoryCurve)
    assert_type(stats.memory_plan("24GB", optimizer="adamw", device="A100"), CheckpointPlan)
    stats.max_batch_size("24GB", autocst=torch.bfloat16)  # type: ignore[call-arg]


def cutting(stats: Statistics) -> None:
    stages = stats.split(4, by="params")
    assert_type(stages, Stages)
    assert_type(stages[0], nn.Sequential)
    assert_type(stages[1:], list[nn.Sequential])
    assert_type(stats.graph().save("net.svg"), Path)
    assert_type(stats.parallel_plan(tensor=2).to_code(), str)


def failing(error: NotLiveError) -> InputError:
    return error
