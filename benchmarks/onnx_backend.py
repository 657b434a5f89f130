"""Read every model of onnx's own backend tests, and compare multiply-adds with a run on onnxruntime.

    python benchmarks/onnx_backend.py [FOLDER ...]

A folder is ``onnx/backend/test/data`` of an installed or unpacked onnx; default: the installed one. Prints what
is refused, with the reason, and where multiply-adds of a model that onnxruntime runs are others; then the totals.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from wild_files import run_with

import modelsummary


def truth_of(path: Path) -> dict[str, Any]:
    """The run of onnxruntime on the first set of inputs beside the model."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(str(path), load_external_data=False)
    weights = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    feeds = {}
    for place, value in enumerate(inputs):
        data = path.parent / "test_data_set_0" / f"input_{place}.pb"
        if value.type.WhichOneof("value") != "tensor_type" or not data.exists():
            return {"error": "no tensor"}
        feeds[value.name] = numpy_helper.to_array(onnx.TensorProto.FromString(data.read_bytes()))
    return run_with(path, feeds)


def outcome(path: Path) -> tuple[str, str]:
    """What became of one model, and details."""
    import torch

    truth: dict[str, Any]
    try:
        truth = truth_of(path)
    except Exception as error:
        truth = {"error": str(error)[:200]}
    given = None
    if "arrays" in truth:
        given = {}
        for name, array in truth.pop("arrays").items():
            try:
                given[name] = torch.from_numpy(array) if array.ndim else torch.from_numpy(array.reshape(1))[0]
            except TypeError:
                given[name] = list(array.shape)
    try:
        stats = modelsummary.load(path, given or None)
        str(stats)
    except modelsummary.ModelSummaryError as error:
        return "refused", str(error)
    except Exception as error:
        return "ESCAPED", f"{type(error).__name__}: {error}"
    if "error" in truth or truth["unknown"]:
        return "read, not run", str(truth)[:200]
    if stats.total_mult_adds == truth["macs"]:
        return "equal", ""
    said = dict(stats.uncounted_ops) or stats.root.note
    return "in the ledger" if said else "OTHER", f"{stats.total_mult_adds} of {truth['macs']} {said}"


def main() -> None:
    import onnx

    folders = [Path(each) for each in sys.argv[1:]] or [Path(onnx.__file__).parent / "backend/test/data"]
    with tempfile.TemporaryDirectory():
        for folder in folders:
            paths = sorted(folder.rglob("*.onnx"))
            with get_context("spawn").Pool(2, maxtasksperchild=400) as pool:
                counts: Counter[str] = Counter()
                for path, (what, details) in zip(paths, pool.imap(outcome, paths, chunksize=20), strict=True):
                    counts[what] += 1
                    if what not in ("equal", "read, not run"):
                        print(f"{what:14} {path.relative_to(folder)} {details[:300]}", flush=True)
            print(folder.parts[-5:], sum(counts.values()), dict(counts))


if __name__ == "__main__":
    main()
