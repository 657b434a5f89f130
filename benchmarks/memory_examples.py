"""Memory plans of three steps for a card of 24 GB: the budget, what is kept, made again or moved, and the curve.

Usage: python benchmarks/memory_examples.py [names]

Models are built on meta in bfloat16; nothing is computed. A budget of 22 GB leaves room for the context of CUDA and for
fragments. Times are predicted for an RTX 4090.
"""

from __future__ import annotations

import sys
import time
import warnings

import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from modelsummary import InputError, Statistics

DEVICE, BUDGET = "RTX 4090", 22 * 10**9


class Residual(nn.Module):
    """A residual block of convolutions that takes the embedding of a time step."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first, self.one = nn.GroupNorm(32, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time, self.second = nn.Linear(1280, out), nn.GroupNorm(32, out)
        self.two = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        """Return images of the same size with other channels."""
        y = self.one(F.silu(self.first(x))) + self.time(F.silu(step))[:, :, None, None]
        return self.skip(x) + self.two(F.silu(self.second(y)))


class Attention(nn.Module):
    """Attention with heads of 64 features to the sequence itself, or to a text of 2,048 features."""

    def __init__(self, width: int, text: int | None = None) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(text or width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, text: Tensor | None = None) -> Tensor:
        """Return the context of each element."""
        source = x if text is None else text
        q, k, v = (y.unflatten(2, (-1, 64)).transpose(1, 2) for y in (self.q(x), self.k(source), self.v(source)))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """A layer of a transformer over the pixels of an image, with cross attention and a gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width), Attention(width, 2048)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Return the pixels."""
        x = x + self.own(self.norms[0](x))
        x = x + self.cross(self.norms[1](x), text)
        hidden, gate = self.up(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.down(hidden * F.gelu(gate))


class UNet(nn.Module):
    """A UNet of the sizes of Stable Diffusion XL: 320, 640 and 1,280 channels, with 0, 2 and 10 transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 320, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        widths, depths, channels, skips = (320, 640, 1280), (0, 2, 10), 320, [320]
        for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for _ in range(2):
                self.down.append(self.block(channels, width, depth))
                channels = width
                skips.append(width)
            if level < 2:
                self.down.append(nn.Conv2d(width, width, 3, 2, 1))
                skips.append(width)
        self.middle = self.block(1280, 1280, 10)
        for level, (width, depth) in reversed([*enumerate(zip(widths, depths, strict=True))]):
            for _ in range(3):
                self.up.append(self.block(channels + skips.pop(), width, depth))
                channels = width
            if level:
                self.up.append(nn.ConvTranspose2d(width, width, 2, 2))
        self.head = nn.Sequential(nn.GroupNorm(32, 320), nn.SiLU(), nn.Conv2d(320, 4, 3, padding=1))

    @staticmethod
    def block(channels: int, width: int, depth: int) -> nn.ModuleList:
        """Return a residual block and the layers of a transformer."""
        return nn.ModuleList([Residual(channels, width), *(Transformer(width) for _ in range(depth))])

    def run(self, block: nn.Module, x: Tensor, step: Tensor, text: Tensor) -> Tensor:
        """Return what a block, or a layer between blocks, makes of images."""
        if not isinstance(block, nn.ModuleList):
            return block(x)
        x = block[0](x, step)
        size = x.shape[2:]
        if len(block) == 1:
            return x
        pixels = x.flatten(2).transpose(1, 2)
        for layer in block[1:]:
            pixels = layer(pixels, text)
        return x + pixels.transpose(1, 2).unflatten(2, size)

    def forward(self, x: Tensor, step: Tensor, text: Tensor) -> Tensor:
        """Return the noise in images."""
        x = self.stem(x)
        skips = [x]
        for block in self.down:
            x = self.run(block, x, step, text)
            skips.append(x)
        x = self.run(self.middle, x, step, text)
        for block in self.up:
            x = torch.cat([x, skips.pop()], 1) if isinstance(block, nn.ModuleList) else x
            x = self.run(block, x, step, text)
        return self.head(x)


def lora() -> Statistics:
    """Return a decoder of 8 billion parameters with adapters, and 2,048 tokens."""
    import peft

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
        config = peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        adapted = peft.get_peft_model(model, config)
        tokens = torch.zeros((1, 2048), dtype=torch.long)
    return Statistics(adapted, input_data={"input_ids": tokens, "labels": tokens})


def vit() -> Statistics:
    """Return a ViT-L/16 and 256 images."""
    with torch.device("meta"):
        model = timm.create_model("vit_large_patch16_224").to(torch.bfloat16)
        return Statistics(model, torch.empty(256, 3, 224, 224, dtype=torch.bfloat16))


def unet() -> Statistics:
    """Return a UNet of the sizes of Stable Diffusion XL and latents of 4 images of 1,024 x 1,024 pixels."""
    with torch.device("meta"):
        model = UNet().to(torch.bfloat16)
        inputs = [(4, 4, 128, 128), (4, 1280), (4, 77, 2048)]
        return Statistics(model, input_data=[torch.empty(size, dtype=torch.bfloat16) for size in inputs])


MODELS = {
    "Llama-3 8B, LoRA, 2,048 tokens": (lora, "adamw"),
    "ViT-L/16, 256 images": (vit, "adamw"),
    "SDXL-like UNet, 4 images": (unet, "sgd"),
}


def main() -> None:
    """Print one line for each model and kind of plan, and the curve of each model."""
    warnings.simplefilter("ignore")
    print("| step | without a plan | plan | peak | longer by | on the host | made in |\n|---|---|---|---|---|---|---|")
    curves = []
    for name, (build, optimizer) in MODELS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        stats = build()
        options = {"optimizer": optimizer, "device": DEVICE}
        plain = stats.memory(optimizer=optimizer, device="cuda").peak
        for label, extra in {
            "whole blocks": {"granularity": "block"},
            "operators": {},
            "operators, offload": {"offload": True},
        }.items():
            begin = time.perf_counter()
            try:
                plan = stats.memory_plan(BUDGET, **options, **extra)
            except InputError as error:
                print(f"| {name} | {plain / 1e9:.1f} GB | {label} | refused: {error} |", flush=True)
                continue
            cells = [
                f"{plan.peak / 1e9:.1f} GB",
                f"{1e3 * (plan.seconds or 0.0):.0f} ms",
                f"{plan.offloaded / 1e9:.1f} GB",
                f"{time.perf_counter() - begin:.1f} s",
            ]
            print(f"| {name} | {plain / 1e9:.1f} GB | {label} | {' | '.join(cells)} |", flush=True)
        begin = time.perf_counter()
        curve = stats.memory_curve(10, **options, offload=True)
        curves.append(f"{name}, in {time.perf_counter() - begin:.1f} s\n{curve}")
    print(*curves, sep="\n\n")


if __name__ == "__main__":
    main()
