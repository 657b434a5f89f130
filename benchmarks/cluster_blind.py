"""Published runs that nothing was fitted on, which ``python benchmarks/cluster_runs.py`` predicts.

The runs were chosen for what they add to ``cluster_runs.py``: FSDP, models without tensor parallelism, and eager mode.
They were predicted once before anything was changed; ``CLUSTER.md`` says what was added afterwards.

- torchtitan on A100: ``docs/performance.md`` of pytorch/torchtitan, version 0413364 (2024): Llama 2 and 3 on 64 A100.
  "selective layer" recomputes every second block.
- torchtitan on H100: the same file of 2025, and its benchmark of asynchronous tensor parallelism of June 2025: devices
  of 96 GB with 2.4 TB/s and a limit of 500 W. The operators that "selective op" recomputes count as half of the
  blocks.
- llm-foundry on H100: ``scripts/train/benchmarking/README.md`` of mosaicml/llm-foundry, version 061f2c7: MPT models on
  nodes as a DGX H100, which the source does not say. Its rows of October 2023 are older than support of flash-attn 2.
  Four runs on A100 that were here are rows of ``cluster_data.py``.
- Megatron-Bridge in 8 bits: Llama 3 with FP8 and current scaling (FP8-CS) in ``docs/performance-summary-archive.md`` of
  NVIDIA-NeMo/Megatron-Bridge, containers 25.11 and 26.02.

Where the source does not speak of torch.compile, eager mode is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import sqrt

import torch
from cluster_data import FOUNDRY
from cluster_models import llama, mpt, token_loss
from cluster_runs import Run
from titan_model import titan_llama

from modelsummary.cluster import Cluster, Plan, Recipe
from modelsummary.devices.device_spec import DeviceSpec

EAGER = Recipe(loss=token_loss, sequence="megatron", kernels="eager", attention="flash2")
COMPILED = replace(EAGER, kernels="compiled")
LLAMA = {  # layers, width, heads, groups, inner width, vocabulary
    "Llama 2 13B": (40, 5120, 40, 40, 13824, 32000),
    "Llama 2 70B": (80, 8192, 64, 8, 28672, 32000),
    "Llama 3 8B": (32, 4096, 32, 8, 14336, 128256),
    "Llama 3 70B": (80, 8192, 64, 8, 28672, 128256),
    "Llama 3 405B": (126, 16384, 128, 8, 53248, 128256),
}
EIGHT_BITS = Recipe(
    precision=torch.float8_e4m3fn,
    gradient_dtype=None,  # its recipes set ``grad_reduce_in_fp32 = False``
    loss=token_loss,
    sequence="megatron",
    kernels="fused",
    overlap_tensor=True,
)
MPT = {"7B": (32, 4096, 32), "13B": (40, 5120, 40), "30B": (48, 7168, 56), "70B": (80, 8192, 64)}


def h100_of_500_watts() -> DeviceSpec:
    """Return the devices of torchtitan's H100 runs."""
    usual, slower = DeviceSpec("H100"), sqrt(500 / 700)  # as between boards of different power
    fastest = {dtype: slower * value for dtype, value in usual.achievable_flops.items()}
    return replace(
        usual,
        name="H100 96GB",
        bandwidth=2.4e12,
        memory_bytes=96 * 10**9,
        achievable_flops=fastest,
        source="torchtitan",
    )


def torchtitan() -> Iterator[Run]:
    """FSDP of Llama on A100, and with tensor parallelism on H100."""
    slow = Cluster(h100_of_500_watts(), network_bandwidth=50e9)
    a100 = Cluster.preset("DGX A100")
    rows = [  # model, cluster, nodes, tensor, length, micro-batch, recomputation, recipe, tokens per second and device
        ("Llama 2 13B", a100, 8, 1, 4096, 2, None, EAGER, 2162),
        ("Llama 2 13B", a100, 8, 1, 4096, 2, 20, EAGER, 1914),
        ("Llama 2 70B", a100, 8, 1, 4096, 2, "every", EAGER, 353),
        ("Llama 3 8B", a100, 8, 1, 8192, 1, 16, EAGER, 2904),
        ("Llama 3 70B", a100, 8, 1, 8192, 1, "every", EAGER, 331),
        ("Llama 3 8B", slow, 1, 1, 8192, 2, 16, EAGER, 5762),
        ("Llama 3 8B", slow, 1, 1, 8192, 2, 16, COMPILED, 6667),
        ("Llama 3 70B", slow, 32, 8, 8192, 16, "every", COMPILED, 597.3),
    ]
    for name, cluster, nodes, tensor, length, micro, checkpoint, recipe, rate in rows:
        *sizes, vocabulary = LLAMA[name]
        make = llama if tensor > 1 else titan_llama
        model = make(*sizes, vocabulary=vocabulary, length=length)
        plan = Plan(
            tensor=tensor, sequence=tensor > 1, shard=8 * nodes // tensor, micro_batch=micro, checkpoint=checkpoint
        )
        batch = micro * plan.batch_ranks
        again = {None: "", "every": ", full"}.get(checkpoint, ", selective")
        label = f"{name}, {plan.devices} {cluster.device.name.split()[0]}{again}, {recipe.kernels}"
        seconds = batch * length / (rate * plan.devices)
        yield Run("torchtitan", label, model, plan, cluster.with_nodes(nodes), batch, length, recipe, seconds)


def foundry() -> Iterator[Run]:
    """FSDP of MPT."""
    rows = [  # model, devices, micro-batch, micro-batches, recomputation, tokens per second of all devices
        ("7B", 8, 6, 1, None, 85144),
        ("13B", 64, 2, 1, None, 307209),
        ("30B", 32, 14, 3, "every", 73860),
        ("70B", 64, 8, 4, "every", 66523),
    ]
    for name, devices, micro, count, checkpoint, rate in rows:
        plan = Plan(shard=devices, micro_batch=micro, checkpoint=checkpoint)
        batch, length = micro * count * devices, 2048
        cluster = Cluster.preset("DGX H100", nodes=devices // 8)
        label = f"MPT {name}, {devices} H100{', full' if checkpoint == 'every' else ''}, eager"
        yield Run("llm-foundry", label, mpt(*MPT[name]), plan, cluster, batch, length, FOUNDRY, batch * length / rate)


def bridge() -> Iterator[Run]:
    """Llama 3 in 8 bits."""
    h100, b200 = Cluster.preset("DGX H100"), Cluster("B200", network_bandwidth=50e9)
    gb200 = Cluster.preset("GB200 NVL72")
    gb300 = replace(gb200, device="GB300", memory_bytes=0, network_bandwidth=100e9)
    # model, cluster, devices, FSDP, tensor, pipeline, context, virtual stages, batch, micro-batch, tokens/s of a device
    rows = [
        ("Llama 3 8B", gb300, 8, False, 1, 1, 1, 1, 128, 2, 37556),
        ("Llama 3 8B", gb200, 8, False, 1, 1, 1, 1, 128, 2, 31508),
        ("Llama 3 8B", b200, 8, False, 1, 1, 1, 1, 128, 2, 30624),
        ("Llama 3 8B", h100, 8, True, 1, 1, 1, 1, 128, 1, 14451),
        ("Llama 3 70B", gb300, 64, True, 1, 1, 1, 1, 256, 2, 5003),
        ("Llama 3 70B", gb200, 64, True, 1, 1, 1, 1, 256, 2, 4040),
        ("Llama 3 70B", h100, 64, False, 4, 8, 1, 5, 256, 1, 1621),
        ("Llama 3 70B", h100, 64, False, 4, 8, 1, 5, 128, 1, 1602),
        ("Llama 3 405B", gb300, 256, False, 4, 8, 1, 4, 1536, 1, 988),
        ("Llama 3 405B", gb300, 256, False, 2, 8, 2, 4, 1536, 1, 999),
        ("Llama 3 405B", gb200, 256, False, 4, 16, 1, 4, 1536, 1, 793),
        ("Llama 3 405B", b200, 128, False, 4, 8, 2, 8, 64, 1, 661),
        ("Llama 3 405B", h100, 1024, False, 8, 8, 2, 8, 1536, 1, 311),
        ("Llama 3 405B", h100, 1024, False, 8, 8, 2, 8, 512, 1, 292),
    ]
    for name, cluster, devices, fsdp, tensor, pipeline, context, virtual, batch, micro, rate in rows:
        plan = Plan(
            tensor=tensor,
            sequence=tensor > 1,
            pipeline=pipeline,
            virtual_stages=virtual,
            context=context,
            shard=devices // (tensor * pipeline * context),
            sharded="parameters" if fsdp else "optimizer",
            micro_batch=micro,
            schedule="interleaved1f1b" if virtual > 1 else "1f1b",
        )
        *sizes, vocabulary = LLAMA[name]
        used = cluster.with_nodes(-(-devices // cluster.devices_per_node))
        seconds = batch * 8192 / (rate * devices)
        label = f"{name}, {devices} {cluster.device.name}, {batch} x {micro}, tensor {tensor}"
        model = llama(*sizes, vocabulary=vocabulary)
        yield Run("Megatron-Bridge, 8 bits", label, model, plan, used, batch, 8192, EIGHT_BITS, seconds)
