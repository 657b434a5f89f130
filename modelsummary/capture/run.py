"""Run a model and record it: on shapes, or for real if values decide what the forward does."""

from __future__ import annotations

import gc
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.distributions import Distribution

from modelsummary import _torch
from modelsummary.capture.containers import replace_in_objects
from modelsummary.capture.devices import device_of, takes_gradients
from modelsummary.capture.execution.cuda_autocast import cuda_autocast
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import ModelParts, tensors_of_modules
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.state.unchanged import unchanged
from modelsummary.capture.step import StepRun
from modelsummary.capture.step_plan import StepPlan
from modelsummary.capture.timer import suspended
from modelsummary.capture.trace import Trace
from modelsummary.capture.tree import ModuleFacts, call_tree, module_facts, static_tree
from modelsummary.errors import DataDependentError, InputError
from modelsummary.layer_info import LayerInfo
from modelsummary.progress import counted

__all__ = [
    "EVEN_ROUTES",
    "Recording",
    "arguments_in",
    "capture",
    "check_execution",
    "list_layers",
    "no_collection",
    "nothing_hidden",
    "obstacle_of",
    "running",
]

_META, _CPU = torch.device("meta"), torch.device("cpu")
_FORWARD = StepPlan(train=False)
_AUTOCAST = "autocast of an accelerator was on, and operators of a model on meta run as on the CPU"
# Matches torch's errors for a forward that computes, retains or hooks a gradient.
_WANTS_GRADIENT = re.compile(r"requires? (grad|gradient)\b|requires_grad=False")


EVEN_ROUTES = (
    "the forward asks for values, and tensors on meta have none: choices are assumed to fall on all experts in turn,"
    " integers that were passed to be zeros, and random numbers to have their mean"
)


@dataclass
class Recording:
    """The result of a run.

    Attributes:
        root: the tree; its first row is the model.
        execution: ``"shape"``, ``"real"``, or ``"none"`` without a forward.
        fallback_reason: why the run fell back from shape-only to real execution; None if it did not.
        error: exception of the forward, if it raised; the tree then reaches up to the failing layer.
        failed: the layers that were running when it raised, innermost first.
        added: FQN of a module that the forward added to the model, which is gone again; None if it added none.
        computes_gradients: as in ``CallArguments``.
    """

    root: LayerInfo
    execution: Literal["shape", "real", "none"]
    fallback_reason: str | None = None
    error: Exception | None = None
    failed: list[LayerInfo] = field(default_factory=list)
    added: str | None = None
    computes_gradients: bool = False


def list_layers(parts: ModelParts) -> Recording:
    """Return the layers of a model without running it.

    >>> [row.fqn for row in list_layers(ModelParts.of(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))).root.walk()]
    ['', '0', '1']
    """
    _check_whole(parts.modules)
    return Recording(static_tree(module_facts(parts.model)), "none")


def check_execution(execution: str) -> None:
    """Raise ``InputError`` if ``execution`` is unknown."""
    if execution not in ("auto", "shape", "real"):
        raise InputError(f"execution={execution!r} is unknown; expected 'auto', 'shape' or 'real'")


def capture(parts: ModelParts, call: CallArguments, execution: str, *, routes_evenly: bool = False) -> Recording:
    """Run a model and record it, leaving model, arguments and global state untouched.

    Args:
        execution: ``"shape"`` runs on shapes; ``"real"`` computes; ``"auto"`` runs on shapes and falls back to real
            execution if that fails (values decide the control flow, or an operator has no meta kernel).
        routes_evenly: a run with another input assumed values that are not known, so this one assumes them at once.

    Raises:
        InputError: real execution was requested, but the model or an input is on meta.
    """
    only_shapes = _needs_meta(parts, call)
    if execution == "real":
        if only_shapes:
            raise InputError(f"execution='real' needs values, but {only_shapes}; use execution='shape'")
        return _real(parts, call)
    with no_collection():
        lacks_values = only_shapes is not None
        assumed = _routed_evenly(parts, call) if routes_evenly and lacks_values else None
        outcome = assumed or _on_shapes(parts, call, fails=execution == "shape", lacks_values=lacks_values)
    if isinstance(outcome, Recording):
        return outcome
    recording = _real(parts, call)
    recording.fallback_reason = recording.fallback_reason or outcome
    return recording


def _on_shapes(parts: ModelParts, call: CallArguments, *, fails: bool, lacks_values: bool) -> Recording | str:
    """Return a shape-only recording. If the run met an obstacle, return the reason, unless the run must be shape-only.

    Args:
        fails: the caller wants no other run.
        lacks_values: the model or an input is on meta. Values are then assumed if the forward asks for them.
    """
    run = _attempt(parts, call, on_shapes=True)
    reason = _obstacle(run)
    if reason is None:
        return _recording(run, "shape")
    if lacks_values and isinstance(run.execution, ShapeOnly) and run.execution.needs_values:
        evenly = _routed_evenly(parts, call)
        if evenly is not None:
            return evenly
    return _with_obstacle(run) if fails or lacks_values else reason


def _routed_evenly(parts: ModelParts, call: CallArguments) -> Recording | None:
    """Return a shape-only recording for which values were assumed; None if it met an obstacle nevertheless."""
    run = _attempt(parts, call, on_shapes=True, routes_evenly=True)
    if _obstacle(run) is not None:
        return None
    recording = _recording(run, "shape")
    recording.root.note = EVEN_ROUTES
    return recording


def _needs_meta(parts: ModelParts, call: CallArguments) -> str | None:
    """Return why the run must be shape-only: a tensor is on meta. Return None if it need not be."""
    if call.device is not None and call.device.type == "meta":
        return "device='meta' was requested"
    if parts.are_on_meta:
        return "the model has tensors on meta"
    return "an input is on meta" if any(tensor.is_meta for tensor in call.tensors()) else None


def _obstacle(run: _Run) -> str | None:
    """Return why a shape-only run is not valid: it failed, or the model caught the exception; None if it is valid."""
    assert isinstance(run.execution, ShapeOnly)
    reason = obstacle_of(run.execution, run.error)
    return _AUTOCAST if reason is None and run.lacks_autocast else reason


def obstacle_of(shapes: ShapeOnly, error: Exception | None) -> str | None:
    """Return the obstacle that a shape-only run met, ``error`` being its exception; None if it met none."""
    if shapes.needs_values:
        return f"{shapes.obstacle} needs the values of a tensor"
    if error is not None:
        sentence = str(error).strip().partition("\n")[0].partition(". ")[0]
        reason = f"{type(error).__name__}: {sentence[:160]}"
        return f"{shapes.obstacle} cannot run on shapes ({reason})" if shapes.obstacle else reason
    return f"{shapes.obstacle} cannot run on shapes" if shapes.obstacle is not None else None


def _with_obstacle(run: _Run) -> Recording:
    """Return the shape-only recording of a run with an obstacle, for a model that cannot run for real."""
    shapes = run.execution
    assert isinstance(shapes, ShapeOnly)
    if shapes.needs_values and shapes.obstacle is not None and run.error is None:
        run.error = DataDependentError(shapes.obstacle)
    recording = _recording(run, "shape")
    if run.lacks_autocast:
        recording.root.note = f"{_AUTOCAST}: dtypes and bytes are given as without autocast"
    return recording


def _real(parts: ModelParts, call: CallArguments) -> Recording:
    """Return the recording of a real run. If it fails and numpy arrays were passed, run again with the arrays as is."""
    run = _attempt(parts, call, on_shapes=False)
    if run.error is not None and call.has_arrays:
        with_arrays = _attempt(parts, call, on_shapes=False, raw_arrays=True)
        if with_arrays.error is None:
            recording = _recording(with_arrays, "real")
            recording.fallback_reason = "the forward takes numpy arrays"
            return recording
    return _recording(run, "real")


# --------------------------------------------------------------------------------------------- one run


@dataclass
class _Run:
    """The result of one run, before the tree is built.

    Attributes:
        parts: the model before the run, which is as it was again.
        facts: facts of its modules during the run.
        computes_gradients: as in ``CallArguments``.
        lacks_autocast: whether the autocast of an accelerator was on, which has no effect on a CPU.
    """

    parts: ModelParts
    trace: Trace
    execution: ShapeOnly | RealExecution
    error: Exception | None
    facts: dict[int, ModuleFacts]
    computes_gradients: bool
    lacks_autocast: bool = False


def _recording(run: _Run, execution: Literal["shape", "real"]) -> Recording:
    root = call_tree(run.facts, run.trace)
    names = frozenset(run.parts.names.values())
    added = next((facts.fqn for facts in run.facts.values() if facts.fqn not in names), None)
    if run.error is None:
        return Recording(root, execution, added=added, computes_gradients=run.computes_gradients)
    rows = {row.key: row for row in root.walk() if row.executed}
    return Recording(root, execution, error=run.error, failed=[rows[key] for key in run.trace.failed])


def _attempt(parts: ModelParts, call: CallArguments, **options: bool) -> _Run:
    """Run without gradients; if the forward computes gradients itself, run again with gradients enabled."""
    compiles = "torch._dynamo" in sys.modules
    run = _run_once(parts, call, **options)
    if run.error is not None and not compiles and "torch._dynamo" in sys.modules:
        # the forward was the first to compile (``torch.cond`` does), and now compiling can be switched off
        run = _run_once(parts, call, **options)
    if run.error is not None and _WANTS_GRADIENT.search(str(run.error)):
        run = _run_once(parts, replace(call, computes_gradients=True), **options)
    return run


def _run_once(
    parts: ModelParts,
    call: CallArguments,
    *,
    on_shapes: bool,
    raw_arrays: bool = False,
    routes_evenly: bool = False,
) -> _Run:
    """Run once. Collect the facts before the model is restored, while lazy modules have their parameters."""
    error: Exception | None = None
    on = running(parts.modules, call, on_shapes=on_shapes, raw_arrays=raw_arrays, grad=False)
    device = _device_of(parts.modules, call)
    is_on_meta = on_shapes and device.type == "meta"
    seen = nullcontext() if on_shapes else counted("real run", "operator")
    casts = _autocast_of_cuda() if is_on_meta else nullcontext()
    with casts, seen as ran, on as (execution, args, kwargs):
        if isinstance(execution, RealExecution) and ran is not None:
            execution.ran = ran
        if isinstance(execution, ShapeOnly):
            execution.checks_indices_of = parts.model
        if isinstance(execution, ShapeOnly) and routes_evenly:
            execution.assume_values((args, kwargs))
        # The trace of the table is not kept, as ``LiveModel`` keeps others: to note arguments, and what tells later
        # whether the model has changed, makes a table of 100,000 modules a quarter slower.
        step = StepRun(parts.model, args, kwargs, _FORWARD, device, level="costs")
        try:
            with Operators(step.observer.around(execution)):
                step.step()
        except Exception as raised:
            error = raised
        facts = module_facts(parts.model)
        names = {id(module.module): module.fqn for module in facts.values()}
        way = "shape" if on_shapes else "real"
        trace = step.trace(names, device=str(device), execution=way, notes=[EVEN_ROUTES] if routes_evenly else [])
    lacks_autocast = is_on_meta and step.watch.under_foreign_autocast
    return _Run(parts, trace, execution, error, facts, call.computes_gradients, lacks_autocast)


@contextmanager
def _autocast_of_cuda() -> Iterator[None]:
    """Return a context in which operators on the CPU are cast as on CUDA, if autocast is on for CUDA alone."""
    if not torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        yield
        return
    with torch.autocast("cpu", torch.get_autocast_dtype("cuda")), cuda_autocast():
        yield


def _device_of(modules: Sequence[nn.Module], call: CallArguments) -> torch.device:
    inputs = (tensor for tensor in call.tensors() if not tensor.is_meta)
    device = device_of(chain(tensors_of_modules(modules), inputs))
    return (
        (_torch.mesh_device(modules) or device) if device.type == "meta" else device
    )  # FSDP2 refuses parameters on meta


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
    """Return a context in which a model may run, and which leaves everything untouched.

    Args:
        grad: whether gradients are enabled, as they are for a forward that computes gradients itself; on shapes, only
            for a device on which autograd can record operators.
        as_is: whether to keep fused fast paths and compiled functions, which hide operators.
        device: on shapes, the device that tensors report, which need not exist; None: the model's device, or the CPU
            for a model on meta.
        dtype: on shapes, the dtype of floating point parameters, buffers and inputs; None: their own dtypes.

    Yields:
        The execution, and the positional and keyword arguments to call the model with.
    """
    _check_whole(modules)
    grad = grad or call.computes_gradients
    model_device = _device_of(modules, call)
    reported = device or (_CPU if model_device.type == "meta" else model_device)  # meta has no autocast
    pause = no_collection() if on_shapes else nullcontext()
    lazy_device = _META if on_shapes else None
    recording = torch.inference_mode(False) if grad and torch.is_inference_mode_enabled() else nullcontext()
    with recording, pause, suspended(), unchanged(modules, (call.args, call.kwargs), lazy_device=lazy_device) as held:
        execution = ShapeOnly(reported, dtype) if on_shapes else RealExecution(held.tensors, all_buffers=as_is)
        try:
            args, kwargs = arguments_in(execution, modules, call, raw_arrays=raw_arrays)
            if isinstance(execution, ShapeOnly):
                execution.replace_tensors_of(held.modules)
            hidden = nullcontext() if as_is else nothing_hidden()
            asked = execution.answering() if isinstance(execution, ShapeOnly) else nullcontext()
            records = grad and (not on_shapes or takes_gradients(reported))
            # distributions check their arguments by values
            checked = _torch.swapped(Distribution, "_validate_args", Distribution._validate_args and not on_shapes)
            sys.setrecursionlimit(2 * sys.getrecursionlimit())  # wrappers of calls take frames that a deep model needs
            with torch.set_grad_enabled(records), hidden, checked, asked:
                yield execution, args, kwargs
        finally:
            execution.end()


def arguments_in(
    execution: ShapeOnly | RealExecution,
    modules: Sequence[nn.Module],
    call: CallArguments,
    *,
    raw_arrays: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a call as an execution passes them to the model."""
    if isinstance(execution, RealExecution):
        return call.on_device(execution.input, _device_of(modules, call), raw_arrays=raw_arrays)
    args, kwargs = call.on_meta(execution.input)
    replace_in_objects(execution.input, (args, kwargs))
    return args, kwargs


def _check_whole(modules: Sequence[nn.Module]) -> None:
    """Raise ``InputError`` if FSDP1 keeps parameters in flat shards, whose views and resizes need data."""
    whole, shard = map(sum, zip(*map(_torch.flat_shards, modules), strict=True))
    if whole:
        raise InputError(
            f"FullyShardedDataParallel (FSDP1) keeps the {whole:,} parameters as flat shards, {shard:,} of them on "
            "this rank, which run neither on shapes nor on one rank alone; pass the model before it is wrapped, or "
            "wrapped by fully_shard (FSDP2)"
        )


@contextmanager
def no_collection() -> Iterator[None]:
    """Run the body without the cyclic garbage collector.

    As the record of a large model grows, the collector would traverse the whole model again and again. That takes half
    of the time of the run.
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
    """Run the body without the fused attention fast path and compiled functions, which hide operators."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _plain_flex_attention():
            if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
                yield
                return
            with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
                # The warning is true and the effect is wanted: a compiled submodule has a row of its own.
                warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


@contextmanager
def _plain_flex_attention() -> Iterator[None]:
    """Run the body with a ``flex_attention`` that calls its operator without compiling, on tensors of any device.

    Outside of ``torch.compile`` it compiles itself, so that a dispatch mode cannot see its operators, and it refuses
    tensors on meta. Computing its shapes needs neither.
    """
    library = sys.modules.get("torch.nn.attention.flex_attention")
    # the first since torch 2.9; the second refuses tensors on meta, and gradients on a CPU
    changes = {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True, "_validate_device": lambda *_: None}
    with ExitStack() as stack:
        for name, value in changes.items():
            if library is not None and name in vars(library):
                stack.enter_context(_torch.swapped(library, name, value))
        yield
