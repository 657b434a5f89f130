"""Run a model under watch: shape-only, or really where values decide what happens."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from modelsummary.capture.facts import ModuleFacts, module_facts, modules_of, tensors_of_modules
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.real import RealExecution
from modelsummary.capture.restore import unchanged
from modelsummary.capture.shape_only import ShapeOnly
from modelsummary.capture.tree import call_tree, static_tree
from modelsummary.capture.watch import Execution, Watch
from modelsummary.errors import DataDependentError, InputError
from modelsummary.layer_info import LayerInfo

__all__ = ["Recording", "capture", "list_layers"]

_META = torch.device("meta")


@dataclass
class Recording:
    """What a run left behind.

    Attributes:
        root: the tree; its first row is the model.
        execution: ``"shape"``, ``"real"``, or ``"none"`` without a forward.
        fallback_reason: why shape-only execution gave way to real execution; None if it did not.
        error: what the forward raised; the tree then reaches up to the failing layer.
        failed: the layers that were running when it raised, innermost first.
    """

    root: LayerInfo
    execution: Literal["shape", "real", "none"]
    fallback_reason: str | None = None
    error: Exception | None = None
    failed: list[LayerInfo] = field(default_factory=list)


def list_layers(model: nn.Module) -> Recording:
    """The layers of a model without running it."""
    return Recording(static_tree(module_facts(model)), "none")


def capture(model: nn.Module, call: CallArguments, execution: str) -> Recording:
    """Run ``model`` and record it; model and global state are afterwards as before.

    Args:
        execution: ``"shape"``: shape-only; ``"real"``: compute; ``"auto"``: shape-only, and if anything
            stands in its way (values decide the control flow, an operator has no meta kernel), really.

    Raises:
        InputError: ``execution`` is none of these, or real execution is impossible on meta tensors.
    """
    if execution not in ("auto", "shape", "real"):
        raise InputError(f"execution={execution!r} is unknown; expected 'auto', 'shape' or 'real'")
    modules = modules_of(model)
    obstacle = _needs_meta(modules, call)
    if execution == "real":
        if obstacle:
            raise InputError(f"execution='real' needs values, but {obstacle}; use execution='shape'")
        return _run_real(model, modules, call)
    recording, reason = _run_on_shapes(model, modules, call)
    if recording.error is None or execution == "shape" or obstacle:
        return recording
    recording = _run_real(model, modules, call)
    recording.fallback_reason = reason
    if recording.error is not None and call.has_arrays:
        with_arrays = _run_real(model, modules, call, raw_arrays=True)
        if with_arrays.error is None:
            with_arrays.fallback_reason = "the forward takes numpy arrays"
            return with_arrays
    return recording


def _needs_meta(modules: Sequence[nn.Module], call: CallArguments) -> str | None:
    """What cannot be computed with: a tensor on meta."""
    if call.device is not None and call.device.type == "meta":
        return "device='meta' was asked for"
    if any(tensor.is_meta for tensor in tensors_of_modules(modules)):
        return "the model has tensors on meta"
    return "an input is on meta" if any(tensor.is_meta for tensor in call.tensors()) else None


def _run_on_shapes(model: nn.Module, modules: Sequence[nn.Module], call: CallArguments) -> tuple[Recording, str | None]:
    execution = ShapeOnly()
    with unchanged(modules, lazy_device=_META):
        _give_rnns_twins(modules, execution)
        for tensor in call.tensors():  # also those inside of objects, which are passed as they are
            execution.input(tensor)
        run = _run(model, execution, *call.on_meta(execution.input))
    recording = _recording(run, "shape")
    if run.error is None:
        return recording, None
    if isinstance(run.error, DataDependentError):
        return recording, f"{execution.obstacle} needs the values of a tensor"
    reason = f"{type(run.error).__name__}: {_first_sentence(run.error)}"
    return recording, f"{execution.obstacle} cannot run on shapes ({reason})" if execution.obstacle else reason


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0][:160]


def _run_real(
    model: nn.Module, modules: Sequence[nn.Module], call: CallArguments, *, raw_arrays: bool = False
) -> Recording:
    device = next((tensor.device for tensor in tensors_of_modules(modules)), torch.device("cpu"))
    with unchanged(modules, lazy_device=None):
        execution = RealExecution(modules, call.tensors())
        try:
            run = _run(model, execution, *call.on_device(execution.input, device, raw_arrays=raw_arrays))
        finally:
            execution.put_back()
    return _recording(run, "real")


def _give_rnns_twins(modules: Sequence[nn.Module], execution: ShapeOnly) -> None:
    """Torch's RNN functions compare the devices of input and weights before any operator runs."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            weights = module._flat_weights
            module._flat_weights = [weight if weight is None else execution.twin(weight) for weight in weights]


@dataclass
class _Run:
    """What one run left behind, before it is made into a tree."""

    watch: Watch
    error: Exception | None
    facts: dict[int, ModuleFacts]


def _run(model: nn.Module, execution: Execution, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
    """Run once, without gradients unless the forward takes some of its own.

    The facts are collected before the model is put back: a lazy module has its parameters only now.
    """
    watch, error = _run_once(model, execution, args, kwargs, grad=False)
    if error is not None and "does not require grad" in str(error):
        watch, error = _run_once(model, execution, args, kwargs, grad=True)
    return _Run(watch, error, module_facts(model))


def _run_once(
    model: nn.Module, execution: Execution, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool
) -> tuple[Watch, Exception | None]:
    watch = Watch(execution)
    try:
        with torch.set_grad_enabled(grad), _nothing_hidden(), watch:
            model(*args, **kwargs)
    except Exception as error:
        return watch, error
    return watch, None


def _recording(run: _Run, execution: Literal["shape", "real"]) -> Recording:
    root = call_tree(run.facts, run.watch.calls)
    rows = {row.layer_id: row for row in root.walk() if row.executed}
    raised = run.watch.failed if run.error is not None else []
    failed = [rows[id(call.module)] for call in raised if id(call.module) in rows]
    return Recording(root, execution, error=run.error, failed=failed)


@contextmanager
def _nothing_hidden() -> Iterator[None]:
    """Switch off what would hide operators: the fused attention fast path, and compiled functions."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
            yield
            return
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            # True, and wanted: a compiled submodule has a row of its own.
            warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
