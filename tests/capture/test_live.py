"""How often questions run the model, and when they run it again."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import nn

from modelsummary import Statistics
from modelsummary.capture.observe import observed
from modelsummary.capture.step_plan import StepPlan
from modelsummary.memory.step_options import step_plan


class Config:
    """Settings of a model, as libraries keep them."""

    def __init__(self):
        self.scale = 2


class Counted(nn.Module):
    """A model that counts its forwards; what they assign is restored, an iterator goes on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        self.config, self.forwards = Config(), count()

    def forward(self, x):
        next(self.forwards)
        return self.layers(x) * self.config.scale


def runs(model, question):
    """Number of forwards that a question takes."""
    before = next(model.forwards)
    question()
    return next(model.forwards) - before - 1


STEP = {"backward": True, "optimizer": "adamw"}


def test_questions_about_one_run_share_it():
    model, made = Counted(), []
    assert runs(model, lambda: made.append(Statistics(model, torch.rand(3, 4)))) == 1
    (stats,) = made
    assert runs(model, lambda: stats.estimate_latency("A100")) == 1  # the model is on another device
    assert runs(model, lambda: stats.estimate_latency("T4", "compiled")) == 0
    assert runs(model, lambda: stats.memory("inference", device="cuda")) == 1
    assert runs(model, lambda: stats.memory(optimizer="adamw", device="cuda")) == 1
    assert runs(model, lambda: stats.memory(optimizer="adamw", device="cuda", workspaces=False)) == 0
    assert runs(model, lambda: stats.estimate_latency("A100", **STEP)) == 0
    assert runs(model, lambda: stats.kernels("H100", "compiled", **STEP)) == 0
    assert runs(model, lambda: stats.memory(optimizer="sgd", device="cuda")) == 1
    assert runs(model, lambda: stats.memory(optimizer="adamw", device="cuda", autocast=torch.bfloat16)) == 1


def test_the_name_of_the_own_device_is_the_default():
    model = Counted()
    stats = Statistics(model, torch.rand(3, 4))
    assert runs(model, lambda: observed(stats.live, StepPlan(train=False))) == 1
    assert runs(model, lambda: observed(stats.live, StepPlan(train=False, device=torch.device("cpu")))) == 0
    stats.memory(optimizer="adamw", device="cpu")
    assert runs(model, lambda: observed(stats.live, step_plan("train", {"optimizer": "adamw"}))) == 0


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_the_trace_of_a_memory_estimate_has_the_same_kernels(mode):
    model, x = Counted(), torch.rand(3, 4)
    alone = Statistics(model, x).kernels("A100", mode, **STEP).to_records()
    stats = Statistics(model, x)
    stats.memory(optimizer="adamw", device="cuda")
    assert stats.kernels("A100", mode, **STEP).to_records() == alone


def grow(model, stats):
    model.layers[0].register_buffer("table", torch.zeros(5))


def write_input(model, stats):
    stats.live.call.args[0].add_(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model.eval(),
        lambda model, _: model.layers[0].requires_grad_(False),
        lambda model, _: setattr(model.layers[1], "p", 0.5),
        lambda model, _: setattr(model.config, "scale", 3),
        lambda model, _: model.layers.append(nn.ReLU()),
        lambda model, _: setattr(model.layers[0], "weight", nn.Parameter(torch.ones(8, 4))),
        lambda model, _: model.layers[0].register_forward_hook(lambda *_: None),
        grow,
        write_input,
    ],
)
def test_a_changed_model_runs_again(change):
    model = Counted()
    stats = Statistics(model, torch.rand(3, 4))
    stats.memory()
    assert runs(model, stats.memory) == 0
    with torch.no_grad():
        change(model, stats)
    assert runs(model, stats.memory) == 1


def test_settings_of_the_process_count():
    model = Counted()
    stats = Statistics(model, torch.rand(3, 4))
    stats.memory()
    with torch.autocast("cpu", torch.bfloat16):
        assert runs(model, stats.memory) == 1
    assert runs(model, stats.memory) == 1


def test_records_are_shared():
    model = Counted()
    stats = Statistics(model, torch.rand(3, 4))
    assert runs(model, stats.graph) == 1
    assert runs(model, stats.explore) == 0
    model.eval()
    assert runs(model, lambda: stats.split(2)) > 1
    nodes = [node.name for node in Statistics(model, torch.rand(3, 4)).graph().nodes]
    assert runs(model, lambda: nodes.append([node.name for node in stats.graph().nodes])) == 0
    assert nodes.pop() == nodes
    assert runs(model, lambda: stats.parallel_plan(tensor=2)) == 1  # a rank's share is checked on a copy
    assert runs(model, lambda: stats.parallel_plan(tensor=4)) == 0
