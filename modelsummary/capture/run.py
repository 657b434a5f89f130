"""Run a model under watch: shape-only, or really where values decide what happens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from modelsummary.capture.facts import module_facts, modules_of, tensors_of_modules
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.real import RealExecution
from modelsummary.capture.restore import unchanged
from modelsummary.capture.shape_only import ShapeOnly
from modelsummary.capture.tree import call_tree, static_tree
from modelsummary.capture.watch import Watch
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
        recording = _watched(model, execution, *call.on_meta(execution.input))
    if recording.error is None:
        return recording, None
    if isinstance(recording.error, DataDependentError):
        return recording, f"{execution.obstacle} needs the values of a tensor"
    reason = f"{type(recording.error).__name__}: {_first_sentence(recording.error)}"
    return recording, f"{execution.obstacle} cannot run on shapes ({reason})" if execution.obstacle else reason


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0][:160]


def _run_real(model: nn.Module, modules: Sequence[nn.Module], call: CallArguments) -> Recording:
    own = next((tensor.device for tensor in tensors_of_modules(modules)), None)
    with unchanged(modules, lazy_device=None):
        execution = RealExecution(modules)
        try:
            return _watched(model, execution, *call.on_device(execution.input, own or torch.device("cpu")))
        finally:
            execution.put_back()


def _give_rnns_twins(modules: Sequence[nn.Module], execution: ShapeOnly) -> None:
    """Torch's RNN functions compare the devices of input and weights before any operator runs."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [weight if weight is None else execution.twin(weight) for weight in module._flat_weights]


def _watched(
    model: nn.Module, execution: ShapeOnly | RealExecution, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Recording:
    """Run once, without gradients unless the forward takes some of its own.

    The tree is built before the model is put back: a forward may have made parameters.
    """
    watch, error = _run_once(model, execution, args, kwargs, grad=False)
    if error is not None and "does not require grad" in str(error):
        watch, error = _run_once(model, execution, args, kwargs, grad=True)
    failed = [id(call.module) for call in watch.failed] if error is not None else []
    root = call_tree(module_facts(model), watch.calls)
    rows = {row.layer_id: row for row in root.walk() if row.executed}
    return Recording(
        root,
        "shape" if isinstance(execution, ShapeOnly) else "real",
        error=error,
        failed=[rows[module] for module in failed if module in rows],
    )


def _run_once(
    model: nn.Module, execution: ShapeOnly | RealExecution, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad: bool
) -> tuple[Watch, Exception | None]:
    watch = Watch(execution)
    try:
        with torch.set_grad_enabled(grad), _nothing_hidden(), watch:
            model(*args, **kwargs)
    except Exception as raised:
        return watch, raised
    return watch, None


@contextmanager
def _nothing_hidden() -> Iterator[None]:
    """Switch off what would hide operators: the fused attention fast path, and compiled functions."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes a second
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
