"""Every architecture of transformers that can be built from its configuration class, made tiny by rule.

A configuration is shrunk field by field, by the field's name (``tiny_config``); inputs follow from the signature of the
forward (``transformers_inputs``). A directory of ``transformers.models`` is an architecture; of its configurations the
one whose head says most is taken, and of its heads the first in ``HEADS``. Decoders appear twice: without a cache, as
they are trained, and with ``+cache``, where the keys and values of earlier tokens are among the inputs and the result.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
from torch import nn

from tests.zoo.example import CannotBuild, Example

LIBRARY = "transformers"
HEADS = (
    "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM",
    "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION", "SEMANTIC_SEGMENTATION",
    "ZERO_SHOT_OBJECT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "MASK_GENERATION", "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "DEPTH_ESTIMATION", "CTC", "AUDIO_CLASSIFICATION", "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM", "TIME_SERIES_PREDICTION", "DOCUMENT_QUESTION_ANSWERING", "IMAGE_TO_IMAGE",
    "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "POSE_ESTIMATION", "SEQUENCE_CLASSIFICATION", "PRETRAINING", "",
)  # fmt: skip
CACHE = "+cache"
LARGEST = 100_000_000  # parameters of what is called tiny


def _mapping(head: str) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES"))


def architectures() -> dict[str, tuple[str, list[str]]]:
    """Name of a directory of ``transformers.models`` -> model type, and names of classes, the best first."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    found: dict[str, tuple[str, list[str]]] = {}
    for head in HEADS:
        for model_type, classes in _mapping(head).items():
            folder = model_type_to_module_name(model_type)
            name = classes if isinstance(classes, str) else classes[0]
            known = found.setdefault(folder, (model_type, []))
            if known[0] == model_type and name not in known[1]:
                known[1].append(name)
    return dict(sorted(found.items()))


def names() -> list[str]:
    """Architectures, and decoders again with a cache."""
    causal = set(_mapping("CAUSAL_LM").values())
    found = []
    for folder, (_, classes) in architectures().items():
        found.append(folder)
        if classes[0] in causal:
            found.append(f"{folder}{CACHE}")
    return found


def warm_up() -> None:
    """Import what most architectures share."""
    make("llama")
    make("vit")


def make(name: str) -> Example:
    """Build an architecture, tiny, and inputs that its forward takes."""
    import transformers

    from tests.zoo.tiny_config import ATTEMPTS, shrunk
    from tests.zoo.transformers_inputs import inputs

    folder = name.removesuffix(CACHE)
    model_type, classes = architectures()[folder]
    first: Exception | None = None
    for class_name, natural, attempt in itertools.product(classes[:2], (True, False), ATTEMPTS):
        try:
            config = shrunk(transformers.AutoConfig.for_model(model_type), attempt)
            for part in parts(config):
                if hasattr(part, "use_cache"):
                    part.use_cache = False
            model = _built(getattr(transformers, class_name), config)
            given = inputs(model, config, natural=natural)
            return Example(model, (), with_cache(model, given) if name.endswith(CACHE) else given)
        except Exception as error:
            first = first or error
    raise CannotBuild(" ".join(f"{type(first).__name__}: {first}".split()))


def _built(model_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise CannotBuild(f"{size:,} parameters although its configuration was shrunk")
    torch.manual_seed(0)
    return model_class(config).eval()


def parts(config: Any) -> list[Any]:
    """A configuration and those within it."""
    inner = [getattr(config, key, None) for key in getattr(config, "sub_configs", {})]
    return [config, *(part for each in inner if each is not None for part in parts(each))]


def with_cache(model: nn.Module, args: dict[str, Any]) -> dict[str, Any]:
    """Inputs that go on after a first call: the cache that it gave, and two more tokens."""
    with torch.no_grad():
        out = model(**args, use_cache=True)
    name = next((name for name in ("past_key_values", "cache", "cache_params") if out.get(name) is not None), None)
    if name is None:
        raise CannotBuild("its result holds no cache")
    return {**args, "input_ids": args["input_ids"][:, :2].contiguous(), name: out[name], "use_cache": True}
