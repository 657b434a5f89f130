"""Compare predicted and measured training steps of processes on this machine, which communicate by gloo.

    python benchmarks/cluster_gloo.py [--steps 9] [--folder FOLDER]

The model is the decoder of ``examples/parallel_train.py``, wider. Two processes of one thread each first measure the
operator calls of all plans at the same time, as a process would whose neighbours compute as well; then collectives and
messages of several sizes; then what the host does for each engine, on tiny layers (``cluster_gloo_host.py``). Four
processes measure their own collectives. The steps are predicted from that (``cluster_gloo_model.py``), and run.

This machine has fewer cores than processes. A process that shares a core with another one computes at half the speed:
times of kernels are multiplied by processes per core. In a pipeline some processes wait, and the others get their
cores: its schedule is simulated with as much speed for each action as the actions that run at the same time leave.

Beside the time of a step, the table has the CPU time that the first process takes for it. On a machine that is busy
with other work, the first is too long, but not the second.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from cluster_gloo_host import HostCosts, calibrate_host, optimizer_of
from cluster_gloo_model import BATCH, LENGTH, predicted
from scipy.stats import kendalltau
from tabulate import tabulate
from torch.nn.parallel import DistributedDataParallel

from modelsummary import Statistics
from modelsummary.cluster import Plan, Recipe, StepModel
from modelsummary.devices.kernel_table import table_of
from modelsummary.latency.calibrate import calibrate_calls
from modelsummary.operators.kernels import one_kernel_of
from modelsummary.operators.operator_calls import OperatorCall
from modelsummary.operators.operator_work import Work, work_of

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from parallel_train import Decoder

VOCABULARY = 512
RECIPE = Recipe(
    precision=None,
    gradient_dtype=None,
    master_weights=False,
    kernels="eager",
    loss=lambda logits: token_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)),
    host_seconds=0.0,  # the time of an operator on a CPU holds its dispatch
    overlap_gradients=False,  # communication takes the cores that compute
)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
SIZES = [2**power for power in range(10, 26)]
CPU = torch.device("cpu")


class Trial(NamedTuple):
    """A plan to be predicted and run."""

    name: str
    plan: Plan


TRIALS = {
    2: [
        Trial("data 2 (DDP)", Plan(data=2, micro_batch=8)),
        Trial("tensor 2", Plan(tensor=2, micro_batch=16)),
        Trial("FSDP 2", Plan(shard=2, micro_batch=8)),
        Trial("FSDP 2, full recomputation", Plan(shard=2, micro_batch=8, checkpoint="every")),
        Trial("pipeline 2, 8 micro-batches", Plan(pipeline=2, micro_batch=2)),
        Trial("pipeline 2, 2 micro-batches", Plan(pipeline=2, micro_batch=8)),
    ],
    4: [
        Trial("data 4 (DDP)", Plan(data=4, micro_batch=4)),
        Trial("tensor 2, FSDP 2", Plan(tensor=2, shard=2, micro_batch=8)),
        Trial("FSDP 4", Plan(shard=4, micro_batch=4)),
        Trial("pipeline 2, tensor 2", Plan(pipeline=2, tensor=2, micro_batch=4)),
    ],
}


def decoder() -> Decoder:
    """Return the model."""
    torch.manual_seed(0)
    return Decoder(vocab=VOCABULARY, width=384, depth=4, heads=6)


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of next tokens."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def step_model() -> StepModel:
    """Return the model ready to be costed under plans."""
    stats = Statistics(decoder(), torch.zeros(BATCH, LENGTH, dtype=torch.long))
    return StepModel(stats.live, stats.root, RECIPE)


# --------------------------------------------------------------------------------------------- measuring


def calls_of_all_plans() -> list[OperatorCall]:
    """Return the distinct operator calls of the ranks of all plans."""
    model = step_model()
    plans = {trial.plan.rank_key: trial.plan for trials in TRIALS.values() for trial in trials}
    found = {each.run.call.key: each.run.call for plan in plans.values() for each in model.operators(plan)}
    return [call for call in found.values() if call.rule.launches_kernel]


def kernel_seconds(rank: int) -> dict[str, Any]:
    """Measure the operator calls in this process; return seconds by work, and bytes per second of a copy."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MODELSUMMARY_CACHE"] = folder  # the processes keep tables of their own
        calls = calls_of_all_plans()
        done = calibrate_calls(calls, CPU)
        table = table_of(CPU)
        by_work: defaultdict[Work, list[float]] = defaultdict(list)
        for call in calls:
            seconds, _ = table.seconds(call.key, one_kernel_of(call))
            for number, work in enumerate(work_of(call)):
                by_work[work].append(0.0 if number else seconds)
    if rank == 0:
        print(f"{done.measured} operator calls measured in {done.seconds:.0f} s", flush=True)
    mean = {work: sum(each) / len(each) for work, each in by_work.items()}
    return {"seconds": mean, "bandwidth": table.facts["bytes_per_second"], "flops": table.facts["flops_per_second"]}


def collective_seconds(size: int) -> list[tuple[str, int, int, float]]:
    """Measure collectives of all groups of ``size`` consecutive ranks at the same time: operation, ranks, bytes, s."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    group = groups[rank // size]
    rows = []
    for nbytes in SIZES:
        whole, part = torch.ones(nbytes // 4), torch.ones(nbytes // 4 // size)
        runs = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole, group=group),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole, group=group),
        }
        for operation, run in runs.items():
            rows.append((operation, size, nbytes, median_seconds(run, 9)[0]))
        if size == 2:
            rows.append(("send", 2, nbytes, median_seconds(lambda whole=whole: there_and_back(whole, group), 9)[0] / 2))
    return rows


def there_and_back(tensor: torch.Tensor, group: Any) -> None:
    """Send a tensor to the other process of a group of two, and get it back."""
    for sender in (0, 1):
        if dist.get_rank(group) == sender:
            dist.send(tensor, group_dst=1 - sender, group=group)
        else:
            dist.recv(tensor, group_src=sender, group=group)


def median_seconds(run: Any, count: int) -> tuple[float, float]:
    """Return the median seconds, and CPU seconds, of a function that all ranks call, after two runs to warm up."""
    times, used = [], []
    for _ in range(count + 2):
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        run()
        times.append(time.perf_counter() - begin)
        used.append(time.process_time() - cpu)
    return sorted(times[2:])[count // 2], sorted(used[2:])[count // 2]


def step_seconds(plan: Plan, steps: int) -> tuple[float, float]:
    """Return the median seconds, and CPU seconds, of a training step under a plan."""
    model, rank = decoder(), dist.get_rank()
    rows = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if plan.data > 1:
        sharded: Any = DistributedDataParallel(model)
        place = rank
    else:
        stats = Statistics(model, ids[: plan.micro_batch])
        derived = stats.parallel_plan(plan.tensor, shard=plan.shard, pipeline=plan.pipeline, checkpoint=plan.checkpoint)
        mesh = derived.device_mesh("cpu")
        sharded = derived.apply(model, mesh)
        place = mesh["shard"].get_local_rank() if plan.shard > 1 else 0
    share = slice(place * BATCH // plan.batch_ranks, (place + 1) * BATCH // plan.batch_ranks)
    ids, targets = ids[share], targets[share]
    if plan.pipeline == 1:
        optimizer = optimizer_of(sharded)

        def forward_and_backward() -> None:
            token_loss(sharded(ids), targets).backward()

    else:
        from torch.distributed.pipelining import Schedule1F1B

        optimizer = optimizer_of(sharded.submod)
        engine = Schedule1F1B(sharded, plan.microbatches(BATCH), loss_fn=token_loss)

        def forward_and_backward() -> None:
            if sharded.is_first:
                engine.step(ids)
            else:
                engine.step(target=targets)

    def step() -> None:
        forward_and_backward()
        optimizer.step()
        optimizer.zero_grad()

    return median_seconds(step, steps)


def worker(rank: int, world: int, steps: int, port: int, folder: str) -> None:
    """Measure what ``world`` processes can measure; the first one writes it down."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    kernels = kernel_seconds(rank) if world == 2 else None
    dist.init_process_group("gloo", rank=rank, world_size=world)
    rows = [row for size in {2, world} for row in collective_seconds(size)]
    measured = {}
    if kernels is not None:
        kernels["host"] = tuple(calibrate_host())
    for trial in TRIALS[world]:
        measured[trial.name] = step_seconds(trial.plan, steps)
        if rank == 0:
            print(f"{trial.name}: {1e3 * measured[trial.name][0]:.0f} ms", flush=True)
    if rank == 0:
        if kernels is not None:
            (Path(folder) / "kernels").write_bytes(pickle.dumps(kernels))
        (Path(folder) / str(world)).write_text(json.dumps({"collectives": rows, "steps": measured}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print predicted and measured seconds of each plan, the mean error, and the rank correlation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="steps that are timed per plan")
    parser.add_argument(
        "--port", type=int, default=29611, help="for the first process group; the second takes the next"
    )
    parser.add_argument("--folder", type=Path, help="where measurements are kept, or are already")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(exist_ok=True)
        for number, world in enumerate(TRIALS):
            if not (folder / str(world)).exists():
                arguments = (world, options.steps, options.port + number, str(folder))
                mp.spawn(worker, arguments, nprocs=world)
        kernels = pickle.loads((folder / "kernels").read_bytes())
        results = {world: json.loads((folder / str(world)).read_text(encoding="utf-8")) for world in TRIALS}
    model, table, pairs = step_model(), [], []
    host = HostCosts(*kernels["host"])
    print("CPU time of the host: " + ", ".join(f"{name} {1e6 * each:.0f} us" for name, each in host._asdict().items()))
    for world, trials in TRIALS.items():
        for trial in trials:
            own = predicted(trial.plan, model, results[world]["collectives"], kernels, host, world)
            measured, cpu = results[world]["steps"][trial.name]
            pairs.append((own, measured))
            table.append([world, trial.name, 1e3 * cpu, 1e3 * measured, 1e3 * own, own / measured])
    headers = ["processes", "plan", "CPU (ms)", "measured (ms)", "predicted (ms)", "ratio"]
    print(tabulate(table, headers, floatfmt=("", "", ".0f", ".0f", ".0f", ".3f"), tablefmt="github"))
    errors = [abs(own / measured - 1) for own, measured in pairs]
    tau = kendalltau(*zip(*pairs, strict=True)).statistic
    print(
        f"{len(pairs)} plans: mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}, "
        f"Kendall's tau {tau:.2f}; took {time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    main()
