"""Run one step without data and follow the memory: forward, backward, optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from modelsummary._torch import FakeTensor
from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.devices import device_of
from modelsummary.capture.execution.recurrent import fused_lstm
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.execution.shape_tensor import ShapeTensor, spec_of
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of, named_modules, tensors_in_attributes, tensors_of_modules
from modelsummary.capture.operators import Operators, Uncounted
from modelsummary.capture.run import no_collection, obstacle_of, running
from modelsummary.capture.timer import Step, Timer
from modelsummary.capture.values import map_tensors, tensors_of
from modelsummary.errors import InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.memory.allocations import Allocation, Allocations
from modelsummary.memory.checkpointing import apply_checkpoint, recomputed_macs
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.memory.plan import StepPlan

__all__ = ["RowMemory", "check_initialized", "loss_of", "predict", "simulate", "simulate_on_fakes", "simulate_step"]

_CUDA_BLOCK = 512


@dataclass
class RowMemory:
    """Of one call of a module: bytes it first saved for the backward, and the most that lived while it ran."""

    activation_bytes: int = 0
    peak_bytes: int = 0


def predict(live: LiveModel, root: LayerInfo, plan: StepPlan) -> MemoryEstimate:
    """Predict the memory of a step, and write what each call has of it into the rows below ``root``.

    Raises:
        InputError: a parameter is not initialised, there is nothing to differentiate, or the step needs values that
            there are not.
    """
    check_initialized(live)
    estimate, by_call = simulate(live, root, plan)
    rows = list(root.walk()) if plan.train else []
    for row in rows:
        found = by_call.get((row.fqn, row.call_index)) if row.executed else None
        row.self_activation_bytes = found.activation_bytes if found is not None else 0
        row.activation_bytes = row.self_activation_bytes
        row.peak_bytes = found.peak_bytes if found is not None else None
    for row in reversed(rows):
        if row.parent_info is not None:
            row.parent_info.activation_bytes += row.activation_bytes  # type: ignore[operator]
    return estimate


def simulate(
    live: LiveModel, root: LayerInfo, plan: StepPlan
) -> tuple[MemoryEstimate, dict[tuple[str, int], RowMemory]]:
    """Predict a step and leave the rows alone; see ``simulate_step``."""
    estimate, by_call = simulate_step(live.model, live.call, plan)
    again = recomputed_macs(root, plan.checkpoint) if plan.train else 0
    return replace(estimate, recomputed_macs=again), by_call


def check_initialized(live: LiveModel) -> None:
    """Raise ``InputError`` if a parameter has no shape yet."""
    if live.uninitialized is not None:
        raise InputError(f"predicting memory: parameter {live.uninitialized!r} is not initialised; run the model once")


class _OperatorClock:
    """Counts operators: the marks of a timer then say which operators ran within a call."""

    waits = False

    def __init__(self, allocations: Allocations) -> None:
        self._allocations = allocations

    def now(self) -> int:
        return len(self._allocations.operators)

    @staticmethod
    def milliseconds(marks: Sequence[int]) -> list[float]:
        raise NotImplementedError  # operators take no time here

    @staticmethod
    def release(marks: Sequence[int]) -> None:
        """Numbers need no care."""


def simulate_step(
    model: nn.Module, call: CallArguments, plan: StepPlan
) -> tuple[MemoryEstimate, dict[tuple[str, int], RowMemory]]:
    """Predict the memory of a step of ``model``, which is afterwards as before.

    A step that needs values runs for real, on the model's own device.

    Returns:
        The estimate; and by FQN and number of the call what each call of a module has of it.

    Raises:
        InputError: nothing in the result can be differentiated, or the loss is no scalar.
    """
    own = device_of(tensors_of_modules(modules_of(model)))
    wanted = plan.device or (own if own.type != "meta" else torch.device("cpu"))
    notes, device = [], wanted
    if wanted.type == "cuda" and not torch.cuda.is_available():
        device = torch.device("cpu")
        notes.append("No CUDA device here: the kernels of the CPU are assumed (its attention and norms keep alike)")
    has_values = own.type != "meta" and not any(tensor.is_meta for tensor in call.tensors())
    can_run = has_values and plan.dtype is None and wanted == own
    block = plan.block_bytes or (_CUDA_BLOCK if wanted.type == "cuda" else 1)
    with (
        no_collection(),
        running(modules_of(model), call, on_shapes=True, grad=plan.train, device=device, dtype=plan.dtype) as running_,
        fused_lstm(),
    ):
        shapes, args, kwargs = running_
        assert isinstance(shapes, ShapeOnly)
        run, reason = _step(model, args, kwargs, plan, shapes, device, block, can_run)
        if reason is None:
            return run.estimate(str(wanted), "shape", notes), run.by_call()
    if not can_run:
        raise InputError(
            f"{reason}, so the step must run for real: on the model's device ({own}), with its dtype, and with values"
        )
    with running(modules_of(model), call, on_shapes=False, grad=plan.train, as_is=True) as (execution, args, kwargs):
        with Operators(Uncounted(), execution):
            apply_checkpoint(model, plan.checkpoint)
            run = _Run(model, args, kwargs, plan, own, block)
            run.step()
        return run.estimate(str(wanted), "real", [f"The step ran for real: {reason}"]), run.by_call()


def simulate_on_fakes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: StepPlan, device: torch.device
) -> MemoryEstimate:
    """Predict the memory of a step of a model of fake tensors, which FSDP2 takes; in its ``FakeTensorMode``.

    Storages may be resized: FSDP2 frees gathered parameters like that.
    """
    block = plan.block_bytes or (_CUDA_BLOCK if device.type == "cuda" else 1)
    make_optimizer = None if plan.make_optimizer is None else partial(_optimizer_of_fakes, plan.make_optimizer)
    run = _Run(model, args, kwargs, replace(plan, make_optimizer=make_optimizer), device, block, counts_fakes=True)
    original: Any = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.nbytes() != size:
            run.allocations.resized(storage, size)
        return original(storage, size)

    with no_collection(), fused_lstm(), patch.object(torch.UntypedStorage, "resize_", resize_):
        apply_checkpoint(model, plan.checkpoint)
        run.step()
    return run.estimate(str(device), "shape", [])


def _optimizer_of_fakes(
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer], parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer whose step asks for the number of steps, which a fake tensor does not know."""
    optimizer = make_optimizer(parameters)
    step: Any = optimizer.step

    def with_numbers(*args: Any, **kwargs: Any) -> Any:
        with patch.object(FakeTensor, "item", lambda _: 1.0):
            return step(*args, **kwargs)

    optimizer.step = with_numbers  # type: ignore[method-assign]
    return optimizer


def _step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: StepPlan,
    shapes: ShapeOnly,
    device: torch.device,
    block: int,
    can_run: bool,
) -> tuple[_Run, str | None]:
    """Run a step on shapes and return it, with what stood in its way, if anything did.

    What no operator raised is raised again where the step cannot run for real (``can_run``), which would tell.
    """
    with Operators(Uncounted(), shapes):
        apply_checkpoint(model, plan.checkpoint)
        run = _Run(model, args, kwargs, plan, device, block)
        try:
            run.step()
        except Exception as error:
            if isinstance(error, InputError) or (shapes.obstacle is None and not can_run):
                raise
            return run, obstacle_of(shapes, error)
    return run, obstacle_of(shapes, None)


class _Run:
    """One simulated step, and what it left."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan: StepPlan,
        device: torch.device,
        block_bytes: int,
        *,
        counts_fakes: bool = False,
    ) -> None:
        self._model, self._args, self._kwargs, self._plan, self._device = model, args, kwargs, plan, device
        self.allocations = Allocations(block_bytes, self._position, counts_fakes=counts_fakes)
        self._timer = Timer(model, _OperatorClock(self.allocations))
        self._trained = [each for each in model.parameters() if each.requires_grad] if plan.train else []
        self._optimizer: torch.optim.Optimizer | None = None
        self._step: Step | None = None
        self._backward: BackwardTimer | None = None
        self._phases: list[tuple[str, int]] = []  # name, number of its first operator
        self._after_forward = 0

    def _position(self) -> int:
        """Number of the call that runs now."""
        return self._timer.position()

    def step(self) -> None:
        """Prepare what is there before a step, and run it."""
        follow = self.allocations
        follow.hold(self._model.parameters(), "params")
        follow.hold(self._model.buffers(), "buffers")
        follow.hold(tensors_in_attributes(modules_of(self._model)), "buffers")
        follow.hold(tensors_of((self._args, self._kwargs)), "inputs")
        with follow:
            self._prepare()
            self._begin("forward")
            hooks = torch.autograd.graph.saved_tensors_hooks(follow.save, lambda tensor: tensor)
            with hooks if self._plan.train else nullcontext(), casting(self._plan.autocast, self._device):
                output = self._forward()
                loss = loss_of(output, self._plan.loss) if self._plan.train else None
            if loss is not None:
                self._train(loss, output)
        self._mark_gradients()

    def _begin(self, phase: str) -> None:
        self._phases.append((phase, len(self.allocations.operators)))

    def _prepare(self) -> None:
        """The state that an optimizer makes in its first step, and gradients that are there already."""
        if self._plan.make_optimizer is not None and self._trained:
            self._optimizer = self._plan.make_optimizer(self._trained)
            self._first_step(self._optimizer)
            states = tensors_of([list(state.values()) for state in self._optimizer.state.values()])
            for state in states:
                found = self.allocations.of(state)
                if found is not None and not found.kind:
                    found.kind = "optimizer_state"
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter) if self._plan.accumulates else None
        self._mark_gradients()

    def _first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state; on shapes, parameters of equal shape and dtype share what is known of one."""
        alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for number, group in enumerate(optimizer.param_groups):
            for each in group["params"]:
                alike[(number, spec_of(each)) if type(each) is ShapeTensor else id(each)].append(each)
        for first, *_ in alike.values():
            first.grad = torch.zeros_like(first)  # a real step goes on with these parameters
        optimizer.step()
        for first, *others in alike.values():
            for each in others if first in optimizer.state else ():
                optimizer.state[each] = map_tensors(torch.clone, optimizer.state[first])

    def _mark_gradients(self) -> None:
        for parameter in self._trained:
            found = self.allocations.of(parameter.grad) if parameter.grad is not None else None
            if found is not None and not found.kind:
                found.kind = "grads"

    def _forward(self) -> Any:
        with self._timer.running(), self._generator_states():
            output = self._model(*self._args, **self._kwargs)
        self._step = self._timer.steps.pop()
        return output

    def _generator_states(self) -> AbstractContextManager[Any]:
        """Context in which states of the CPU's generator are followed: each region of a checkpoint keeps one."""
        if self._device.type != "cpu":
            return nullcontext()
        original = torch.get_rng_state

        def get_rng_state() -> Tensor:
            state = original()
            self.allocations.keep(state)
            return state

        return patch.object(torch, "get_rng_state", get_rng_state)

    def _train(self, loss: Tensor, output: Any) -> None:
        assert self._step is not None
        self._backward = BackwardTimer(self._step, self._timer.clock, on_node=self.allocations.note_node)
        self.allocations.forward_ended((*tensors_of(output), loss))
        self._after_forward = self.allocations.held()
        self._begin("backward")
        loss.backward()
        self._backward.detach()
        self._mark_gradients()
        if self._optimizer is not None:
            self._begin("step")
            self._optimizer.step()

    # ------------------------------------------------------------------------------------- what it means

    def estimate(self, device: str, execution: str, notes: list[str]) -> MemoryEstimate:
        """The figures."""
        first = self._phases[0][1]
        every = self.allocations.every
        timeline = self._timeline()[first:]
        kept = [each for each in every if each.saved_at is not None or each.kind == "activations"]

        def total(kind: str) -> int:
            return sum(each.nbytes for each in every if each.kind == kind)

        return MemoryEstimate(
            mode="train" if self._plan.train else "inference",
            device=device,
            optimizer=type(self._optimizer).__name__ if self._optimizer is not None else None,
            params=total("params"),
            buffers=total("buffers"),
            grads=sum(each.nbytes for each in every if each.kind == "grads" and each.died is None),
            optimizer_state=total("optimizer_state"),
            inputs=total("inputs"),
            activations=sum(each.nbytes for each in kept if each.kind in ("", "activations")),
            held_after_forward=self._after_forward or self.allocations.held(),
            peak=max(point.total for point in timeline),
            timeline=timeline,
            execution=execution,
            notes=notes,
        )

    def _timeline(self) -> list[TimelinePoint]:
        number = len(self.allocations.operators)
        changes: list[list[int]] = [[0] * (number + 1) for _ in CATEGORIES]
        for each in self.allocations.every:
            series = changes[CATEGORIES.index(_category(each))]
            series[min(each.born, number)] += each.nbytes
            if each.died is not None:
                series[each.died] -= each.nbytes
        fqns, phases = self._fqns(), self._phase_of_each()
        held = [0] * len(CATEGORIES)
        points = []
        for place, (name, _) in enumerate(self.allocations.operators):
            held = [so_far + series[place] for so_far, series in zip(held, changes, strict=True)]
            points.append(TimelinePoint(name, fqns[place], phases[place], tuple(held)))
        return points

    def _phase_of_each(self) -> list[str]:
        phases = [""] * len(self.allocations.operators)
        for name, begin in self._phases:
            phases[begin:] = [name] * (len(phases) - begin)
        return phases

    def _fqns(self) -> list[str | None]:
        assert self._step is not None
        names = {id(module): fqn for fqn, module in named_modules(self._model)}
        innermost = self._step.innermost()
        calls = [innermost[position] for _, position in self.allocations.operators]
        for call, begin, end in self._backward.intervals() if self._backward is not None else ():
            calls[begin:end] = [call] * (end - begin)
        return [None if call is None else names[id(call.module)] for call in calls]

    def by_call(self) -> dict[tuple[str, int], RowMemory]:
        """What each call of a module saved first, and the most that lived during it."""
        assert self._step is not None
        names = {id(module): fqn for fqn, module in named_modules(self._model)}
        innermost = self._step.innermost()
        saved: defaultdict[int, int] = defaultdict(int)
        for each in self.allocations.every:
            call = innermost[each.saved_at] if each.saved_at is not None else None
            if call is not None and each.kind in ("", "activations"):
                saved[id(call)] += each.nbytes
        held = self.allocations.bytes_over_time()
        counts: defaultdict[str, int] = defaultdict(int)
        found: dict[tuple[str, int], RowMemory] = {}
        for call in self._step.root().walk():
            fqn = names[id(call.module)]
            found[fqn, counts[fqn]] = RowMemory(saved[id(call)], max(held[call.begin : call.end], default=0))
            counts[fqn] += 1
        return found


def _category(allocation: Allocation) -> str:
    if allocation.kind:
        return allocation.kind
    return "activations" if allocation.saved_at is not None else "temporary"


def casting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """``torch.autocast``, where a dtype is given."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """What the backward of a step begins with. Raises ``InputError`` if that is nothing, or no scalar."""
    if loss is not None:
        value = loss(output)
    elif isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        value = output["loss"]
    else:
        tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if not tensors:
            raise InputError("nothing in the model's result requires a gradient; use mode='inference', or unfreeze it")
        return torch.stack([tensor.sum() for tensor in tensors]).sum() if len(tensors) > 1 else tensors[0].sum()
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise InputError(f"loss gave {value!r:.80}; expected a scalar tensor that requires a gradient")
    return value
