"""Whole models of torchvision against figures derived by hand or with plain PyTorch, and the model zoo."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modelsummary import Statistics
from tests.models import zeros_as_parameters
from tests.untouched import untouched
from tests.zoo.torchvision_models import KINDS, swept

models = pytest.importorskip("torchvision.models", exc_type=(ImportError, RuntimeError))

# Multiply-adds of one forward, parameters. For the first: sum over convolutions of outputs * weights per
# output, plus the linear layers; transformers add two products of batch * heads * tokens^2 * size a block.
WHOLE_MODELS = {
    "resnet18": ((16, 3, 224, 224), 29_025_173_504, 11_689_512),
    "resnet152": ((1, 3, 224, 224), 11_513_626_624, 60_192_808),
    "mobilenet_v2": ((100, 3, 224, 224), 30_077_427_200, 3_504_872),
    "vit_b_16": ((8, 3, 224, 224), 140_510_625_792, 86_567_656),
    "swin_t": ((1, 3, 224, 224), 4_490_566_656, 28_288_354),
    "mobilenet_v3_large": ((1, 3, 224, 224), 216_589_760, 5_483_032),
    "alexnet": ((1, 3, 224, 224), 714_188_480, 61_100_840),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_whole_models(name, mode):
    size, macs, params = WHOLE_MODELS[name]
    model = models.get_model(name, weights=None).train(mode == "train")
    stats = Statistics(model, size)
    assert stats.total_mult_adds == macs
    assert stats.total_params == params
    assert stats.total_param_bytes == 4 * params
    assert stats.uncounted_ops == {}


def test_googlenet_without_its_auxiliary_heads():
    model = models.googlenet(weights=None, aux_logits=False, init_weights=False).eval()
    stats = Statistics(model, (1, 3, 224, 224))
    assert stats.total_mult_adds == 1_498_376_192
    assert (stats.total_params, stats.total_param_bytes) == (6_624_904, 26_499_616)
    assert stats.total_buffer_bytes == 58_696


def test_googlenet_in_training_reports_all_outputs():
    stats = Statistics(models.googlenet(weights=None, init_weights=False), (2, 3, 224, 224))
    assert stats.root.output_size == ([2, 1000], [2, 1000], [2, 1000])


def test_resnet152_row_by_row():
    stats = Statistics(models.resnet152(weights=None), torch.rand(1, 3, 224, 224))
    assert len(stats) == 522
    assert max(row.depth for row in stats) == 4
    assert repr(stats.summary_list[4]) == "Sequential: 1-5"
    assert repr(stats.summary_list[-1]) == "Linear: 1-10"
    layer1 = stats["layer1"]
    assert layer1.num_params == 215_808
    assert layer1.macs == 667_942_912
    assert layer1.params_bytes / 2**20 == 0.8232421875
    assert stats.total_param_bytes / 2**20 == 229.61734008789062
    assert stats.total_input_bytes / 2**20 == 0.57421875
    leaves = [row for row in stats if row.is_leaf and row.num_params]
    assert sum(row.output_bytes for row in leaves) == 4 * 45_109_224


def test_depthwise_convolutions_of_mobilenet_v2():
    stats = Statistics(models.mobilenet_v2(weights=None), (100, 3, 224, 224))
    depthwise = [row for row in stats if (row.groups or 1) > 1]
    assert sum(row.macs for row in depthwise) == 2_071_641_600


def test_activations_of_leaf_layers():
    stats = Statistics(models.mobilenet_v2(weights=None), (1, 3, 224, 224))
    assert sum(row.executed and row.is_leaf for row in stats) == 141
    assert stats.total_output_bytes == 77_857_184
    assert Statistics(models.alexnet(weights=None), (1, 3, 224, 224)).total_output_bytes == 4_392_864


def test_attention_of_vit():
    stats = Statistics(models.vit_b_16(weights=None), (8, 3, 224, 224))
    layer = stats["encoder.layers.encoder_layer_0"]
    assert stats["encoder.layers.encoder_layer_0.self_attention"].macs == 4_195_135_488
    assert stats["encoder.layers.encoder_layer_0.mlp.0"].macs == 3_718_250_496
    assert stats["conv_proj"].macs == 924_844_032
    assert stats["heads.head"].macs == 6_144_000
    assert layer.macs == 4_195_135_488 + 2 * 3_718_250_496


def test_table_of_resnet18_by_kind():
    """DeepSpeed's aggregated profile: all depth-1 Sequentials, all depth-3 convolutions."""
    stats = Statistics(models.resnet18(weights=None), (16, 3, 224, 224))
    blocks = [row for row in stats if row.depth == 1 and row.class_name == "Sequential"]
    assert sum(row.num_params for row in blocks) == 11_166_976
    assert sum(row.macs for row in blocks) == 27_128_758_272
    convolutions = [row for row in stats if row.depth == 3 and row.class_name == "Conv2d"]
    assert sum(row.num_params for row in convolutions) == 10_985_472
    assert sum(row.macs for row in convolutions) == 26_820_476_928


# --------------------------------------------------------------------------------------------- the zoo

ZOO = models.list_models()
DETECTION = models.list_models(module=models.detection)
SEGMENTATION = models.list_models(module=models.segmentation)
VIDEO = models.list_models(module=models.video)


def build(name):
    options = {"weights_backbone": None} if name in DETECTION + SEGMENTATION else {}
    options |= {"init_weights": False} if name.endswith(("googlenet", "inception_v3")) else {}
    if name in DETECTION:  # runs for real
        options |= {} if name.startswith("ssd") else {"min_size": 96, "max_size": 128}
        options |= {"rpn_post_nms_top_n_test": 50, "box_detections_per_img": 4} if "rcnn" in name else {}
        return models.get_model(name, weights=None, **options).eval()
    with zeros_as_parameters():
        return models.get_model(name, weights=None, **options).eval()


def arguments(name):
    """Forward's positional arguments."""
    if name in DETECTION:
        return ([torch.rand(3, 300, 320)],)
    if name.startswith("raft"):
        return torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)
    if name in VIDEO:
        return (torch.rand(1, 3, 16, 224, 224),)
    return (torch.rand(2, 3, 299, 299) if name == "inception_v3" else torch.rand(2, 3, 224, 224),)


def flop_counter(model, inputs):
    """MACs by torch's FlopCounterMode. On meta, without the fused attention kernel, and without gradients,
    none of its blind spots (fast path, grouped backward, CPU attention) is met by these models."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    return counter.get_total_flops() // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", swept(ZOO))
def test_zoo(name):
    model, inputs = build(name), arguments(name)
    with untouched(model):
        stats = Statistics(model, inputs)
    assert stats.total_params == sum(p.numel() for p in model.parameters())
    assert stats.uncounted_ops == {}
    assert str(stats)
    if name in DETECTION:
        assert stats.execution == "real"
        torch.manual_seed(0)
        assert stats.total_mult_adds == flop_counter(model, inputs)
    else:
        assert stats.execution == "shape"
        expected = flop_counter(model.to("meta"), [each.to("meta") for each in inputs])
        assert stats.total_mult_adds == expected


def test_the_zoo_is_whole():
    def files(names):
        return {models.get_model_builder(name).__module__ for name in names}

    assert len(ZOO) >= 121
    assert files(ZOO) == files(KINDS)
