"""Compare the predicted memory of each rank with what two processes hold, and time the account of a giant model.

python -m benchmarks.parallel_memory            # predicted beside measured, two gloo processes
python -m benchmarks.parallel_memory gpt2       # these models only
python -m benchmarks.parallel_memory --schedules  # two stages or four, under each schedule of torch's engine
python -m benchmarks.parallel_memory --giant    # seconds for Llama 3.1 405B on 8,192 ranks
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import torch
from torch.distributed import pipelining
from torch.utils._pytree import tree_map

from modelsummary import Statistics
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.step import loss_of
from modelsummary.split.engine import ENGINE_SCHEDULES, pipeline_stages
from tests.parallel import models, processes
from tests.real_memory import alive, allocated

MICROBATCHES = 4
TARGET = torch.zeros(MICROBATCHES)  # the loss takes none, but torch's schedules ask for it
STEPS = 3  # gloo copies in a thread of its own; the step whose copies overlap least with others counts
MEMORY_MODELS = ("decoder", "gpt2", "llama", "bert", "vit", "hf_llama", "hf_bert", "hf_vit")
MEMORY_PLANS = ({"tensor": 2}, {"shard": 2}, {"pipeline": 2})
ENGINE = {**ENGINE_SCHEDULES, "dualpipev": ("ScheduleDualPipeV", False, True)}
SCHEDULES = ("gpipe", "zb", "interleaved1f1b", "zbv", "dualpipev")  # of torch's engine, besides 1F1B


def memory(chosen: list[str], plans: tuple[dict[str, Any], ...]) -> None:
    """Print the bytes held after the forward and the peak, predicted and measured, of the rank that differs most."""
    torch.set_default_dtype(torch.float64)
    for name in chosen or MEMORY_MODELS:
        measured = processes.run(_held, 2, [(name, options) for options in plans])
        for number, options in enumerate(plans):
            model, inputs = models.make(name)
            plan = Statistics(model, inputs).parallel_plan(**_sizes(options))
            given: dict[str, Any] = {}
            if "pipeline" in options:
                given = {"microbatches": MICROBATCHES, "schedule": options.get("schedule", "1f1b")}
            found = []
            for rank in range(2):
                guess = plan.memory(rank, optimizer="adamw", **given)
                held, peak = measured[rank][number]
                found.append((abs(guess.peak / peak - 1), guess.held_after_forward, held, guess.peak / peak, rank))
            _, guessed, held, ratio, rank = max(found)
            plan_name = ", ".join(f"{key}={value}" for key, value in options.items())
            print(f"| {name}, {plan_name}, rank {rank} | {guessed:,} / {held:,} | {ratio:.4f} |", flush=True)


def _sizes(options: dict[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in options.items() if name != "schedule"}


def _held(_rank: int, _n: int, cases: list[Any]) -> list[tuple[int, int]]:
    """Return the bytes held after the forward, and the peak, of each case: the smallest of some steps."""
    found = []
    for name, options in [cases[0], *cases]:  # the first run also fills caches of torch, and is left out
        before = alive()
        model, inputs = models.make(name)
        plan = Statistics(model, inputs).parallel_plan(**_sizes(options))
        without = alive()
        mesh = plan.device_mesh("cpu")
        before += alive() - without  # the ranks of a mesh are a tensor, which is on the CPU with any device
        applied = _stages(plan, options.get("schedule", "1f1b")) if "pipeline" in options else plan.apply(model, mesh)
        if "pipeline" in options:
            step, clear = _stage_step(applied, inputs, options.get("schedule", "1f1b"))
        else:
            step, clear = _model_step(applied, inputs)
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


def _stages(plan: Any, schedule: str) -> list[Any]:
    """Return the stages of this rank."""
    _, is_alone, in_v = ENGINE[schedule]
    stages = plan._stages if is_alone or schedule == "zb" else plan._split(4)
    return pipeline_stages(stages, torch.device("cpu"), None, in_v=in_v)


def _stage_step(stages: list[Any], inputs: Any, name: str) -> Any:
    """Return a step of a schedule, whose record of the forward is the begin of the first backward."""
    kind, is_alone, _ = ENGINE[name]
    make: Any = getattr(pipelining, kind)
    schedule = make(
        stages[0] if is_alone else stages, MICROBATCHES, loss_fn=lambda out, _: loss_of(out, None), scale_grads=False
    )
    is_first, is_last = (any(getattr(each, where) for each in stages) for where in ("is_first", "is_last"))
    whole = tree_map(lambda each: torch.cat([each] * MICROBATCHES), inputs) if is_first else ()
    args, kwargs = ((), whole) if isinstance(whole, dict) else (whole, {})
    target = TARGET if is_last else None
    optimizer = torch.optim.AdamW([each for stage in stages for each in stage.submod.parameters()])
    backwards = [stage.backward_one_chunk for stage in stages]
    for stage in stages:
        if stage.is_last:  # torch's engine takes no other containers
            stage.submod.register_forward_hook(lambda _module, _args, out: tuple(tensors_of(out)))

    def first_backward(number: int) -> Any:
        def backward(*args: Any, **kwargs: Any) -> None:
            with torch.profiler.record_function("## forward"):
                for stage, own in zip(stages, backwards, strict=True):
                    stage.backward_one_chunk = own
            backwards[number](*args, **kwargs)

        return backward

    def step() -> None:
        for number, stage in enumerate(stages):
            stage.backward_one_chunk = first_backward(number)
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
    parser.add_argument("--schedules", action="store_true", help="compare schedules of stages")
    parser.add_argument("--giant", action="store_true", help="time the account of Llama 3.1 405B")
    chosen = parser.parse_args()
    if chosen.giant:
        giant()
    elif chosen.schedules:
        memory(chosen.names, tuple({"pipeline": 2, "schedule": name} for name in SCHEDULES))
    else:
        memory(chosen.names, MEMORY_PLANS)
