"""Compare memory plans of operators with plans of whole blocks: predicted seconds of what runs again, at equal peaks.

Usage: python benchmarks/memory_plans.py [names]

Models are built on meta in the sizes of their configurations; nothing is computed. A budget lies some share of the way
from the peak with all blocks recomputed up to the peak without checkpoints. ``suggest_checkpoint(by="latency")``
chooses whole blocks for it; the other plan gets the peak that this one reaches as its budget.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from torch import nn

from modelsummary import Statistics

DEVICE = "A100"
SHARES = (0.6, 0.2)
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "Llama-2 7B": ("LlamaForCausalLM", "LlamaConfig", {}, (4, 2048)),
    "Llama-3 8B": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
        (2, 4096),
    ),
    "Mistral 7B": ("MistralForCausalLM", "MistralConfig", {}, (4, 2048)),
    "Qwen2 7B": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        (4, 2048),
    ),
    "GPT-2 XL": ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 48, "n_embd": 1600, "n_head": 25}, (4, 1024)),
    "BERT large": ("BertForMaskedLM", "BertConfig", _LARGE, (16, 512)),
    "RoBERTa large": ("RobertaForMaskedLM", "RobertaConfig", {**_LARGE, "max_position_embeddings": 514}, (16, 512)),
    "T5 large": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": 1024,
            "d_ff": 4096,
            "num_layers": 24,
            "num_heads": 16,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        (8, 512),
    ),
}


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model on meta in bfloat16, and its inputs."""
    kind, config, settings, size = MODELS[name]
    with torch.device("meta"):
        model = getattr(transformers, kind)(getattr(transformers, config)(**settings)).to(torch.bfloat16)
        tokens = torch.zeros(size, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Print one line of the table for each model and budget."""
    print("| model | peak without | peak | time again, whole blocks | operators | ratio |\n|---|---|---|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        model, inputs = built(name)
        stats = Statistics(model, input_data=inputs)
        plain, least = (stats.memory(device="cuda", checkpoint=which).peak for which in (None, "every"))
        for share in SHARES:
            blocks = stats.suggest_checkpoint(int(least + share * (plain - least)), by="latency", device=DEVICE)
            plan = stats.memory_plan(blocks.peak, device=DEVICE)
            assert plan.seconds is not None
            assert blocks.seconds is not None
            assert plan.peak <= blocks.peak
            cells = (
                name,
                f"{plain / 1e9:.1f} GB",
                f"{blocks.peak / 1e9:.1f} GB",
                f"{1e3 * blocks.seconds:.0f} ms",
                f"{1e3 * plan.seconds:.0f} ms",
                f"{plan.seconds / blocks.seconds:.2f}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
