"""The fixed part of the gate, and what does not hold of it today."""

from __future__ import annotations

__all__ = ["FIXED", "KNOWN"]

# Library -> models: each kind of architecture and each mechanism of the package at least once.
FIXED: dict[str, tuple[str, ...]] = {
    "transformers": (
        "llama", "llama+cache", "gpt2", "mixtral", "deepseek_v3", "gemma2", "mamba", "bamba",
        "bert", "deberta_v2", "xlnet", "t5", "bart", "whisper", "wav2vec2", "vit", "swin", "convnext", "detr", "clip",
        "llava", "segformer", "patchtst",
    ),
    "timm": (
        "test_byobnet", "test_vit", "test_convnext", "test_efficientnet", "test_resnet", "test_nfnet", "levit_384_s8",
        "gmlp_ti16_224", "xcit_nano_12_p8_224",
    ),
    "torchvision": (
        "squeezenet1_1", "resnet18", "mobilenet_v3_small", "googlenet", "shufflenet_v2_x0_5",
        "lraspp_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large", "r3d_18", "quantized_mobilenet_v2",
    ),
    "diffusers": ("UNet2DModel", "AutoencoderKL", "DiTTransformer2DModel"),
    "torch_geometric": ("GCNConv", "GATv2Conv", "SAGEConv", "GINConv", "RGCNConv", "HGTConv", "EdgeConv", "ChebConv"),
    "others": (
        "smp.Unet", "smp.Segformer", "peft.LoraConfig+llama", "peft.LoHaConfig+llama", "torchao.int8_weight_only",
        "torchao.int8_dynamic", "torch.quantize_dynamic", "recommender.dlrm", "recommender.two_tower",
        "x_transformers.rotary", "open_clip.ViT-B-32", "nn.LSTM", "nn.GRU", "nn.TransformerEncoder", "nn.Bilinear",
    ),
}  # fmt: skip

_VALUES = "the forward asks for values of tensors"
_MEMORY = "bytes held differ from those of the real step"
_UNEVEN = "the stages are less even than cuts between operators allow"
_QUANTISED = "quantised operators have no shape rule"
_RECURRENT = "the model is one layer, and there is nothing to cut"
_ONE_CALL = "there is one call, and nothing to cut"
_SPLIT_BY_VALUES = {"split(2)": _VALUES, "split(4)": _VALUES, "trace": _VALUES, "meta": _VALUES}
_ONE_LAYER = {"split(2)": _RECURRENT, "split(4)": _RECURRENT, "trace": _RECURRENT}

# (library, model) -> check -> why it does not hold. An entry that begins to hold fails the test: take it out.
KNOWN: dict[tuple[str, str], dict[str, str]] = {
    ("transformers", "bamba"): {"balance(4)": _UNEVEN},
    ("transformers", "deberta_v2"): {"meta": _VALUES},
    ("torchvision", "ssdlite320_mobilenet_v3_large"): {
        **_SPLIT_BY_VALUES,
        "on shapes": _VALUES,
        "memory": _MEMORY,
    },
    ("torchvision", "quantized_mobilenet_v2"): {"on shapes": _QUANTISED, "meta": _VALUES},
    ("torch_geometric", "GCNConv"): {"meta": _VALUES},
    ("torch_geometric", "GATv2Conv"): {"meta": _VALUES},
    ("torch_geometric", "RGCNConv"): {"meta": _VALUES},
    ("torch_geometric", "ChebConv"): {"meta": _VALUES},
    ("torch_geometric", "HGTConv"): {"balance(3)": _UNEVEN},
    ("others", "torch.quantize_dynamic"): {"on shapes": _QUANTISED, "meta": _VALUES},
    ("others", "nn.LSTM"): _ONE_LAYER,
    ("others", "nn.GRU"): _ONE_LAYER,
    ("others", "nn.TransformerEncoder"): {"balance(3)": _UNEVEN},
    ("others", "nn.Bilinear"): {"split(2)": _ONE_CALL, "split(4)": _ONE_CALL},
}
