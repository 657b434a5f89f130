"""Compare the predicted memory of a rank with torch's own trackers, on models of other libraries.

python -m benchmarks.memory_trackers            # all models, all plans
python -m benchmarks.memory_trackers opt t5     # these models only

``FSDPMemTracker`` and ``MemTracker`` of ``torch.distributed._tools`` follow a step of the sharded model on real
tensors, in a fake process group, whose collectives move nothing. They see no workspaces.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
from torch import nn

from modelsummary import Statistics
from modelsummary.capture.step import loss_of
from modelsummary.parallel.fake_world import fake_world
from tests.zoo import timm_models, torchvision_models, transformers_models

MODELS = (
    "opt",
    "gpt_neox",
    "qwen2",
    "phi",
    "t5",
    "roberta",
    "whisper",
    "timm/mixer_s32_224",
    "timm/deit_tiny_patch16_224",
    "torchvision/convnext_tiny",
)
PLANS: dict[str, dict[str, Any]] = {
    "FSDP2": {"shard": 4},
    "TP": {"tensor": 2},
    "TP + FSDP2": {"tensor": 2, "shard": 2},
    "FSDP2, checkpoint": {"shard": 4, "checkpoint": "every"},
    "FSDP2, bfloat16": {"shard": 4, "precision": torch.bfloat16},
}
LIBRARIES = {"timm": timm_models, "torchvision": torchvision_models}


def example(name: str) -> tuple[nn.Module, Any]:
    library, _, model = name.rpartition("/")
    torch.manual_seed(0)
    made = LIBRARIES.get(library, transformers_models).make(model)
    return made.model.train(), made.kwargs or made.args


def tracked(name: str, plan: Any, rank: int) -> tuple[int, int]:
    """Return the bytes after the forward, and the peak, of the second step."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import FSDPModule

    with fake_world(rank, plan.world_size):
        model, inputs = example(name)
        plan.apply(model, plan.device_mesh("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def forward() -> tuple[Any, torch.Tensor]:
            output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            return output, loss_of(output, None)

        forward()[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker: Any
        if isinstance(model, FSDPModule):
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((inputs,))
        else:
            tracker = MemTracker()
            given = list(inputs.values()) if isinstance(inputs, dict) else list(inputs)
            tracker.track_external(model, optimizer, *(each for each in given if isinstance(each, torch.Tensor)))
        with tracker:
            output, loss = forward()
            held = total(tracker.get_tracker_snapshot())
            loss.backward()
            optimizer.step()
            del output
        return held, total(tracker.get_tracker_snapshot("peak"))


def total(snapshot: Any) -> int:
    return sum(each["Total"] for device, each in snapshot.items() if device.type != "meta")


def compare(name: str, label: str) -> None:
    """Print one row per rank: the first and the last."""
    plan = Statistics(*example(name)).parallel_plan(**PLANS[label])
    for rank in (0, plan.world_size - 1):
        found = plan.memory(rank, optimizer="adamw", workspaces=False)
        held, peak = tracked(name, plan, rank)
        print(
            f"| {name} | {label} | {rank} | {found.held_after_forward:,} | {found.held_after_forward - held:+,} | "
            f"{found.peak:,} | {found.peak - peak:+,} | {100 * (found.peak / peak - 1):+.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of models")
    for name in parser.parse_args().names or MODELS:
        for label in PLANS:
            try:
                compare(name, label)
            except Exception as error:
                print(f"| {name} | {label} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
