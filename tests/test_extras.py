"""Libraries that are optional."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from modelsummary import InputError, MissingExtraError, Statistics
from modelsummary.cluster.pictures import stacked_bars


def test_pictures_are_drawn_into_axes_only():
    pytest.importorskip("matplotlib")
    stats = Statistics(nn.Linear(4, 2), (3, 4))
    for draw in (stats.memory().plot, stats.plot.bars, lambda ax: stacked_bars({"step": {"products": 1.0}}, ax)):
        with pytest.raises(InputError, match=r"ax must be matplotlib Axes, .* got 3"):
            draw(ax=3)


@pytest.mark.parametrize(
    ("library", "extra", "ask"),
    [
        ("matplotlib", "plot", lambda stats: stats.memory().plot()),
        ("pandas", "pandas", lambda stats: stats.kernels("A100").to_pandas()),
        ("pandas", "pandas", lambda stats: stats.to_pandas()),
    ],
)
def test_an_absent_library_is_named(monkeypatch, library, extra, ask):
    stats = Statistics(nn.Linear(4, 2), (3, 4))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        MissingExtraError, match=rf"^{library} is not installed; pip install 'torch-modelsummary\[{extra}\]'$"
    ):
        ask(stats)
