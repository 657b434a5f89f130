"""Keyword arguments of public calls: earlier names warn, and unknown ones are refused with a guess."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from modelsummary.errors import InputError, close_to

__all__ = ["check_names", "takes", "takes_keywords", "warn_renamed"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)
Modern = Callable[[dict[str, Any]], dict[str, Any]]
"""Function from keyword arguments, some with names of earlier versions, to the present ones; it warns of each."""

_PACKAGE = str(Path(__file__).parent)
# Names of other libraries, and the abbreviations of papers.
_GUESSES = {
    "tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
    "data": "dp ddp data_parallel replicate dp_replicate data_parallel_size dp_size",
    "shard": "fsdp zero dp_shard fsdp_size",
    "pipeline": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size stages n_stages",
    "expert": "ep expert_parallel expert_parallel_size expert_model_parallel_size ep_size",
    "context": "cp context_parallel context_parallel_size cp_size",
    "sequence": "sp sequence_parallel",
    "checkpoint": "recompute recomputation activation_checkpointing gradient_checkpointing ac",
    "precision": "dtype param_dtype",
    "sharded": "zero_stage stage",
    "micro_batch": "microbatch micro_batch_size mbs",
}
_GUESS_OF = {name: argument for argument, names in _GUESSES.items() for name in names.split()}


def check_names(call: str, names: Collection[str], arguments: Collection[str]) -> None:
    """Raise ``InputError`` for the first of ``names`` that a call does not take; it names the nearest one.

    >>> check_names("Plan", ["tp"], ["tensor", "data"])
    Traceback (most recent call last):
    modelsummary.errors.InputError: unknown option 'tp' of Plan; expected tensor, data; did you mean 'tensor'?
    """
    for name in names:
        if name not in arguments:
            guess = _GUESS_OF.get(str(name).lower())
            advice = f"; did you mean {guess!r}?" if guess in arguments else close_to(name, arguments)
            raise InputError(f"unknown option {name!r:.80} of {call}; expected {', '.join(arguments)}{advice}")


def warn_renamed(call: str, old: str, new: str) -> None:
    """Warn the caller of the package that an argument or attribute has another name.

    Args:
        call: what has the argument.
        old, new: as they are written: ``"zero=3"``, ``"shard=8"``.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{old} of {call} is deprecated: use {new}", DeprecationWarning, stacklevel=level)


def takes(call: str, modern: Modern | None = None) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Return a decorator of a function whose keyword arguments are checked by name.

    Args:
        call: what the function is called in messages.
        modern: renames the arguments of earlier versions. Default: there are none.

    >>> @takes("doubled")
    ... def doubled(tensor=1):
    ...     return 2 * tensor
    >>> doubled(tensor=2)
    4
    """

    def decorated(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        parameters = inspect.signature(function).parameters.values()
        arguments = [parameter.name for parameter in parameters if parameter.name != "self"]
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

        @wraps(function)
        def checked(*args: _Args.args, **keywords: _Args.kwargs) -> _Result:
            if is_open or keywords.keys() <= set(arguments):
                return function(*args, **keywords)
            present: Any = keywords if modern is None else modern(dict(keywords))
            check_names(call, present, arguments)
            return function(*args, **present)

        return checked

    return decorated


def takes_keywords(
    modern: Modern | None = None, attributes: Mapping[str, str] | None = None
) -> Callable[[_Class], _Class]:
    """Return a decorator of a class, as ``takes`` for its constructor.

    Args:
        modern: as for ``takes``.
        attributes: earlier name of an attribute -> present name.
    """

    def decorated(owner: _Class) -> _Class:
        constructor: Any = owner.__init__  # type: ignore[misc]
        owner.__init__ = takes(owner.__name__, modern)(constructor)  # type: ignore[misc]
        if attributes:
            owner.__getattr__ = _renamed(attributes)  # type: ignore[attr-defined]
        return owner

    return decorated


def _renamed(names: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """Return a ``__getattr__`` that reads attributes by earlier names."""

    def attribute(self: Any, name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_renamed(type(self).__name__, name, names[name])
        return getattr(self, names[name])

    return attribute
