"""The step of one rank of a pipeline: micro-batches in the order of a schedule, as torch's engine runs them.

All micro-batches of a stage take the same memory. So at most three run here, and the others are added: what each of
them keeps between its forward and its backward, and the buffers for what it receives.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelsummary.capture.backward import BackwardTimer
from modelsummary.capture.timer import TimedStep
from modelsummary.capture.values import map_tensors, tensors_of
from modelsummary.memory.estimate import CATEGORIES, MemoryEstimate, TimelinePoint
from modelsummary.memory.step import StepRun, casting, category_of, loss_of
from modelsummary.memory.step_plan import StepPlan

__all__ = ["StageRun", "run_of"]


def run_of(model: torch.nn.Module, args: Any, kwargs: Any, plan: StepPlan, *place: Any, **options: Any) -> StepRun:
    """Return the run of a step: of a whole model, or of a stage if the plan has one."""
    kind = StepRun if plan.stage is None else StageRun
    return kind(model, args, kwargs, plan, *place, **options)


class _InFlight(NamedTuple):
    """A micro-batch between its forward and its backward.

    Attributes:
        step: log of its forward.
        output: its result, which torch's engine keeps until the backward has ended.
        results: tensors of its result that require a gradient; the loss on the last stage.
        inputs: tensors that it took.
    """

    step: TimedStep
    output: Any
    results: list[Tensor]
    inputs: list[Tensor]


class StageRun(StepRun):
    """One simulated step of a stage and its record."""

    def step(self) -> None:
        """Prepare the state before a step, and run the micro-batches and the optimizer."""
        stage = self.plan.stage
        assert stage is not None
        self._waiting: list[_InFlight] = []
        self._gradients: list[Tensor] = []  # buffers of what the next stage sends back
        self._sent: list[Tensor | None] = []  # gradients on their way to the stage before
        self._kept = self._unfollowed = self._activations = self._last_backward = 0
        order = _order(stage.microbatches, stage.in_flight)
        ahead = order.index("B")
        calls = [(self._args, self._kwargs), *(self._like_first() for _ in range(order.count("F") - 1))]
        arguments = iter(calls)  # the buffers live as long as the stage
        self._hold_state(tensors_of(calls))
        inputs = sum(each.nbytes for each in tensors_of(calls[0]))
        self._unfollowed = stage.microbatches * inputs - self._held("inputs")
        with self.allocations:
            self._prepare()
            for place, kind in enumerate(order):
                if kind == "B":
                    self._run_backward()
                    continue
                before = self.allocations.held()
                self._run_forward(*next(arguments))
                if place == ahead - 1:
                    self._kept = (stage.in_flight - ahead) * (self.allocations.held() - before)
                    self._note_fullest()
            self._reduce_gradients()
            self._step_optimizer()
        self._mark_gradients()

    def _like_first(self) -> tuple[Any, Any]:
        """Return the arguments, with new buffers for the tensors that the previous stage sends."""

        def buffer(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor).requires_grad_() if tensor.requires_grad else tensor

        made: tuple[Any, Any] = map_tensors(buffer, (self._args, self._kwargs))
        return made

    def _held(self, category: str) -> int:
        return sum(
            each.nbytes for each in self.allocations.every if each.died is None and category_of(each) == category
        )

    # --------------------------------------------------------------------------------------- micro-batches

    def _run_forward(self, args: Any, kwargs: Any) -> None:
        assert self.plan.stage is not None
        self._args, self._kwargs = args, kwargs
        self._begin("forward")
        with self._saving(), casting(self.plan.autocast, self._device):
            output = self._forward()
            results = [each for each in tensors_of(output) if each.requires_grad]
            if self.plan.stage.is_last:
                self.doing = "loss"
                results = [loss_of(output, self.plan.loss)]
            elif not self._gradients:
                self._make_gradients(results)
        assert self._step is not None
        self._waiting.append(_InFlight(self._step, output, results, list(tensors_of((args, kwargs)))))

    def _make_gradients(self, results: list[Tensor]) -> None:
        """Make the buffers of one micro-batch's gradients, which live from the start of the first step on."""
        assert self.plan.stage is not None
        self._gradients = [torch.empty_like(each) for each in results]
        for each in self._gradients:
            found = self.allocations.of(each)
            assert found is not None
            found.kind, found.born = "inputs", 0
            self._unfollowed += (self.plan.stage.microbatches - 1) * found.nbytes

    def _note_fullest(self) -> None:
        """Note the moment at which all micro-batches are in flight, before the first backward."""
        assert self.plan.stage is not None
        kept = [(each.output, each.results) for each in self._waiting] if self.plan.stage.is_last else ()
        self.allocations.forward_ended(tensors_of(kept))
        self._activations = self._held("activations")
        self._after_forward = self.allocations.held()

    def _run_backward(self) -> None:
        step, _output, results, inputs = self._waiting.pop(0)
        backward = BackwardTimer(step, self._timer.clock, on_node=self.allocations.note_node)
        self._backwards.append(backward)
        self._last_backward = len(self.allocations.operators)
        self._begin("backward")
        fsdp = self._fsdp()
        if fsdp is not None:  # gradients are accumulated whole, and reduced after the last backward
            fsdp.set_is_last_backward(False)
            fsdp.set_reshard_after_backward(False)
            fsdp.set_requires_gradient_sync(False)
        torch.autograd.backward(results, self._gradients or None)
        backward.detach()
        self._mark_gradients()
        self._sent = [each.grad for each in inputs if each.requires_grad]
        for each in inputs:
            each.grad = None

    def _fsdp(self) -> Any:
        """Return the stage if FSDP2 shards it, else None."""
        from torch.distributed.fsdp import FSDPModule

        return self.model if isinstance(self.model, FSDPModule) else None

    def _reduce_gradients(self) -> None:
        """Reduce the gradients that FSDP accumulated, with the function of torch's engine."""
        if self._fsdp() is not None:
            from torch.distributed.pipelining import PipelineStage

            stage: Any = SimpleNamespace(submod=self.model)
            PipelineStage.perform_reduce_grad(stage, 1)
            self._mark_gradients()
        self._sent = []

    # -------------------------------------------------------------------------------------------- results

    def estimate(self, device: str, execution: str, notes: list[str]) -> MemoryEstimate:
        """Return the figures of the step; all micro-batches in flight keep activations."""
        found = super().estimate(device, execution, notes)
        return replace(
            found,
            inputs=found.inputs + self._unfollowed,
            activations=self._activations + self._kept,
            held_after_forward=found.held_after_forward + self._unfollowed + self._kept,
        )

    def _timeline(self) -> list[TimelinePoint]:
        """Return the timeline of the micro-batches that ran while the most others were in flight."""
        inputs, activations = CATEGORIES.index("inputs"), CATEGORIES.index("activations")
        points = []
        for number, point in enumerate(super()._timeline()):
            held = list(point.held)
            held[inputs] += self._unfollowed
            held[activations] += self._kept if number < self._last_backward else 0
            points.append(point._replace(held=tuple(held)))
        return points


def _order(microbatches: int, in_flight: int) -> str:
    """Return the forwards ("F") and backwards ("B") that have the memory of a schedule, at most three of each.

    After ``in_flight`` forwards, each backward is followed by a forward as long as there are micro-batches.

    >>> _order(8, 4), _order(4, 4), _order(8, 1), _order(2, 2), _order(1, 1)
    ('FFBFBB', 'FFFBBB', 'FBFBFB', 'FFBB', 'FB')
    """
    if microbatches == in_flight:
        ahead = min(in_flight, 3)
        return "F" * ahead + "B" * ahead
    ahead = min(in_flight, 2)
    return "F" * ahead + "BF" * min(microbatches - in_flight, 3 - ahead) + "B" * ahead
