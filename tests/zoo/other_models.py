"""Segmentation decoders, adapters, quantised weights, recommenders, encoder zoos, and torch's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.example import CannotBuild, Example

LIBRARY = "others"
BATCH = 2


# ------------------------------------------------------------------------ segmentation_models_pytorch


def segmentation(name: str) -> Callable[[], Example]:
    """A decoder over a small encoder."""

    def build() -> Example:
        import segmentation_models_pytorch as smp

        encoder = "tu-vit_tiny_patch16_224" if name == "DPT" else "resnet18"
        options: dict[str, Any] = {"dynamic_img_size": True} if name == "DPT" else {}
        model = getattr(smp, name)(encoder, encoder_weights=None, **options)
        return Example(model.eval(), (torch.randn(BATCH, 3, 128, 128),))

    return build


DECODERS = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "PAN", "UPerNet",
            "Segformer", "DPT")  # fmt: skip


# -------------------------------------------------------------------------------------------- adapters


def _decoder(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **options)).eval()


def _ids(length: int = 16) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 120, (BATCH, length))}


def adapted(kind: str, base: str) -> Callable[[], Example]:
    """A model under an adapter of peft."""

    def build() -> Example:
        import peft

        if base == "llama":
            model, targets, given = _decoder(use_cache=False), ["q_proj", "v_proj", "down_proj"], _ids()
        elif base == "bert":
            from transformers import BertConfig, BertForSequenceClassification

            sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
            model = BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=4)).eval()
            targets, given = ["query", "value"], _ids()
        else:
            from transformers import ViTConfig, ViTForImageClassification

            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
            model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).eval()
            targets, given = ["q_proj", "v_proj"], {"pixel_values": torch.randn(BATCH, 3, 32, 32)}
            targets = sorted(
                {
                    n.split(".")[-1]
                    for n, m in model.named_modules()
                    if isinstance(m, nn.Linear) and "classifier" not in n
                }
            )
        config = getattr(peft, kind)(target_modules=targets)
        return Example(peft.get_peft_model(model, config).eval(), (), given)

    return build


# ---------------------------------------------------------------------------------- quantised weights


def quantised(name: str, make_config: Callable[[Any], Any]) -> Callable[[], Example]:
    """A decoder whose linear layers hold quantised weights of torchao."""

    def build() -> Example:
        from torchao import quantization

        model = _decoder(use_cache=False)
        if "int4" in name:
            model = model.to(torch.bfloat16)
        try:
            quantization.quantize_(model, make_config(quantization))
        except Exception as error:
            raise CannotBuild(" ".join(f"{type(error).__name__}: {error}".split())) from error
        example = Example(model, (), _ids())
        try:
            with torch.no_grad():
                example()
        except Exception as error:
            raise CannotBuild(" ".join(f"{type(error).__name__}: {error}".split())) from error
        return example

    return build


def dynamic() -> Example:
    """Quantised by torch itself: 8-bit weights, activations quantised as they come."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return Example(torch.ao.quantization.quantize_dynamic(model.eval(), {nn.Linear}), (torch.randn(BATCH, 32),))


# ---------------------------------------------------------------------------------------- recommenders


class Dlrm(nn.Module):
    """Dense features through an MLP, sparse ones through bags of embeddings, and the products of all pairs."""

    def __init__(self, tables: int = 4, width: int = 16, rows: int = 100) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, dense: Tensor, sparse: list[Tensor]) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *(bag(ids) for bag, ids in zip(self.bags, sparse, strict=True))], 1)
        products = every @ every.transpose(1, 2)
        row, column = torch.tril_indices(every.shape[1], every.shape[1], -1, device=x.device)
        return self.top(torch.cat([x, products[:, row, column]], 1))


class TwoTower(nn.Module):
    """A user's history and a candidate's features, each through a tower; bags with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(200, 32, mode="mean", include_last_offset=True)
        self.item = nn.Embedding(200, 32)
        self.user = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.candidate = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, items: Tensor, offsets: Tensor, candidates: Tensor) -> Tensor:
        user = nn.functional.normalize(self.user(self.history(items, offsets)), dim=-1)
        candidate = nn.functional.normalize(self.candidate(self.item(candidates)), dim=-1)
        return torch.einsum("bd,bnd->bn", user, candidate)


def dlrm() -> Example:
    sparse = [torch.randint(0, 100, (BATCH, 5)) for _ in range(4)]
    return Example(Dlrm().eval(), (torch.randn(BATCH, 13), sparse))


def two_tower() -> Example:
    items, offsets = torch.randint(0, 200, (7,)), torch.tensor([0, 3, 7])
    return Example(TwoTower().eval(), (items, offsets, torch.randint(0, 200, (BATCH, 6))))


# ---------------------------------------------------------------------------------------- encoder zoos


def x_decoder(**options: Any) -> Callable[[], Example]:
    """A language model of x-transformers."""

    def build() -> Example:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, **options)
        model = TransformerWrapper(num_tokens=128, max_seq_len=64, attn_layers=layers)
        return Example(model.eval(), (torch.randint(0, 128, (BATCH, 16)),))

    return build


def x_encoder() -> Example:
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=10, attn_layers=Encoder(dim=64, depth=4, heads=4, attn_dim_head=16)
    )
    return Example(model.eval(), (torch.randn(BATCH, 3, 32, 32),))


def x_translation() -> Example:
    from x_transformers import XTransformer

    model = XTransformer(dim=64, enc_num_tokens=128, enc_depth=2, enc_heads=4, enc_max_seq_len=32,
                         dec_num_tokens=128, dec_depth=2, dec_heads=4, dec_max_seq_len=32)  # fmt: skip
    return Example(model.eval(), (torch.randint(0, 128, (BATCH, 16)), torch.randint(0, 128, (BATCH, 16))))


def clip(name: str) -> Callable[[], Example]:
    """A pair of encoders of open_clip, with few layers."""

    def build() -> Example:
        import open_clip

        config = open_clip.get_model_config(name)
        config["embed_dim"] = 64
        vision, text = config["vision_cfg"], config["text_cfg"]
        vision["image_size"] = 64 if "timm_model_name" not in vision else vision.get("image_size", 224)
        if isinstance(vision.get("layers"), int):
            vision |= {"layers": 2, "width": 64, "head_width": 16, "patch_size": 16}
        elif isinstance(vision.get("layers"), list):
            vision |= {"layers": [1, 1, 1, 1], "width": 16}
        if "hf_model_name" not in text:
            text |= {"layers": 2, "width": 64, "heads": 4, "vocab_size": 128, "context_length": 16}
        kind = open_clip.CoCa if "multimodal_cfg" in config else open_clip.CLIP
        if "multimodal_cfg" in config:
            config["multimodal_cfg"] |= {"layers": 2, "width": 64, "heads": 4, "context_length": 16}
        options = {
            key: value
            for key, value in config.items()
            if key in ("embed_dim", "vision_cfg", "text_cfg", "multimodal_cfg")
        }
        model = kind(**options)
        size = vision["image_size"]
        return Example(model.eval(), (torch.randn(BATCH, 3, size, size), torch.randint(1, 128, (BATCH, 16))))

    return build


# --------------------------------------------------------------------------------------- torch's layers


def layer(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Callable[[], Example]:
    """A module of ``torch.nn`` and random inputs of these sizes."""
    return lambda: Example(make().eval(), tuple(torch.randn(shape) for shape in shapes))


MAKERS: dict[str, Callable[[], Example]] = {
    **{f"smp.{name}": segmentation(name) for name in DECODERS},
    **{f"peft.{kind}+{base}": adapted(kind, base)
       for kind, base in (("LoraConfig", "llama"), ("LoraConfig", "bert"), ("LoraConfig", "vit"),
                          ("LoHaConfig", "llama"), ("LoKrConfig", "llama"), ("OFTConfig", "llama"),
                          ("VeraConfig", "bert"))},
    "torchao.int8_weight_only": quantised("int8", lambda q: q.Int8WeightOnlyConfig()),
    "torchao.int8_dynamic": quantised("int8", lambda q: q.Int8DynamicActivationInt8WeightConfig()),
    "torchao.int8_dynamic_int4_weight": quantised("int8", lambda q: q.Int8DynamicActivationIntxWeightConfig()),
    "torchao.intx_weight_only": quantised("intx", lambda q: q.IntxWeightOnlyConfig()),
    "torchao.int4_weight_only": quantised("int4", lambda q: q.Int4WeightOnlyConfig(group_size=32)),
    "torchao.float8_weight_only": quantised("float8", lambda q: q.Float8WeightOnlyConfig()),
    "torch.quantize_dynamic": dynamic,
    "recommender.dlrm": dlrm,
    "recommender.two_tower": two_tower,
    "x_transformers.decoder": x_decoder(),
    "x_transformers.rotary": x_decoder(rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True),
    "x_transformers.alibi": x_decoder(alibi_pos_bias=True),
    "x_transformers.grouped": x_decoder(attn_kv_heads=2, attn_qk_norm=True),
    "x_transformers.flash": x_decoder(attn_flash=True),
    "x_transformers.memory": x_decoder(attn_num_mem_kv=4, attn_sparse_topk=4),
    "x_transformers.encoder": x_encoder,
    "x_transformers.translation": x_translation,
    **{f"open_clip.{name}": clip(name) for name in ("ViT-B-32", "RN50", "coca_ViT-B-32")},
    "nn.LSTM": layer(lambda: nn.LSTM(32, 64, 2, batch_first=True), (BATCH, 16, 32)),
    "nn.GRU": layer(lambda: nn.GRU(32, 64, 2, batch_first=True, bidirectional=True), (BATCH, 16, 32)),
    "nn.RNN": layer(lambda: nn.RNN(32, 64, 2, batch_first=True), (BATCH, 16, 32)),
    "nn.TransformerEncoder": layer(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 4), (BATCH, 16, 64)),
    "nn.Transformer": layer(
        lambda: nn.Transformer(64, 4, 2, 2, 128, batch_first=True), (BATCH, 16, 64), (BATCH, 8, 64)),
    "nn.Bilinear": layer(lambda: nn.Bilinear(16, 24, 32), (BATCH, 16), (BATCH, 24)),
}  # fmt: skip


def names() -> list[str]:
    """Names of all models."""
    return list(MAKERS)


def make(name: str) -> Example:
    """Build a model; one of a library that is not installed cannot be built."""
    try:
        return MAKERS[name]()
    except ImportError as error:
        raise CannotBuild(str(error)) from error
