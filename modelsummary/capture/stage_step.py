"""Three micro-batches of one stage of a pipeline, run as torch's engine runs them, and observed.

All micro-batches of a stage take the same memory. Three run, in an order in which each kind of action occurs as the
first one, among others, and as the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modelsummary import _torch
from modelsummary.capture.backward import BackwardNodes
from modelsummary.capture.backward_halves import backward_of_inputs, backward_of_weights, has_halves
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.capture.step import StepRun
from modelsummary.capture.trace import Trace

__all__ = ["StageRun", "StageTrace", "trial_of"]

_REDUCE, _STEP = "R", "S"


def trial_of(actions: str) -> str:
    """Return a short order in which the actions of a stage occur as in a long one.

    >>> trial_of("FFFFBFBFBBBB"), trial_of("FFIFIWFIWIWW"), trial_of("FFFIWBBB")
    ('FFBFBB', 'FFIWFIWIW', 'FFIWFBIW')
    """
    kinds = list(dict.fromkeys(action for action in actions if action in "BI"))
    first, other = ({"B": "B", "I": "IW"}[kind] for kind in (kinds[0], kinds[-1]))
    return f"FF{first}F{other}{first}"


class _InFlight(NamedTuple):
    """A micro-batch between its forward and its backward.

    Attributes:
        nodes: the autograd nodes of its backward.
        output: its result, which torch's engine keeps until the backward has ended.
        results: tensors of its result that require a gradient; the loss on the last stage.
        inputs: tensors that it took.
    """

    nodes: BackwardNodes
    output: Any
    results: list[Tensor]
    inputs: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class StageTrace(Trace):
    """Three observed micro-batches of a stage.

    Attributes:
        marks: kind of each action, and the number of the operator that follows it.
        unfollowed: bytes of inputs and buffers of the micro-batches of a step that did not run.
        result: bytes of the result of one micro-batch.
        sent: bytes of the gradients of one micro-batch's inputs.
    """

    marks: Sequence[tuple[str, int]]
    unfollowed: int
    result: int
    sent: int


class StageRun(StepRun):
    """Three micro-batches of a stage, and what was observed of them."""

    _kind = StageTrace

    def step(self) -> None:
        """Prepare the state before a step, and run the micro-batches and the optimizer."""
        stage = self.plan.stage
        assert stage is not None
        self._waiting: list[_InFlight] = []
        self._halves: list[Any] = []  # what the second half of a backward continues with
        self._gradients: list[Tensor] = []  # buffers of what the next stage sends back
        self._sent: list[Tensor | None] = []  # gradients on their way to the stage before
        self._marks: list[tuple[str, int]] = []  # kind of an action, number of the operator that follows it
        order = trial_of(stage.actions)
        calls = [(self._args, self._kwargs), *(self._like_first() for _ in range(order.count("F") - 1))]
        arguments = iter(calls)  # the buffers live as long as the stage
        self._hold_state(tensors_of(calls))
        inputs = sum(tensor.nbytes for tensor in tensors_of(calls[0]))
        self._unfollowed = stage.microbatches * inputs - self._held("inputs")
        with self.observer:
            self._prepare()
            self._mark("")
            for position, kind in enumerate(order):
                if kind == "F":
                    self._run_forward(*next(arguments))
                else:
                    self._run_backward(kind)
                self._mark(kind)
                if position == 1:
                    self._note_fullest()
            self._reduce_gradients()
            self._mark(_REDUCE)
            self._step_optimizer()
            self._mark(_STEP)
        self._mark_gradients()

    def _mark(self, kind: str) -> None:
        self._marks.append((kind, self._n_operators()))

    def _like_first(self) -> tuple[Any, Any]:
        """Return the arguments, with new buffers for the tensors that the previous stage sends."""

        def buffer(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor).requires_grad_() if tensor.requires_grad else tensor

        arguments: tuple[Any, Any] = map_tensors(buffer, (self._args, self._kwargs))
        return arguments

    def _held(self, category: str) -> int:
        return sum(
            allocation.nbytes
            for allocation in self.observer.every
            if allocation.died is None and allocation.category == category
        )

    # --------------------------------------------------------------------------------------- micro-batches

    def _run_forward(self, args: Any, kwargs: Any) -> None:
        assert self.plan.stage is not None
        self._args, self._kwargs = args, kwargs
        fsdp = self._fsdp()
        if hasattr(fsdp, "set_manual_backward_finalization"):  # torch >= 2.15
            fsdp.set_manual_backward_finalization(True)
        output, loss = self._forward(has_loss=self.plan.stage.is_last)
        results = [tensor for tensor in tensors_of(output) if tensor.requires_grad] if loss is None else [loss]
        if loss is None and not self._gradients:
            self._make_gradients(results)
        self._result = sum({id(tensor): tensor.nbytes for tensor in tensors_of(output)}.values())
        # It also notes the numbers that the graph keeps, so it is made before the forward counts as ended.
        self._waiting.append(_InFlight(self._nodes(output), output, results, list(tensors_of((args, kwargs)))))

    def _make_gradients(self, results: list[Tensor]) -> None:
        """Make the buffers of one micro-batch's gradients, which live from the start of the first step on."""
        assert self.plan.stage is not None
        self._gradients = [torch.empty_like(result) for result in results]
        for gradient in self._gradients:
            allocation = self.observer.of(gradient)
            assert allocation is not None
            allocation.kind, allocation.born = "inputs", 0
            self._unfollowed += (self.plan.stage.microbatches - 1) * allocation.nbytes

    def _note_fullest(self) -> None:
        """Note what is kept for the backward: two micro-batches are in flight."""
        assert self.plan.stage is not None
        kept = (
            [(microbatch.output, microbatch.results) for microbatch in self._waiting] if self.plan.stage.is_last else ()
        )
        self.observer.forward_ended(tensors_of(kept))

    def _run_backward(self, kind: str) -> None:
        if kind != "W":
            self._current = self._waiting.pop(0)
            fsdp = self._fsdp()
            if fsdp is not None:  # gradients are accumulated whole, and reduced after the last backward
                fsdp.set_is_last_backward(False)
                fsdp.set_reshard_after_backward(False)
                fsdp.set_requires_gradient_sync(False)
        self._begin("backward")
        nodes, _output, results, inputs = self._current
        assert self.plan.stage is not None
        if kind == "B" or self.plan.stage.is_first:
            if kind != "I":  # the first stage has no gradient of inputs to send: its backward runs whole
                torch.autograd.backward(results, self._gradients or None)
        elif kind == "W":
            backward_of_weights(self._halves.pop(0))
        else:
            weights = list(self.model.parameters())
            later: list[Any] = []
            if has_halves(results, inputs, weights):
                gradients, later = backward_of_inputs(results, self._gradients or None, inputs, weights)
                for tensor, gradient in zip(inputs, gradients, strict=True):
                    tensor.grad = gradient
            else:  # as where FSDP2 gathers them
                torch.autograd.backward(results, self._gradients or None)
            self._halves.append(later)
        if kind != "I":
            del self._current, _output, results
            nodes.detach()
        self._mark_gradients()
        if kind != "W":
            self._sent = [tensor.grad for tensor in inputs if tensor.requires_grad]
        for tensor in inputs:
            tensor.grad = None

    def _fsdp(self) -> Any:
        """Return the stage if FSDP2 shards it, else None."""
        from torch.distributed.fsdp import FSDPModule

        return self.model if isinstance(self.model, FSDPModule) else None

    def _reduce_gradients(self) -> None:
        """Reduce the gradients that FSDP accumulated, with the function of torch's engine."""
        if self._fsdp() is not None:
            _torch.reduce_gradients(self.model)
            self._mark_gradients()
        self._sent = []

    # -------------------------------------------------------------------------------------------- results

    def trace(self, names: Mapping[int, str], **facts: Any) -> Trace:
        """Return what was observed."""
        sent = sum(tensor.nbytes for tensor in tensors_of((self._args, self._kwargs)) if tensor.requires_grad)
        return super().trace(
            names,
            marks=[(kind, operator_number - self._phases[0][1]) for kind, operator_number in self._marks],
            unfollowed=self._unfollowed,
            result=self._result,
            sent=sent,
            **facts,
        )
