"""Published training runs of the data folder: Megatron on A100 and B200, FSDP on A100, nanotron on H100.

The files have every second row of a source, or the rows of some devices. Recipes follow the sources, and were written
before a row was predicted; but the fused losses of llm-foundry and SimuMax were added when peaks had been seen.

- ``a100_multi_node.csv``: vTrain, MICRO 2024: GPT on 64 to 512 A100, Megatron-DeepSpeed, full recomputation, nodes of 8
  with 800 Gbit/s.
- ``foundry_a100.csv``: llm-foundry, ``scripts/train/benchmarking`` at 8c8dd48: MPT under FSDP, 1,600 Gbit/s for a node.
  With ``PURE`` gradients are reduced in bfloat16. Attention and loss are of flash-attn 1
  (``fused_crossentropy``), which its releases pinned then.
- ``b200_simumax.csv``: SimuMax, ``docs/b200`` at 4dcaae5: Megatron-LM on 8 B200, models cut to a few layers, with
  peaks. Experts after one dense block. Its boards sustain 1,107 TFLOP/s in long products.
- ``h100_nanotron.csv``: nanotron 0.5, ``docs/benchmark_summary.svg``: the best configurations on 8 to 512 H100, with
  peaks. Widths, blocks and the vocabulary of 131,072 follow from the numbers of parameters; MFU counts attention dense.
  Its stages are balanced by cost (``get_block_compute_costs``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from cluster_models import Sizes, fused_token_loss, gpt, llama, measured_token_loss, mixture, mpt, token_loss
from cluster_runs import MEGATRON, Run
from torch import nn

from modelsummary import DeviceSpec
from modelsummary.cluster import Cluster, Plan, Recipe

EAGER = Recipe(loss=token_loss, sequence="megatron", kernels="eager", attention="flash2")
FOUNDRY = replace(EAGER, loss=measured_token_loss, attention="flash1")
PURE = replace(FOUNDRY, gradient_dtype=None, early_stop=False)
SIMUMAX = Recipe(
    loss=fused_token_loss, sequence="megatron", kernels="fused", overlap_tensor=True, overlap_gradients=False
)
B200 = DeviceSpec("B200", sustained_flops={torch.bfloat16: 1.107e15})
MPT = {  # width, heads, layers
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
LLAMA = {"llama3_70b": (8192, 64, 8, 28672), "llama3_405b": (16384, 128, 16, 53248)}  # width, heads, groups, inner
DEEPSEEK = {
    "deepseekv2": Sizes(4, 5120, 128, 0, 64, 160, 6, 1536, 102400, shared=3072, dense=1, dense_inner=12288),
    "deepseekv3": Sizes(4, 7168, 128, 0, 64, 256, 8, 2048, 129280, shared=2048, dense=1, dense_inner=18432),
}
NANOTRON = {  # layers, width, heads, inner, the head shares the embedding's weights
    "1.34B": (16, 2048, 32, 8192, True),
    "3.57B": (28, 3072, 24, 8192, True),
    "8.86B": (32, 4096, 32, 14336, False),
}


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of a file of training runs."""
    with open(folder / "training_runs" / name, encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


@lru_cache(maxsize=16)
def model_of(name: str, *sizes: object) -> nn.Module:
    """Return a model on the meta device; several rows have the same one."""
    if name == "gpt":
        return gpt(*sizes)
    if name == "mpt":
        layers, width, heads, length = sizes
        return mpt(layers, width, heads, length=length)
    if name == "llama":
        *layers, vocabulary, is_tied = sizes
        model = llama(*layers, vocabulary=vocabulary)
        if is_tied:
            model.head.weight = model.tokens.weight
        return model
    return mixture(*sizes)


def vtrain(folder: Path) -> Iterator[Run]:
    """GPT with tensor, data and pipeline parallelism on many nodes."""
    for row in rows_of(folder, "a100_multi_node.csv"):
        names = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "tensor", "data", "pipeline")
        gpus, batch, micro, width, heads, layers, tensor, data, pipeline = (int(row[name]) for name in names)
        plan = Plan(tensor=tensor, data=data, pipeline=pipeline, micro_batch=micro, checkpoint="every")
        cluster = Cluster.preset("DGX A100", nodes=gpus // 8, network_bandwidth=12.5e9)
        label = f"{row['params_billion']}B, {gpus} A100, tensor {tensor}, data {data}, pipeline {pipeline}, {micro}"
        model = model_of("gpt", layers, width, heads)
        seconds = float(row["iteration_ms"]) * 1e-3
        yield Run("vTrain, many nodes", label, model, plan, cluster, batch, 2048, MEGATRON, seconds)


def foundry(folder: Path) -> Iterator[Run]:
    """MPT under FSDP."""
    for row in rows_of(folder, "foundry_a100.csv"):
        width, heads, layers = MPT[row["model"]]
        length, gpus, batch = (int(row[name]) for name in ("sequence", "gpus", "global_batch"))
        plan = Plan(
            shard=gpus,
            sharded="gradients" if row["sharding"] == "SGO" else "parameters",
            micro_batch=int(row["micro_batch"]),
            checkpoint="every" if row["recompute"] == "AC" else None,
        )
        cluster = Cluster(row["device"], nodes=gpus // 8)
        recipe = PURE if "PURE" in row["precision"] else FOUNDRY
        label = f"MPT {row['model']}, {length} tokens, {gpus} {row['device']}, {plan.micro_batch}"
        seconds = batch * length / (float(row["tokens_per_second_per_gpu"]) * gpus)
        model = model_of("mpt", layers, width, heads, length)
        yield Run(f"llm-foundry, {row['device']}", label, model, plan, cluster, batch, length, recipe, seconds)


def simumax(folder: Path) -> Iterator[Run]:
    """Megatron-LM on one node of B200."""
    for row in sorted(rows_of(folder, "b200_simumax.csv"), key=lambda row: row["case"].startswith("deepseek")):
        name, case = re.split(r"_(?:tp|l\d)", row["case"])[0], row["case"]
        number = {key: int(value) for key, value in re.findall(r"(?<![a-z])(l|tp|cp|pp|dp|ep|mbc|seq)(\d+)", case)}
        if name in LLAMA:
            model = model_of("llama", number["l"], *LLAMA[name], 128256, False)
        else:
            model = model_of("mixture", DEEPSEEK[name]._replace(layers=number["l"]))
        plan = Plan(
            tensor=number["tp"],
            sequence=number["tp"] > 1,
            context=number.get("cp", 1),
            expert=number.get("ep", 1),
            pipeline=number["pp"],
            shard=number["dp"],
            sharded="optimizer",
        )
        batch, length = number["mbc"] * number["dp"], number.get("seq", 4096)
        table = "SimuMax, Llama" if name in LLAMA else "SimuMax, DeepSeek"
        seconds, peak = float(row["measured_ms"]) * 1e-3, float(row["measured_peak_gib"]) * 2**30
        yield Run(table, case, model, plan, Cluster(B200), batch, length, SIMUMAX, seconds, peak)


def nanotron(folder: Path) -> Iterator[Run]:
    """Llama with tensor, data and pipeline parallelism; a step has 1,048,576 tokens."""
    length, vocabulary, batch = 4096, 131072, 256
    for row in rows_of(folder, "h100_nanotron.csv"):
        layers, width, heads, inner, is_tied = NANOTRON[row["model"]]
        names = ("nodes_of_8", "data", "tensor", "pipeline", "micro_batch", "zero")
        nodes, data, tensor, pipeline, micro, zero = (int(row[name]) for name in names)
        block = 2 * length * (4 * width**2 + 3 * width * inner) + 4 * length**2 * width
        flops = 3 * batch * (layers * block + 2 * length * width * vocabulary)
        seconds = flops / (float(row["mfu_percent"]) / 100 * 8 * nodes * 989e12)
        plan = Plan(
            tensor=tensor,
            sequence=tensor > 1,
            data=1 if zero else data,
            shard=data if zero else 1,
            sharded="optimizer" if zero else None,
            pipeline=pipeline,
            micro_batch=micro,
            blocks="cost",
        )
        cluster = Cluster.preset("DGX H100", nodes=nodes)
        model = model_of("llama", layers, width, heads, heads, inner, vocabulary, is_tied)
        label = f"{row['model']}, {8 * nodes} H100, tensor {tensor}, data {data}, pipeline {pipeline}"
        peak = float(row["peak_memory"].removesuffix("GB")) * 2**30
        yield Run("nanotron", label, model, plan, cluster, batch, length, EAGER, seconds, peak)
