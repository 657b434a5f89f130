"""Inputs for a model of transformers, by the names in the signature of its forward."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["inputs"]

BATCH, LENGTH = 2, 16


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the configuration or one of its parts has."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]
    for name in names:
        for part in parts:
            value = getattr(part, name, None) if part is not None else None
            if value is not None:
                return value
    return default


def _image(config: Any) -> tuple[int, int]:
    vision = next((p for p in (getattr(config, "vision_config", None), config) if p is not None and hasattr(p, "image_size")), config)
    size = getattr(vision, "image_size", None) or _first(config, "image_size", "img_size", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    if isinstance(size, (list, tuple)):
        return int(size[0]), int(size[-1])
    return int(size), int(size)


NATURAL = ("pixel_values", "input_features", "input_values", "pixel_values_videos", "audio_values")


def inputs(model: nn.Module, config: Any, *, natural: bool) -> dict[str, Any]:
    """Find arguments that the forward takes: the likely ones, then what its errors ask for.

    Args:
        natural: a model that takes images or sounds is given some; else text will do.
    """
    first: Exception | None = None
    names = inspect.signature(model.forward).parameters
    needed = natural and any(name in names for name in NATURAL)
    for candidate in _candidates(model, config):
        if needed and not any(name in candidate for name in NATURAL):
            continue
        for _ in range(3):
            try:
                with torch.no_grad():
                    model(**candidate)
                return candidate
            except Exception as error:
                mended = _mended(candidate, str(error), model, config)
                if mended is None:
                    first = first or error
                    break
                candidate = mended
    assert first is not None
    raise first


def _mended(candidate: dict[str, Any], error: str, model: nn.Module, config: Any) -> dict[str, Any] | None:
    """Put as many tokens for images or sounds into the text as there are features."""
    names = inspect.signature(model.forward).parameters
    if "mm_token_type_ids" in error and "mm_token_type_ids" in names and "mm_token_type_ids" not in candidate:
        return {**candidate, "mm_token_type_ids": torch.zeros_like(candidate["input_ids"])}
    numbers = re.search(r"tokens:?\s*:?(\d+).*?features:?\s*(?:torch\.Size\(\[)?(\d+)", error, re.IGNORECASE)
    if numbers is None or "input_ids" not in candidate:
        return None
    kind = "video" if "video" in error.lower() else "audio" if "audio" in error.lower() else "image"
    token = _first(config, f"{kind}_token_id", f"{kind}_token_index", "image_token_id", "image_token_index", "media_token_id")
    wanted = int(numbers[2])
    if token is None or wanted % BATCH or wanted // BATCH > 600:
        return None
    each = wanted // BATCH
    ids = torch.full((BATCH, each + LENGTH), 5)
    ids[:, LENGTH // 2 :] = torch.randint(3, 80, (BATCH, each + LENGTH - LENGTH // 2))
    ids[:, 2 : 2 + each] = token
    if bool((ids == candidate["input_ids"]).all()) if ids.shape == candidate["input_ids"].shape else False:
        return None
    mended = {**candidate, "input_ids": ids}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        mended["mm_token_type_ids"] = (ids == token).long()
    return mended


def _candidates(model: nn.Module, config: Any) -> Any:
    names = list(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    ids = torch.randint(3, 80, (BATCH, LENGTH))
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if isinstance(channels, int) else 3
    height, width = _image(config)
    base: dict[str, Any] = {}
    if "input_ids" in names:
        base["input_ids"] = ids
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        base["decoder_input_ids"] = ids[:, :8].clone()
    if "qformer_input_ids" in names:
        base["qformer_input_ids"] = ids.clone()
    if "bbox" in names:
        base["bbox"] = torch.randint(0, 20, (BATCH, LENGTH, 4)).cumsum(-1)
    more = list(_main_inputs(names, main, config, channels, height, width))
    for each in more:
        yield {**base, **each}
        if "input_ids" in base and "input_ids" not in each:
            without = {key: value for key, value in {**base, **each}.items() if key != "input_ids"}
            if main != "input_ids":
                yield without
    yield base
    if "decoder_input_ids" not in base and "decoder_input_ids" in names:
        for each in [*more, {}]:
            yield {**base, **each, "decoder_input_ids": ids[:, :8].clone()}
    if "inputs_embeds" in names and "input_ids" not in names:
        yield {"inputs_embeds": torch.randn(BATCH, LENGTH, _first(config, "hidden_size", "d_model", default=64))}
    if "labels" in names:
        yield {**base, "labels": ids.clone()}


def _main_inputs(names: list[str], main: str, config: Any, channels: int, height: int, width: int) -> Any:
    if "image_grid_thw" in names or "grid_thw" in names:
        patch = _first(config, "patch_size", default=16)
        temporal = _first(config, "temporal_patch_size", default=1)
        grid = torch.tensor([[1, 4, 4]] * BATCH)
        pixels = torch.randn(BATCH * 16, channels * temporal * patch * patch)
        yield {"pixel_values": pixels, "image_grid_thw" if "image_grid_thw" in names else "grid_thw": grid}
    if "pixel_values" in names:
        still = torch.randn(BATCH, channels, height, width)
        extra: dict[str, Any] = {}
        if "image_sizes" in names:
            extra["image_sizes"] = torch.tensor([[height, width]] * BATCH)
        yield {"pixel_values": still, **extra}
        if "pixel_attention_mask" in names:
            mask = torch.ones(BATCH, 1, height, width, dtype=torch.bool)
            yield {"pixel_values": still[:, None], "pixel_attention_mask": mask}
        if "image_attention_mask" in names:
            yield {"pixel_values": still[:, None], "image_attention_mask": torch.ones(BATCH, LENGTH, 1)}
        if extra:
            yield {"pixel_values": still}
            yield {"pixel_values": still[:, None].repeat(1, 3, 1, 1, 1), **extra}
        frames = _first(config, "num_frames", "frames", "frames_per_clip", default=4)
        frames = frames if isinstance(frames, int) else 4
        yield {"pixel_values": torch.randn(BATCH, frames, channels, height, width)}
        yield {"pixel_values": torch.randn(BATCH, 2, channels, height, width)}
        yield {"pixel_values": torch.randn(BATCH, 1, channels, height, width)}
        for size in (32, 128, 224, 256):
            yield {"pixel_values": torch.randn(BATCH, channels, size, size)}
        patch = _first(config, "patch_size", default=16)
        if isinstance(patch, int):
            yield {"pixel_values": torch.randn(BATCH, 16, channels * patch * patch)}
            if "spatial_shapes" in names:
                flat = {"pixel_values": torch.randn(BATCH, 16, channels * patch * patch)}
                shapes = torch.tensor([[4, 4]] * BATCH)
                yield {**flat, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long)}
            if "pixel_position_ids" in names or "image_position_ids" in names:
                key = "pixel_position_ids" if "pixel_position_ids" in names else "image_position_ids"
                grid = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).reshape(1, 36, 2)
                yield {"pixel_values": torch.rand(BATCH, 36, channels * patch * patch), key: grid.repeat(BATCH, 1, 1)}
    if "pixel_values_videos" in names:
        frames = _first(config, "frames_per_clip", "num_frames", default=4)
        yield {"pixel_values_videos": torch.randn(BATCH, min(frames, 8), channels, height, width)}
    if "input_features" in names:
        mels = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "feature_projection_input_dim", default=80)
        length = 2 * _first(config, "max_source_positions", default=32)
        for shape in ((BATCH, mels, length), (BATCH, length, mels), (BATCH, mels, 2 * length), (BATCH, 96, mels), (BATCH, 3000, mels), (BATCH, mels, 3000), (BATCH, 1, 3001, mels)):
            mask = {}
            if "input_features_mask" in names:
                mask["input_features_mask"] = torch.ones(BATCH, shape[-1] if shape[1] == mels else shape[1], dtype=torch.bool)
            yield {"input_features": torch.randn(*shape), **mask}
            if mask:
                yield {"input_features": torch.randn(*shape)}
            if "feature_attention_mask" in names:
                yield {"input_features": torch.randn(*shape), "feature_attention_mask": torch.ones(BATCH, shape[-1], dtype=torch.long)}
    if "input_values" in names:
        mels = _first(config, "num_mel_bins", default=80)
        yield {"input_values": torch.randn(BATCH, 4000)}
        yield {"input_values": torch.randn(BATCH, 1, 4000)}
        yield {"input_values": torch.randn(BATCH, _first(config, "max_length", default=64) or 64, mels)}
        yield {"input_values": torch.randn(BATCH, 32, mels)}
        yield {"input_values": torch.randint(0, 100, (BATCH, LENGTH, _first(config, "num_codebooks", default=8)))}
        if "decoder_input_values" in [*names]:
            yield {"input_values": torch.randn(BATCH, 4000), "decoder_input_values": torch.randn(BATCH, 16, mels)}
    if "decoder_input_values" in names:
        yield {"decoder_input_values": torch.randn(BATCH, 16, _first(config, "num_mel_bins", default=80))}
    if "audio_values" in names:
        yield {"audio_values": torch.randn(BATCH, 1, 4000)}
    if "past_values" in names:
        length = _first(config, "context_length", "seq_length", default=32)
        past = torch.randn(BATCH, length + max(_first(config, "lags_sequence", default=[0]) or [0]))
        wide = torch.randn(BATCH, length, _first(config, "num_input_channels", "input_size", default=1))
        yield {"past_values": wide}
        times = _first(config, "num_time_features", default=0)
        more = {"past_time_features": torch.randn(*past.shape, times), "past_observed_mask": torch.ones_like(past)}
        ahead = _first(config, "prediction_length", default=8) or 8
        future = {"future_values": torch.randn(BATCH, ahead), "future_time_features": torch.randn(BATCH, ahead, times)}
        yield {"past_values": past, **more, **future}
        yield {"past_values": past, "freq": torch.zeros(BATCH, 1, dtype=torch.long)}
        yield {"past_values": past}
    if "states" in names and "actions" in names:
        states, acts = _first(config, "state_dim", default=17), _first(config, "act_dim", "action_dim", default=4)
        steps = torch.arange(LENGTH).repeat(BATCH, 1)
        yield {
            "states": torch.randn(BATCH, LENGTH, states), "actions": torch.randn(BATCH, LENGTH, acts),
            "rewards": torch.randn(BATCH, LENGTH, 1), "returns_to_go": torch.randn(BATCH, LENGTH, 1),
            "timesteps": steps, "attention_mask": torch.ones(BATCH, LENGTH),
        }  # fmt: skip
    if "inputs" in names:
        yield {"inputs": torch.randint(3, 80, (BATCH, LENGTH))}
        yield {"inputs": torch.randn(BATCH, channels, height, width)}
    if "hidden_states" in names and main == "hidden_states":
        yield {"hidden_states": torch.randn(BATCH, LENGTH, _first(config, "hidden_size", default=64))}
    if main not in ("input_ids", "pixel_values", "input_features", "input_values") and main in names:
        yield {main: torch.randn(BATCH, channels, height, width)}
