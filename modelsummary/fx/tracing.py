"""``symbolic_trace``: a model as a ``torch.fx.GraphModule``, built from a record of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from modelsummary.capture.exclusive import exclusive
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import ModelParts
from modelsummary.capture.run import capture, no_collection
from modelsummary.capture.templates import leaves_of, taken_apart
from modelsummary.errors import InputError, TraceError, in_short
from modelsummary.fx import registry
from modelsummary.fx.bias import split_bias_additions
from modelsummary.fx.builder import GraphBuilder
from modelsummary.fx.shape_prop import note_shapes
from modelsummary.fx.traced_module import FunctionModule, TracedModule, graph_module
from modelsummary.record.events import Record
from modelsummary.record.fingerprint import compared, difference
from modelsummary.record.runs import record
from modelsummary.record.trace_rules import checkpoints_opened

__all__ = ["graph_call", "symbolic_trace", "trace_call"]


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: Mapping[str, Any] | None = None,
    meta_args: Mapping[str, Any] | None = None,
    trace_act_ckpt: bool = False,
    bias_addition_split: bool = False,
) -> GraphModule:
    """Return a model as a graph of calls of its layers, and of functions between them.

    The forward is recorded on shapes at several batch sizes and in both modes. The graph repeats the recorded calls, so
    Python control flow is fixed by the given values. Layers of ``torch.nn`` stay one node. Other modules are opened,
    unless their forward cannot be written as a list of calls (for example because it decides by values). Sizes that
    follow the batch are computed from an input. Constants that depend on the mode are chosen by ``training``. The graph
    is compared with the model, operator by operator, before it is returned.

    Args:
        root: the model, which is not changed, or a function of tensors.
        concrete_args: name of an argument of the forward -> its value, which becomes part of the graph.
        meta_args: name of an argument -> a tensor, or a container of tensors. Only shapes and dtypes matter, and values
            if the forward needs them. Arguments without tensors, and those not given, are concrete.
        trace_act_ckpt: mark the regions under ``torch.utils.checkpoint``, so that they run under it in the graph.
        bias_addition_split: split layers and functions that add a bias into two nodes: the product, and the addition.

    Returns:
        A graph module with the model's own modules, parameters and buffers under their own names. Each node has
        ``meta["info"]`` (``MetaInfo``) with the FQN of its module, and ``meta["tensor_meta"]``.

    Raises:
        InputError: an argument is unknown, missing, or of the wrong kind. It is a ``ValueError``.
        TraceError: the forward failed, or cannot be written as a graph; the message says why.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    >>> gm = symbolic_trace(model, meta_args={"input": torch.empty(4, 8, device="meta")})
    >>> [(node.op, node.meta["info"].fqn, node.meta["info"].shape) for node in gm.graph.nodes]
    [('placeholder', '', (4, 8)), ('call_module', '0', (4, 16)), ('call_module', '1', (4, 16)), ('output', '', ...)]
    """
    model = _as_module(root)
    for kind, arguments in (("concrete_args", concrete_args), ("meta_args", meta_args)):
        if not isinstance(arguments, (Mapping, NoneType)):
            raise InputError(f"{kind} must be a dict from argument names to values, got {type(arguments).__name__}")
    call, names = _call_of(model, dict(concrete_args or {}), dict(meta_args or {}))
    return trace_call(model, call, names, marks=trace_act_ckpt, splits_bias=bias_addition_split)


def _as_module(root: Any) -> nn.Module:
    if isinstance(root, nn.Module):
        return root
    if not callable(root) or isinstance(root, type):
        hint = "; pass an instance, not the class" if isinstance(root, type) else ""
        raise InputError(f"expected a torch.nn.Module or a function, got {type(root).__name__}: {root!r:.80}{hint}")
    try:
        inspect.signature(root)
    except ValueError:
        raise InputError(f"{root!r:.80} has no signature with argument names; wrap it in a function") from None
    # Errors name the class, and registered replacements are looked up in its module: use the function's own.
    named = {"__module__": getattr(root, "__module__", None) or __name__}
    kind: type[FunctionModule] = type(getattr(root, "__name__", type(root).__name__), (FunctionModule,), named)
    return kind(root)


def _call_of(
    model: nn.Module, concrete: dict[str, Any], meta: dict[str, Any]
) -> tuple[CallArguments, dict[str | int, str]]:
    """Return the call's arguments, and a dict from position or name to graph input for tensor arguments."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(described.kind is described.VAR_KEYWORD for described in parameters.values())
    for kind, arguments in (("concrete_args", concrete), ("meta_args", meta)):
        unknown = [name for name in arguments if name not in parameters]
        if unknown and not takes_any:
            expected = ", ".join(parameters) or "none"
            raise InputError(f"{kind} names {unknown[0]!r}, but the arguments of the forward are: {expected}")
    size = next((name for name, value in meta.items() if _is_size(value)), None)
    if size is not None and not any(map(_holds_tensor, meta.values())):  # beside a tensor, a size is a plain argument
        tensor = f"torch.empty({list(meta[size])}, device='meta')"
        raise InputError(f"meta_args[{size!r}] must be a tensor, got {meta[size]!r}; pass {tensor}")
    twice = sorted(concrete.keys() & meta.keys())
    if twice:
        raise InputError(f"argument {twice[0]!r} is in concrete_args and in meta_args; pass it in one of them")
    held = next((name for name, value in concrete.items() if _holds_tensor(value)), None)
    if held is not None:
        raise InputError(f"concrete_args[{held!r}] holds a tensor; pass it in meta_args")
    args: list[str] = []
    arguments = {**concrete, **meta}
    for name, parameter in parameters.items():  # by position, up to the first gap
        if parameter.kind is parameter.VAR_POSITIONAL and name in arguments:
            raise InputError(
                f"the forward takes *{name}, whose values have no names; wrap the model in a module that names them"
            )
        if parameter.kind is parameter.VAR_KEYWORD or parameter.kind is parameter.KEYWORD_ONLY or name not in arguments:
            break
        args.append(name)
    keywords = [name for name in arguments if name not in args]
    inputs: dict[str | int, str] = {
        position: name for position, name in enumerate(args) if _holds_tensor(arguments[name])
    }
    inputs.update({name: name for name in keywords if _holds_tensor(arguments[name])})
    call = CallArguments(tuple(arguments[name] for name in args), {name: arguments[name] for name in keywords}, None)
    try:
        inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise InputError(f"{error}; pass it in meta_args (tensors) or concrete_args (anything else)") from None
    return call, inputs


def _is_size(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(dim) is int for dim in value)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in leaves_of(taken_apart(value)))


@exclusive
def trace_call(
    model: nn.Module,
    call: CallArguments,
    names: Mapping[str | int, str],
    *,
    marks: bool = False,
    splits_bias: bool = False,
    execution: str | None = None,
) -> TracedModule:
    """Return the graph of a model for one call.

    Args:
        names: position or name of an argument -> graph input.
        marks, splits_bias: ``trace_act_ckpt`` and ``bias_addition_split`` of ``symbolic_trace``.
        execution: ``"shape"`` or ``"real"``, whichever is known to work; None: the model runs once more to find out.
    """
    lazy = next((fqn for fqn, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise TraceError(f"parameter {lazy!r} is not initialised; run the model once, then trace it")
    used: set[Any] = set()
    rules = registry.rules(model, used)
    execution = _execution(model, call, execution)
    failed: list[Exception] = []
    for way in ("shape", "real") if execution == "real" and (rules.shapes or rules.layer_shapes) else (execution,):
        arguments = _without_values(call) if way == "shape" else call
        try:
            pause = no_collection() if way == "shape" else nullcontext()
            with pause, registry.replaced(model, rules):
                records = record(model, arguments, way, rules=rules)
                return _first(model, arguments, names, records, way, used, marks=marks, splits_bias=splits_bias)
        except TraceError:
            raise
        except Exception as error:
            failed.append(error)
    raise TraceError(f"{type(model).__name__} could not be run: {in_short(failed[-1])}") from failed[-1]


def _without_values(call: CallArguments) -> CallArguments:
    """Return the arguments with floating point tensors on meta, so that larger batches take no memory.

    Integers keep their values: a layer that stays whole may read them.
    """
    twins: dict[int, Tensor] = {}

    def twin(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_floating_point():
            return tensor
        if id(tensor) not in twins:
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            twins[id(tensor)] = meta.requires_grad_(tensor.requires_grad)
        return twins[id(tensor)]

    return CallArguments(*call.on_meta(twin), call.device, call.nothing_found)


def _execution(model: nn.Module, call: CallArguments, execution: str | None) -> str:
    """Return ``"shape"`` if the model can run on shapes with the same result, else ``"real"``."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "real"  # autocast has no effect on meta tensors
    if execution is not None:
        return execution
    recording = capture(ModelParts.of(model), call, "auto")
    return "shape" if recording.error is not None else recording.execution


def _first(
    model: nn.Module,
    call: CallArguments,
    names: Mapping[str | int, str],
    records: Iterable[Record],
    execution: str,
    used: set[Any],
    *,
    marks: bool,
    splits_bias: bool,
) -> TracedModule:
    """Return the graph of the first record that can be written as one.

    Records come in order, from the one that holds for the most inputs and modes. A record for batches of two or more is
    preferred over one for all batches if it opens more modules.
    """
    reason: TraceError | None = None
    rest = iter(records)
    while (current := next(rest, None)) is not None:
        try:
            builder = _builder(model, current, names, marks)
            if builder.kept_whole and current.batch_size is not None and (following := next(rest, None)) is not None:
                rest = chain([following], rest)
                if following.smallest_batch > current.smallest_batch:
                    with suppress(TraceError):
                        if _builder(model, following, names, marks).kept_whole != builder.kept_whole:
                            continue
            traced = graph_module(model, builder.graph, builder.constants)
            if not used:  # registered implementations run other operators on purpose
                with checkpoints_opened():
                    _check(model, traced, current, call, names, execution)
        except TraceError as error:
            reason = error
            continue
        if splits_bias and split_bias_additions(traced):
            traced.recompile()
        note_shapes(traced, graph_call(call, names), builder.origins, execution)
        return traced
    assert reason is not None
    raise reason


def _builder(model: nn.Module, record: Record, names: Mapping[str | int, str], marks: bool) -> GraphBuilder:
    root = record.root
    inputs = {name: root.args[key] if isinstance(key, int) else root.kwargs[key] for key, name in names.items()}
    return GraphBuilder(model, record, registry.is_leaf, inputs, marks_checkpoints=marks)


def _check(
    model: nn.Module,
    traced: TracedModule,
    recorded: Record,
    call: CallArguments,
    names: Mapping[str | int, str],
    execution: str,
) -> None:
    """Raise ``TraceError`` unless the graph runs the same operators as the model, also at another batch size."""

    def differs(call: CallArguments, **options: Any) -> str:
        return difference(model, traced, [traced], call, execution, other_call=graph_call(call, names), **options)

    problem, _ = compared(recorded, call, differs)
    if problem:
        raise TraceError(
            f"the graph differs from the model: it runs {problem}. The forward does something between its layers that "
            "cannot be recorded (a TorchScript function, a global hook, an overridden __call__, other operators "
            "without gradients); move it into a module and register that with register_leaf_module"
        )


def graph_call(call: CallArguments, names: Mapping[str | int, str]) -> CallArguments:
    """Return the arguments of the graph for a call of the model."""
    arguments = {name: call.args[key] if isinstance(key, int) else call.kwargs[key] for key, name in names.items()}
    return CallArguments((), arguments, call.device)
