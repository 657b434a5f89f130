from __future__ import annotations

import logging
import sys

import pytest
import torch
from torch import nn

from modelsummary import InputError, MissingExtraError, Statistics
from tests.untouched import untouched


@pytest.fixture
def lightning():
    """The library, imported by the tests that need it: it takes seconds, and all workers collect this file."""
    return pytest.importorskip("lightning.pytorch")


def module(lightning):
    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.zeros(2, 4)
            self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.body(x))

        def training_step(self, batch):
            return self(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net()


def test_example_input(lightning):
    model = module(lightning)
    with untouched(model):
        stats = Statistics(model)
    assert stats.root.input_size == [2, 4]
    assert stats.total_mult_adds == 2 * (4 * 3 + 3)
    assert Statistics(model, (5, 4)).root.input_size == [5, 4]
    model.example_input_array = None
    assert Statistics(model).execution == "none"


@pytest.mark.filterwarnings("ignore")  # of Lightning: workers, steps to log
@pytest.mark.parametrize(("depth", "rows"), [(1, 3), (None, 5), (0, 0)])
def test_callback(lightning, depth, rows, caplog, tmp_path):
    from modelsummary.integrations.lightning import ModelSummary

    callback = ModelSummary(depth, columns=["num_params", "mult_adds"])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", devices=1, callbacks=[callback], default_root_dir=tmp_path, **quiet
    )
    torch.manual_seed(0)
    model = module(lightning)
    with caplog.at_level(logging.INFO):
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    text = caplog.text
    assert model.body[1].num_batches_tracked == 2  # the table ran nothing for real
    assert "| Name" not in text  # Lightning's own table gave way
    if not rows:
        assert callback.statistics is None
        return
    expected = Statistics(model, (2, 4)).table(["num_params", "mult_adds"], depth)
    assert expected in text
    assert sum(": " in line and "-" in line.split(": ")[-1] for line in expected.splitlines()) >= rows - 1


@pytest.mark.usefixtures("lightning")
def test_arguments_are_checked_before_the_fit():
    from modelsummary.integrations.lightning import ModelSummary

    with pytest.raises(InputError, match="unknown column 'macz'"):
        ModelSummary(columns=["macz"])
    with pytest.raises(InputError, match=r"depth must be an integer >= 0.*, got -2"):
        ModelSummary(-2)
    assert ModelSummary(columns="macs").statistics is None


def test_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", None)
    monkeypatch.delitem(sys.modules, "modelsummary.integrations.lightning", raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'torch-modelsummary\[lightning\]'"):
        import modelsummary.integrations.lightning  # noqa: F401
