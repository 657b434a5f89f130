"""The catalogues of models: a module each, imported when it is needed."""

from __future__ import annotations

import os

__all__ = ["CATALOGUES", "REQUIRES", "SWEEPS_ALL"]

# Sweeps take all models of their library where MODELSUMMARY_ZOO is "all"; else one of each kind.
SWEEPS_ALL = os.environ.get("MODELSUMMARY_ZOO") == "all"

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
