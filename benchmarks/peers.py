"""Compare counts of other tools with ours on the same models: one measured figure per reason for a difference.

    pip install torchvision torchinfo deepspeed fvcore onnx-tool ptflops
    pip install --no-deps colossalai  # for its Analyzer
    python benchmarks/peers.py

Every figure is measured in this run; tools that are not installed are skipped. docs/peers.md explains the differences.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn
from torchvision import models

from modelsummary import Statistics, load
from modelsummary.fx import flop_count

IMAGE = (1, 3, 224, 224)
BATCH = (16, 3, 224, 224)
DEPTHWISE = (100, 32, 112, 112)
GROUPED = (2, 32, 28, 28)


class Attention(nn.Module):
    """A single call of ``scaled_dot_product_attention``, without a layer around it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def make(name: str) -> nn.Module:
    if name == "attention function":
        return Attention()
    if name == "Conv2d(32, 64, 3, groups=4)":
        return nn.Conv2d(32, 64, 3, groups=4)
    if name == "depthwise Conv2d(32, 32, 3)":
        return nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False)
    return models.get_model(name, weights=None)


def ours(name: str, size: tuple[int, ...]) -> int:
    return Statistics(make(name).eval(), size).total_mult_adds


def our_backward(name: str, size: tuple[int, ...]) -> int:
    return flop_count(make(name), torch.rand(size, requires_grad=True))[1] // 2


def torchinfo(name: str, size: tuple[int, ...]) -> int:
    from torchinfo import summary

    return summary(make(name), size, verbose=0, mode="eval").total_mult_adds


def deepspeed(name: str, size: tuple[int, ...], what: str = "flops") -> int:
    from deepspeed.profiling.flops_profiler import get_model_profile

    flops, macs, _ = get_model_profile(make(name).eval(), size, print_profile=False, as_string=False)
    return int(flops if what == "flops" else macs)


def fvcore(name: str, size: tuple[int, ...]) -> int:
    from fvcore.nn import FlopCountAnalysis

    logging.getLogger("fvcore").setLevel(logging.ERROR)
    return int(FlopCountAnalysis(make(name).eval(), torch.rand(size)).total())


def ptflops(name: str, size: tuple[int, ...], backend: str = "pytorch") -> int:
    from ptflops import get_model_complexity_info as info

    return int(info(make(name).eval(), size[1:], print_per_layer_stat=False, as_strings=False, backend=backend)[0])


def flop_counter(name: str, size: tuple[int, ...], *, backward: bool = False) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    model, x = make(name).eval(), torch.rand(size, requires_grad=backward)
    counter = FlopCounterMode(display=False)
    with torch.set_grad_enabled(backward):
        out = model(x) if backward else None
        with counter:
            _ = out.sum().backward() if backward else model(x)
    return counter.get_total_flops()


def analyzer(name: str, size: tuple[int, ...], *, backward: bool = False) -> int:
    if "colossalai" not in sys.modules:  # its own __init__ imports packages that counting does not need
        package = types.ModuleType("colossalai")
        package.__path__ = list(importlib.util.find_spec("colossalai").submodule_search_locations)
        sys.modules["colossalai"] = package
    from colossalai._analyzer._subclasses.flop_tensor import flop_count as count

    return count(make(name).train(), torch.rand(size, requires_grad=True))[backward]


def onnx_file(read: Callable[[Path], int], name: str, size: tuple[int, ...]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(make(name).eval(), (torch.rand(size),), path, opset_version=20, external_data=False)
        return read(path)


def onnx_tool(path: Path) -> int:
    import onnx_tool

    model = onnx_tool.loadmodel(str(path), {"verbose": False})
    model.graph.shape_infer(None)
    model.graph.profile()
    return int(sum(model.graph.macs))


Figure = Callable[[str, "tuple[int, ...]"], int]
ours_in_file = partial(onnx_file, lambda path: load(path).total_mult_adds)
CASES: list[tuple[str, str, str, tuple[int, ...], Figure, Figure]] = [
    # package, its name for the figure, model, input, theirs, ours
    ("torchinfo", "mult-adds", "resnet18", BATCH, torchinfo, ours),
    ("torchinfo", "mult-adds", "vit_b_16", IMAGE, torchinfo, ours),
    ("deepspeed", "FLOPs", "resnet18", BATCH, deepspeed, lambda *case: 2 * ours(*case)),
    ("deepspeed", "MACs", "vit_b_16", IMAGE, partial(deepspeed, what="macs"), ours),
    ("fvcore", "flops", "resnet50", IMAGE, fvcore, ours),
    ("fvcore", "flops", "vit_b_16", IMAGE, fvcore, ours),
    ("ptflops", "MACs, backend pytorch", "resnet50", IMAGE, ptflops, ours),
    ("ptflops", "MACs, backend pytorch", "vit_b_16", IMAGE, ptflops, ours),
    ("torch", "FlopCounterMode", "vit_b_16", IMAGE, flop_counter, lambda *case: 2 * ours(*case)),
    (
        *("torch", "FlopCounterMode, backward", "Conv2d(32, 64, 3, groups=4)", GROUPED),
        *(partial(flop_counter, backward=True), lambda *case: 2 * our_backward(*case)),
    ),
    ("colossalai", "Analyzer, fwd flops", "mobilenet_v2", (4, 3, 224, 224), analyzer, ours),
    (
        *("colossalai", "Analyzer, bwd flops", "depthwise Conv2d(32, 32, 3)", DEPTHWISE),
        *(partial(analyzer, backward=True), our_backward),
    ),
    ("onnx-tool", "MACs", "mobilenet_v2", IMAGE, partial(onnx_file, onnx_tool), ours_in_file),
    ("onnx-tool", "MACs", "vit_b_16", IMAGE, partial(onnx_file, onnx_tool), ours_in_file),
]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def quietly(figure: Figure, *case: object) -> int:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return figure(*case)


def main() -> None:
    rows = []
    for package, what, name, size, theirs, mine in CASES:
        if (number := installed(package)) is None:
            print(f"{package} is not installed", file=sys.stderr)
            continue
        figure, own = quietly(theirs, name, size), quietly(mine, name, size)
        row = [f"{package} {number}", what, name, "x".join(map(str, size)), f"{figure:,}", f"{own:,}"]
        rows.append([*row, f"{figure - own:+,}"])
    print(tabulate(rows, ["tool", "its figure", "model", "input", "there", "here", "difference"], tablefmt="github"))


if __name__ == "__main__":
    main()
