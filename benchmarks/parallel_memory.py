"""Compare the predicted memory of each rank with what two processes hold, and time the account of a giant model.

python -m benchmarks.parallel_memory            # predicted beside measured, two gloo processes
python -m benchmarks.parallel_memory gpt2       # these models only
python -m benchmarks.parallel_memory --giant    # seconds for Llama 3.1 405B on 8,192 ranks
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map

from modelsummary import Statistics
from modelsummary.capture.values import tensors_of
from modelsummary.memory.step import loss_of
from tests.parallel import models, processes
from tests.real_memory import alive, allocated

MICROBATCHES = 4
TARGET = torch.zeros(MICROBATCHES)  # the loss takes none, but torch's schedules ask for it
STEPS = 3  # gloo copies in a thread of its own; the step whose copies overlap least with others counts
MEMORY_MODELS = ("decoder", "gpt2", "llama", "bert", "vit", "hf_llama", "hf_bert", "hf_vit")
MEMORY_PLANS = ({"tensor": 2}, {"shard": 2}, {"pipeline": 2})


def memory(chosen: list[str]) -> None:
    """Print the bytes held after the forward and the peak, predicted and measured, of the rank that differs most."""
    torch.set_default_dtype(torch.float64)
    for name in chosen or MEMORY_MODELS:
        measured = processes.run(_held, 2, [(name, options) for options in MEMORY_PLANS])
        for number, options in enumerate(MEMORY_PLANS):
            model, inputs = models.make(name)
            plan = Statistics(model, inputs).parallel_plan(**options)
            given = {"microbatches": MICROBATCHES} if "pipeline" in options else {}
            found = []
            for rank in range(2):
                guess = plan.memory(rank, optimizer="adamw", **given)
                held, peak = measured[rank][number]
                found.append((abs(guess.peak / peak - 1), guess.held_after_forward, held, guess.peak / peak, rank))
            _, guessed, held, ratio, rank = max(found)
            plan_name = ", ".join(f"{key}={value}" for key, value in options.items())
            print(f"| {name}, {plan_name}, rank {rank} | {guessed:,} / {held:,} | {ratio:.4f} |", flush=True)


def _held(_rank: int, _n: int, cases: list[Any]) -> list[tuple[int, int]]:
    """Return the bytes held after the forward, and the peak, of each case: the smallest of some steps."""
    found = []
    for name, options in [cases[0], *cases]:  # the first run also fills caches of torch, and is left out
        before = alive()
        model, inputs = models.make(name)
        plan = Statistics(model, inputs).parallel_plan(**options)
        applied = plan.apply(model, plan.device_mesh("cpu"))
        step, clear = _stage_step(applied, inputs) if "pipeline" in options else _model_step(applied, inputs)
        del model, inputs, plan, applied  # with the other stages
        step()
        steps = []
        for _ in range(STEPS):
            clear()
            own = alive() - before
            held, peak = allocated(step)
            steps.append((own + held["forward"], own + peak))
        found.append(tuple(map(min, zip(*steps, strict=True))))
        del step, clear
    return found[1:]


def _model_step(model: Any, inputs: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.profiler.record_function("## forward"):
            out = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
            loss = loss_of(out, None)
        loss.backward()
        optimizer.step()

    return step, optimizer.zero_grad


def _stage_step(stage: Any, inputs: Any) -> Any:
    """Return a step of 1F1B, whose record of the forward is the begin of the first backward."""
    from torch.distributed.pipelining import Schedule1F1B

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda out, _: loss_of(out, None), scale_grads=False)
    whole = tree_map(lambda each: torch.cat([each] * MICROBATCHES), inputs) if stage.is_first else ()
    args, kwargs = ((), whole) if isinstance(whole, dict) else (whole, {})
    target = TARGET if stage.is_last else None
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    backward = stage.backward_one_chunk
    if stage.is_last:  # torch's engine takes no other containers
        stage.submod.register_forward_hook(lambda _module, _args, out: tuple(tensors_of(out)))

    def first_backward(*args: Any, **kwargs: Any) -> None:
        with torch.profiler.record_function("## forward"):
            stage.backward_one_chunk = backward
        backward(*args, **kwargs)

    def step() -> None:
        stage.backward_one_chunk = first_backward
        schedule.step(*args, target=target, return_outputs=False, **kwargs)
        optimizer.step()

    return step, optimizer.zero_grad


def giant() -> None:
    """Print the CPU seconds of a plan of Llama 3.1 405B for tensor 8 x pipeline 16 x data 64, and of its memory."""
    from examples.giants import GIANTS, TOKENS, decoder

    model = decoder(GIANTS["Llama 3.1 405B"])
    begin = time.process_time()
    stats = Statistics(model, torch.zeros(1, TOKENS, dtype=torch.long, device="meta"))
    print(f"summary: {time.process_time() - begin:.1f} s")
    for sizes in ({"tensor": 8}, {"tensor": 8, "pipeline": 16, "data": 64}, {"tensor": 8, "pipeline": 16, "shard": 64}):
        begin = time.process_time()
        plan = stats.parallel_plan(**sizes)
        print(f"parallel_plan({sizes}): {time.process_time() - begin:.1f} s")
        for rank in {0, plan.world_size // 2, plan.world_size - 1} if plan.pipeline > 1 else ():
            begin = time.process_time()
            found = plan.memory(rank, optimizer="adamw", microbatches=64)
            figures = f"parameters {found.params / 1e9:.2f} GB, activations {found.activations / 1e9:.2f} GB"
            seconds = time.process_time() - begin
            print(f"  memory of rank {rank}: {figures}, peak {found.peak / 1e9:.2f} GB, {seconds:.1f} s")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of models in tests/parallel/models.py")
    parser.add_argument("--giant", action="store_true", help="time the account of Llama 3.1 405B")
    chosen = parser.parse_args()
    if chosen.giant:
        giant()
    else:
        memory(chosen.names)
