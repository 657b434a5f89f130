"""All models of torchvision, at small images."""

from __future__ import annotations

import torch

from tests.zoo.catalogues import SWEEPS_ALL
from tests.zoo.example import Example

LIBRARY = "torchvision"
# Hundreds of millions of parameters, and the same modules as their smaller sisters.
TOO_LARGE = {"vit_h_14", "vit_l_16", "vit_l_32", "regnet_y_128gf"}
# Each file of torchvision, and each kind of layer in it, once: the smallest model that has it.
KINDS = (
    "alexnet", "convnext_tiny", "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "densenet121", "efficientnet_b0",
    "efficientnet_v2_s", "fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_resnet50_fpn_v2", "fcn_resnet50",
    "fcos_resnet50_fpn", "googlenet", "inception_v3", "keypointrcnn_resnet50_fpn", "lraspp_mobilenet_v3_large",
    "maskrcnn_resnet50_fpn", "maxvit_t", "mc3_18", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "mvit_v1_b",
    "mvit_v2_s", "quantized_googlenet", "quantized_inception_v3", "quantized_mobilenet_v2",
    "quantized_mobilenet_v3_large", "quantized_resnet18", "quantized_shufflenet_v2_x0_5", "r2plus1d_18", "r3d_18",
    "raft_large", "raft_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d",
    "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", "s3d", "shufflenet_v2_x0_5", "squeezenet1_0",
    "squeezenet1_1", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large", "swin3d_t", "swin_t", "swin_v2_t", "vgg11",
    "vgg11_bn", "vit_b_32",
)  # fmt: skip
SIZES = {"inception_v3": 128, "maxvit_t": 224, "quantized_inception_v3": 128}


def names() -> list[str]:
    """Names of all models."""
    from torchvision import models

    return [name for name in models.list_models() if name not in TOO_LARGE]


def swept(names: list[str]) -> list[str]:
    """Return the names that a sweep takes: one of each kind, or all."""
    return names if SWEEPS_ALL else [name for name in names if name in KINDS]


def make(name: str) -> Example:
    """Build a model with random weights and its inputs."""
    from torchvision import models

    module = next(
        part
        for part in (
            models,
            models.segmentation,
            models.detection,
            models.video,
            models.optical_flow,
            models.quantization,
        )
        if name in models.list_models(module=part)
    )
    options: dict[str, object] = {"weights": None}
    if module in (models.segmentation, models.detection):
        options["weights_backbone"] = None
    if module is models.detection and not name.startswith("ssd"):
        options |= {"min_size": 64, "max_size": 64}
    if module is models.quantization:
        options["quantize"] = True
    if name.startswith("vit"):
        options["image_size"] = 64
    if "googlenet" in name or "inception" in name:
        options["init_weights"] = False
    model = models.get_model(name, **options).eval()
    if module is models.video:
        large = name.startswith(("mvit", "swin3d", "s3d"))
        return Example(model, (torch.randn(*((1, 3, 16, 224, 224) if large else (2, 3, 8, 32, 32))),))
    if module is models.optical_flow:
        return Example(model, (torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)))
    if module is models.detection:
        return Example(model, ([torch.rand(3, 64, 64) for _ in range(2)],))
    size = SIZES.get(name, 64)
    return Example(model, (torch.randn(2, 3, size, size),))
