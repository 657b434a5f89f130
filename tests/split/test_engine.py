"""The pipeline engine: in one process where that is enough, else under torchrun on gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from modelsummary import InputError, SplitError, Statistics
from modelsummary.capture.materialize import checkpoint_values, materialize
from modelsummary.split.engine import rank_of
from tests.idioms import Bert, Gpt2, ids, rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_train.py"
needs_engine = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="the engine needs torch 2.11"
)


needs_tolerant_engine = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="the engine of torch 2.11 compares strides, and counts integers as results"
)


@pytest.fixture
def alone(tmp_path):
    """Yield with a process group of this process only."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _torchrun(n_ranks, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(n_ranks),
        str(EXAMPLE),
        *arguments,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)


@needs_engine
@pytest.mark.parametrize(
    ("n_ranks", "model", "schedule"),
    [
        (2, "decoder", "1f1b"),
        pytest.param(4, "decoder", "zbv", marks=pytest.mark.slow),
        pytest.param(4, "resnet18", "interleaved1f1b", marks=pytest.mark.slow),
    ],
)
def test_processes_train_like_one(n_ranks, model, schedule):
    if model == "resnet18":
        pytest.importorskip("torchvision", exc_type=Exception)
    result = _torchrun(n_ranks, "--model", model, "--schedule", schedule)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("largest difference of a weight") == n_ranks


@needs_engine
@pytest.mark.slow
def test_when_a_rank_dies_the_others_end():
    result = _torchrun(2, "--dies", "1")
    assert result.returncode != 0
    assert "largest difference" not in result.stdout


def _loss(out, target):
    return ((out - target) ** 2).mean()


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@needs_engine
def test_a_step_is_that_of_the_whole_batch(alone):
    model = _model()
    x, y = rows(12, 4), rows(12, 2)
    _loss(model(x), y).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    stages = Statistics(model, rows(3, 4)).split(1)
    pipeline = stages.schedule("1f1b", 4, _loss, device="cpu")
    losses = []
    out = pipeline.step(x, target=y, losses=losses)
    assert torch.allclose(out, model(x))
    assert torch.stack(losses).mean().item() == pytest.approx(_loss(model(x), y).item())
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    pipeline.step(x, target=y)  # gradients are added, not scaled again
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)


@needs_tolerant_engine
def test_a_batch_in_another_dimension_and_inputs_without_one(alone):
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8), nn.Linear(8, 2)

        def forward(self, x, scale, power=1):
            return {"out": self.head(self.lstm(x)[0]) * scale**power, "scale": scale, "power": power}

    model = Sequence()
    x, scale = rows(5, 6, 4), torch.tensor([1.0, 2.0])
    stages = Statistics(model, (x[:, :2], scale), batch_dim=1).split(1)
    pipeline = stages.schedule("gpipe", 3, device="cpu")
    out = pipeline.step(x, scale)
    assert torch.allclose(out["out"], model(x, scale)["out"])
    assert torch.equal(out["scale"], scale)
    assert out["power"] == 1


@needs_tolerant_engine
def test_keyword_arguments_and_other_sizes_of_micro_batches(alone):
    model = Bert().eval()
    stages = Statistics(model, {"input_ids": ids(2)}).split(1)
    pipeline = stages.schedule("gpipe", 2, lambda out, target: (out.pooled - target).abs().mean(), microbatch_size=3)
    losses = []
    pipeline.step(input_ids=ids(6), target=torch.zeros(6, 16), losses=losses)
    assert torch.stack(losses).mean().item() == pytest.approx(model(ids(6)).pooled.abs().mean().item())


@needs_engine
def test_uneven_micro_batches_are_refused_with_the_numbers(alone):
    stages = Statistics(_model(), rows(3, 4)).split(1)
    pipeline = stages.schedule("1f1b", 4, _loss, device="cpu")
    with pytest.raises(SplitError, match=r"batch of 10 cannot be dealt into 4 equal micro-batches.*pass 8 or 12"):
        pipeline.step(rows(10, 4), target=rows(10, 2))
    with pytest.raises(SplitError, match=r"4 micro-batches of 2, but the pipeline was made for 3; pass 12.*_size=2"):
        pipeline.step(rows(8, 4), target=rows(8, 2))


@needs_engine
def test_stages_and_ranks_must_fit(alone):
    stages = Statistics(_model(), rows(3, 4)).split(2)
    with pytest.raises(SplitError, match="one stage per rank, but there are 2 stages and 1 ranks; split into 1"):
        stages.schedule("1f1b", 4, _loss)
    with pytest.raises(SplitError, match="rank=1 of 2 stages, but this process is rank 0 of 1"):
        stages.pipeline_stage(1, "cpu")
    with pytest.raises(InputError, match=r"schedule must be one of 'gpipe', .* got 'fast'"):
        stages.schedule("fast", 4, _loss)
    with pytest.raises(InputError, match="n_microbatches must be an integer >= 1, got 0"):
        stages.schedule("1f1b", 0, _loss)
    with pytest.raises(InputError, match="microbatch_size must be an integer >= 1, got 0"):
        Statistics(_model(), rows(3, 4)).split(1).schedule("1f1b", 1, _loss, microbatch_size=0)


@needs_engine
def test_zero_bubble_carries_one_tensor(alone):
    stages = Statistics(Gpt2().eval(), ids()).split(2, boundaries=["h.1.mlp.0"])
    with pytest.raises(SplitError, match=r"carries one tensor between two stages, but 2 cross.*single_tensor_cuts"):
        stages.schedule("zb", 2, _loss)


@needs_engine
def test_a_stage_of_the_engine(alone):
    stages = Statistics(_model(), rows(3, 4)).split(1)
    stage = stages.pipeline_stage(0, "cpu")
    assert stage.submod is stages[0]
    assert stage.is_first
    assert stage.is_last


def test_the_engine_needs_a_process_group():
    with pytest.raises(SplitError, match="no process group"):
        Statistics(_model(), rows(3, 4)).split(2).schedule("1f1b", 2, _loss)


def test_ranks_of_stages():
    assert [rank_of(stage, 4, in_v=False) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [rank_of(stage, 4, in_v=True) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


def test_a_model_on_meta_is_made_from_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    real = Gpt2().eval()
    torch.save({**real.state_dict(), **dict(real.named_buffers())}, tmp_path / "model.pt")
    with torch.device("meta"):
        model = Gpt2().eval()
    stages = Statistics(model, ids().to("meta")).split(2)
    materialize(stages[:], torch.device("cpu"), checkpoint_values(stages[:], tmp_path / "model.pt", None))
    assert torch.equal(stages(ids()), real(ids()))
    assert stages[0].get_parameter("wte.weight") is stages[1].get_parameter("lm_head.weight")
    assert len(stages.shared_parameters) == 1


def test_a_stage_alone_is_made_by_its_init():
    with torch.device("meta"):
        model = _model()
    stages = Statistics(model, rows(3, 4).to("meta")).split(2)

    def init(module):
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    materialize([stages[1]], torch.device("cpu"), init=init)
    assert all((parameter == 1).all() for parameter in stages[1].parameters())
    assert all(parameter.is_meta for parameter in stages[0].parameters())


def test_nothing_stays_without_values():
    with torch.device("meta"):
        model = Gpt2()
    stages = Statistics(model, ids().to("meta")).split(2)
    with pytest.raises(InputError, match=r"'wte\.weight' is on meta and has no values; pass init= or checkpoint="):
        checkpoint_values([stages[0]], None, None)
    values = {"wte.weight": torch.zeros(3, 3)}
    with pytest.raises(InputError, match=r"shape \[50, 16\], but \[3, 3\] in the checkpoint"):
        checkpoint_values([stages[1], stages[0]], values, None)
