"""Prefill and decode of decoders: predicted by ``serving``, beside measurements.

    python benchmarks/decoders.py [--context 256] [--rounds 8] [--cpu-time] [--filter llama]
    python benchmarks/decoders.py --published

Prediction: ``stats.serving(context, calibrate=True)``, in eager mode. Truth: a real prompt of ``context - 1`` tokens
with a ``DynamicCache``, then four single tokens, each of which makes the cache longer. They run after each round of the
operator calls that ``calibrate`` measures, so both see the same fast and slow seconds of the machine. The lower
quartile of the runs counts; how far the quartiles are apart shows the noise of the machine. "Operators alone" are the
operators of the forward in their order, without the code of the model: what they lack of the measured time is the
host's. Tables of kernels are made anew in a temporary folder. With ``--cpu-time``, one thread is used and its CPU time
counts, for busy machines. The last lines report the load.

``--published``: a 13B GPT in NVIDIA's FasterTransformer on one and two A100, as published.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from interleaved_runs import between_rounds

from modelsummary import Statistics
from modelsummary.latency.kernel_runs import arguments_of
from modelsummary.serving.request import request_of
from modelsummary.serving.run import run_request

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


# C. Chen, "Transformer Inference Arithmetic", 2022, https://kipp.ly/transformer-inference-arithmetic: 40 layers, 40
# heads, width 5,120, float16, batch 1, prompts of 512 tokens. GPUs -> milliseconds of prefill, and of decoding a token.
PUBLISHED = {1: (63.17, 22.0), 2: (45.45, 13.5)}


def published() -> None:
    """Print predictions beside the published times; the attention of that version was not fused."""
    import transformers as hf

    config = hf.OPTConfig(
        hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, ffn_dim=20480, word_embed_proj_dim=5120
    )
    rows = []
    for attention in ("sdpa", "eager"):
        config._attn_implementation = attention
        with torch.device("meta"):
            model = hf.OPTForCausalLM(config).eval()
        ids = torch.zeros(1, 16, dtype=torch.long, device="meta")
        stats = Statistics(model, {"input_ids": ids})
        for gpus, times in PUBLISHED.items():
            found = stats.serving(513, device="A100 40GB", dtype=torch.float16, tensor=gpus, batches=[1])
            for phase, own, real in zip(("prefill", "decode"), (found.prefill_ms, found.decode_ms), times, strict=True):
                rows.append([gpus, attention, phase, f"{own:.1f}", f"{real:.1f}", f"{own / real - 1:+.1%}"])
            rows.append([gpus, attention, "collectives of a token", f"{found.collective_ms:.2f}", "", ""])
    print(tabulate(rows, ["GPUs", "attention", "phase", "predicted (ms)", "published (ms)", "error"]))


Runs = list[float]


class Decoder:
    """A decoder with its predictions and its measured runs, in seconds."""

    def __init__(self, name: str, make: Callable[[], nn.Module], context: int, clock: Callable[[], float]) -> None:
        torch.manual_seed(0)
        self.name, self.model, self.context, self.clock = name, make().eval(), context, clock
        self.stats = Statistics(self.model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
        self.real: dict[str, Runs] = {"prefill": [], "decode": []}
        self.replayed: dict[str, Runs] = {"prefill": [], "decode": []}

    def predict(self) -> None:
        """Calibrate and predict; measure the model between the rounds of calls."""
        with tempfile.TemporaryDirectory() as folder, between_rounds(self.measure):
            os.environ["MODELSUMMARY_CACHE"] = folder
            found = self.stats.serving(self.context, calibrate=True, batches=[1])
        self.predicted = {"prefill": found.prefill_ms, "decode": found.decode_ms}

    def measure(self) -> None:
        """Measure a prompt and four tokens; a first prompt does not count, as its memory is new."""
        prompt, token = torch.zeros(1, self.context - 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            self.model(prompt, use_cache=True, logits_to_keep=1)
            begin = self.clock()
            cache = self.model(prompt, use_cache=True, logits_to_keep=1).past_key_values
            self.real["prefill"].append(self.clock() - begin)
            for _ in range(4):
                begin = self.clock()
                cache = self.model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
                self.real["decode"].append(self.clock() - begin)

    def replay(self, rounds: int) -> None:
        """Measure the operators in their order, with random arguments and without the code of the model."""
        phases = run_request(self.model, request_of(self.stats.live), 1, self.context)
        for phase, forward in zip(("prefill", "decode"), phases, strict=True):
            calls = [each.run.call for each in forward.operators if each.run.call.rule.launches_kernel]
            ready = [(call.func, *arguments_of(call, torch.device("cpu"))[:2]) for call in calls]
            with torch.no_grad():
                for _ in range(rounds + 1):
                    begin, kept = self.clock(), []
                    for func, args, kwargs in ready:
                        kept = [*kept[-6:], func(*args, **kwargs)]
                    self.replayed[phase].append(self.clock() - begin)
            del self.replayed[phase][0]

    def rows(self) -> Iterator[list[Any]]:
        """Yield, for each phase: predicted, measured and replayed milliseconds, the error, and the noise."""
        for phase, runs in self.real.items():
            real, own = typical(runs), self.predicted[phase]
            noise = sorted(runs)[3 * len(runs) // 4] / sorted(runs)[len(runs) // 4] - 1
            yield [self.name, phase, own, real, typical(self.replayed[phase]), own / real - 1, noise]


def typical(runs: Runs) -> float:
    """The lower quartile in milliseconds."""
    return 1e3 * sorted(runs)[len(runs) // 4]


def main() -> None:
    """Predict, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8, help="of the operators alone")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--filter", default="")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.published:
        published()
        return
    if options.cpu_time:
        torch.set_num_threads(1)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    begin = os.getloadavg()
    made = decoders().items()
    chosen = [Decoder(name, make, options.context, clock) for name, make in made if options.filter in name]
    for each in chosen:
        each.predict()
        each.replay(options.rounds)
    rows = [row for each in chosen for row in each.rows()]
    headers = ["model", "phase", "predicted (ms)", "measured (ms)", "operators alone (ms)", "error", "quartiles apart"]
    cells = [[*row[:2], *(f"{each:.2f}" for each in row[2:5]), *(f"{each:+.1%}" for each in row[5:])] for row in rows]
    print(tabulate(cells, headers, "github", colalign=("left",) * 2 + ("right",) * 5))
    errors = [abs(row[5]) for row in rows]
    within = sum(each < 0.15 for each in errors)
    print(f"mean error {statistics.mean(errors):.1%}; {within} of {len(errors)} within 15 %")
    print(f"load of {os.cpu_count()} cores: {begin[0]:.1f} at the beginning, {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
