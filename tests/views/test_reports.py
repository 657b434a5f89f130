"""The reports in the formats of TIDSProfiler and of DeepSpeed's flops profiler."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelsummary import InputError, ModelStatistics, Statistics
from modelsummary.views.reports import flops_with_elementwise, top_classes


@pytest.fixture
def small():
    stats = Statistics(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.BatchNorm2d(2), nn.ReLU())), (1, 1, 4, 4))
    times = {"": (4.0, 1.0), "0": (3.0004, 0.75), "1": (1.0, 0.25), "1.0": (0.75, 0.1875), "1.1": (0.25, 0.0625)}
    for row in (stats.root, *stats):
        row.latency_ms, row.latency_share = times[row.fqn]
    return stats


def test_a_line_a_call(small, tmp_path):
    expected = """\
(model): Sequential, num_params 24, 4.0ms, 100.0% latency, input shape [1, 1, 4, 4], output shape [1, 2, 2, 2]
\t(0): Conv2d, num_params 20, 3.0ms, 75.0% latency, input shape [1, 1, 4, 4], output shape [1, 2, 2, 2]
\t(1): Sequential, num_params 4, 1.0ms, 25.0% latency, input shape [1, 2, 2, 2], output shape [1, 2, 2, 2]
\t\t(0): BatchNorm2d, num_params 4, 0.75ms, 18.75% latency, input shape [1, 2, 2, 2], output shape [1, 2, 2, 2]
\t\t(1): ReLU, num_params 0, 0.25ms, 6.25% latency, input shape [1, 2, 2, 2], output shape [1, 2, 2, 2]"""
    assert small.latency_report() == expected
    assert len(small.latency_report(depth=1, output_file=tmp_path / "lines.txt").splitlines()) == 3
    assert (tmp_path / "lines.txt").read_text() == small.latency_report(depth=1) + "\n"


def test_what_was_not_timed():
    stats = Statistics(nn.ReLU(), (1, 2))
    assert stats.latency_report() == "(model): ReLU, num_params 0, not timed, input shape [1, 2], output shape [1, 2]"
    assert "latency:" not in stats.profile_report()


def test_report(small, tmp_path):
    small.root.backward_latency_ms = 8.0
    expected = """\
Profile of Sequential, [1, 1, 4, 4], float32

params:                                          24
forward MACs:                                    72 MACs
forward FLOPs = 2 x MACs:                        144
forward FLOPs with element-wise work of modules: 168
forward latency:                                 4.00 ms
forward FLOP/s = FLOPs / latency:                36.00 kFLOP/s
backward FLOPs, estimated as 2 x forward:        288
backward latency:                                8.00 ms
backward FLOP/s:                                 36.00 kFLOP/s
forward and backward FLOP/s:                     36.00 kFLOP/s

Top 1 classes of modules in terms of params, MACs or forward latency, by depth:
depth 0:
    params           Sequential 24
    MACs             Sequential 72 MACs
    forward latency  Sequential 4.00 ms
depth 1:
    params           Conv2d 20
    MACs             Conv2d 72 MACs
    forward latency  Conv2d 3.00 ms"""
    assert small.profile_report(module_depth=1, detailed=False) == expected
    report = small.profile_report(top_modules=2, output_file=tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text() == report + "\n"
    assert "    params           Conv2d 20, Sequential 4\n" in report
    assert (
        report.endswith(
            """\
Sequential(
  24, 100.00% Params, 72 MACs, 100.00% MACs, 4.00 ms, 100.00% latency, 36.00 kFLOP/s
  (0): Conv2d(20, 83.33% Params, 72 MACs, 100.00% MACs, 3.00 ms, 75.00% latency, 47.99 kFLOP/s, 1, 2, \
kernel_size=(3, 3), stride=(1, 1))
  (1): Sequential(
    4, 16.67% Params, 0 MACs, 0.00% MACs, 1.00 ms, 25.00% latency, 0 FLOP/s
    (0): BatchNorm2d(4, 16.67% Params, 0 MACs, 0.00% MACs, 750.00 us, 18.75% latency, 0 FLOP/s, 2, eps=1e-05, \
momentum=0.1, affine=True, track_running_stats=True)
    (1): ReLU(0, 0.00% Params, 0 MACs, 0.00% MACs, 250.00 us, 6.25% latency, 0 FLOP/s, )
  )
)""".replace(", )", ")")
        )
        or "bias=True, track" in report
    )  # torch 2.15 prints one more argument of the norm


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_figures_of_deepspeed_for_resnet18(mode):
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18().train(mode == "train")
    root = Statistics(model, (16, 3, 224, 224)).root
    assert flops_with_elementwise(root) == 58_180_001_792
    by_depth = [{each.class_name: each for each in classes} for classes in top_classes(root)]
    assert by_depth[1]["Sequential"][1:3] == (11_166_976, 27_128_758_272)
    assert by_depth[3]["Conv2d"][1:3] == (10_985_472, 26_820_476_928)


def test_norms_are_weighted_as_deepspeed_does():
    # 8 elements: 2 each with affine parameters, 1 without; layer norms 5 and 4; 1 for an activation
    for layer, expected in [
        (nn.BatchNorm1d(4), 16),
        (nn.BatchNorm1d(4, affine=False), 8),
        (nn.LayerNorm(4), 40),
        (nn.LayerNorm(4, elementwise_affine=False), 32),
        (nn.GELU(), 8),
    ]:
        assert flops_with_elementwise(Statistics(nn.Sequential(layer), (2, 4)).root) == expected


def test_a_module_called_again_counts_its_parameters_once():
    layer = nn.Linear(4, 4)
    stats = Statistics(nn.Sequential(layer, layer), (2, 4))
    assert top_classes(stats.root)[1][0][1:3] == (20, 64)


def test_the_dtype_of_a_model_that_is_not_there_is_not_told():
    stats = Statistics(nn.Linear(4, 2).bfloat16(), torch.ones(3, 4, dtype=torch.bfloat16))
    loaded = ModelStatistics.from_json(stats.to_json())
    assert stats.profile_report().startswith("Profile of Linear, [3, 4], bfloat16\n")
    assert loaded.profile_report().startswith("Profile of Linear, [3, 4]\n")


def test_after_unpickling():
    import pickle

    stats = Statistics(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4))
    assert "(0): Linear(20, 100.00% Params" in pickle.loads(pickle.dumps(stats)).profile_report()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda stats: stats.latency_report(depth="a"), "depth must be an integer .* got 'a'"),
        (lambda stats: stats.roofline("H100", depth=-1), "depth must be an integer .* got -1"),
        (lambda stats: stats.profile_report(module_depth=1.5), r"module_depth must be an integer .* got 1\.5"),
        (lambda stats: stats.profile_report(top_modules=-1), "top_modules must be an integer >= 1, got -1"),
    ],
)
def test_bad_arguments(small, call, message):
    with pytest.raises(InputError, match=message):
        call(small)
