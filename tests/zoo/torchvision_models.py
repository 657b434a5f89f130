"""All models of torchvision, at small images."""

from __future__ import annotations

import torch

from tests.zoo.example import Example

LIBRARY = "torchvision"
# Hundreds of millions of parameters, and the same modules as their smaller sisters.
TOO_LARGE = {"vit_h_14", "vit_l_16", "vit_l_32", "regnet_y_128gf"}
SIZES = {"inception_v3": 128, "maxvit_t": 224, "quantized_inception_v3": 128}


def names() -> list[str]:
    """Names of all models."""
    from torchvision import models

    return [name for name in models.list_models() if name not in TOO_LARGE]


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
        return Example(model, (torch.randn(1 if large else 2, 3, 16, *((224, 224) if large else (64, 64))),))
    if module is models.optical_flow:
        return Example(model, (torch.randn(2, 3, 128, 128), torch.randn(2, 3, 128, 128)))
    if module is models.detection:
        return Example(model, ([torch.rand(3, 64, 64) for _ in range(2)],))
    size = SIZES.get(name, 64)
    return Example(model, (torch.randn(2, 3, size, size),))
