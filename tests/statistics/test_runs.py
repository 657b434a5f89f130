"""Runs of the user's model per question: a second question about the same run runs nothing."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import SplitError, Statistics
from modelsummary.split import splitter

RUNS = itertools.count()  # no library restores it after a run


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + F.dropout(self.out(attention.reshape(batch, length, width)), 0.1, self.training)
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Decoder(nn.Module):
    def __init__(self, asks=False):
        super().__init__()
        self.asks, self.embed, self.head = asks, nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, tokens):
        next(RUNS)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.asks:
            x = x * (1 if torch.is_grad_enabled() or not x.requires_grad else 2)
        return self.head(x)


def count(question):
    before = next(RUNS)
    result = question()
    return next(RUNS) - before - 1, result


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_runs_per_question(batch, training):
    tokens = torch.zeros(batch, 4, dtype=torch.long)
    n_runs, stats = count(lambda: Statistics(Decoder().train(training), tokens))
    assert n_runs == 1
    assert count(lambda: stats.split(2, by="params"))[0] == 4  # three batch sizes, and the other mode
    later = {
        "other stages": lambda: stats.split(3),
        "graph": stats.graph,
        "stages of a plan": lambda: stats.parallel_plan(pipeline=2),
        "page": stats.explore,
    }
    assert {name: count(question)[0] for name, question in later.items()} == dict.fromkeys(later, 0)
    assert count(stats.graph_module)[0] == 4  # its record opens other modules


class Alone(Decoder):
    """A decoder that runs other functions for a batch of one."""

    def __init__(self, scale=lambda: 2.0):
        super().__init__()
        self.scale = scale

    def forward(self, tokens):
        next(RUNS)
        x = self.embed(tokens) * self.scale()
        if len(tokens) == 1:
            x = x.relu()
        for block in self.blocks:
            x = F.gelu(block.down(F.gelu(block.up(x))))
        return self.head(x)


def test_runs_of_a_forward_that_depends_on_the_batch_size():
    stats = Statistics(Alone(), torch.zeros(1, 4, dtype=torch.long))
    n_runs, stages = count(lambda: stats.split(2, by="params"))
    assert n_runs == 4  # three batch sizes, and the other mode of the first
    assert stages.batch_size is None
    tokens = torch.arange(4)[None]
    assert stages.verify(tokens).outputs == 0


@pytest.mark.parametrize("batch", [1, 3])
def test_a_graph_after_a_split_has_all_calls(batch):
    tokens = torch.zeros(batch, 4, dtype=torch.long)
    stats = Statistics(Alone(), tokens)
    with pytest.raises(SplitError):
        stats.split(99)
    assert str(stats.graph(depth=None)) == str(Statistics(Alone(), tokens).graph(depth=None))


def test_a_constant_that_differs_in_each_run_does_not_follow_the_mode():
    clock = itertools.count(1)
    stats = Statistics(Alone(lambda: float(next(clock))), torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(SplitError, match="can only be run as one stage"):
        stats.split(2, by="params")


def test_a_forward_that_asks_for_gradients_also_runs_without(monkeypatch):
    compared = []

    def difference(*args, **options):
        compared.append((options["grad"], options.get("other_mode", False)))
        return found(*args, **options)

    found = splitter.difference
    monkeypatch.setattr(splitter, "difference", difference)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    Statistics(Decoder(), tokens).split(2, by="params")
    assert compared == [(True, False), (True, True)]
    compared.clear()
    n_runs, _ = count(lambda: Statistics(Decoder(asks=True), tokens).split(2, by="params"))
    assert compared == [(True, False), (True, True), (False, False), (False, True)]
    assert n_runs == 1 + 4 + 2


@pytest.mark.parametrize("is_imported", [True, False])
def test_a_question_by_another_name_is_seen(monkeypatch, is_imported):
    if is_imported:
        monkeypatch.setattr(sys.modules[__name__], "asks", torch.is_grad_enabled, raising=False)
    stages = Statistics(Decoder(), torch.zeros(2, 4, dtype=torch.long)).split(2, by="params")
    assert stages.record.asks_gradients is is_imported


class ScalesInTraining(nn.Module):
    """A number that depends on the batch size in one mode only."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(torch.add(self.first(x), 1.0, alpha=2.0 * len(x) if self.training else 1.0))


def test_a_number_that_follows_the_batch_in_the_other_mode_is_refused():
    with pytest.raises(SplitError, match="the stages differ from the model"):
        Statistics(ScalesInTraining().eval(), (2, 4)).split(2, by="params")
