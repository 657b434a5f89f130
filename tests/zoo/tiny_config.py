"""Shrink a configuration of transformers by rule: each field by its name, sub-configurations likewise."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

__all__ = ["ATTEMPTS", "VOCABULARY", "Attempt", "shrunk"]

VOCABULARY = 128


@dataclass(frozen=True)
class Attempt:
    """Sizes of a tiny model; where a configuration does not take the first, the next ones are tried."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 64
    inner: int = 128
    image: int = 64
    patch: int | None = 16
    widths: bool = True  # else widths stay and only depths and vocabularies shrink
    pad: bool = False  # name a token for padding where there is none; models then look for it in their inputs


ATTEMPTS = (
    Attempt(),
    Attempt(layers=2, pad=True),
    Attempt(kv_heads=4),
    Attempt(layers=2, heads=2, kv_heads=1, head_dim=128, hidden=256, inner=256),
    Attempt(image=224, patch=None),
    Attempt(layers=2, widths=False, image=64, patch=None),
    Attempt(layers=2, widths=False, image=224, patch=None),
)

# The first pattern that a field's name matches decides. An int: that value; a name: of ``Attempt``; None: as it is.
RULES: tuple[tuple[str, int | str | None], ...] = (
    (r"position_embeddings|max_position|n_positions|n_ctx|max_seq|max_sequence", "positions"),
    (r"token_id|token_index|_token$|eos_ids|pad_id|bos_id|eos_id", "token"),
    (r"type_vocab", None),
    (r"vocab|codebook_size|num_embeddings$", "vocabulary"),
    (r"^n_group|topk_group|num_expert_group|moe_.*group", "one"),
    (r"mamba_(n|num)_heads|mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"num_labels|num_channels|in_channels|in_chans|out_channels$|num_codebooks|num_quantizers", None),
    (r"group|num_feature_levels|num_levels|num_points|n_points|num_stages", None),
    (r"kernel|stride|dilation|window|dropout|conv_bias|num_mel|downsample|upsample|ratio|_rate$|hop|factor", None),
    (r"first_k_dense|num_dense_layers|num_nextn|mtp|n_mtp|num_kv_shared|layer_start|layer_end|layer_offset", 0),
    (r"(experts?_per_tok|top_?k|moe_topk|moe_k|num_selected)", "two"),
    (r"shared_experts?$|num_shared", "one"),
    (r"(num|n)_.*experts|moe_num|num_experts", "experts"),
    (r"qk_rope_head_dim|rope_head_dim|rotary_dim", 8),
    (r"qk_nope_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"index_head_dim", 16),
    (r"head_dim|head_size|kv_channels|d_kv|dim_head|headdim|dim_heads", "head_dim"),
    (r"key_value_heads?$|kv_heads?$|n_head_kv|multi_query_group|num_v_heads", "kv_heads"),
    (r"heads?$|num_heads_.*|.*_heads?_num", "heads"),
    (r"lora_rank|_rank$|lora_dim", 16),
    (r"state_size|d_state|ssm_state|dt_rank", 16),
    (r"(layers?|blocks?|depth)$|n_layer", "layers"),
    (r"moe_intermediate|expert_(dim|intermediate)", "hidden"),
    (r"intermediate_size|ffn|d_ff|d_inner|n_inner|inner_dim|mlp_dim|mlp_hidden|feed_?forward|ff_dim", "inner"),
    (r"^image_size|img_size|input_size|resolution$|^image_width|^image_height", "image"),
    (r"patch_size|patch_width|patch_height", "patch"),
    (r"num_frames|tubelet|frames", None),
    (r"hidden_size|d_model|n_embd|^dim$|embed_dim|embedding_size|hidden_dim|projection_(dim|size)|width|"
     r"_dim$|_hidden|decoder_hidden|encoder_hidden|hidden_channels|embed_size|d_embed|embedding_dim|_hidden_size|"
     r"_embed|feature_size|output_dim", "hidden"),
    (r"num_queries|max_source_positions|max_target_positions|num_image_tokens|num_latents|query", "queries"),
)  # fmt: skip
_DEPTHS = re.compile(r"depths?$|layers?$|num_blocks|layer_nums|stage_repeats|depths")
_WIDTHS = re.compile(r"hidden_sizes?|embed_dims?|dims?$|channels?$|width|embed|hidden|neck|conv_dim|_dim")


def shrunk(config: Any, attempt: Attempt) -> Any:
    """Build a configuration of the same class with small sizes, checked by the class itself."""
    own = set(inspect.signature(type(config).__init__).parameters)
    set_before = {name: value for name, value in vars(config).items() if name in own and name not in _DERIVED}
    return type(config)(**{**set_before, **_changes(config, attempt, own)})


_DERIVED = {"id2label", "label2id", "transformers_version"}


_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads")


def _changes(config: Any, attempt: Attempt, own: set[str]) -> dict[str, Any]:
    """The fields that are other than before."""
    from transformers import PreTrainedConfig

    changed: dict[str, Any] = {}
    tokens = iter(range(VOCABULARY - 1, 0, -1))
    for key, value in vars(config).items():
        name = key.removeprefix("_") if key.removeprefix("_") in own else key
        if isinstance(value, PreTrainedConfig):
            changed[name] = shrunk(value, attempt)
        elif name in own:
            new = _new(name, value, config, attempt, tokens)
            if new is not value:
                changed[name] = new
    layers = next((changed[name] for name in _LAYERS if name in changed), None)
    for name, value in vars(config).items():
        if layers is not None and name in own and _is_per_layer(name, value, config) and len(value) > layers:
            changed[name] = _sample(list(value), layers)
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
            changed[name] = {**value, "mrope_section": [2, 3, 3]} if attempt.widths else value
    if "backbone_config" in own and getattr(config, "backbone_config", None) is None:
        changed["backbone_config"] = _backbone()
        changed |= {key: value for key, value in (("use_timm_backbone", False), ("backbone", None)) if key in own}
    return changed


def _number(config: Any, names: tuple[str, ...]) -> int:
    return next((getattr(config, name) for name in names if hasattr(config, name)), 0)


def _backbone() -> Any:
    """A small convolutional backbone, for detectors whose default is a checkpoint of timm."""
    from transformers import ResNetConfig

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "layer_type": "basic"}
    return ResNetConfig(**sizes, out_features=["stage2", "stage3", "stage4"])


def _is_per_layer(name: str, value: Any, config: Any) -> bool:
    named = "layer_types" in name or "layers_block_type" in name or "pattern" in name
    return isinstance(value, (list, tuple)) and (named or len(value) == _number(config, _LAYERS))


def _sample(values: list[Any], number: int) -> list[Any]:
    """So many, with one of each kind first, in their order."""
    kinds: list[int] = []
    for place, value in enumerate(values):
        if all(values[each] != value for each in kinds):
            kinds.append(place)
    others = [place for place in range(len(values)) if place not in kinds]
    return [values[place] for place in sorted([*kinds, *others][:number])]


_WHERE_NONE: tuple[tuple[str, Any], ...] = (
    (r"vocab_size$", VOCABULARY),
    (r"experts_per_tok$", 2),
    (r"n_routed_experts$|num_experts$", 4),
    (r"^n_group$|^topk_group$|n_shared_experts|num_shared_experts|routed_scaling", 1),
    (r"prediction_length", 8),
    (r"attn_layer_indices", [1]),
    (r"^head_dim$", 16),
    (r"^image_token_(id|index)$", VOCABULARY - 2),
    (r"^mask_token_id$", 1),
    (r"first_k_dense", 0),
    (r"moe_intermediate_size", 64),
)
_AT_MOST = {"vocabulary": VOCABULARY, "positions": 512, "experts": 4, "two": 2, "one": 1, "queries": 32}
_NO_WIDTHS = ("vocabulary", "layers", "image", "positions")  # these shrink also where widths stay


def _new(name: str, value: Any, config: Any, attempt: Attempt, tokens: Any) -> Any:
    """The small value of a field, or the value itself."""
    if value is None and name == "pad_token_id":
        return 1 if attempt.pad else None
    if value is None and not (name == "head_dim" and not attempt.widths):
        return next((new for pattern, new in _WHERE_NONE if re.search(pattern, name)), None)
    if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
        return _new_list(name, list(value), attempt, tokens)
    rule = next((rule for pattern, rule in RULES if re.search(pattern, name)), None)
    if type(value) is not int or rule is None:
        return value
    if rule == "token":
        return value if value < VOCABULARY - 40 else next(tokens)
    if rule not in _NO_WIDTHS and (not attempt.widths or value <= 1):
        return value
    if rule == "heads" and hasattr(config, "expand") and hasattr(config, "state_size"):
        return 8  # of a state space: heads x head size = 2 x width
    if rule == "kv_heads" and value == _number(config, _HEADS):
        return attempt.heads
    most = _AT_MOST.get(rule, rule) if isinstance(rule, int) or rule in _AT_MOST else getattr(attempt, rule)
    return value if most is None else min(value, most)


def _new_list(name: str, value: list[int], attempt: Attempt, tokens: Any) -> list[int]:
    if "token" in name or "eos" in name:
        return [each if each < VOCABULARY - 40 else next(tokens) for each in value]
    if re.search(r"out_indices|out_features|feature_layer|neck_ignore|_indexes", name):
        return list(range(len(value)))
    if re.search(r"image_size|img_size|input_size", name):
        return [min(each, attempt.image) for each in value]
    if _DEPTHS.search(name) and max(value) <= 50 and "dim" not in name:
        if sorted(set(value)) == value and len(value) > 1 and ("out" in name or "idx" in name or "ind" in name):
            return list(range(len(value)))
        return [min(each, 2) for each in value]
    if not attempt.widths:
        return value
    if _WIDTHS.search(name) and min(value) >= 16:
        factor = max(min(value) // 16, 1)
        while any(each % factor for each in value):
            factor -= 1
        return [each // factor for each in value]
    return value
