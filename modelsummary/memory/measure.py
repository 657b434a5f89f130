"""Measurement of a real step's memory: from torch's profiler on the CPU, from the allocator's statistics on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from modelsummary import _torch
from modelsummary.capture.checkpoints import apply_checkpoint
from modelsummary.capture.containers import tensors_of
from modelsummary.capture.devices import device_of
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of, tensors_in_attributes, tensors_of_modules
from modelsummary.capture.observe import check_initialized, eager_optimizers
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import running
from modelsummary.capture.step import casting, loss_of
from modelsummary.capture.step_error import as_step_error, remedies_for
from modelsummary.capture.step_plan import StepPlan
from modelsummary.errors import InputError
from modelsummary.memory.estimate import MemoryMeasurement
from modelsummary.memory.predict import simulate
from modelsummary.operators.cpu_allocations import cpu_allocations
from modelsummary.operators.tensor_bytes import stored_tensors

__all__ = ["measure"]

_FORWARD = "modelsummary: forward"


def measure(live: LiveModel, plan: StepPlan) -> MemoryMeasurement:
    """Measure a step and predict the same step.

    Raises:
        InputError: ``plan`` chooses a device or a dtype, the model has no values, or it is on a device whose memory
            cannot be measured; see also ``predict``.
    """
    check_initialized(live)
    if plan.device is not None or plan.dtype is not None:
        raise InputError("memory is measured on the model's own device and dtype; leave out device and dtype")
    measured = _measured(live.model, live.call, plan)
    return MemoryMeasurement(*measured, simulate(live, plan))


def _measured(model: nn.Module, call: CallArguments, plan: StepPlan) -> tuple[int, int]:
    """Run steps on data; return the bytes alive at the end of the last forward, and at the peak of its step."""
    device = device_of((*tensors_of_modules(modules_of(model)), *call.tensors()))
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"memory is measured on the CPU and on CUDA, but the model is on {device}")
    compiler = _torch.isolated_compiling() if plan.compiled else nullcontext()
    run = running(modules_of(model), call, on_shapes=False, grad=plan.train, as_is=True)
    with compiler, run as (execution, args, kwargs):
        apply_checkpoint(model, dict(plan.checkpoint), offload=dict(plan.offload))
        step = _RealStep(model, args, kwargs, plan, device)
        remedies = remedies_for(train=plan.train, checkpointed=bool(plan.checkpoint))
        with as_step_error(lambda: step.doing, remedies), eager_optimizers(), Operators(execution):
            assert isinstance(execution, RealExecution)
            execution.keep(step.written())
            step.run()  # saves what else a step writes, to restore it later; gives the optimizer its state
        if plan.compiled:
            step.call = torch.compile(model)
            with as_step_error(lambda: step.doing, remedies):
                step.run()
        if not plan.accumulates:
            model.zero_grad()
        gc.collect()
        before = sum(storage.nbytes() for storage in step.storages().values())
        held, peak = (_on_cpu if device.type == "cpu" else _on_cuda)(step)
        return before + held, before + peak


class _RealStep:
    """A training step or a forward, in parts that can be measured."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plan: StepPlan, device: torch.device
    ) -> None:
        self._model, self._args, self._kwargs, self._plan, self._device = model, args, kwargs, plan, device
        self.call: Callable[..., Any] = model
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if plan.train else []
        self._optimizer = plan.optimizer_of(plan.groups_of(model), dict(model.named_parameters()))
        self._trained = trained
        self._kept: Any = None
        self.doing = "forward"

    def run(self) -> None:
        """Run the whole step."""
        self.forward()
        self.rest()

    def forward(self) -> None:
        """Run forward and loss."""
        self.doing = "forward"
        with casting(self._plan.autocast, self._device):
            output = self.call(*self._args, **self._kwargs)
            self.doing = "loss"
            self._kept = output, loss_of(output, self._plan.loss) if self._plan.train else None

    def rest(self) -> None:
        """Run backward and optimizer step; the output stays alive, as it does in a training loop."""
        self.doing, loss = "backward", self._kept[1]
        if loss is not None:
            loss.backward()
        if self._optimizer is not None:
            self.doing = "step"
            self._optimizer.step()
        self._kept = None

    def written(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer may write; random numbers may decide which of them get gradients."""
        return self._trained if self._optimizer is not None else []

    def storages(self) -> dict[int, Any]:
        """Return the storages alive before a step, by address."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        optimizer_tensors = tensors_of([list(state.values()) for state in states])
        grads = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        modules, inputs = modules_of(self._model), tensors_of((self._args, self._kwargs))
        tensors = (*tensors_of_modules(modules), *tensors_in_attributes(modules), *inputs, *optimizer_tensors, *grads)
        storages = [inner.untyped_storage() for tensor in tensors for inner in stored_tensors(tensor)]
        return {storage.data_ptr(): storage for storage in storages}


def _on_cpu(step: _RealStep) -> tuple[int, int]:
    with cpu_allocations() as allocations:
        with record_function(_FORWARD):
            step.forward()
        step.rest()
    return allocations.held_and_peak(_FORWARD)[0], allocations.held_and_peak()[1]


def _on_cuda(step: _RealStep) -> tuple[int, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.forward()
    held = torch.cuda.memory_allocated() - before
    step.rest()
    torch.cuda.synchronize()
    return held, torch.cuda.max_memory_allocated() - before
