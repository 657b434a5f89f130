"""A training loop over processes, compared with one process on every parameter, state and loss.

Three clipped steps of AdamW with accumulated gradients, an evaluation at another size, the states saved and read again
in fresh objects and in one process, and two more steps.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import lru_cache, partial
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.overrides import TorchFunctionMode

from modelsummary import ModelSummaryError, Statistics
from modelsummary.capture.containers import tensors_of
from tests.parallel import models, processes

# Name of a plan -> processes, options of ``parallel_plan``, schedule. "split" has two stages per rank, without a plan.
PLANS: dict[str, tuple[int, dict[str, Any], str]] = {
    "tensor": (2, {"tensor": 2}, ""),
    "sequence": (2, {"tensor": 2, "sequence": True}, ""),
    "shard": (2, {"shard": 2}, ""),
    "data": (2, {"data": 2}, ""),
    "expert": (2, {"expert": 2, "dispatch": "all_reduce"}, ""),
    "1f1b": (2, {"pipeline": 2}, "1f1b"),
    "zero bubble": (2, {"pipeline": 2}, "zb"),
    "interleaved": (2, {"split": 4}, "interleaved1f1b"),
    "tensor x shard": (4, {"tensor": 2, "shard": 2}, ""),
    "pipeline x shard": (4, {"pipeline": 2, "shard": 2}, "1f1b"),
}
SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
MICROBATCHES, ACCUMULATED, STEPS, MORE_STEPS = 2, 2, 3, 2
NORM = 0.05  # small enough to clip
CACHES = ("past_key_values", "cache", "cache_params", "mems")  # of which each rank has its own heads
_mesh: dict[tuple[str, ...], Any] = {}


class Float64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32, so that no rounding hides a difference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def like(inputs: Any, seed: int) -> Any:
    """Other values of the same shapes: floats are drawn, and the integers of each row change places."""
    generator = torch.Generator().manual_seed(seed)

    def other(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=value.dtype)
        return value[..., torch.randperm(value.shape[-1], generator=generator)]

    return _mapped(other, inputs)


def _mapped(function: Any, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return {name: function(value) for name, value in inputs.items()}
    return tuple(map(function, inputs))


def other_sizes(model: nn.Module, inputs: Any) -> Any:
    """Inputs with twice the batch, and two elements less along the sequence where the model takes them."""

    def sized(value: Any, *, twice: bool, dims: dict[int, bool]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if dims.get(value.dim(), False) == value.is_floating_point() and value.dim() in dims and value.shape[1] > 4:
            value = value[:, :-2]
        return torch.cat([value, value]) if twice else value

    for dims in ({2: False, 3: True}, {2: False}, {}):
        for twice in (True, False):
            other = like(_mapped(partial(sized, twice=twice, dims=dims), inputs), 7)
            try:
                with torch.no_grad(), Float64():
                    call(model, other)
            except Exception:
                continue
            return other
    raise AssertionError("the model does not take its own inputs")


def call(model: nn.Module, inputs: Any) -> Any:
    return without_caches(model(**inputs) if isinstance(inputs, dict) else model(*inputs))


def without_caches(out: Any) -> Any:
    return {name: out[name] for name in out if name not in CACHES} if hasattr(out, "keys") else out


def joined(parts: list[Any]) -> Any:
    def along_batch(values: list[Any]) -> Any:
        return torch.cat(values) if isinstance(values[0], Tensor) else values[0]

    if isinstance(parts[0], dict):
        return {name: along_batch([part[name] for part in parts]) for name in parts[0]}
    return tuple(along_batch(list(values)) for values in zip(*parts, strict=True))


def adamw(parameters: Any, **options: Any) -> Any:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], lr=1e-2, **options)


def worst(whole: nn.Module, parts: list[nn.Module]) -> tuple[float, str]:
    """Largest difference of a parameter, and its name."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    pairs = [pair for part in parts for pair in part.named_parameters(remove_duplicate=False)]
    return max(
        (processes.difference(expected[name].detach(), processes.whole(parameter.detach())), name)
        for name, parameter in pairs
    )


class Loop:
    """The loop of one process, over all rows and micro-batches of a step."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.modules = [model]
        self.optimizer = adamw(model.parameters(), **options)

    def step(self, batches: list[list[Any]]) -> list[float]:
        """Return the losses of a step and its norm. Gradients of the batches are added, of their parts averaged."""
        losses = [loss for parts in batches for loss in self.accumulate(parts)]
        norm = self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [*losses, float(processes.whole(norm))]

    def accumulate(self, parts: list[Any]) -> list[float]:
        losses = []
        for part in parts:
            with Float64():
                loss = processes.loss_of(call(self.modules[0], part))
                (loss / len(parts)).backward()
            losses.append(loss.item())
        return losses

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.modules[0].parameters(), NORM)

    def evaluate(self, inputs: Any) -> list[Tensor]:
        with torch.no_grad(), Float64():
            out = call(self.modules[0], inputs)
        return [processes.whole(tensor) for tensor in tensors_of(out)]

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the whole states of model and optimizer, by the names of the model."""
        model, optimizer = {}, {}
        for module in self.modules:
            part = get_state_dict(module, self.optimizer, options=StateDictOptions(full_state_dict=True))
            model |= part[0]
            optimizer |= part[1]["state"]
            groups = part[1]["param_groups"]
        return model, {"state": optimizer, "param_groups": groups}

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        options = StateDictOptions(full_state_dict=True, strict=False)
        for module in self.modules:
            names = {name for name, _ in module.named_parameters()}
            state = {name: state for name, state in optimizer["state"].items() if name in names}
            groups = [{**optimizer["param_groups"][0], "params": list(state)}]
            set_state_dict(
                module,
                self.optimizer,
                model_state_dict={name: model[name] for name in module.state_dict()},
                optim_state_dict={"state": state, "param_groups": groups},
                options=options,
            )


class Sharded(Loop):
    """The loop of one rank of a plan."""

    def __init__(self, plan: Any, model: nn.Module, **options: Any) -> None:
        self.plan, self.mesh = plan, _mesh_of(plan)
        super().__init__(plan.apply(model, self.mesh), **options)
        if plan.expert > 1:
            self.clip = partial(plan.clip_grad_norm_, model, self.mesh, NORM)
        self.n_rows, self.row, self.n_parts = *_rows(self.mesh), 1

    def of_rank(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Return the parts of each batch that this rank takes."""
        first = self.row * self.n_parts
        return [parts[first : first + self.n_parts] for parts in batches]


class Staged(Sharded):
    """The loop of one rank of a pipeline."""

    def __init__(self, plan: Any, model: nn.Module, schedule: str, **options: Any) -> None:
        from torch.distributed import pipelining

        self.mesh = _mesh_of(plan)
        self.stage = plan.apply(model, self.mesh)
        self.engine = getattr(pipelining, SCHEDULES[schedule])(
            self.stage if schedule in ("1f1b", "gpipe") else [self.stage], MICROBATCHES, loss_fn=_loss
        )
        self.modules = [self.stage.submod]
        self.optimizer = adamw(self.stage.submod.parameters(), **options)
        self.n_rows, self.row, self.n_parts = *_rows(self.mesh), MICROBATCHES
        self.clip = partial(self.stage.clip_grad_norm_, NORM)
        self.is_first, self.is_last = self.stage.is_first, self.stage.is_last

    def accumulate(self, parts: list[Any]) -> list[float]:
        inputs = joined(parts) if self.is_first else ()
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        losses: list[Tensor] = []
        target = {"target": torch.zeros(MICROBATCHES), "losses": losses} if self.is_last else {}
        with Float64():
            self.engine.step(*args, **kwargs, **target, return_outputs=False)
        return [loss.item() for loss in losses]


class Split(Staged):
    """The loop of one rank of a pipeline with several stages per rank."""

    def __init__(self, stages: Any, schedule: str, **options: Any) -> None:
        self.pipeline = stages.schedule(schedule, MICROBATCHES, _loss, device="cpu")
        self.modules = [stage.submod for stage in self.pipeline.stages]
        self.optimizer = adamw(self.pipeline.parameters, **options)
        self.n_rows, self.row, self.n_parts = 1, 0, MICROBATCHES
        self.clip = partial(self.pipeline.clip_grad_norm_, NORM)

    def accumulate(self, parts: list[Any]) -> list[float]:
        inputs = joined(parts)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        losses: list[Tensor] = []
        with Float64():
            self.pipeline.step(*args, **kwargs, target=torch.zeros(MICROBATCHES), losses=losses)
        return [loss.item() for loss in losses]

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        model = {name: value for module in self.modules for name, value in module.state_dict().items()}
        state = {name: self.optimizer.state[parameter] for name, parameter in self._trained()}
        return model, {"state": state, "param_groups": [{**self.optimizer.param_groups[0], "params": list(state)}]}

    def load(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        for module in self.modules:
            module.load_state_dict({name: model[name] for name in module.state_dict()})
        for name, parameter in self._trained():
            self.optimizer.state[parameter] = optimizer["state"][name]

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        named = [pair for module in self.modules for pair in module.named_parameters()]
        return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _loss(out: Any, _target: Tensor) -> Tensor:
    return processes.loss_of(without_caches(out))


def _mesh_of(plan: Any) -> Any:
    """The plan's mesh; a process has one of each shape."""
    key = tuple(f"{name}{size}" for name, size in plan.mesh_shape.items())
    if key not in _mesh:
        _mesh[key] = plan.device_mesh("cpu")
    return _mesh[key]


def _rows(mesh: Any) -> tuple[int, int]:
    """Number of ranks with different rows, and the position of this one among them."""
    rank, n = 0, 1
    for name in ("data", "shard"):
        if name in mesh.mesh_dim_names:
            size = mesh[name].size()
            rank, n = rank * size + mesh[name].get_local_rank(), n * size
    return n, rank


def _step_of(inputs: Any, step: int, n_parts: int) -> list[list[Any]]:
    return [[like(inputs, 1000 * step + 100 * batch + part) for part in range(n_parts)] for batch in range(ACCUMULATED)]


@lru_cache(maxsize=4)
def _one_process(name: str, n_parts: int) -> dict[str, Any]:
    """What the loop of one process leaves, over so many parts of a batch."""
    model, inputs = models.make(name)
    other = other_sizes(model, inputs)
    loop = Loop(model)
    found: dict[str, Any] = {"other": other}
    found["losses"] = [loop.step(_step_of(inputs, step, n_parts)) for step in range(STEPS)]
    found["evaluated"] = loop.evaluate(other)
    found["saved"] = _copied(loop)
    found["losses"] += [loop.step(_step_of(inputs, STEPS + step, n_parts)) for step in range(MORE_STEPS)]
    found["end"] = _copied(loop)
    return found


def _copied(loop: Loop) -> dict[str, Tensor]:
    """Copies of the parameters, buffers and states of the optimizer, by name."""
    found = {}
    names = {}
    for module in loop.modules:
        found |= {name: processes.whole(value.detach()).clone() for name, value in module.state_dict().items()}
        names |= dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in names.items():
        for key, state in loop.optimizer.state.get(parameter, {}).items():
            if key != "step":
                found[f"{key} of {name}"] = processes.whole(state).clone()
    return found


def _differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Iterator[tuple[float, str]]:
    for name, tensor in found.items():  # torch saves zeros as the states of parameters without a gradient
        yield _difference(expected[name] if name in expected else torch.zeros_like(tensor), tensor), name


def _difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point():
        return float(not torch.equal(one, other))
    difference = processes.difference(one, other)
    return float("inf") if math.isnan(difference) else difference


def _loop(name: str, sizes: dict[str, Any], schedule: str, **options: Any) -> Any:
    """Return the loop of this rank, or the reason for which there is none."""
    model, inputs = models.make(name)
    try:
        with Float64():
            stats = Statistics(model, inputs)
            plan = stats.split(sizes["split"]) if "split" in sizes else stats.parallel_plan(**sizes)
        if "split" in sizes:
            return Split(plan, schedule, **options)
        return Staged(plan, model, schedule, **options) if schedule else Sharded(plan, model, **options)
    except ModelSummaryError as error:
        return f"{type(error).__name__}: {error}"


def compared(_rank: int, _n: int, name: str, sizes: dict[str, Any], schedule: str = "") -> dict[str, Any]:
    """The largest difference from one process, and of what; or the reason of a refusal."""
    loop = _loop(name, sizes, schedule, fused=True)
    if isinstance(loop, str):
        return {"refused": loop}
    differences: list[tuple[float, str]] = []
    expected = _one_process(name, loop.n_rows * loop.n_parts)
    _, inputs = models.make(name)
    _train(loop, inputs, expected, range(STEPS), differences)
    if not schedule:
        outputs = zip(expected["evaluated"], loop.evaluate(expected["other"]), strict=True)
        differences += [(_difference(*pair), "a result at another size") for pair in outputs]
    differences += _differences(expected["saved"], _copied(loop))
    differences = [max(differences)]

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, loop.states())
    file = BytesIO()
    torch.save(_union(parts), file)
    file.seek(0)
    model_state, optimizer_state = torch.load(file)
    plain = Loop(models.make(name)[0])
    plain.modules[0].load_state_dict(model_state)
    plain.load(model_state, optimizer_state)
    differences += [
        (each, f"{what}, read in one process") for each, what in _differences(expected["saved"], _copied(plain))
    ]

    # Stages are made of one model; another plan is for any model of the same sizes.
    fresh = _loop(name, sizes, schedule) if schedule else Sharded(loop.plan, models.make(name)[0])
    fresh.load(model_state, optimizer_state)
    for group in fresh.optimizer.param_groups:
        group |= {"fused": False, "foreach": True}
    _train(fresh, inputs, expected, range(STEPS, STEPS + MORE_STEPS), differences)
    differences += _differences(expected["end"], _copied(fresh))
    difference, what = max(differences)
    return {"difference": difference, "of": what}


def _train(
    loop: Any, inputs: Any, expected: dict[str, Any], steps: range, differences: list[tuple[float, str]]
) -> None:
    for step in steps:
        batches = _step_of(inputs, step, loop.n_rows * loop.n_parts)
        *losses, norm = loop.step(loop.of_rank(batches))
        *whole, whole_norm = expected["losses"][step]
        rows = [loss for batch in loop.of_rank(_cut(whole, len(batches))) for loss in batch]
        pairs = [*zip(rows, losses, strict=True)] if losses else []  # the last stage alone has losses
        differences += [(_relative(one, other), f"the loss of step {step}") for one, other in pairs]
        differences.append((_relative(whole_norm, norm), f"the norm of step {step}"))


def _relative(expected: float, value: float) -> float:
    return abs(expected - value) / max(1.0, abs(expected))


def _cut(values: list[Any], n: int) -> list[list[Any]]:
    size = len(values) // n
    return [values[size * place : size * (place + 1)] for place in range(n)]


def _union(parts: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Join the states of ranks that hold different parameters."""
    model = {name: value for part, _ in parts for name, value in part.items()}
    state = {name: value for _, part in parts for name, value in part["state"].items()}
    group = {**parts[0][1]["param_groups"][0], "params": list(state)}
    return model, {"state": state, "param_groups": [group]}


def saved(state: dict[str, Any]) -> str:
    """Save with torch.distributed.checkpoint. Return the folder."""
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])
    return folder[0]
