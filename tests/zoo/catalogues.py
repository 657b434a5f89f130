"""The catalogues of models: a module each, imported when it is needed."""

from __future__ import annotations

__all__ = ["CATALOGUES", "REQUIRES"]

CATALOGUES = {
    "torchvision": "tests.zoo.torchvision_models",
    "timm": "tests.zoo.timm_models",
    "transformers": "tests.zoo.transformers_models",
    "diffusers": "tests.zoo.diffusers_models",
    "torch_geometric": "tests.zoo.geometric_models",
    "others": "tests.zoo.other_models",
}
# What must be installed to build a library's models.
REQUIRES = {
    **{library: (library,) for library in CATALOGUES if library != "others"},
    "others": ("segmentation_models_pytorch", "peft", "torchao", "x_transformers", "open_clip", "transformers"),
}
