"""Run a model under watch: shape-only, or really where values decide what happens."""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributions import Distribution

from modelsummary.capture.calls import Watch
from modelsummary.capture.devices import device_of
from modelsummary.capture.execution.flex_attention import plain_flex_attention
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import ModuleFacts, module_facts, modules_of, tensors_of_modules
from modelsummary.capture.state.restore import unchanged
from modelsummary.capture.timer import suspended
from modelsummary.capture.tree import call_tree, static_tree
from modelsummary.capture.values import replace_in_objects
from modelsummary.errors import DataDependentError, InputError
from modelsummary.layer_info import LayerInfo

__all__ = [
    "WANTS_GRADIENT",
    "Recording",
    "capture",
    "check_execution",
    "list_layers",
    "no_collection",
    "nothing_hidden",
    "obstacle_of",
    "running",
]

_META = torch.device("meta")
_AUTOCAST = "autocast was on, which knows no meta tensors"
# What torch says where a forward takes a gradient, keeps one or hooks one.
WANTS_GRADIENT = re.compile(r"requires? (grad|gradient)\b|requires_grad=False")


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


def check_execution(execution: str) -> None:
    """Raise ``InputError`` if ``execution`` is unknown."""
    if execution not in ("auto", "shape", "real"):
        raise InputError(f"execution={execution!r} is unknown; expected 'auto', 'shape' or 'real'")


def capture(model: nn.Module, call: CallArguments, execution: str) -> Recording:
    """Run ``model`` and record it; model, arguments and global state are afterwards as before.

    Args:
        execution: as checked by ``check_execution``. ``"shape"``: shape-only; ``"real"``: compute; ``"auto"``:
            shape-only, and if anything stands in its way (values decide the control flow, an operator has no
            meta kernel), really.

    Raises:
        InputError: real execution is asked for, and impossible on meta tensors.
    """
    with no_collection():
        modules = modules_of(model)
    only_shapes = _needs_meta(modules, call)
    if execution == "real":
        if only_shapes:
            raise InputError(f"execution='real' needs values, but {only_shapes}; use execution='shape'")
        return _real(model, modules, call)
    with no_collection():
        recording = _on_shapes(model, modules, call, fails=execution == "shape" or only_shapes is not None)
    if isinstance(recording, Recording):
        return recording
    reason, recording = recording, _real(model, modules, call)
    recording.fallback_reason = recording.fallback_reason or reason
    return recording


def _on_shapes(model: nn.Module, modules: Sequence[nn.Module], call: CallArguments, *, fails: bool) -> Recording | str:
    """A shape-only recording. If something stood in its way: what it was, or the recording nevertheless (``fails``)."""
    run = _attempt(model, modules, call, on_shapes=True)
    reason = _obstacle(run)
    if reason is None:
        return _recording(run, "shape")
    return _with_obstacle(run) if fails else reason


def _needs_meta(modules: Sequence[nn.Module], call: CallArguments) -> str | None:
    """What cannot be computed with: a tensor on meta."""
    if call.device is not None and call.device.type == "meta":
        return "device='meta' was asked for"
    if any(tensor.is_meta for tensor in tensors_of_modules(modules)):
        return "the model has tensors on meta"
    return "an input is on meta" if any(tensor.is_meta for tensor in call.tensors()) else None


def _obstacle(run: _Run) -> str | None:
    """Why a shape-only run is not to be trusted: it failed, or the model caught what would have failed it."""
    assert isinstance(run.execution, ShapeOnly)
    reason = obstacle_of(run.execution, run.error)
    if reason is None and run.watch.under_autocast and run.execution.device.type == "meta":
        return _AUTOCAST
    return reason


def obstacle_of(shapes: ShapeOnly, error: Exception | None) -> str | None:
    """What stood in the way of a shape-only run that ended with ``error``, if with any; None if nothing did."""
    if shapes.needs_values:
        return f"{shapes.obstacle} needs the values of a tensor"
    if error is not None:
        reason = f"{type(error).__name__}: {_first_sentence(error)}"
        return f"{shapes.obstacle} cannot run on shapes ({reason})" if shapes.obstacle else reason
    return f"{shapes.obstacle} cannot run on shapes" if shapes.obstacle is not None else None


def _first_sentence(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0][:160]


def _with_obstacle(run: _Run) -> Recording:
    """A shape-only recording that cannot be replaced by a real one."""
    shapes = run.execution
    assert isinstance(shapes, ShapeOnly)
    if shapes.needs_values and shapes.obstacle is not None and run.error is None:
        run.error = DataDependentError(shapes.obstacle)
    recording = _recording(run, "shape")
    if run.watch.under_autocast and shapes.device.type == "meta":
        recording.root.note = f"{_AUTOCAST}: dtypes and bytes are those without it"
    return recording


def _real(model: nn.Module, modules: Sequence[nn.Module], call: CallArguments) -> Recording:
    """A real run; if it fails, another with numpy arrays as they are, where some were passed."""
    run = _attempt(model, modules, call, on_shapes=False)
    if run.error is not None and call.has_arrays:
        with_arrays = _attempt(model, modules, call, on_shapes=False, raw_arrays=True)
        if with_arrays.error is None:
            recording = _recording(with_arrays, "real")
            recording.fallback_reason = "the forward takes numpy arrays"
            return recording
    return _recording(run, "real")


# --------------------------------------------------------------------------------------------- one run


@dataclass
class _Run:
    """What one run left behind, before it is made into a tree."""

    watch: Watch
    execution: ShapeOnly | RealExecution
    error: Exception | None
    facts: dict[int, ModuleFacts]


def _recording(run: _Run, execution: Literal["shape", "real"]) -> Recording:
    root = call_tree(run.facts, run.watch.calls)
    rows = {row.layer_id: row for row in root.walk() if row.executed}
    raised = run.watch.failed if run.error is not None else []
    failed = [rows[id(call.module)] for call in raised if id(call.module) in rows]
    return Recording(root, execution, error=run.error, failed=failed)


def _attempt(
    model: nn.Module,
    modules: Sequence[nn.Module],
    call: CallArguments,
    *,
    on_shapes: bool,
    raw_arrays: bool = False,
) -> _Run:
    """Run without gradients; if the forward turns out to take some of its own, again with them."""
    options = {"on_shapes": on_shapes, "raw_arrays": raw_arrays}
    run = _run_once(model, modules, call, **options, grad=False)
    if run.error is not None and WANTS_GRADIENT.search(str(run.error)):
        run = _run_once(model, modules, call, **options, grad=True)
    return run


def _run_once(
    model: nn.Module,
    modules: Sequence[nn.Module],
    call: CallArguments,
    *,
    on_shapes: bool,
    raw_arrays: bool,
    grad: bool,
) -> _Run:
    """Run once. The facts are collected before the model is put back: a lazy module has its parameters only now."""
    error: Exception | None = None
    with running(modules, call, on_shapes=on_shapes, raw_arrays=raw_arrays, grad=grad) as (execution, args, kwargs):
        watch = Watch(model, execution)
        try:
            watch.run(args, kwargs)
        except Exception as raised:
            error = raised
        facts = module_facts(model)
    return _Run(watch, execution, error, facts)


@contextmanager
def running(
    modules: Sequence[nn.Module],
    call: CallArguments,
    *,
    on_shapes: bool,
    raw_arrays: bool = False,
    grad: bool,
    as_is: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[ShapeOnly | RealExecution, tuple[Any, ...], dict[str, Any]]]:
    """Context in which a model may run: yields the execution and the arguments, and leaves everything as it was.

    Args:
        grad: with gradients enabled.
        as_is: leave on what hides operators: fused fast paths and compiled functions.
        device: on shapes, where tensors are, which need not be there; None: where the model is.
        dtype: on shapes, of floating point parameters, buffers and inputs; None: their own.
    """
    own = device_of((*tensors_of_modules(modules), *(each for each in call.tensors() if not each.is_meta)))
    pause = no_collection() if on_shapes else nullcontext()
    lazy_device = _META if on_shapes else None
    with pause, suspended(), unchanged(modules, (call.args, call.kwargs), lazy_device=lazy_device) as held:
        execution = ShapeOnly(device or own, dtype) if on_shapes else RealExecution(held.tensors, all_buffers=as_is)
        try:
            if isinstance(execution, ShapeOnly):
                args, kwargs = call.on_meta(execution.input)
                replace_in_objects(execution.input, (args, kwargs))
                execution.replace_tensors_of(held.modules)
            else:
                args, kwargs = call.on_device(execution.input, own, raw_arrays=raw_arrays)
            hidden = nullcontext() if as_is else nothing_hidden()
            asked = execution.running() if isinstance(execution, ShapeOnly) else nullcontext()
            with torch.set_grad_enabled(grad), hidden, _room(), _validation(not on_shapes), asked:
                yield execution, args, kwargs
        finally:
            if isinstance(execution, RealExecution):
                execution.put_back()


@contextmanager
def no_collection() -> Iterator[None]:
    """Context without the cyclic garbage collector.

    It would go over the whole model again and again, as a record of many calls grows: half of the time of a large one.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def nothing_hidden() -> Iterator[None]:
    """Switch off what would hide operators: the fused attention fast path, and compiled functions."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with plain_flex_attention():
            if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
                yield
                return
            with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
                # True, and wanted: a compiled submodule has a row of its own.
                warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


@contextmanager
def _room() -> Iterator[None]:
    """Hooks take frames: a deep model that just fits into the recursion limit shall still fit."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(2 * limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@contextmanager
def _validation(enabled: bool) -> Iterator[None]:
    """Distributions check the values of their parameters, if there are values."""
    default = Distribution._validate_args
    Distribution._validate_args = default and enabled
    try:
        yield
    finally:
        Distribution._validate_args = default
