"""The fixed part of the gate, and what does not hold of it today."""

from __future__ import annotations

__all__ = ["FIXED", "KNOWN"]

# Library -> models: each kind of architecture and each mechanism of the package at least once.
FIXED: dict[str, tuple[str, ...]] = {
    "transformers": (
        "llama", "llama+cache", "gpt2", "gpt2+cache", "mixtral", "qwen3_moe", "deepseek_v3", "gemma2", "mamba",
        "bamba", "bert", "deberta_v2", "xlnet", "t5", "bart", "whisper", "wav2vec2", "vit", "swin", "convnext", "detr", "clip", "llava",
        "segformer", "patchtst",
    ),
    "timm": (
        "test_byobnet", "test_vit", "test_convnext", "test_efficientnet", "test_resnet", "test_nfnet", "levit_128s",
        "mixer_s16_224", "swin_tiny_patch4_window7_224", "xcit_nano_12_p16_224",
    ),
    "torchvision": (
        "alexnet", "resnet18", "mobilenet_v3_small", "googlenet", "shufflenet_v2_x0_5", "vit_b_32",
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

# (library, model) -> check -> why it does not hold. An entry that begins to hold fails the test: take it out.
KNOWN: dict[tuple[str, str], dict[str, str]] = {}
