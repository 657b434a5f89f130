"""Run a model under watch: shape-only, or really where values decide what happens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from modelsummary.capture.facts import module_facts
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.real import RealExecution
from modelsummary.capture.restore import unchanged
from modelsummary.capture.shape_only import ShapeOnly
from modelsummary.capture.tree import call_tree, static_tree
from modelsummary.capture.watch import Watch
from modelsummary.errors import InputError
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
    obstacle = _needs_meta(model, call)
    if execution == "real":
        if obstacle:
            raise InputError(f"execution='real' needs values, but {obstacle}; use execution='shape'")
        return _run_real(model, call)
    recording, reason = _run_on_shapes(model, call)
    if recording.error is None or execution == "shape" or obstacle:
        return recording
    recording = _run_real(model, call)
    recording.fallback_reason = reason
    return recording


def _needs_meta(model: nn.Module, call: CallArguments) -> str | None:
    """What cannot be computed with: a tensor on meta."""
    if call.device is not None and call.device.type == "meta":
        return "device='meta' was asked for"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            return f"{name} is on meta"
    return "an input is on meta" if any(tensor.is_meta for tensor in call.tensors()) else None


def _run_on_shapes(model: nn.Module, call: CallArguments) -> tuple[Recording, str | None]:
    execution = ShapeOnly()
    with unchanged(model, lazy_device=_META):
        args, kwargs = call.on_meta(execution.input)
        recording = _watched(model, Watch(execution), args, kwargs, "shape")
    if recording.error is None:
        return recording, None
    text = str(recording.error).strip().splitlines()
    reason = f"{type(recording.error).__name__}: {text[0] if text else ''}"
    return recording, f"{execution.obstacle} could not run on shapes ({reason})" if execution.obstacle else reason


def _run_real(model: nn.Module, call: CallArguments) -> Recording:
    own = next((tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors), None)
    with unchanged(model, lazy_device=None):
        execution = RealExecution(model)
        try:
            args, kwargs = call.on_device(execution.input, own or torch.device("cpu"))
            return _watched(model, Watch(execution), args, kwargs, "real")
        finally:
            execution.put_back()


def _watched(
    model: nn.Module, watch: Watch, args: tuple[Any, ...], kwargs: dict[str, Any], execution: Literal["shape", "real"]
) -> Recording:
    """Run once. The tree is built before the model is put back: a forward may have made parameters."""
    error: Exception | None = None
    try:
        with torch.no_grad(), _nothing_hidden(), watch:
            model(*args, **kwargs)
    except Exception as raised:
        error = raised
    failed = [call.module for call in watch.failed] if error is not None else []
    root = call_tree(module_facts(model), watch.calls)
    rows = {row.layer_id: row for row in root.walk() if row.executed}
    return Recording(root, execution, error=error, failed=[rows[id(each)] for each in failed if id(each) in rows])


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
