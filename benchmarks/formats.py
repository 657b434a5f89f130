"""Ten models in every format: multiply-adds and parameters of the files against the live model's.

    python benchmarks/formats.py [--only TEXT]

Prints one row per model, one column per format: "=" where both are equal, else multiply-adds and the ledger. Dynamic
files are exported with an open batch and read with a batch of 3. Parameters are compared where the format keeps them:
an ONNX exporter may fold a normalisation into a convolution and store other elements.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torchvision import models

from modelsummary import Statistics, load

IMAGE = (2, 3, 64, 64)


class Recurrent(nn.Module):
    """Embeddings, a recurrent layer, and a classifier of each position."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.layer = kind(24, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.words(x))[0])


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 2, 1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.down(x))
        y = self.up(torch.relu(self.norm(self.deep(x))))
        return self.last(torch.cat([x, y], 1))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)


def transformer() -> nn.Module:
    return models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=10)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    **{
        name: (lambda name=name: models.get_model(name, weights=None), lambda batch: torch.rand(batch, *IMAGE[1:]))
        for name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "squeezenet1_1", "convnext_tiny")
    },
    "vision transformer": (transformer, lambda batch: torch.rand(batch, *IMAGE[1:])),
    "encoder": (encoder, lambda batch: torch.rand(batch, 7, 16)),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda batch: torch.randint(50, (batch, 7))),
    "gru": (lambda: Recurrent(nn.GRU), lambda batch: torch.randint(50, (batch, 7))),
    "unet": (UNet, lambda batch: torch.rand(batch, *IMAGE[1:])),
}


def to_onnx(model: nn.Module, x: torch.Tensor, path: Path, *, dynamo: bool, dynamic: bool) -> None:
    shapes: dict[str, Any] = {}
    if dynamic and dynamo:
        shapes = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    elif dynamic:
        shapes = {"dynamic_axes": {"x": {0: "batch"}}}
    rest = {"dynamo": True, "external_data": False, "verbose": False} if dynamo else {"dynamo": False}
    torch.onnx.export(model, (x,), str(path), opset_version=18, input_names=["x"], **rest, **shapes)


def to_pt2(model: nn.Module, x: torch.Tensor, path: Path, *, dynamic: bool) -> None:
    shapes = ({0: torch.export.Dim("batch", max=64)},) if dynamic else None
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=shapes), path)


def to_script(model: nn.Module, x: torch.Tensor, path: Path, *, traced: bool) -> None:
    torch.jit.save(torch.jit.trace(model, x, check_trace=False) if traced else torch.jit.script(model), path)


FORMS: dict[str, tuple[str, bool, Callable[..., None], dict[str, bool]]] = {
    "onnx": (".onnx", False, to_onnx, {"dynamo": True, "dynamic": False}),
    "onnx, dynamic": (".onnx", True, to_onnx, {"dynamo": True, "dynamic": True}),
    "old onnx": (".onnx", False, to_onnx, {"dynamo": False, "dynamic": False}),
    "old onnx, dynamic": (".onnx", True, to_onnx, {"dynamo": False, "dynamic": True}),
    "pt2": (".pt2", False, to_pt2, {"dynamic": False}),
    "pt2, dynamic": (".pt2", True, to_pt2, {"dynamic": True}),
    "traced": (".pt", False, to_script, {"traced": True}),
    "scripted": (".pt", True, to_script, {"traced": False}),
}


def cell(model: nn.Module, sample: Callable[[int], torch.Tensor], form: str, folder: Path) -> str:
    ending, other_batch, write, options = FORMS[form]
    path = folder / f"model{ending}"
    try:
        with torch.set_grad_enabled(form.startswith("old")):  # without gradients it cannot export fused attention
            write(model, sample(2), path, **options)
    except Exception as error:
        return f"no export: {type(error).__name__}"
    x = sample(3 if other_batch else 2)
    live = Statistics(model, x)
    stats = load(path, x, run=True) if ending == ".pt" else load(path, x)
    said = (
        [] if stats.total_mult_adds == live.total_mult_adds else [f"{stats.total_mult_adds - live.total_mult_adds:+,}"]
    )
    if stats.uncounted_ops:
        said.append(f"ledger {dict(stats.uncounted_ops)}")
    if ending != ".onnx" and stats.total_params != live.total_params:
        said.append(f"parameters {stats.total_params - live.total_params:+,}")
    return ", ".join(said) or "="


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, sample) in MODELS.items():
            if options.only not in name:
                continue
            torch.manual_seed(0)
            model = make().eval()
            began = time.time()
            rows.append([name, *(cell(model, sample, form, Path(folder)) for form in FORMS)])
            print(f"{time.time() - began:.0f} s", rows[-1], flush=True)
    print(tabulate(rows, ["", *FORMS]))


if __name__ == "__main__":
    main()
