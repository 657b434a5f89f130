"""What torch's allocator reserves on CUDA beside the prediction, and its own allocations replayed.

    python benchmarks/allocator_truth.py --out truth.json    # on a machine with CUDA: measures and predicts
    python benchmarks/allocator_truth.py --truth truth.json  # anywhere: predicts, and compares with a measurement

Each model takes three training steps after ``empty_cache``, ``reset_peak_memory_stats`` and the release of the
workspace of cuBLAS, as in a fresh process. The allocations that torch recorded are kept, too: replayed through
``CachingAllocator``, they must take the same segments.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F

from modelsummary import Statistics
from modelsummary.errors import ModelSummaryError
from modelsummary.memory.caching_allocator import CachingAllocator

STEPS, SECONDS = 3, 75.0  # calibrations begin within so many seconds
ACTIONS = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")


class Case(NamedTuple):
    """A training step.

    Attributes:
        name: what it is called.
        make: function that makes the model.
        inputs: function that makes the arguments.
        options: options of the step.
        expandable_segments: whether the allocator runs with them.
        calibrates: also predict with measured workspaces.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    options: dict[str, Any]
    expandable_segments: bool = False
    calibrates: bool = False


class Recurrent(nn.Module):
    """An embedding, a recurrent layer and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(10_000, 512), nn.LSTM(512, 1024, 2, batch_first=True)
        self.head = nn.Linear(1024, 10_000)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def class_loss(output: Tensor) -> Tensor:
    """Return the cross entropy of the logits of images."""
    return F.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.long, device=output.device))


def token_loss(output: Any) -> Tensor:
    """Return the cross entropy of the logits of tokens, in float32."""
    logits = output if isinstance(output, Tensor) else output.logits
    targets = torch.zeros(logits.shape[0] * logits.shape[1], dtype=torch.long, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets)


def sum_loss(output: Tensor) -> Tensor:
    """Return a loss that costs nothing."""
    return output.sum()


def image_model(name: str, size: int = 224, batch: int = 32, **options: Any) -> Case:
    """Return the step of a model of timm."""
    import timm

    options = {"optimizer": "sgd-momentum", "loss": class_loss, **options}
    return Case(name, lambda: timm.create_model(name), lambda: (torch.rand(batch, 3, size, size),), options)


def language_model(name: str, batch: int, length: int, config: dict[str, Any], **options: Any) -> Case:
    """Return the step of a decoder of transformers, from a configuration alone."""
    import transformers

    def make() -> nn.Module:
        settings = transformers.AutoConfig.for_model(name, use_cache=False, **config)
        return transformers.AutoModelForCausalLM.from_config(settings)

    options = {"optimizer": "adamw", "loss": token_loss, **options}
    return Case(name, make, lambda: (torch.randint(0, 1000, (batch, length)),), options)


def cases() -> Iterator[Case]:
    """Yield the steps that are compared."""
    perceptron = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 100)
    )
    rows = lambda: (torch.rand(512, 1024),)  # noqa: E731
    yield Case("perceptron", perceptron, rows, {"optimizer": "sgd", "loss": class_loss})
    yield Case("perceptron, AdamW", perceptron, rows, {"optimizer": "adamw", "loss": class_loss})
    encoder = lambda: nn.Sequential(  # noqa: E731
        *(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(6))
    )
    sequences = lambda: (torch.rand(16, 256, 512),)  # noqa: E731
    adamw = {"optimizer": "adamw", "loss": sum_loss}
    yield Case("encoder", encoder, sequences, adamw)
    yield Case("encoder, autocast", encoder, sequences, {**adamw, "autocast": torch.bfloat16})
    yield Case("encoder, expandable", encoder, sequences, adamw, expandable_segments=True)
    yield Case(
        "LSTM", Recurrent, lambda: (torch.randint(0, 10_000, (32, 64)),), {"optimizer": "adam", "loss": token_loss}
    )
    yield image_model("vit_small_patch16_224", optimizer="adamw")
    yield image_model("resnet50")._replace(calibrates=True)
    yield image_model("resnet50")._replace(name="resnet50, expandable", expandable_segments=True)
    yield image_model("convnext_tiny", optimizer="adamw")._replace(calibrates=True)
    yield image_model("efficientnet_b0")._replace(calibrates=True)
    yield image_model("swin_tiny_patch4_window7_224", batch=16, optimizer="adamw")
    yield language_model("gpt2", 8, 512, {"n_layer": 6})
    yield language_model("gpt2", 8, 512, {"n_layer": 6}, autocast=torch.bfloat16)._replace(name="gpt2, autocast")
    small = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}
    small |= {"num_key_value_heads": 4, "vocab_size": 32_000}
    yield language_model("llama", 8, 512, small, dtype=torch.bfloat16)
    yield language_model("opt", 4, 512, {**small, "ffn_dim": 3072})


def predicted(stats: Statistics, case: Case, **options: Any) -> dict[str, Any]:
    """Return the figures of the prediction."""
    begin = time.perf_counter()
    expandable = {"expandable_segments": case.expandable_segments}
    memory = stats.memory(device="cuda", reserve=True, **expandable, **{**case.options, **options})
    assert memory.reserve is not None
    sizes = memory.reserve.segments
    seconds = time.perf_counter() - begin
    return {"peak": memory.peak, **memory.reserve.to_dict(), "segments": sizes, "seconds": seconds}


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a case."""
    name, parameters = case.options["optimizer"], model.parameters()
    if name.startswith("sgd"):
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if name.endswith("momentum") else 0.0)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](parameters)


def measured(case: Case, model: nn.Module) -> dict[str, Any]:
    """Return what torch's allocator says of three steps, and all that it did."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{case.expandable_segments}")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    device = torch.cuda.current_device()
    earlier = len(torch.cuda.memory._snapshot()["device_traces"][device])
    try:
        model = model.to("cuda", case.options.get("dtype"))
        args = [tensor.to("cuda") for tensor in case.inputs()]
        optimizer = optimizer_of(case, model)
        after_steps = []
        autocast = case.options.get("autocast")

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda", autocast) if autocast is not None else nullcontext():
                loss = case.options["loss"](model(*args))
            loss.backward()
            optimizer.step()

        for _ in range(STEPS):
            step()
            torch.cuda.synchronize()
            after_steps.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(None)
    changes = [event for event in snapshot["device_traces"][device][earlier:] if event["action"] in ACTIONS]
    first = min(event["addr"] for event in changes)
    events = [[ACTIONS.index(event["action"]), event["addr"] - first, event["size"]] for event in changes]
    segments = [segment["total_size"] for segment in snapshot["segments"] if segment["device"] == device]
    return {
        "before": before,
        "max_allocated": torch.cuda.max_memory_allocated(),
        "max_reserved": torch.cuda.max_memory_reserved(),
        "after_steps": after_steps,
        "segments": segments,
        "events": events,
    }


def replayed(events: list[list[int]], *, expandable_segments: bool) -> tuple[int, int]:
    """Return the most bytes that torch's allocations reserve when replayed, and how many blocks lie elsewhere.

    Segments get the addresses that the device gave them, as the lowest of equally large blocks is taken. What torch put
    into segments from before the recording is left out.
    """
    allocator, blocks, reserved, elsewhere = CachingAllocator(expandable_segments=expandable_segments), {}, 0, 0
    segments: list[tuple[int, int]] = []
    for action, address, nbytes in events:
        if ACTIONS[action] in ("segment_alloc", "segment_map"):
            segments.append((address, address + nbytes))
            if not expandable_segments:
                allocator.next_address = address
        elif ACTIONS[action] == "alloc" and any(begin <= address < end for begin, end in segments):
            blocks[address] = allocator.allocate(nbytes)
            elsewhere += not expandable_segments and blocks[address].address != address
        elif ACTIONS[action] == "free_completed" and address in blocks:
            allocator.free(blocks.pop(address))
        reserved = max(reserved, allocator.reserved)
    return reserved, elsewhere


def calibrated(case: Case, model: nn.Module, args: list[Tensor]) -> dict[str, Any]:
    """Return the figures of the prediction with measured workspaces."""
    from modelsummary.latency import kernel_runs

    kernel_runs._LEAST_ROUNDS, kernel_runs._SECONDS_OF_ROUNDS = 1, 0.0  # bytes matter here, not seconds
    stats = Statistics(model, tuple(args))
    step = {name: value for name, value in case.options.items() if name in ("optimizer", "loss")}
    stats.calibrate(backward=True, **step)
    return predicted(stats, case)


def results_of(case: Case, begin: float) -> dict[str, Any]:
    """Return the prediction and, with CUDA, the measurement of a case; a prediction that fails says why."""
    torch.manual_seed(0)
    model = case.make().train()
    result: dict[str, Any] = {}
    try:
        result["predicted"] = predicted(Statistics(model, case.inputs()), case)
    except ModelSummaryError as error:
        result["refused"] = str(error)
    if torch.cuda.is_available():
        result["measured"] = measured(case, model)
        if case.calibrates and time.perf_counter() - begin < SECONDS:
            model.zero_grad()
            args = [tensor.to("cuda") for tensor in case.inputs()]
            try:
                result["calibrated"] = calibrated(case, model, args)
            except ModelSummaryError as error:
                result["refused"] = str(error)
    return result


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to write")
    parser.add_argument("--truth", type=Path, help="file of an earlier measurement")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    begin = time.perf_counter()
    truth = json.loads(options.truth.read_text()) if options.truth else {}
    results: dict[str, Any] = {"torch": torch.__version__}
    if torch.cuda.is_available():
        torch.cuda.init()
        results["device"] = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MODELSUMMARY_CACHE"] = folder
        for case in cases():
            if options.only not in case.name:
                continue
            try:
                result = results_of(case, begin)
            except Exception:
                result = {"error": traceback.format_exc()}
                print(case.name, result["error"], flush=True)
            results[case.name] = result
            if "measured" not in result and "measured" in truth.get(case.name, {}):
                result["measured"] = truth[case.name]["measured"]
            table += [row(case, result)] if "measured" in result and "predicted" in result else []
            print(
                case.name,
                f"{time.perf_counter() - begin:.0f} s",
                [result.get("refused", "")[:300], *table[-1:]],
                flush=True,
            )
            if options.out:
                options.out.write_text(json.dumps(results, separators=(",", ":")))
    headers = ["model", "allocated (B)", "predicted", "reserved (B)", "predicted", "calibrated", "replayed"]
    print(tabulate(table, headers, tablefmt="github", disable_numparse=True))


def row(case: Case, result: dict[str, Any]) -> list[str]:
    """Return the figures of a case as texts."""
    truth, prediction = result["measured"], result["predicted"]
    allocated, reserved = truth["max_allocated"] - truth["before"][0], truth["max_reserved"] - truth["before"][1]
    replay = replayed(truth["events"], expandable_segments=case.expandable_segments)
    other = result.get("calibrated", {}).get("reserved")
    return [
        case.name,
        f"{allocated:,}",
        f"{prediction['max_allocated'] / allocated - 1:+.2%}",
        f"{reserved:,}",
        f"{prediction['reserved'] / reserved - 1:+.2%}",
        "" if other is None else f"{other / reserved - 1:+.2%}",
        f"{replay[0] / reserved - 1:+.2%}, {replay[1]} elsewhere",
    ]


if __name__ == "__main__":
    main()
