"""Measured steps on the CPU: memory plans beside the budgets of torch's partitioner, at equal measured peaks.

    PYTHONPATH=. python benchmarks/partitioner_plans.py [names] [--every 1] [--steps 3]

The partitioner chooses for ``activation_memory_budget``; its graphs run operator by operator (the backend
``"aot_eager_decomp_partition"``), as a plan does, so kernels are the same for both. The measured peak of its step is
the budget of two plans: of operators, and of whole blocks. Plans count multiply-adds, as the partitioner does by
default. Times are the median CPU time of some steps, on one thread.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from benchmarks.plan_truth import CONFIGS, encoder
from modelsummary import InputError, Statistics
from tests.real_memory import allocated

BUDGETS = (1.0, 0.5, 0.2)
_SIZES = {
    "hidden_size": 256,
    "dim": 256,
    "n_embd": 256,
    "intermediate_size": 1024,
    "hidden_dim": 1024,
    "ffn_dim": 1024,
    "word_embed_proj_dim": 256,
    "num_hidden_layers": 8,
    "n_layers": 8,
    "n_layer": 8,
    "head_dim": 64,
    "rotary_dim": 32,
    "max_position_embeddings": 512,
}


class Step:
    """A training step that can be repeated.

    Args:
        model, inputs: what runs.
        call: the model, or the same compiled.
    """

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor] | Tensor, call: nn.Module) -> None:
        self._model, self._inputs, self._call = model, inputs, call

    def run(self) -> None:
        """Run a forward and a backward."""
        self._model.zero_grad(set_to_none=True)
        out = self._call(**self._inputs).loss if isinstance(self._inputs, dict) else self._call(self._inputs).sum()
        out.backward()

    def peak(self) -> int:
        """Return the most bytes that a step allocates over what lived before it."""
        self.run()
        self._model.zero_grad(set_to_none=True)
        return int(allocated(self.run)[1])

    def seconds(self) -> float:
        """Return the CPU time of a step."""
        begin = time.process_time()
        self.run()
        return time.process_time() - begin


def subject(name: str) -> tuple[nn.Module, dict[str, Tensor] | Tensor]:
    """Return a model without dropout, eight layers deep, and its input."""
    if name == "encoder":
        return encoder(0.0, norm_first=True, width=256)[0], torch.randn(8, 256, 256)
    import transformers

    kind, config, settings = CONFIGS[name]
    settings = {key: _SIZES.get(key, value) for key, value in settings.items()}
    tokens = torch.randint(3, 1000, (4, 256))
    config_object = getattr(transformers, config)(**settings)
    for key in vars(config_object):
        if "dropout" in key or key.endswith("_pdrop"):
            setattr(config_object, key, 0.0)
    return getattr(transformers, kind)(config_object), {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Print a line of the table for each model and budget of the partitioner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="take one model in so many")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | budget | peak, partitioner | operators | blocks | time, partitioner | operators | blocks |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in (arguments.names or ["encoder", *CONFIGS])[:: arguments.every]:
        torch.manual_seed(0)
        model, inputs = subject(name)
        model.train()
        stats = Statistics(model, input_data=inputs)
        plain = stats.memory(workspaces=False)
        before = plain.params + plain.buffers + plain.inputs
        eager = Step(model, inputs, model)
        print(f"| {name} | none | | {eager.peak() / 1e6:.1f} MB | | | {1e3 * eager.seconds():.0f} ms | |", flush=True)
        for budget in BUDGETS:
            torch._dynamo.reset()
            with functorch.patch(activation_memory_budget=budget):
                compiled = Step(model, inputs, torch.compile(model, backend="aot_eager_decomp_partition"))
                peak = compiled.peak()
                peaks, seconds = [peak], []
                for granularity in ("operator", "block"):
                    try:
                        plan = stats.memory_plan(peak + before, granularity=granularity, workspaces=False)
                    except InputError:  # it cannot go as low
                        peaks.append(0)
                        seconds.append(0.0)
                        continue
                    applied = plan.apply(model)
                    peaks.append(eager.peak())
                    seconds.append(median(eager.seconds() for _ in range(arguments.steps)))
                    applied.undo()
                seconds.insert(0, median(compiled.seconds() for _ in range(arguments.steps)))
            cells = [f"{nbytes / 1e6:.1f} MB" if nbytes else "-" for nbytes in peaks]
            cells += [f"{1e3 * value:.0f} ms" if value else "-" for value in seconds]
            print(f"| {name} | {budget} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
