"""Run a function in several processes on gloo, and compare a sharded model with the whole one."""

from __future__ import annotations

import copy
import os
import resource
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from modelsummary.capture.containers import tensors_of

_GRACE = 3  # seconds in which processes fail after the first one
# Kilobytes that a waiting process may have held. Models and compiled graphs of earlier functions stay in it, and the
# processes of two test workers together took 15 GB.
_HELD_KB = 2_000_000
# Number of processes -> processes that wait for a function, and the store of their process group. Starting them takes
# longer than most tests.
_waiting: dict[int, tuple[ProcessPoolExecutor, dist.TCPStore]] = {}
# On Linux they are copies of one that has imported torch, which takes seconds and 300 MB.
_starting = mp.get_context("forkserver" if sys.platform.startswith("linux") else "spawn")
_starting.set_forkserver_preload(["tests.parallel.training"])


def run(function: Any, n: int, *args: Any, timeout: float | None = None) -> list[Any]:
    """What ``function(rank, n, *args)`` returns in each of ``n`` processes, which wait for the next function then.

    Raises:
        TimeoutError: they take longer than so many seconds; they are ended.
    """
    if n not in _waiting:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _waiting[n] = ProcessPoolExecutor(n, _starting, _join, (n, store.port)), store
    tasks: list[Any] = []
    try:
        tasks += [_waiting[n][0].submit(_entry, function, n, args) for _ in range(n)]
        results = {rank: (data, held_kb) for rank, data, held_kb in (t.result() for t in as_completed(tasks, timeout))}
    except BaseException:
        _, waits = wait(tasks, timeout=_GRACE)
        failures = [task.exception() for task in tasks if task not in waits]
        if len(failures) < n or None in failures or any(isinstance(each, BrokenProcessPool) for each in failures):
            stop()  # a process waits for one that failed, or has ended
        raise
    if max(held_kb for _, held_kb in results.values()) > _HELD_KB:
        stop(n)
    return [torch.load(BytesIO(results[rank][0]), weights_only=False) for rank in range(n)]


def stop(n: int | None = None) -> None:
    """End the processes that wait, or the group of ``n`` of them."""
    for size in list(_waiting) if n is None else [n]:
        pool, _ = _waiting.pop(size)
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for each in processes:
            each.kill()


def _join(n: int, port: int) -> None:
    warnings.filterwarnings("ignore")  # thousands of lines of torch's would hide the failure of a test
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    rank = store.add("ranks", 1) - 1
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timedelta(seconds=60))


def _entry(function: Any, n: int, args: Any) -> tuple[int, bytes, int]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # the function before this one may have set another
    rank, result = dist.get_rank(), BytesIO()
    torch.save(function(rank, n, *args), result)
    dist.barrier()  # else a process that is ready would take the part of another
    return rank, result.getvalue(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


os.environ.setdefault("OMP_NUM_THREADS", "1")


def loss_of(out: Any) -> Tensor:
    """A loss that tells every element of the result from the others."""
    parts = [each for each in tensors_of(out) if each.requires_grad]
    return sum((each * torch.linspace(0.5, 1.5, each.numel()).view(each.shape)).mean() for each in parts)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest element where that is more than one."""
    if one.numel() == 0:
        return 0.0
    return float((one - other).abs().max() / one.abs().max().clamp(min=1))


def compare(model: nn.Module, sharded: nn.Module, inputs: dict[str, Any] | tuple[Any, ...]) -> dict[str, float]:
    """Largest differences of results, gradients, and parameters after a step of AdamW.

    Experts of a list that another rank holds are compared there.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    outs = [each(*args, **kwargs) for each in (model, sharded)]
    pairs = zip(*([each for each in tensors_of(out) if each.is_floating_point()] for out in outs), strict=True)
    found = {"output": max(difference(one, whole(other)) for one, other in pairs)}
    for out in outs:
        loss_of(out).backward()
    own = dict(sharded.named_parameters())
    pairs = [(each, own[name]) for name, each in model.named_parameters() if name in own or "experts." not in name]
    for one, other in pairs:
        if one.grad is None and other.grad is not None:  # FSDP reduces zeros for experts that no rank used
            one.grad = torch.zeros_like(one)
    found["grad"] = max(difference(one.grad, whole(other.grad)) for one, other in pairs if one.grad is not None)
    for each in (model, sharded):
        torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False).step()
    found["step"] = max(difference(one.detach(), whole(other.detach())) for one, other in pairs)
    return found


def copies(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)
