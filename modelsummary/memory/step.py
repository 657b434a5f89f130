"""One step of a model, run while its memory and its operators are noted.

``predict`` chooses the execution, runs the step, and writes the figures into the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.execution.shape_tensor import ShapeTensor, spec_of
from modelsummary.capture.modules import modules_of, named_modules, tensors_in_attributes
from modelsummary.capture.timer import TimedCall, TimedStep, Timer
from modelsummary.capture.values import map_tensors, tensors_of
from modelsummary.costs.kernels import StepOperator
from modelsummary.costs.operator_calls import OperatorCall
from modelsummary.costs.tensor_bytes import inner_tensors
from modelsummary.errors import InputError
from modelsummary.memory.allocations import Allocation, Allocations
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.memory.given_gradients import GivenGradients
from modelsummary.memory.operator_notes import OperatorNotes
from modelsummary.memory.saved_tensor import SavedTensor
from modelsummary.memory.step_plan import StepPlan

__all__ = ["RowMemory", "Saved", "StepRun", "casting", "category_of", "loss_of"]


@dataclass
class RowMemory:
    """Memory of one call of a module: bytes it first saved for the backward, and the most bytes alive in it."""

    activation_bytes: int = 0
    peak_bytes: int = 0


class Saved(NamedTuple):
    """A storage that is kept for the backward.

    Attributes:
        row: FQN and call index of the module call that saved it first; None outside of the model.
        operator: number of the operator that made it, from 0 at the begin of the forward.
        nbytes: size in bytes.
        storage: identity of the storage, as in ``OperatorRun``.
    """

    row: tuple[str, int] | None
    operator: int
    nbytes: int
    storage: int


class _OperatorClock:
    """A clock that counts operators, so that the marks of a timer delimit the operators of a call."""

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
        """Do nothing: numbers need no release."""


class StepRun:
    """One simulated step and its record."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        plan: StepPlan,
        device: torch.device,
        block_bytes: int,
        *,
        on_shapes: bool = True,
        notes_operators: bool = False,
        counts_bytes: bool = False,
        workspaces: Callable[[OperatorCall], int] | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self._args, self._kwargs, self._device = args, kwargs, device
        self._counts_bytes = counts_bytes or not (notes_operators and on_shapes)
        kind = Allocations if self._counts_bytes else OperatorNotes
        self.allocations = kind(block_bytes, self._position)
        self._timer = Timer(model, _OperatorClock(self.allocations))
        self._names = {id(module): fqn for fqn, module in named_modules(model)}  # the forward may replace modules
        self._trained = [each for each in model.parameters() if each.requires_grad] if plan.train else []
        self._optimizer: torch.optim.Optimizer | None = None
        self._counts_attributes = not notes_operators  # finding them takes long, and only bytes depend on them
        self._notes_operators = notes_operators or workspaces is not None
        self._workspaces = workspaces
        self._step: TimedStep | None = None
        self._backwards: list[BackwardTimer] = []
        self._phases: list[tuple[str, int]] = []  # name, number of its first operator
        self._after_forward = 0
        self.doing = "step"  # what runs: also "forward", "loss", "backward"; the optimizer's state is made first

    def _position(self) -> int:
        """Return the number of the call that runs now."""
        return self._timer.position()

    def step(self) -> None:
        """Prepare the state before a step, and run the step."""
        self._hold_state(tensors_of((self._args, self._kwargs)))
        with self.allocations:
            self._prepare()
            self._begin("forward")
            with self._saving(), casting(self.plan.autocast, self._device):
                output = self._forward()
                self.doing = "loss"
                loss = loss_of(output, self.plan.loss) if self.plan.train else None
            if loss is not None:
                self._train(loss, output)
        self._mark_gradients()

    def _hold_state(self, inputs: Iterable[Tensor]) -> None:
        """Follow what lives before the step, except the state of the optimizer."""
        follow = self.allocations
        follow.hold(self.model.parameters(), "params")
        follow.hold(self.model.buffers(), "buffers")
        if self._counts_attributes:
            follow.hold(tensors_in_attributes(modules_of(self.model)), "buffers")
        follow.hold(inputs, "inputs")

    def _saving(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that are saved for the backward are noted."""
        counts_saved = self.plan.train and self._counts_bytes
        save = self.allocations.save
        return torch.autograd.graph.saved_tensors_hooks(save, SavedTensor.unpack) if counts_saved else nullcontext()

    def _begin(self, phase: str) -> None:
        self._phases.append((phase, len(self.allocations.operators)))
        self.doing = phase

    def _prepare(self) -> None:
        """Make the state of the optimizer, as its first step does, and gradients if they accumulate."""
        if self.plan.make_optimizer is not None and self._trained:
            self._optimizer = self.plan.make_optimizer(self._trained)
            self._made_at_once = frozenset(map(id, self._optimizer.state))
            self._first_step(self._optimizer)
            states = tensors_of([list(state.values()) for state in self._optimizer.state.values()])
            for part in (inner for state in states for inner in inner_tensors(state)):
                found = self.allocations.of(part)
                if found is not None and not found.kind:
                    found.kind = "optimizer_state"
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter) if self.plan.accumulates else None
        self._given = GivenGradients(self._trained)
        self._mark_gradients()
        if self._notes_operators:
            self.allocations.note_operators()

    def _first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's state; on shapes, it steps one parameter per shape and dtype and copies the state."""
        alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
        for number, group in enumerate(optimizer.param_groups):
            for each in group["params"]:
                alike[(number, spec_of(each)) if type(each) is ShapeTensor else id(each)].append(each)
        for first, *_ in alike.values():
            first.grad = torch.zeros_like(first)  # a real step continues with these parameters
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
            output = self.model(*self._args, **self._kwargs)
        self._step = self._timer.steps.pop()
        return output

    def _generator_states(self) -> AbstractContextManager[Any]:
        """Return a context in which the CPU generator's states are followed: each checkpointed region keeps one."""
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
        backward = BackwardTimer(self._step, self._timer.clock, on_node=self.allocations.note_node)
        self._backwards.append(backward)
        self.allocations.forward_ended((*tensors_of(output), loss))
        self._after_forward = self.allocations.held()
        self._begin("backward")
        loss.backward()
        backward.detach()
        self._mark_gradients()
        self._step_optimizer()

    def _step_optimizer(self) -> None:
        self._leave_out_unused()
        if self._optimizer is not None:
            self._begin("step")
            self._optimizer.step()

    def _leave_out_unused(self) -> None:
        """Do not count gradients and optimizer states of parameters that get no gradient: no loop ever makes them.

        States that the optimizer makes for all parameters before its first step, as Adagrad does, are counted.
        """
        states = {} if self._optimizer is None else self._optimizer.state
        unused: list[Any] = []
        for parameter in self._given.unused():
            unused.append(parameter.grad)
            parameter.grad = None
            if states and id(parameter) not in self._made_at_once:
                unused.append(states.pop(parameter, None))
        self._after_forward -= self.allocations.leave_out(tensors_of(unused), tensors_of(list(states.values())))

    # -------------------------------------------------------------------------------------------- results

    def estimate(self, device: str, execution: str, notes: list[str]) -> MemoryEstimate:
        """Return the figures of the step."""
        first = self._phases[0][1]
        every = self.allocations.every
        timeline = self._timeline()[first:]
        kept = [each for each in every if each.saved_at is not None or each.kind == "activations"]

        def total(kind: str) -> int:
            return sum(each.nbytes for each in every if each.kind == kind)

        return MemoryEstimate(
            mode="train" if self.plan.train else "inference",
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
            series = changes[CATEGORIES.index(category_of(each))]
            series[min(each.born, number)] += each.nbytes
            if each.died is not None:
                series[each.died] -= each.nbytes
        fqns, phases = self._fqns(), self._phase_of_each()
        held = [0] * len(CATEGORIES)
        points = []
        spaces = self._workspace_of_each()
        for place, (name, _) in enumerate(self.allocations.operators):
            held = [so_far + series[place] for so_far, series in zip(held, changes, strict=True)]
            points.append(TimelinePoint(name, fqns[place], phases[place], (*held[:-1], spaces[place])))
        return points

    def _workspace_of_each(self) -> list[int]:
        """Return the workspace of each operator in bytes; 0 if it is not known."""
        spaces = [0] * len(self.allocations.operators)
        for number, nbytes in self.allocations.clones.items() if self.plan.workspaces else ():
            spaces[number] = nbytes
        log, known = self.allocations.log, self._workspaces
        if log is None or known is None:
            return spaces
        found: dict[int, int] = {}
        for run in log.runs:
            if id(run.call) not in found:
                found[id(run.call)] = known(run.call)
        return [max(found[id(run.call)], space) for run, space in zip(log.runs, spaces, strict=True)]

    def _phase_of_each(self) -> list[str]:
        phases = [""] * len(self.allocations.operators)
        for name, begin in self._phases:
            phases[begin:] = [name] * (len(phases) - begin)
        return phases

    def _fqns(self) -> list[str | None]:
        return [None if call is None else self._names[id(call.module)] for call in self._calls()]

    def _calls(self) -> list[TimedCall | None]:
        """Return the module call that each operator belongs to, or None."""
        assert self._step is not None
        innermost = self._step.innermost()
        calls = [innermost[position] for _, position in self.allocations.operators]
        for backward in self._backwards:
            for call, begin, end in backward.intervals():
                calls[begin:end] = [call] * (end - begin)
        return calls

    def operators(self) -> list[StepOperator]:
        """Return the operators of the step in the order in which they ran; needs ``notes_operators``."""
        assert self.allocations.log is not None
        rows = self._rows()
        first = self._phases[0][1]
        found = zip(self.allocations.log.runs, self._phase_of_each(), self._calls(), strict=True)
        return [
            StepOperator(run, phase, None if call is None else rows[id(call)])
            for run, phase, call in list(found)[first:]
        ]

    def saved(self) -> list[Saved]:
        """Return the storages that are kept for the backward, without parameters, buffers and inputs."""
        assert self._step is not None
        innermost, rows, first = self._step.innermost(), self._rows(), self._phases[0][1]
        found = []
        for each in self.allocations.every:
            if each.saved_at is not None and each.kind in ("", "activations"):
                call = innermost[each.saved_at]
                row = None if call is None else rows[id(call)]
                found.append(Saved(row, each.born - first, each.nbytes, id(each)))
        return found

    def _rows(self) -> dict[int, tuple[str, int]]:
        """Return the FQN and call index of each module call, by the id of the call."""
        assert self._step is not None
        counts: defaultdict[str, int] = defaultdict(int)
        rows = {}
        for call in self._step.root().walk():
            fqn = self._names[id(call.module)]
            rows[id(call)] = fqn, counts[fqn]
            counts[fqn] += 1
        return rows

    def by_call(self) -> dict[tuple[str, int], RowMemory]:
        """Return the memory of each module call: bytes it saved first, and the most bytes alive in it."""
        assert self._step is not None
        innermost = self._step.innermost()
        saved: defaultdict[int, int] = defaultdict(int)
        for each in self.allocations.every:
            call = innermost[each.saved_at] if each.saved_at is not None else None
            if call is not None and each.kind in ("", "activations"):
                saved[id(call)] += each.nbytes
        spaces = self._workspace_of_each()
        held = [sum(each) for each in zip(self.allocations.bytes_over_time(), spaces, strict=True)]
        rows = self._rows()
        return {
            rows[id(call)]: RowMemory(saved[id(call)], max(held[call.begin : call.end], default=0))
            for call in self._step.root().walk()
        }


def category_of(allocation: Allocation) -> str:
    """Return the category of a storage, one of ``CATEGORIES``."""
    if allocation.kind:
        return allocation.kind
    return "activations" if allocation.saved_at is not None else "temporary"


def casting(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return ``torch.autocast`` if a dtype is given, else an empty context."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    """Return the scalar that the backward of a step begins with. Raise ``InputError`` if there is none."""
    if loss is not None:
        value = loss(output)
    elif isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        value = output["loss"]
        value = value if value.numel() == 1 else value.sum()  # some models return the loss of each sample
    else:
        tensors = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if not tensors:
            raise InputError(
                "nothing in the model's result requires a gradient; run the forward alone, or unfreeze parameters"
            )
        return torch.stack([tensor.sum() for tensor in tensors]).sum() if len(tensors) > 1 else tensors[0].sum()
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise InputError(f"loss must return a scalar tensor that requires a gradient, got {value!r:.80}")
    return value
