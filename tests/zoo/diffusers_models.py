"""The denoisers and autoencoders of diffusers, made small by rule from the defaults of their constructors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.zoo.example import CannotBuild, Example

LIBRARY = "diffusers"
BATCH, TEXT = 2, 8
LARGEST = 100_000_000
NO_MODELS = re.compile(r"Multi.*ControlNetModel|MultiControlNet|Adapter$|^Transformer2DModel$|MotionAdapter")

# The first pattern that the name of a constructor's argument matches decides; widths stay in the second attempt.
RULES: tuple[tuple[str, int], ...] = (
    (r"layers_per_block|num_res_blocks|num_resnet|res_block", 1),
    (r"num_.*layers$|^depth$|num_blocks|n_layers|num_double|num_single|_layers$", 2),
    (r"experts?_per|top_k|num_activated", 2),
    (r"num_.*experts|num_routed", 4),
    (r"num_(key_value|kv)_heads|n_kv_heads|num_kv", 1),
    (r"num_attention_heads|num_cross_attention_heads|num_heads|n_heads|audio_num_attention_heads", 2),
    (r"sample_size$|sample_height|sample_width", 16),
    (r"sample_frames", 9),
    (r"vocab_size", 128),
)
WIDTHS: tuple[tuple[str, int], ...] = (
    (r"joint_attention_dim|cross_attention_dim|caption_channels|text_dim|text_embed|pooled_projection_dim|caption_dim|"
     r"context_dim|llm_dim|projection_class|encoder_hid_dim", 64),
    (r"ffn_dim|ff_inner|intermediate_size", 128),
    (r"^base_dim$|^dim$", 32),
    (r"^freq_dim$|frequency_embedding", 64),
)  # fmt: skip


def names() -> list[str]:
    """Names of the classes: of the UNets, transformers, autoencoders and control nets."""
    import diffusers
    from diffusers.models import autoencoders, controlnets, transformers, unets

    found = []
    for part in (unets, transformers, autoencoders, controlnets):
        for name, kind in vars(part).items():
            if inspect.isclass(kind) and issubclass(kind, diffusers.ModelMixin) and not NO_MODELS.search(name):
                found.append(name)
    return list(dict.fromkeys(found))


def make(name: str) -> Example:
    """Build a model and find inputs that it takes."""
    from diffusers.models import autoencoders, controlnets, transformers, unets

    kind = next(getattr(part, name) for part in (unets, transformers, autoencoders, controlnets) if hasattr(part, name))
    first: Exception | None = None
    for widths in (True, False):
        try:
            options = _options(kind, widths)
            with torch.device("meta"):
                size = sum(each.numel() for each in kind(**options).parameters())
            if size > LARGEST:
                raise CannotBuild(f"{size:,} parameters although its arguments were shrunk")
            torch.manual_seed(0)
            model = kind(**options).eval()
        except Exception as error:
            first = first or error
            continue
        for given in _inputs(model, options):
            try:
                with torch.no_grad():
                    model(**given)
                return Example(model, (), given)
            except Exception as error:
                first = first or error
    raise CannotBuild(" ".join(f"{type(first).__name__}: {first}".split()))


def _options(kind: Any, widths: bool) -> dict[str, Any]:
    options = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        value = None if parameter.default is parameter.empty else parameter.default
        if name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        rules = (*RULES, *WIDTHS) if widths else RULES
        rule = next((new for pattern, new in rules if re.search(pattern, name)), None)
        if rule is not None and type(value) is int:
            options[name] = min(value, rule)
        elif isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
            new = _of_list(name, list(value), widths)
            if new != list(value):
                options[name] = type(value)(new)
        elif parameter.default is parameter.empty:
            raise CannotBuild(f"its argument {name!r} has no default")
    return options


def _of_list(name: str, value: list[int], widths: bool) -> list[int]:
    if re.search(r"layers|depth|blocks", name) and "channels" not in name:
        return [min(each, 2) for each in value]
    if widths and re.search(r"block_out_channels|channels|dims$", name) and min(value) >= 64 and "rope" not in name:
        return [each * 32 // min(value) // 32 * 32 or 32 for each in value]
    return value


def _inputs(model: nn.Module, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a forward with these names may take, the most likely first."""
    config = model.config
    signature = inspect.signature(model.forward).parameters
    channels = config.get("in_channels") or config.get("num_channels") or config.get("encoder_in_channels") or 3
    size = config.get("sample_size") or 16
    size = size if isinstance(size, int) else size[0]
    size = min(max(size, 16), 32)
    main = next(
        (n for n in ("hidden_states", "sample", "x", "input_ids", "z") if n in signature), next(iter(signature))
    )
    picture = (channels, size, size)
    shapes = (
        (BATCH, *picture), (BATCH, 16, channels), (BATCH, channels, 5, size, size), (BATCH, 3, *picture),
        (BATCH, channels, 64, 64), (BATCH, channels, 9, 64, 64), (BATCH, channels, 64), (BATCH, 1, *picture),
        (BATCH, channels, 2048), (BATCH, channels, 1, size, size),
    )  # fmt: skip
    for shape in shapes:
        for times in (torch.full((BATCH,), 3), torch.tensor(3), torch.full((BATCH,), 0.3)):
            for text in ("text", "none"):
                given: dict[str, Any] = {main: torch.randn(shape)}
                for name, parameter in signature.items():
                    needed = parameter.default is parameter.empty
                    value = _named(name, config, shape, times)
                    wanted = (
                        needed or name in ("encoder_hidden_states", "timestep", "pooled_projections") or text == "text"
                    )
                    if name != main and value is not None and wanted:
                        given[name] = value
                yield given
            if "timestep" not in signature and "timesteps" not in signature:
                break


_TEXT_WIDTHS = ("joint_attention_dim", "cross_attention_dim", "caption_channels", "text_dim", "text_embed_dim",
                "caption_dim", "cap_feat_dim", "context_in_dim", "context_dim", "encoder_hid_dim")  # fmt: skip


def _named(name: str, config: Any, shape: tuple[int, ...], times: torch.Tensor) -> Any:
    """An argument by its name; None if no rule knows it."""
    text = next((config.get(key) for key in _TEXT_WIDTHS if isinstance(config.get(key), int)), 64)
    mask, sizes = torch.ones(BATCH, TEXT, dtype=torch.bool), torch.tensor([[64, 64]] * BATCH)
    known: dict[str, Any] = {
        "timestep": times, "timesteps": times, "guidance": torch.ones(BATCH), "r": torch.rand(BATCH),
        "timestep_ratio": torch.full((BATCH,), 0.3), "fps": torch.full((BATCH,), 8),
        "encoder_hidden_states": torch.randn(BATCH, TEXT, text), "conditioning": torch.randn(BATCH, 8, 64),
        "pooled_projections": torch.randn(BATCH, config.get("pooled_projection_dim") or 64),
        "proj_embedding": torch.randn(BATCH, config.get("embedding_dim") or 64),
        "clip_text_pooled": torch.randn(BATCH, 1, 64), "class_labels": torch.zeros(BATCH, dtype=torch.long),
        "img_ids": torch.zeros(shape[1], 3), "txt_ids": torch.zeros(TEXT, 3), "img_shapes": [[(1, 4, 4)]] * BATCH,
        "encoder_attention_mask": mask, "encoder_hidden_states_mask": mask, "attention_mask": mask,
        "padding_mask": torch.zeros(1, 1, 64, 64), "txt_seq_lens": [TEXT] * BATCH,
        "original_size": sizes, "target_size": sizes, "crop_coords": torch.zeros(BATCH, 2, dtype=torch.long),
        "num_frames": shape[2] if len(shape) == 5 else 2, "height": shape[-2], "width": shape[-1],
        "added_time_ids": torch.zeros(BATCH, 3), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "controlnet_cond": torch.randn(BATCH, 3, 8 * shape[-2], 8 * shape[-1]),
        "image_latents": torch.randn(BATCH, 4, *shape[2:]),
    }  # fmt: skip
    return known.get(name)
