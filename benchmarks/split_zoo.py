"""Split the models of torchvision and compare stages with the model, also for torch's ``pipeline()``.

    python benchmarks/split_zoo.py                 # all models, about half an hour on two cores
    python benchmarks/split_zoo.py resnet18 swin_t --peer

Each cell is for n = 2, 4, 8 stages: ``yes``, or the n that work, or the reason. "twice" is twice the batch. Gradients
may differ by rounding. ``pipeline()`` makes 4 stages that begin at the same layers as ours.
"""

from __future__ import annotations

import argparse
import copy
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision import models

import modelsummary

COUNTS = (2, 4, 8)
COLUMNS = ("split", "exact", "gradients", "buffers", "twice", "keys")
# The largest of each family take minutes and behave like the others.
LEFT_OUT = {"vit_h_14", "regnet_y_128gf", "vit_l_16", "vit_l_32"}
SIZES = {"inception_v3": 299, "maxvit_t": 224}


def zoo() -> list[str]:
    """Return the names of all models."""
    parts = (models, models.segmentation, models.video, models.optical_flow, models.detection)
    names = [name for part in parts for name in models.list_models(module=part)]
    return [name for name in names if name not in LEFT_OUT and not name.startswith("quantized")]


def make(name: str) -> tuple[nn.Module, Callable[[int], tuple[Any, ...]]]:
    """Return the model, and a function that makes its inputs for a batch size."""
    options: dict[str, Any] = {"weights": None}
    if name in models.list_models(module=models.segmentation) or name in models.list_models(module=models.detection):
        options["weights_backbone"] = None
    if name.startswith("vit"):
        options["image_size"] = 64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = models.get_model(name, **options)
    size = SIZES.get(name, 64)
    if name in models.list_models(module=models.video):
        shape: tuple[int, ...] = (3, 16, 224, 224) if name.startswith(("mvit", "swin3d", "s3d")) else (3, 16, 64, 64)
        return model, lambda batch: (torch.randn(batch, *shape),)
    if name in models.list_models(module=models.optical_flow):
        return model, lambda batch: (torch.randn(batch, 3, 128, 128), torch.randn(batch, 3, 128, 128))
    if name in models.list_models(module=models.detection):
        return model, lambda batch: ([torch.rand(3, 96, 96) for _ in range(batch)],)
    return model, lambda batch: (torch.randn(batch, 3, size, size),)


def ours(model: nn.Module, inputs: Callable[[int], tuple[Any, ...]]) -> dict[str, dict[int, str]]:
    """Return a dict of column -> number of stages -> "yes" or the reason."""
    cells: dict[str, dict[int, str]] = {column: {} for column in COLUMNS}
    stats = modelsummary.Statistics(model, inputs(2) if len(inputs(2)) > 1 else inputs(2)[0])
    for count in COUNTS:
        try:
            stages = stats.split(count)
        except modelsummary.SplitError as error:
            cells["split"][count] = str(error)
            continue
        cells["split"][count] = "yes"
        same, twice = (verified(stages, inputs(batch)) for batch in (2, 4))
        for column, value in same.items():
            cells[column][count] = value
        cells["twice"][count] = "yes" if set(twice.values()) == {"yes"} else "no"
        cells["keys"][count] = "yes" if list(stages.state_dict()) == list(model.state_dict()) else "no"
    return cells


def verified(stages: modelsummary.Stages, inputs: tuple[Any, ...]) -> dict[str, str]:
    try:
        found = stages.verify(*inputs)
    except modelsummary.SplitError as error:
        return dict.fromkeys(("exact", "gradients", "buffers"), str(error))
    answer = {True: "yes", False: "no"}
    return {"exact": answer[found.outputs == 0], "gradients": "yes", "buffers": answer[found.buffers == 0]}


def peer(model: nn.Module, inputs: Callable[[int], tuple[Any, ...]]) -> dict[str, dict[int, str]]:
    """Return the same for ``torch.distributed.pipelining.pipeline()`` with 4 stages."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    cells: dict[str, dict[int, str]] = {column: {} for column in COLUMNS}
    keys = set(model.state_dict())
    try:
        sample = inputs(2)
        stages = modelsummary.Statistics(model, sample if len(sample) > 1 else sample[0]).split(4)
        modules = dict(model.named_modules())
        begins = [each.first if each.first in modules else _next_module(stages, number, modules)
                  for number, each in enumerate(stages.facts)][1:]  # fmt: skip
        twin = copy.deepcopy(model)
        pipe = pipeline(twin, sample, split_spec={name: SplitPoint.BEGINNING for name in begins if name})
    except Exception as error:
        cells["split"][4] = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        return cells
    cells["split"][4] = "yes"
    own = [key for number in range(pipe.num_stages) for key in pipe.get_stage_module(number).state_dict()]
    cells["keys"][4] = "yes" if set(own) == keys else "no"
    for batch, columns in ((2, ("exact", "gradients", "buffers")), (4, ("twice",))):
        try:
            found = _same(model, _Attached(pipe.split_gm), inputs(batch))
        except Exception as error:
            found = dict.fromkeys(("exact", "gradients", "buffers"), type(error).__name__)
        for column in columns:
            cells[column][4] = found["exact"] if column == "twice" else found[column]
    return cells


class _Attached(nn.Module):
    """The stages of a ``Pipe`` in one autograd graph; the ``Pipe`` itself detaches between stages."""

    def __init__(self, split: torch.fx.GraphModule) -> None:
        super().__init__()
        self.split = split

    def forward(self, *args: Any) -> Any:
        return torch.fx.Interpreter(self.split).run(*args)


def _next_module(stages: modelsummary.Stages, number: int, modules: dict[str, nn.Module]) -> str:
    return next((name for name, _ in stages[number].named_children() if name in modules), "")


def _same(model: nn.Module, pipe: Any, inputs: tuple[Any, ...]) -> dict[str, str]:
    results = []
    for run in (copy.deepcopy(model), pipe):
        torch.manual_seed(0)
        tensors = [leaf for leaf in tree_leaves(run(*inputs)) if isinstance(leaf, Tensor)]
        sum(each.float().sum() for each in tensors).backward()
        grads = {name: each.grad for name, each in run.named_parameters() if each.grad is not None}
        buffers = sorted((tuple(each.shape), float(each.double().sum())) for each in run.buffers())
        results.append((tensors, sorted(float(each.double().norm()) for each in grads.values()), buffers))
    (out, grads, buffers), (other_out, other_grads, other_buffers) = results
    answer = {True: "yes", False: "no"}
    same_out = len(out) == len(other_out) and all(map(torch.equal, out, other_out))
    same_grads = len(grads) == len(other_grads) and torch.allclose(
        torch.tensor(grads), torch.tensor(other_grads), rtol=1e-3, atol=1e-6
    )
    return {"exact": answer[same_out], "gradients": answer[same_grads], "buffers": answer[buffers == other_buffers]}


def cell(by_count: dict[int, str]) -> str:
    """Return the cell's text, one word if all counts agree."""
    values = set(by_count.values())
    if not values:
        return "--"
    if len(values) == 1:
        return values.pop()[:60]
    return ", ".join(f"{count}: {value[:24]}" for count, value in by_count.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="default: all of torchvision")
    parser.add_argument("--peer", action="store_true", help="also torch.distributed.pipelining.pipeline()")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, tally = [], Counter()
    for name in options.models or zoo():
        # In training, detection models need targets, and decide by values before they use them.
        for mode in ("eval",) if name in models.list_models(module=models.detection) else ("train", "eval"):
            for tool, check in (("ours", ours), ("pipeline()", peer))[: 2 if options.peer else 1]:
                torch.manual_seed(0)
                model, inputs = make(name)
                try:
                    cells = check(model.train(mode == "train"), inputs)
                except Exception as error:
                    cells = {column: {} for column in COLUMNS} | {"split": {0: f"{type(error).__name__}: {error}"}}
                rows.append([name, mode, tool, *(cell(cells[column]) for column in COLUMNS)])
                print(*rows[-1], sep=" | ", flush=True)
                tally.update((tool, column) for column in COLUMNS if rows[-1][3 + COLUMNS.index(column)] == "yes")
                tally[tool, "of"] += 1
                gc.collect()
    print(tabulate(rows, ["model", "mode", "by", *COLUMNS], tablefmt="plain"))
    for tool in ("ours", "pipeline()")[: 2 if options.peer else 1]:
        counts = ", ".join(f"{column} {tally[tool, column]}" for column in COLUMNS)
        print(f"{tool}: of {tally[tool, 'of']} model x mode: {counts}")


if __name__ == "__main__":
    main()
