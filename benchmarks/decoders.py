"""Prefill and decode of small decoders on this machine: predicted by ``serving`` after calibrating, and measured.

    python benchmarks/decoders.py [--context 256] [--rounds 5] [--cpu-time]

Prediction: ``stats.serving(context, calibrate=True)``, in eager mode. Truth: a real prompt of ``context - 1`` tokens
with a ``DynamicCache``, then single tokens; the cache is cropped back to the prompt before each. The lower quartile of
the runs counts. Tables of kernels are made anew in a temporary folder. With ``--cpu-time``, one thread is used and its
CPU time counts, for busy machines. The last lines report the load.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from modelsummary import Statistics

WIDTH, LAYERS, HEADS, WORDS = 512, 6, 8, 8000


def decoders() -> dict[str, Callable[[], nn.Module]]:
    """Six families, of equal size."""
    import transformers as hf

    usual: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    usual |= {"vocab_size": WORDS}
    gated = {**usual, "intermediate_size": 1408}
    return {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**gated, num_key_value_heads=HEADS)),
        "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**gated, num_key_value_heads=2)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**gated, num_key_value_heads=2, sliding_window=64)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=WORDS)),
        "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**usual, ffn_dim=2048, word_embed_proj_dim=WIDTH)),
        "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**usual, intermediate_size=2048)),
    }


def typical(runs: list[float]) -> float:
    """The lower quartile."""
    return sorted(runs)[len(runs) // 4]


def measured(model: nn.Module, context: int, rounds: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Milliseconds of a prompt, and of one token after it."""
    prompt, token = torch.zeros(1, context - 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
    prefills, decodes = [], []
    with torch.no_grad():
        for _ in range(rounds + 1):
            gc.collect()
            begin = clock()
            cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
            prefills.append(clock() - begin)
            for _ in range(4):
                begin = clock()
                cache = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
                decodes.append(clock() - begin)
    return 1e3 * typical(prefills[1:]), 1e3 * typical(decodes[4:])


def main() -> None:
    """Predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    rows, errors, begin = [], [], os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MODELSUMMARY_CACHE"] = folder
        for name, make in decoders().items():
            torch.manual_seed(0)
            model = make().eval()
            stats = Statistics(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
            estimate = stats.serving(options.context, calibrate=True, batches=[1])
            prefill, decode = measured(model, options.context, options.rounds, clock)
            for phase, predicted, real in (
                ("prefill", estimate.prefill_ms, prefill),
                ("decode", estimate.decode_ms, decode),
            ):
                errors.append(predicted / real - 1)
                rows.append([name, phase, f"{predicted:.2f}", f"{real:.2f}", f"{errors[-1]:+.1%}"])
                print(*rows[-1], flush=True)
    print(tabulate(rows, ["model", "phase", "predicted (ms)", "measured (ms)", "error"], colalign=("left",) * 2))
    within = sum(abs(each) < 0.15 for each in errors)
    print(f"mean error {statistics.mean(map(abs, errors)):.1%}; {within} of {len(errors)} within 15 %")
    print(f"load of {os.cpu_count()} cores: {begin[0]:.1f} at the beginning, {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
