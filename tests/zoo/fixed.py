"""The fixed part of the gate, and what does not hold of it today."""

from __future__ import annotations

__all__ = ["FIXED", "KNOWN"]

# Library -> models: each kind of architecture and each mechanism of the package at least once.
FIXED: dict[str, tuple[str, ...]] = {
    "transformers": (
        "llama", "llama+cache", "gpt2", "gpt2+cache", "mixtral", "qwen3_moe", "deepseek_v3", "gemma2", "mamba", "bamba",
        "bert", "deberta_v2", "xlnet", "t5", "bart", "whisper", "wav2vec2", "vit", "swin", "convnext", "detr", "clip",
        "llava", "segformer", "patchtst",
    ),
    "timm": (
        "test_byobnet", "test_vit", "test_convnext", "test_efficientnet", "test_resnet", "test_nfnet", "levit_384_s8",
        "gmlp_ti16_224", "swin_s3_tiny_224", "xcit_nano_12_p8_224",
    ),
    "torchvision": (
        "squeezenet1_1", "resnet18", "mobilenet_v3_small", "googlenet", "shufflenet_v2_x0_5", "regnet_y_400mf",
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

_GROUPED = "torch's grouped product on meta takes bfloat16 only"
_CACHE = "a cache object is given and returned"
_VALUES = "the forward asks for values of tensors"
_MEMORY = "bytes held or the peak differ from those of the real step"
_UNEVEN = "the stages are less even than cuts between operators allow"
_QUANTISED = "quantised operators have no shape rule"
_RECURRENT = "the layer assigns its attribute '_flat_weight_refs'"
_ONE_CALL = "there is one call, and nothing to cut"
_COMPLEX = "an operator does not run on shapes"
_OUT_DTYPE = "the higher-order operator out_dtype is not opened"

# (library, model) -> check -> why it does not hold. An entry that begins to hold fails the test: take it out.
KNOWN: dict[tuple[str, str], dict[str, str]] = {
    ("transformers", "llama"): {"memory": _MEMORY, "balance(2)": _UNEVEN, "balance(3)": _UNEVEN},
    ("transformers", "llama+cache"): {"split(2)": _CACHE, "split(4)": _CACHE, "trace": _CACHE},
    ("transformers", "gpt2"): {"balance(2)": _UNEVEN, "balance(3)": _UNEVEN},
    ("transformers", "gpt2+cache"): {"split(2)": _CACHE, "split(4)": _CACHE, "trace": _CACHE},
    ("transformers", "mixtral"): {"on shapes": _GROUPED, "memory": _GROUPED, "meta": _GROUPED},
    ("transformers", "qwen3_moe"): {"on shapes": _GROUPED, "memory": _GROUPED, "meta": _GROUPED},
    ("transformers", "deepseek_v3"): {"on shapes": _GROUPED, "memory": _GROUPED, "meta": _GROUPED},
    ("transformers", "gemma2"): {"balance(2)": _UNEVEN, "balance(3)": _UNEVEN, "balance(4)": _UNEVEN},
    ("transformers", "mamba"): {"memory": _MEMORY, "balance(3)": _UNEVEN, "balance(8)": _UNEVEN},
    ("transformers", "bamba"): {
        "memory": _MEMORY,
        "balance(2)": _UNEVEN,
        "balance(3)": _UNEVEN,
        "balance(4)": _UNEVEN,
        "balance(8)": _UNEVEN,
    },
    ("transformers", "deberta_v2"): {
        "on shapes": _VALUES,
        "balance(2)": _UNEVEN,
        "balance(3)": _UNEVEN,
        "balance(4)": _UNEVEN,
        "meta": _VALUES,
    },
    ("transformers", "bart"): {"memory": _MEMORY},
    ("transformers", "whisper"): {"memory": _MEMORY},
    ("transformers", "detr"): {"memory": _MEMORY},
    ("transformers", "llava"): {"memory": _MEMORY, "balance(2)": _UNEVEN, "balance(3)": _UNEVEN, "balance(4)": _UNEVEN},
    ("transformers", "patchtst"): {"memory": _MEMORY},
    ("timm", "levit_384_s8"): {"balance(8)": _UNEVEN},
    ("torchvision", "ssdlite320_mobilenet_v3_large"): {
        "on shapes": _VALUES,
        "memory": _MEMORY,
        "split(2)": _VALUES,
        "split(4)": _VALUES,
        "trace": _VALUES,
        "meta": _VALUES,
    },
    ("torchvision", "quantized_mobilenet_v2"): {"on shapes": _QUANTISED, "ledger": _QUANTISED, "meta": _VALUES},
    ("diffusers", "UNet2DModel"): {"balance(4)": _UNEVEN, "balance(8)": _UNEVEN},
    ("diffusers", "AutoencoderKL"): {"memory": _MEMORY},
    ("diffusers", "DiTTransformer2DModel"): {"memory": _MEMORY},
    ("torch_geometric", "GCNConv"): {"split(2)": _VALUES, "split(4)": _VALUES, "trace": _VALUES, "meta": _VALUES},
    ("torch_geometric", "GATv2Conv"): {
        "on shapes": _VALUES,
        "split(2)": _VALUES,
        "split(4)": _VALUES,
        "trace": _VALUES,
        "meta": _VALUES,
    },
    ("torch_geometric", "RGCNConv"): {
        "memory": _MEMORY,
        "split(2)": _VALUES,
        "split(4)": _VALUES,
        "trace": _VALUES,
        "meta": _VALUES,
    },
    ("torch_geometric", "HGTConv"): {"balance(3)": _UNEVEN},
    ("torch_geometric", "EdgeConv"): {"balance(2)": _UNEVEN, "balance(3)": _UNEVEN, "balance(4)": _UNEVEN},
    ("torch_geometric", "ChebConv"): {"split(2)": _VALUES, "split(4)": _VALUES, "trace": _VALUES, "meta": _VALUES},
    ("others", "peft.LoraConfig+llama"): {"memory": _MEMORY, "balance(2)": _UNEVEN, "balance(3)": _UNEVEN},
    ("others", "peft.LoHaConfig+llama"): {"balance(2)": _UNEVEN, "balance(3)": _UNEVEN, "balance(8)": _UNEVEN},
    ("others", "torchao.int8_weight_only"): {"memory": _MEMORY, "balance(2)": _UNEVEN, "balance(3)": _UNEVEN},
    ("others", "torchao.int8_dynamic"): {"macs": _OUT_DTYPE, "ledger": _OUT_DTYPE},
    ("others", "torch.quantize_dynamic"): {"on shapes": _QUANTISED, "meta": _VALUES},
    ("others", "recommender.two_tower"): {"memory": _MEMORY},
    ("others", "x_transformers.rotary"): {"on shapes": _COMPLEX, "meta": _VALUES},
    ("others", "nn.LSTM"): {"split(2)": _RECURRENT, "split(4)": _RECURRENT, "trace": _RECURRENT},
    ("others", "nn.GRU"): {"split(2)": _RECURRENT, "split(4)": _RECURRENT, "trace": _RECURRENT},
    ("others", "nn.TransformerEncoder"): {"balance(3)": _UNEVEN},
    ("others", "nn.Bilinear"): {"split(2)": _ONE_CALL, "split(4)": _ONE_CALL},
}
