"""Inputs for a model of transformers, by the names in the signature of its forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["inputs"]

BATCH, LENGTH = 2, 16
NATURAL = ("pixel_values", "input_features", "input_values", "pixel_values_videos", "audio_values")
Inputs = dict[str, Any]


def inputs(model: nn.Module, config: Any, *, natural: bool) -> Inputs:
    """Find arguments that the forward takes: the likely ones, then what its errors ask for.

    Args:
        model: the model.
        config: its configuration.
        natural: a model that takes images or sounds is given some; else text will do.

    Raises:
        Exception: none was taken; the error of the first.
    """
    first: Exception | None = None
    names = inspect.signature(model.forward).parameters
    needed = natural and any(name in names for name in NATURAL)
    for given in _candidates(model, config):
        if needed and not any(name in given for name in NATURAL):
            continue
        candidate: Inputs | None = given
        for _ in range(3):
            try:
                with torch.no_grad():
                    model(**candidate)
            except Exception as error:
                failed = error
                candidate = _mended(candidate, str(error), model, config)
                if candidate is None:
                    break
            else:
                return candidate
        first = first or failed
    raise first or ValueError("no rule for the arguments of its forward")


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the configuration or one of its parts has."""
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]
    values = (getattr(part, name, None) for name in names for part in parts if part is not None)
    return next((value for value in values if value is not None), default)


def _mended(candidate: Inputs, error: str, model: nn.Module, config: Any) -> Inputs | None:
    """Put as many tokens for images or sounds into the text as there are features; None if that is not the error."""
    names = inspect.signature(model.forward).parameters
    if "mm_token_type_ids" in error and "mm_token_type_ids" in names and "mm_token_type_ids" not in candidate:
        return {**candidate, "mm_token_type_ids": torch.zeros_like(candidate["input_ids"])}
    numbers = re.search(r"tokens:?\s*:?(\d+).*?features:?\s*(?:torch\.Size\(\[)?(\d+)", error, re.IGNORECASE)
    if numbers is None or "input_ids" not in candidate:
        return None
    kind = next((each for each in ("video", "audio") if each in error.lower()), "image")
    keys = (f"{kind}_token_id", f"{kind}_token_index", "image_token_id", "image_token_index", "media_token_id")
    token, number = _first(config, *keys), int(numbers[2]) // BATCH
    if token is None or int(numbers[2]) % BATCH or number > 600:
        return None
    ids = torch.randint(3, 80, (BATCH, number + LENGTH))
    ids[:, 2 : 2 + number] = token
    if ids.shape == candidate["input_ids"].shape:  # tried already
        return None
    types = {"mm_token_type_ids": (ids == token).long()} if "mm_token_type_ids" in names else {}
    return {**candidate, "input_ids": ids, **types}


def _candidates(model: nn.Module, config: Any) -> Iterator[Inputs]:
    names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    text, decoder = _text(names, config)
    more = [each for rule in RULES for each in rule(names, config, main)]
    for each in more:
        yield {**text, **each}
        if "input_ids" in text and main != "input_ids":
            yield {**{key: value for key, value in text.items() if key != "input_ids"}, **each}
    yield text
    for each in (*more, {}):
        if decoder and not decoder.keys() <= text.keys():
            yield {**text, **each, **decoder}
    if "inputs_embeds" in names and "input_ids" not in names:
        yield {"inputs_embeds": torch.randn(BATCH, LENGTH, _first(config, "hidden_size", "d_model", default=64))}
    if "labels" in names:
        yield {**text, "labels": torch.randint(3, 80, (BATCH, LENGTH))}


def _text(names: set[str], config: Any) -> tuple[Inputs, Inputs]:
    """Arguments for text, and those of a decoder, which are among the first if the configuration speaks of one."""
    text: Inputs = {}
    decoder: Inputs = {"decoder_input_ids": torch.randint(3, 80, (BATCH, 8))} if "decoder_input_ids" in names else {}
    for name in ("input_ids", "qformer_input_ids"):
        if name in names:
            text[name] = torch.randint(3, 80, (BATCH, LENGTH))
    if getattr(config, "is_encoder_decoder", False):
        text |= decoder
        if "use_cache" in names:
            text["use_cache"] = False  # their decoders make one whatever the configuration says
    if "bbox" in names:
        text["bbox"] = torch.randint(0, 20, (BATCH, LENGTH, 4)).cumsum(-1)
    return text, decoder


# ------------------------------------------------------------- by what a model takes, the most likely first


def _size(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    vision = getattr(config, "vision_config", None)
    size = getattr(vision, "image_size", None) or _first(config, "image_size", "img_size", default=64)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = (size[0], size[-1]) if isinstance(size, (list, tuple)) else (size, size)
    channels = _first(config, "num_channels", "in_channels", "in_chans", default=3)
    return channels if isinstance(channels, int) else 3, int(height), int(width)


def _patches(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    """Images as patches in a row, with the grid that they make."""
    key = next((each for each in ("image_grid_thw", "grid_thw") if each in names), None)
    if key is not None:
        patch, times = _first(config, "patch_size", default=16), _first(config, "temporal_patch_size", default=1)
        pixels = torch.randn(BATCH * 16, _size(config)[0] * times * patch * patch)
        yield {"pixel_values": pixels, key: torch.tensor([[1, 4, 4]] * BATCH)}


def _images(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    if "pixel_values" not in names:
        return
    channels, height, width = _size(config)
    still = torch.randn(BATCH, channels, height, width)
    if "image_sizes" in names:
        sizes = torch.tensor([[height, width]] * BATCH)
        yield {"pixel_values": still, "image_sizes": sizes}
    if "pixel_attention_mask" in names:
        yield {"pixel_values": still[:, None], "pixel_attention_mask": torch.ones(BATCH, 1, height, width).bool()}
    if "image_attention_mask" in names:
        yield {"pixel_values": still[:, None], "image_attention_mask": torch.ones(BATCH, LENGTH, 1)}
    yield {"pixel_values": still}
    if "image_sizes" in names:
        yield {"pixel_values": still[:, None].repeat(1, 3, 1, 1, 1), "image_sizes": sizes}
    frames = _first(config, "num_frames", "frames", "frames_per_clip", default=4)
    for number in (frames if isinstance(frames, int) else 4, 2, 1):
        yield {"pixel_values": torch.randn(BATCH, number, channels, height, width)}
    for side in (32, 128, 224, 256):
        yield {"pixel_values": torch.randn(BATCH, channels, side, side)}


def _flat_images(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    """Images as patches, each sample apart."""
    patch = _first(config, "patch_size", default=16)
    if "pixel_values" not in names or not isinstance(patch, int):
        return
    values = _size(config)[0] * patch * patch
    yield {"pixel_values": torch.randn(BATCH, 16, values)}
    if "spatial_shapes" in names:
        masks = {"pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long)}
        yield {
            "pixel_values": torch.randn(BATCH, 16, values),
            "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
            **masks,
        }
    key = next((each for each in ("pixel_position_ids", "image_position_ids") if each in names), None)
    if key is not None:
        grid = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(1)
        yield {"pixel_values": torch.rand(BATCH, 36, values), key: grid.expand(BATCH, -1, -1).contiguous()}


def _videos(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    if "pixel_values_videos" in names:
        frames = _first(config, "frames_per_clip", "num_frames", default=4)
        yield {"pixel_values_videos": torch.randn(BATCH, min(frames, 8), *_size(config))}


def _spectrograms(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    if "input_features" not in names:
        return
    fields = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "feature_projection_input_dim")
    mels, length = _first(config, *fields, default=80), 2 * _first(config, "max_source_positions", default=32)
    times_last = [(BATCH, mels, each) for each in (length, 2 * length, 3000)]
    mels_last = [(BATCH, each, mels) for each in (length, 96, 3000)]
    for shape in (times_last[0], mels_last[0], *times_last[1:], *mels_last[1:], (BATCH, 1, 1024, mels)):
        times = shape[-1] if shape in times_last else shape[-2]
        features = {"input_features": torch.randn(shape)}
        for mask, dtype in (("input_features_mask", torch.bool), ("feature_attention_mask", torch.long)):
            if mask in names:
                yield {**features, mask: torch.ones(BATCH, times, dtype=dtype)}
        yield features


def _sounds(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    mels = _first(config, "num_mel_bins", default=80)
    if "input_values" in names:
        codes = _first(config, "num_codebooks", default=8)
        length = _first(config, "max_length", default=64)
        for shape in ((BATCH, 4000), (BATCH, 1, 4000), (BATCH, length, mels), (BATCH, 32, mels)):
            yield {"input_values": torch.randn(shape)}
        yield {"input_values": torch.randint(0, 100, (BATCH, LENGTH, codes))}
    if "decoder_input_values" in names:
        target = {"decoder_input_values": torch.randn(BATCH, 16, mels)}
        yield from ({"input_values": torch.randn(BATCH, 4000), **target}, target)
    if "audio_values" in names:
        yield {"audio_values": torch.randn(BATCH, 1, 4000)}


def _series(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    """Values over time, and what is known of them."""
    if "past_values" not in names:
        return
    length = _first(config, "context_length", "seq_length", default=32)
    past = torch.randn(BATCH, length + max(_first(config, "lags_sequence", default=[0]) or [0]))
    yield {"past_values": torch.randn(BATCH, length, _first(config, "num_input_channels", "input_size", default=1))}
    features, ahead = _first(config, "num_time_features", default=0), _first(config, "prediction_length", default=8)
    before = {"past_time_features": torch.randn(*past.shape, features), "past_observed_mask": torch.ones_like(past)}
    after = {"future_values": torch.randn(BATCH, ahead), "future_time_features": torch.randn(BATCH, ahead, features)}
    yield {"past_values": past, **before, **after}
    yield {"past_values": past, "freq": torch.zeros(BATCH, 1, dtype=torch.long)}
    yield {"past_values": past}


def _decisions(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    if {"states", "actions"} <= names:
        sizes = {"states": _first(config, "state_dim"), "actions": _first(config, "act_dim", "action_dim")}
        values = {name: torch.randn(BATCH, LENGTH, size or 4) for name, size in sizes.items()}
        rewards = {name: torch.randn(BATCH, LENGTH, 1) for name in ("rewards", "returns_to_go")}
        steps = {"timesteps": torch.arange(LENGTH).repeat(BATCH, 1), "attention_mask": torch.ones(BATCH, LENGTH)}
        yield {**values, **rewards, **steps}


def _others(names: set[str], config: Any, main: str) -> Iterator[Inputs]:
    """What the model itself calls its main input."""
    if "inputs" in names:
        yield {"inputs": torch.randint(3, 80, (BATCH, LENGTH))}
    if main == "hidden_states":
        yield {main: torch.randn(BATCH, LENGTH, _first(config, "hidden_size", default=64))}
    if main in names and main not in ("input_ids", *NATURAL):
        yield {main: torch.randn(BATCH, *_size(config))}


RULES = (_patches, _images, _flat_images, _videos, _spectrograms, _sounds, _series, _decisions, _others)
