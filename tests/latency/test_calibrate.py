from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import InputError, Statistics
from modelsummary.cli import run
from modelsummary.devices.kernel_table import table_of
from modelsummary.latency.predict import TABLE_ERROR
from tests.untouched import untouched


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("MODELSUMMARY_CACHE", str(tmp_path))
    return tmp_path


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, ids):
        return torch.relu(self.linear(self.embedding(ids))).sum(-1)


def test_a_model_is_measured_and_predicted_exactly():
    model = Small()
    stats = Statistics(model, torch.randint(0, 50, (4, 6)))
    with untouched(model):
        done = stats.calibrate()
    assert (done.measured, done.known, done.failed) == (4, 0, 0)  # embedding, product, relu, sum
    assert stats.calibrate().measured == 0
    estimate = stats.estimate_latency()
    assert estimate.shares == {"measured": pytest.approx(1.0)}
    assert estimate > 1e3 * sum(each.seconds for each in stats.kernels())  # calls of modules and views come on top
    assert "kernel table of this machine" in str(estimate)
    assert stats["linear"].estimated_latency_ms > 0


def test_another_visit_measures_known_calls_again():
    stats = Statistics(Small(), torch.randint(0, 50, (4, 6)))
    stats.calibrate()
    done = stats.calibrate(again=True)
    assert (done.measured, done.known) == (4, 0)
    assert all(len(entry.visits) == 2 for entry in table_of(torch.device("cpu")).entries.values())


def test_forgetting_deletes_what_any_model_measured():
    Statistics(nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.rand(3, 5)).calibrate()
    stats = Statistics(Small(), torch.randint(0, 50, (4, 6)))
    stats.calibrate()
    with pytest.raises(InputError):
        stats.calibrate(forget=True, optimizer="none of torch")
    assert len(table_of(torch.device("cpu")).entries) == 6
    done = stats.calibrate(forget=True)
    assert (done.measured, done.known) == (4, 0)
    entries = table_of(torch.device("cpu")).entries.values()
    assert [len(entry.visits) for entry in entries] == [1] * 4


def test_a_model_that_was_not_measured_is_interpolated():
    Statistics(Small(), torch.randint(0, 50, (4, 6))).calibrate()
    estimate = Statistics(Small(), torch.randint(0, 50, (8, 6))).estimate_latency()
    assert "measured" not in estimate.shares
    assert estimate.typical_error == TABLE_ERROR


def test_a_call_that_does_not_run_alone_has_failed():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.empty_like(x).normal_(generator=generator)  # whose generator no call alone can have

    generator = torch.Generator()
    done = Statistics(Noisy(), torch.ones(4)).calibrate()
    assert (done.measured, done.failed) == (1, 1)


def test_workspace_of_a_kernel_is_in_the_peak():
    model = nn.Conv2d(16, 32, 3, bias=False)
    stats = Statistics(model, torch.randn(2, 16, 24, 24))
    stats.calibrate(backward=True)
    measured = stats.measure_memory()
    assert measured.predicted.peak == pytest.approx(measured.peak, rel=0.025)
    assert stats.memory(workspaces=False).peak <= measured.predicted.peak
    table = table_of(torch.device("cpu"))
    assert all(entry.workspace is not None for entry in table.entries.values())


@pytest.mark.gpu
def test_an_accelerator_is_measured_by_events():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    stats = Statistics(model, torch.randn(32, 64, device="cuda"))
    done = stats.calibrate("cuda", backward=True)
    assert done.measured > 0
    assert done.failed == 0
    estimate = stats.estimate_latency("cuda", backward=True)
    assert estimate.shares == {"measured": pytest.approx(1.0)}
    assert estimate > 0
    assert all(entry.workspace is not None for entry in table_of(torch.device("cuda")).entries.values())


def test_command(own_tables, capsys):
    assert run(["calibrate", "torch.nn:Flatten", "--input", "2,3,4"]) == 0
    assert "operator calls measured" in capsys.readouterr().out
    assert run(["calibrate", "torch.nn:Flatten"]) == 2
    assert "needs an --input" in capsys.readouterr().err
    assert run(["calibrate", "--device", "nowhere"]) == 2
