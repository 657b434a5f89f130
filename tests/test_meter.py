"""The meters of MFU and tokens per second, with a clock that the tests turn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import DeviceSpec, InputError, Statistics
from modelsummary.integrations import meter as meters
from modelsummary.integrations.meter import MFUMeter, tokens_in

DEVICE = DeviceSpec("made up", {torch.bfloat16: 1e12}, 1e11)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now[0])
    return now


def test_readings(clock):
    shown = []
    meter = MFUMeter(1e6, DEVICE, n_devices=2, every=2, show=shown.append)
    for tokens in (999, 100, 300, 100, 100):  # those of the first step were processed before the clock started
        reading = meter.step(tokens)
        clock[0] += 0.25
    first, second = shown
    assert (first.step, first.seconds, first.tokens_per_second) == (3, 0.5, 800)
    assert (second.step, second.tokens_per_second) == (5, 400)
    assert second is reading
    # 800 tokens/s of 10^6 FLOPs each, on two devices of 10^12 FLOP/s
    assert first.mfu == 800 * 1e6 / 2e12
    assert str(first) == "step 3: 800 tokens/s, 800.00 MFLOP/s, MFU 0.0%"
    assert meter.overall().tokens_per_second == 600 / 1.25


def test_flops_of_a_model(clock):
    found = Statistics(nn.Linear(4, 8), (2, 4)).flops_per_token()
    meter = MFUMeter(found, DEVICE, torch.bfloat16, every=1, show=None)
    meter.step(8)
    clock[0] = 2.0
    reading = meter.step(8)
    # per sample 32 multiply-adds forward, and 32 for the gradient of the weight
    assert (reading.flops_per_second, reading.unit) == (4 * 2 * 64, "sample")


def test_tokens_of_a_batch():
    ids = torch.zeros(4, 16).long()
    assert tokens_in((torch.zeros(4, 3, 8, 8), ids)) == 64
    assert tokens_in([torch.zeros(4, 3, 8, 8), torch.zeros(4).long()], "sample") == 4
    assert tokens_in({}) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, DEVICE), r"flops_per_token must be a number > 0 or stats.flops_per_token\(\), got 0"),
        ((1e6, "A100"), "pass dtype=, one of .*torch.bfloat16"),
        ((1e6, DEVICE, torch.float64), "the peak of made up with torch.float64 is not known"),
        ((1e6, DEVICE, None, 0), "n_devices must be an integer >= 1, got 0"),
        ((1e6, DEVICE, None, 1, 0), "every must be an integer >= 1, got 0"),
    ],
)
def test_errors(arguments, said):
    with pytest.raises(InputError, match=said):
        MFUMeter(*arguments)
    with pytest.raises(InputError, match="a reading needs two steps, 0 counted"):
        MFUMeter(1e6, DEVICE).overall()


@pytest.mark.filterwarnings("ignore")  # of Lightning: workers, steps to log
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from modelsummary.integrations.lightning import MFUMonitor
    from tests.test_lightning import module

    monitor = MFUMonitor(1e3, lambda batch: batch.numel(), DEVICE, every=1)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", devices=1, callbacks=[monitor], default_root_dir=tmp_path, **quiet
    )
    trainer.fit(module(lightning), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=4))
    assert [reading.step for reading in monitor.readings] == [2, 3]
    assert all(reading.tokens_per_second * reading.seconds == pytest.approx(16) for reading in monitor.readings)


@pytest.mark.slow  # importing the trainer takes seconds
@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate
@pytest.mark.parametrize("tokens", [24, None])
def test_trainer_of_transformers(tokens, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from modelsummary.integrations.transformers import MFUCallback

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0)
    rows = [{"input_ids": torch.arange(12) % 16, "labels": torch.arange(12) % 16} for _ in range(6)]
    counts = "all" if tokens is None else "no"
    arguments = transformers.TrainingArguments(
        tmp_path, per_device_train_batch_size=2, max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", include_num_input_tokens_seen=counts,
    )  # fmt: skip
    shown = []
    callback = MFUCallback(1e3, tokens, DEVICE, every=1, show=shown.append)
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=[callback]
    )
    trainer.train()
    assert [reading.step for reading in shown] == [2, 3]
    assert all(reading.tokens_per_second * reading.seconds == pytest.approx(24) for reading in callback.readings)
    if tokens is None:
        arguments.include_num_input_tokens_seen = "no"
        with pytest.raises(InputError, match="pass tokens_per_step="):
            callback.on_train_begin(arguments, trainer.state, trainer.control)


def test_tokens_in_another_unit():
    with pytest.raises(InputError, match="unit must be one of 'token', 'sample', got 'tokens'; did you mean 'token'"):
        tokens_in(torch.zeros(2, 3), "tokens")
