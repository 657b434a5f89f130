"""A training loop over processes, and in one process: steps, clipping, saving, resuming."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modelsummary import Statistics
from tests.parallel import models, processes

SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
MICROBATCHES = 4
NORM = 0.05  # small enough to clip


def like(inputs: Any, seed: int) -> Any:
    """Other values of the same shapes and ranges."""
    generator = torch.Generator().manual_seed(seed)

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=value.dtype)
        return torch.randint(0, int(value.max()) + 1, value.shape, generator=generator).to(value.dtype)

    if isinstance(inputs, dict):
        return {name: other(value) for name, value in inputs.items()}
    return tuple(map(other, inputs))


def call(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def plain_losses(model: nn.Module, optimizer: Any, steps: list[list[Any]], norm: float | None = NORM) -> list[float]:
    """Train one process: the loss of a step is the mean over its parts."""
    found = []
    for parts in steps:
        total = sum(processes.loss_of(call(model, each)) for each in parts) / len(parts)
        total.backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total.item())
    return found


def adamw(parameters: Any, **options: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def worst(whole: nn.Module, parts: list[nn.Module]) -> tuple[float, str]:
    """Largest difference of a parameter, and its name."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    pairs = [pair for part in parts for pair in part.named_parameters(remove_duplicate=False)]
    return max(
        (processes.difference(expected[name].detach(), processes.whole(each.detach())), name) for name, each in pairs
    )


def _rows(mesh: Any) -> tuple[int, int]:
    """Number of ranks with different rows, and the position of this one among them."""
    rank, n = 0, 1
    for name in ("data", "shard"):
        if name in mesh.mesh_dim_names:
            size = mesh[name].size()
            rank, n = rank * size + mesh[name].get_local_rank(), n * size
    return n, rank


def trained(
    _rank: int, _n: int, cases: list[tuple[Any, ...]], optimizer: dict[str, Any] | None = None
) -> dict[Any, Any]:
    """Largest difference of a parameter after three steps with clipping, and its name, by case."""
    found: dict[Any, Any] = {}
    for name, sizes in cases:
        whole, inputs = models.make(name)
        model, _ = models.make(name)
        schedule = sizes.get("schedule")
        options = {key: value for key, value in sizes.items() if key != "schedule"}
        plan = Statistics(model, inputs).parallel_plan(**options)
        mesh = plan.device_mesh("cpu")
        made = plan.apply(model, mesh)
        n_rows, own = _rows(mesh)
        n_parts = MICROBATCHES if schedule else 1
        steps = [
            [[like(inputs, 100 * step + 10 * row + part) for part in range(n_parts)] for row in range(n_rows)]
            for step in range(3)
        ]
        plain_losses(whole, adamw(whole.parameters()), [[part for row in step for part in row] for step in steps])
        if schedule:
            _staged(plan, made, mesh, schedule, [step[own] for step in steps], optimizer or {})
            modules = [made.submod]
        else:
            own_optimizer = adamw(model.parameters(), **(optimizer or {}))
            plain_losses(model, own_optimizer, [step[own] for step in steps])
            modules = [model]
        found[str((name, plan.mesh_shape, schedule))] = worst(whole, modules)
    return found


def _staged(
    plan: Any, stage: Any, mesh: Any, schedule: str, steps: list[list[Any]], options: dict[str, Any]
) -> list[float]:
    from torch.distributed import pipelining

    kind = getattr(pipelining, SCHEDULES[schedule])
    engine = kind(
        stage if schedule in ("1f1b", "gpipe") else [stage], MICROBATCHES, loss_fn=lambda out, _: processes.loss_of(out)
    )
    optimizer = adamw(stage.submod.parameters(), **options)
    rank = mesh["pipeline"].get_local_rank()
    found = []
    for parts in steps:
        losses: list[Tensor] = []
        inputs = joined(parts) if rank == 0 else ()
        target = torch.zeros(len(parts) * 4)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        engine.step(
            *args, **kwargs, **({"target": target, "losses": losses} if stage.is_last else {}), return_outputs=False
        )
        stage.clip_grad_norm_(NORM)
        optimizer.step()
        optimizer.zero_grad()
        found += [(sum(losses) / len(losses)).item()] if losses else []
    return found


def saved(state: dict[str, Any]) -> str:
    """Save with torch.distributed.checkpoint. Return the folder."""
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])
    return folder[0]
