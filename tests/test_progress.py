"""The progress bar: on a terminal after two seconds, on stderr; nothing anywhere else."""

from __future__ import annotations

import io
import sys

import pytest
from torch import nn

from modelsummary import Statistics, progress
from tests.models import Call


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """A terminal as stderr; made by the test itself, as pytest replaces stderr after fixtures."""
    pytest.importorskip("tqdm")
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(progress, "_AFTER_S", 0.0)
    return found


def values_decide():
    """A forward that runs for real."""
    return Call(lambda self, x: self.linear(x) if x.sum() > -1 else x, linear=nn.Linear(2, 2))


WORK = {
    "latency": lambda: Statistics(nn.Linear(2, 2), (1, 2)).measure_latency(warmup=1, runs=1),
    "max batch size": lambda: Statistics(nn.Linear(2, 2), (1, 2)).max_batch_size(1000),
    "checkpoint plan": lambda: Statistics(nn.Sequential(nn.Linear(2, 2)), (1, 2)).suggest_checkpoint(10_000),
    "real run": lambda: Statistics(values_decide(), (1, 2)),
}


@pytest.mark.parametrize("what", WORK)
def test_a_terminal_shows_a_bar(what, monkeypatch, capsys):
    stderr = terminal(monkeypatch)
    WORK[what]()
    assert f"{what}: " in stderr.getvalue()
    assert stderr.getvalue().endswith("\r")  # and the bar is gone at the end
    assert capsys.readouterr().out == ""


def test_work_within_other_work_shows_one_bar(monkeypatch):
    stderr = terminal(monkeypatch)
    with progress.counted("outer", "step", 1) as done, progress.counted("inner", "step", 1):
        done()
    assert "outer: " in stderr.getvalue()
    assert "inner: " not in stderr.getvalue()


def test_short_work_shows_none(monkeypatch):
    stderr = terminal(monkeypatch)
    monkeypatch.setattr(progress, "_AFTER_S", 60.0)
    WORK["latency"]()
    assert stderr.getvalue().strip() == ""


def test_a_pipe_shows_none(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_AFTER_S", 0.0)
    for work in WORK.values():
        work()
    assert capsys.readouterr() == ("", "")


def test_without_stderr_or_tqdm_work_goes_on(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress.followed([1, 2], "work", "item")) == [1, 2]
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert list(progress.followed([1, 2], "work", "item")) == [1, 2]
