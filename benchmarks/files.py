"""Compare with onnx-tool: the time to read an ONNX file, and the multiply-adds, interleaved in one run.

    python benchmarks/files.py [--runs 7] [--tiles]

Prints medians in milliseconds, with both libraries imported before, and multiply-adds beside the live model's.
``--tiles`` cuts alexnet into tiles and prints the time to build and save, the file size and the error on onnxruntime.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from growth import decoder
from tabulate import tabulate
from torch import nn
from torchvision import models

from modelsummary import Statistics, load

IMAGE = (1, 3, 224, 224)


def image_model(name: str) -> Callable[[], nn.Module]:
    return lambda: models.get_model(name, weights=None)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    name: (image_model(name), lambda: torch.rand(IMAGE)) for name in ("mobilenet_v2", "resnet50", "vit_b_16")
}
CASES["decoder, 12 layers"] = (lambda: decoder(12), lambda: torch.zeros(1, 128, dtype=torch.long))


def export(model: nn.Module, x: torch.Tensor, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=True, opset_version=20, external_data=False, verbose=False)
    return path


def ours(path: Path) -> tuple[float, int]:
    began = time.perf_counter()
    macs = load(path).total_mult_adds
    return time.perf_counter() - began, macs


def onnx_tool(path: Path) -> tuple[float, int]:
    import onnx_tool as tool

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.perf_counter()
        model = tool.Model(str(path))
        model.graph.shape_infer(None)
        model.graph.profile()
        macs = model.graph.macs[0]
        return time.perf_counter() - began, int(macs)


def compare(runs: int, folder: Path) -> None:
    rows = []
    for name, (make, sample) in CASES.items():
        torch.manual_seed(0)
        model, x = make().eval(), sample()
        live = Statistics(model, x).total_mult_adds
        path = export(model, x, folder / "model.onnx")
        times: dict[str, list[float]] = {"ours": [], "onnx-tool": []}
        found: dict[str, int | str] = {}
        for _ in range(runs):
            for who, run in (("ours", ours), ("onnx-tool", onnx_tool)):
                try:
                    seconds, found[who] = run(path)
                    times[who].append(1e3 * seconds)
                except Exception as error:
                    found[who] = type(error).__name__
        medians = {who: statistics.median(each) if each else float("nan") for who, each in times.items()}
        ratio = medians["ours"] / medians["onnx-tool"]
        rows.append([name, live, found["ours"], found["onnx-tool"], medians["ours"], medians["onnx-tool"], ratio])
        path.unlink()
    headers = ["model", "live MACs", "ours", "onnx-tool", "ours (ms)", "onnx-tool (ms)", "ratio"]
    print(tabulate(rows, headers, floatfmt=".2f", intfmt=","))


def tiles(folder: Path) -> None:
    import onnx

    from modelsummary.onnx import tile_linear, verify

    torch.manual_seed(0)
    whole = export(models.alexnet(weights=None).eval(), torch.rand(IMAGE), folder / "alexnet.onnx")
    rows = []
    for tile in (64, 256, 1024):
        began = time.perf_counter()
        model = tile_linear(whole, tile)
        onnx.checker.check_model(model)
        path = folder / f"tiled{tile}.onnx"
        onnx.save(model, path)
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        found = verify(whole, path)
        checked = time.perf_counter() - began
        gemms = sum(node.op_type == "Gemm" for node in model.graph.node)
        size = path.stat().st_size / 1e6
        rows.append([tile, gemms, len(model.graph.node), seconds, size, checked, found.mse, found.equal])
        path.unlink()
    print(f"alexnet: {whole.stat().st_size / 1e6:.1f} MB")
    headers = ["tile", "Gemm", "nodes", "build, check, save (s)", "file (MB)", "verify (s)", "MSE", "equal"]
    print(tabulate(rows, headers, floatfmt=("", "", "", ".2f", ".1f", ".2f", ".2e", "")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tiles", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.tiles:
            tiles(Path(folder))
        else:
            compare(options.runs, Path(folder))


if __name__ == "__main__":
    main()
