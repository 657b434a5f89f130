"""Published training runs of mixtures of experts, which ``python benchmarks/cluster_runs.py`` predicts.

All runs divide the experts over ranks and balance the tokens between them (their benchmarks force that). Nothing was
fitted to them, and they were predicted once before anything was changed; ``CLUSTER.md`` has both results.

- Megatron-Core: ``megatron/core/transformer/moe/README.md`` of NVIDIA/Megatron-LM: Mixtral 8x7B, 468 TFLOP/s, whose
  reference mapping is in the same file. Its FLOPs are counted with dense attention.
- NeMo AutoModel: ``docs/performance-summary.md`` of NVIDIA-NeMo/Automodel, October 2025, with the recipes of that time
  in ``examples/benchmark/configs``: DGX H100, bfloat16, FSDP. Its pipelines end after each local batch. Its gate deals
  the experts out in turn (``FakeBalancedGate``), so all experts of a token are in one node, and DeepEP sends one copy
  there.
- Megatron-Bridge: ``docs/performance-summary.md`` of NVIDIA-NeMo/Megatron-Bridge, container 25.11, bfloat16: H100,
  B200, GB200 and GB300. Recomputation of single functions is left out. GPT-OSS also of container 26.02, from
  ``docs/performance-summary-archive.md``; these five runs were predicted once, after all changes. The table of 25.11
  has 4 samples in a micro-batch on H100, and 8 ranks of experts on B200, which do not fit; the recipes of this batch
  have 1 and 64 (``scripts/performance/configs/gpt_oss/workload_base_configs.py``), which are predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from cluster_models import Sizes, mixture, token_loss
from cluster_runs import Run

from modelsummary.cluster import Cluster, Plan, Recipe

EAGER = Recipe(loss=token_loss, sequence="megatron", kernels="eager")
MEGATRON = replace(EAGER, kernels="fused")
BRIDGE = replace(MEGATRON, gradient_dtype=None)  # its recipes set ``grad_reduce_in_fp32 = False``
HYBRID_EP = replace(BRIDGE, dispatcher="hybridep")
DEEP_EP = replace(  # torch.optim.Adam has its states in the dtype of the parameters
    EAGER,
    dispatcher="deepep",
    copies_per_token=1,
    gradient_dtype=None,
    state_dtype=torch.bfloat16,
    master_weights=False,
)
MODELS = {
    "Mixtral 8x7B": Sizes(32, 4096, 32, 8, 128, 8, 2, 14336, 32000),
    "Qwen3 30B": Sizes(48, 2048, 32, 4, 128, 128, 8, 768, 151936),
    "Qwen3 235B": Sizes(94, 4096, 64, 4, 128, 128, 8, 1536, 151936),
    "GPT-OSS 20B": Sizes(24, 2880, 64, 8, 64, 32, 4, 2880, 201088, window=128, has_biases=True),
    "GPT-OSS 120B": Sizes(36, 2880, 64, 8, 64, 128, 4, 2880, 201088, window=128, has_biases=True),
    "DeepSeek-V3": Sizes(61, 7168, 128, 0, 64, 256, 8, 2048, 129280, shared=2048, dense=3, dense_inner=18432),
    "Kimi K2": Sizes(61, 7168, 64, 0, 64, 384, 8, 2048, 163840, shared=2048, dense=1, dense_inner=18432),
}


def megatron_core() -> Iterator[Run]:
    """Mixtral on 64 H100."""
    sizes, batch, length, gpus = MODELS["Mixtral 8x7B"], 256, 4096, 64
    width, layers = sizes.width, sizes.layers
    block = 1 + sizes.groups / sizes.heads + length / width + 1.5 * sizes.chosen * sizes.inner / width
    flops = 12 * batch * length * layers * width**2 * (block + sizes.vocabulary / (2 * layers * width))
    plan = Plan(
        expert=8, pipeline=4, virtual_stages=8, shard=16, sharded="optimizer", micro_batch=1, schedule="interleaved1f1b"
    )
    cluster = Cluster.preset("DGX H100", nodes=8)
    seconds = flops / (gpus * 468e12)
    label = "Mixtral 8x7B, 64 H100"
    yield Run("Megatron-Core", label, mixture(sizes), plan, cluster, batch, length, MEGATRON, seconds)


def automodel() -> Iterator[Run]:
    """FSDP on H100; rounds of a pipeline follow each other."""
    # model, devices, pipeline, virtual stages, expert, micro-batch, samples of a copy per round, recomputation, rounds,
    # seconds of a step
    rows = [
        ("DeepSeek-V3", 1024, 4, 8, 64, 1, 8, "every", 4, 37.87),
        ("DeepSeek-V3", 256, 4, 8, 64, 1, 8, "every", 1, 8.18),
        ("Kimi K2", 256, 8, 4, 32, 1, 8, "every", 2, 8.86),
        ("Qwen3 30B", 8, 1, 1, 8, 4, 64, "every", 1, 21.773),
        ("GPT-OSS 20B", 8, 1, 1, 8, 2, 32, None, 1, 10.04),
        ("GPT-OSS 120B", 64, 1, 1, 64, 2, 8, None, 1, 4.30),
    ]
    for name, gpus, pipeline, virtual, expert, micro, samples, checkpoint, rounds, seconds in rows:
        plan = Plan(
            expert=expert,
            pipeline=pipeline,
            virtual_stages=virtual,
            shard=gpus // pipeline,
            sharded="gradients" if pipeline > 1 else "parameters",  # stages keep what they gathered
            micro_batch=micro,
            checkpoint=checkpoint,
            schedule="interleaved1f1b" if virtual > 1 else "1f1b",
        )
        cluster = Cluster.preset("DGX H100", nodes=gpus // 8)
        batch = samples * plan.batch_ranks
        # FlexAttention is as fast as FlashAttention-2, within 15 % (https://pytorch.org/blog/flexattention/)
        recipe = replace(DEEP_EP, attention="flash2") if "GPT-OSS" in name else DEEP_EP
        label = f"{name}, {gpus:,} H100{', full' if checkpoint == 'every' else ''}, eager"
        yield Run(
            "NeMo AutoModel", label, mixture(MODELS[name]), plan, cluster, batch, 4096, recipe, seconds, rounds=rounds
        )


def bridge() -> Iterator[Run]:
    """Megatron on several devices."""
    b200 = Cluster("B200", network_bandwidth=50e9)
    b300 = Cluster("B300", network_bandwidth=100e9)
    gb200 = Cluster.preset("GB200 NVL72")
    gb300 = replace(gb200, device="GB300", memory_bytes=0, network_bandwidth=100e9)
    h100 = Cluster.preset("DGX H100")
    # model, cluster, devices, pipeline, virtual stages, expert, micro-batch, batch, length, tokens/s of a device
    rows = [
        ("GPT-OSS 120B", h100, 64, 4, 1, 8, 1, 512, 4096, 5630),
        ("GPT-OSS 120B", b200, 64, 1, 1, 64, 4, 512, 4096, 8213),
        ("GPT-OSS 120B", gb200, 64, 1, 1, 64, 1, 1280, 8192, 15876),
        ("GPT-OSS 120B", gb300, 64, 1, 1, 64, 2, 1280, 8192, 18347),
        ("GPT-OSS 120B", h100, 64, 4, 1, 8, 1, 1280, 4096, 5993),
        ("GPT-OSS 120B", b200, 64, 1, 1, 64, 4, 1280, 4096, 8047),
        ("GPT-OSS 120B", b300, 64, 1, 1, 64, 4, 1280, 4096, 8359),
        ("GPT-OSS 120B", gb200, 64, 1, 1, 64, 4, 1280, 4096, 15784),
        ("GPT-OSS 120B", gb300, 64, 1, 1, 64, 4, 1280, 4096, 19412),
        ("Qwen3 235B", gb200, 256, 8, 3, 32, 1, 8192, 4096, 4916),
        ("Qwen3 235B", gb300, 256, 4, 12, 16, 2, 8192, 4096, 6131),
        ("DeepSeek-V3", gb200, 256, 4, 4, 64, 1, 4096, 4096, 3139),
        ("DeepSeek-V3", gb300, 256, 2, 4, 32, 1, 4096, 4096, 3848),
    ]
    for name, cluster, gpus, pipeline, virtual, expert, micro, batch, length, rate in rows:
        plan = Plan(
            expert=expert,
            pipeline=pipeline,
            virtual_stages=virtual,
            shard=gpus // pipeline,
            sharded="optimizer",
            micro_batch=micro,
            schedule="interleaved1f1b" if virtual > 1 else "1f1b",
        )
        seconds = batch * length / (rate * gpus)
        release = ", 26.02" if (name, batch, length) == ("GPT-OSS 120B", 1280, 4096) else ""
        label = f"{name}, {gpus} {cluster.device.name}{release}"
        used = cluster.with_nodes(-(-gpus // cluster.devices_per_node))
        recipe = BRIDGE if "GPT-OSS" in name else HYBRID_EP
        yield Run("Megatron-Bridge", label, mixture(MODELS[name]), plan, used, batch, length, recipe, seconds)
