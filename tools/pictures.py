"""Take the pictures of the explorer that README and docs show, with Chromium.

    python tools/pictures.py [NAME ...]

Needs the extras ``test`` and ``transformers``. Addresses say what is selected, and the view.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright
from torch import nn
from torchvision import models

import modelsummary
from modelsummary import Statistics

ROOT = Path(__file__).parents[1]
IMAGE = (1, 3, 224, 224)


def moe(path: Path) -> None:
    """Write the page of Mixtral 8x7B on meta."""
    from transformers import MixtralConfig, MixtralForCausalLM

    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(dtype=torch.bfloat16)).bfloat16().eval()
        tokens = torch.zeros(1, 128, dtype=torch.long)
    Statistics(model, {"input_ids": tokens}).explore(path)


def resnet152(path: Path) -> None:
    """Write the page of a ResNet."""
    Statistics(models.resnet152(), IMAGE).explore(path)


def llama405b(path: Path) -> None:
    """Write the page of a decoder with 405 billion parameters."""
    sys.path.insert(0, str(ROOT / "docs" / "tutorials"))
    from giants import GIANTS, decoder

    tokens = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    Statistics(decoder(GIANTS["Llama 3.1 405B"]), tokens).explore(path)


def vit_b_16(path: Path) -> None:
    """Write the page of a vision transformer."""
    Statistics(models.vit_b_16(), IMAGE).explore(path)


def onnx(path: Path) -> None:
    """Write the page of an ONNX file."""
    file = path.with_suffix(".onnx")
    torch.onnx.export(models.mobilenet_v3_small().eval(), (torch.rand(IMAGE),), file, dynamo=True, verbose=False)
    modelsummary.load(file).explore(path)


def diff(path: Path) -> None:
    """Write the page of two models, of which the second has a wider kernel."""
    wider = models.resnet18()
    wider.layer3[0].conv1 = nn.Conv2d(128, 256, 5, stride=2, padding=2, bias=False)
    Statistics(models.resnet18(), IMAGE).explore(path, compare=Statistics(wider, IMAGE))


def split(path: Path) -> None:
    """Write the page of a ResNet in four stages."""
    stats = Statistics(models.resnet50(), IMAGE)
    stats.explore(path, stages=stats.split(4))


def memory(path: Path) -> None:
    """Write the page of a training step."""
    stats = Statistics(models.vit_b_16(), IMAGE)
    stats.explore(path, memory=stats.memory(optimizer="adamw"))


# what makes the page, its address, width and height in pixels, dark or light
PICTURES: dict[str, tuple[Callable[[Path], None], str, int, int, str]] = {
    "moe": (moe, "at=model.layers.0", 1280, 740, "light"),
    "resnet152": (resnet152, "at=layer3.0&size=macs", 1200, 700, "dark"),
    "llama405b": (llama405b, "", 1200, 800, "light"),
    "vit_b_16": (vit_b_16, "view=treemap&at=encoder.layers.encoder_layer_3", 1200, 700, "light"),
    "onnx": (onnx, "view=icicle", 1200, 420, "dark"),
    "diff": (diff, "at=layer3.0.conv1", 1280, 720, "light"),
    "split": (split, "", 1200, 720, "light"),
    "memory": (memory, "view=memory&at=encoder.layers.encoder_layer_3", 1200, 600, "light"),
}


def take(browser: Any, name: str, folder: Path) -> None:
    """Make a page and write its picture."""
    make, address, width, height, scheme = PICTURES[name]
    path = folder / f"{name}.html"
    make(path)
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(f"{path.as_uri()}#{address}")
    page.wait_for_selector("body[data-ready]")
    page.screenshot(path=ROOT / "docs" / "pictures" / f"{name}.png")
    page.close()


def main() -> None:
    """Take the pictures that are named, or all."""
    warnings.simplefilter("ignore")
    with sync_playwright() as library, tempfile.TemporaryDirectory() as folder:
        browser = library.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in sys.argv[1:] or PICTURES:
            take(browser, name, Path(folder))
            print(name, flush=True)


if __name__ == "__main__":
    main()
