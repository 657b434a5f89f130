"""Read a plan from JSON that may hold anything."""

from __future__ import annotations

import inspect
import json
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch.distributed.tensor import parallel

from modelsummary.capture.checkpoints import kept_results
from modelsummary.errors import InputError
from modelsummary.operators.collective_calls import OPERATIONS
from modelsummary.parallel.plan_arguments import check_sending
from modelsummary.parallel.plan_entries import WHOLE_CALL_KINDS

__all__ = ["plan_from_json"]

_SENDING = frozenset({"ExpertDispatch", "ExpertListDispatch"})  # styles with which ranks send tokens to experts
_Instance = TypeVar("_Instance")
_ROLES = frozenset("column row embedding head norm local heads gradient copy sizes input output expert".split())


def plan_from_json(kind: type[_Instance], mesh_names: Sequence[str], text: str) -> _Instance:
    """Return the plan that ``to_json`` wrote.

    Args:
        kind: class of the plan, a dataclass that may hold tuples of other dataclasses.
        mesh_names: names of its sizes of the mesh.
        text: the JSON.

    Raises:
        InputError: the text is not a plan, or one of its fields has a value of another type.
    """
    try:
        data = json.loads(text, parse_float=_refused, parse_constant=_refused)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"this is not the JSON of a plan: {error!r:.200}") from error
    if not isinstance(data, dict) or "mesh" not in data:
        raise InputError(f"this is not the JSON of a plan: expected an object with 'mesh', got {data!r:.80}")
    mesh = data.pop("mesh")
    plan: Any = _instance(kind, data, "")
    _check(plan, mesh_names)
    if mesh != plan.mesh_shape:
        raise InputError(f"mesh of a plan must be {plan.mesh_shape}, as its other fields say, got {mesh!r:.80}")
    whole: _Instance = plan
    return whole


def _instance(cls: type[_Instance], data: Any, where: str) -> _Instance:
    """Return an instance of a dataclass whose attributes have the types that it declares.

    Args:
        cls: the class.
        data: its attributes by name.
        where: what to call it in messages; empty for the plan.
    """
    of = f"{where} of a plan" if where else "a plan"
    if not isinstance(data, dict):
        raise InputError(f"{of} must be an object, got {data!r:.80}")
    named = {field.name for field in fields(cls) if not field.name.startswith("_")}  # type: ignore[arg-type]
    other = next((name for name in data if name not in named), None)
    missing = next((name for name in sorted(named) if name not in data), None)
    if other is not None or missing is not None:
        wrong = f"has no {missing!r}" if missing is not None else f"has an unknown {other!r:.80}"
        raise InputError(f"{of} {wrong}; expected {', '.join(sorted(named))}")
    hints = get_type_hints(cls)
    return cls(
        **{name: _value(hints[name], value, f"{where}{'.' if where else ''}{name}") for name, value in data.items()}
    )


def _value(hint: Any, data: Any, where: str) -> Any:
    """Return the value of an attribute that has this type."""
    whole = hint
    if NoneType in get_args(hint) and data is not None:
        hint = next(argument for argument in get_args(hint) if argument is not NoneType)
    item = next(iter(get_args(hint)), None)
    if is_dataclass(item) and isinstance(item, type):  # a tuple of them
        if not isinstance(data, list):
            raise InputError(f"{where} of a plan must be a list, got {data!r:.80}")
        return tuple(_instance(item, inner, f"{where}[{n}]") for n, inner in enumerate(data))
    value = _tuples(data)
    if not _is(value, hint):
        kind = str(whole).replace("typing.", "").removeprefix("<class '").removesuffix("'>")
        raise InputError(f"{where} of a plan must be {kind}, got {value!r:.80}")
    return value


def _tuples(value: Any) -> Any:
    """Return a value with tuples instead of lists."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def _is(value: Any, hint: Any) -> bool:
    """Return True if a value has a type as a dataclass declares it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[1:] == (...,):
            return all(_is(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_is, value, arguments))
    if origin is dict:
        return isinstance(value, dict) and all(
            _is(name, arguments[0]) and _is(item, arguments[1]) for name, item in value.items()
        )
    if hint is None or hint is NoneType:
        return value is None
    return type(value) is hint


def _check(plan: Any, mesh_names: Sequence[str]) -> None:
    """Raise ``InputError`` for values that no plan has, and for names that could not be written as code."""
    for name in mesh_names:
        if getattr(plan, name) < 1:
            raise InputError(f"{name} of a plan must be an integer >= 1, got {getattr(plan, name)}")
    check_sending(plan.dispatch, **{name: getattr(plan, name) for name in mesh_names})
    if not plan.parameter_dtypes.keys() <= {"trained", "frozen"}:
        raise InputError(
            f"parameter_dtypes of a plan must be dtypes of 'trained' and 'frozen', got {plan.parameter_dtypes!r:.80}"
        )
    dtypes = {
        "precision": plan.precision,
        **{f"parameter_dtypes[{kind!r}]": name for kind, name in plan.parameter_dtypes.items()},
    }
    for name, dtype in dtypes.items():
        if dtype is not None and not _is_floating(dtype):
            raise InputError(f"{name} of a plan must be the name of a floating point dtype, got {dtype!r:.80}")
    if not all(len(names) > 1 for names in plan.ties) or not all(plan.units):
        raise InputError("ties of a plan must be lists of two names or more, and units lists of one or more")
    if plan.context > 1 and plan.tokens < 1:
        raise InputError(f"tokens of a plan with context={plan.context} must be an integer >= 1, got {plan.tokens}")
    has_units = max(plan.shard, plan.data, plan.context) > 1 or plan.precision is not None
    if has_units and len(plan.unit_calls) != len(plan.units):
        raise InputError("unit_calls of a plan must have a number for each of units")
    if plan.last_unit and plan.last_unit not in plan.units:
        raise InputError(f"last_unit of a plan must be one of its units, got {plan.last_unit!r:.80}")
    if not kept_results(plan.kept).keys() <= set(plan.checkpoint):
        raise InputError(f"kept of a plan must be of modules in its checkpoint, got {plan.kept!r:.80}")
    _check_layers(plan)
    for call in plan.whole_calls:
        _check_whole_call(call)
    _check_communication(plan.stored_communication or (), mesh_names)
    names = (attribute.name for attribute in plan.attributes)
    wrong = next((name for name in names if not name.isidentifier() or keyword.iskeyword(name)), None)
    if wrong is not None:
        raise InputError(f"a plan names {wrong!r:.80} where it must have the name of an attribute")


def _check_communication(collectives: Sequence[Any], mesh_names: Sequence[str]) -> None:
    """Raise ``InputError`` for a collective that does not exist."""
    for collective in collectives:
        is_known = collective.phase in ("forward", "loss", "backward") and collective.operation in OPERATIONS
        if not is_known or collective.group not in mesh_names:
            raise InputError(
                "communication of a plan must have a known phase, operation and group, got "
                f"{collective.phase!r:.40}, {collective.operation!r:.40} and {collective.group!r:.40}"
            )


def _check_whole_call(call: Any) -> None:
    """Raise ``InputError`` for a call that sees all tokens in a way that does not exist."""
    if call.kind not in WHOLE_CALL_KINDS or (call.kind == "part") != (call.dim is not None):
        kinds = ", ".join(sorted(WHOLE_CALL_KINDS))
        raise InputError(
            f"whole_calls of a plan must be {kinds}, and have a dim if they are part, got {call.kind!r:.40} and "
            f"{call.dim!r:.40}"
        )


def _check_layers(plan: Any) -> None:
    """Raise ``InputError`` for layers that do not exist, or that move tokens in another way than the plan says."""
    kinds = _styles()
    for layer in plan.layers:
        _check_layer(layer, kinds)
        if layer.mesh == "expert" and (layer.style in _SENDING) != plan.sends_tokens:
            raise InputError(
                f"dispatch of a plan must be the one of its layers, got {plan.dispatch!r} and {layer.style!r}"
            )


def _check_layer(layer: Any, kinds: Mapping[str, type]) -> None:
    """Raise ``InputError`` for a layer of a plan that names what does not exist."""
    if layer.style not in kinds or layer.role not in _ROLES or layer.mesh not in ("tensor", "expert"):
        raise InputError(
            f"layers of a plan must have a known style, role and mesh, got {layer.style!r:.40}, {layer.role!r:.40} "
            f"and {layer.mesh!r:.40}"
        )
    taken = inspect.signature(kinds[layer.style]).parameters
    unknown = next((name for name in layer.options if name not in taken), None)
    if unknown is not None:
        raise InputError(f"options of {layer.style} must be of {', '.join(taken)}, got {unknown!r:.40}")


def _is_floating(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def _styles() -> dict[str, type[parallel.ParallelStyle]]:
    """Return the styles of torch and of this package by their names."""
    from modelsummary.parallel import styles

    named = ((name, getattr(module, name)) for module in (parallel, styles) for name in module.__all__)
    base = parallel.ParallelStyle
    return {
        name: kind for name, kind in named if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    }


def _refused(number: str) -> None:
    raise ValueError(f"a plan has no number {number:.40}")
