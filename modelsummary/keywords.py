"""Names that users write: keyword arguments of public calls, names of choices, and dtypes.

Unknown names are refused with a guess.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from modelsummary.errors import InputError, close_to

if TYPE_CHECKING:
    import torch

__all__ = [
    "autocast_dtype",
    "check_names",
    "choice_of",
    "dtype_named",
    "listed",
    "methods_take_keywords",
    "nearest",
    "takes",
    "takes_keywords",
]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)

# Names of other libraries, and the abbreviations of papers.
_GUESSES = {
    "tensor": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size",
    "data": "dp ddp data_parallel replicate dp_replicate data_parallel_size dp_size",
    "shard": "fsdp dp_shard fsdp_size",
    "pipeline": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size stages n_stages",
    "expert": "ep expert_parallel expert_parallel_size expert_model_parallel_size ep_size",
    "context": "cp context_parallel context_parallel_size cp_size",
    "sequence": "sp sequence_parallel",
    "checkpoint": "recompute recomputation activation_checkpointing gradient_checkpointing ac",
    "precision": "dtype param_dtype",
    "sharded": "zero zero_stage stage reshard_after_forward",
    "micro_batch": "microbatch micro_batch_size mbs batch_size bs",
    "global_batch": "batch batch_size bs global_batch_size gbs",
    "n_stages": "stages pp pipeline",
    "columns": "column cols col_names",
    "optimizer": "optim opt",
    "sequence_length": "sequence seq_len seqlen seq max_length length context",
    "device": "gpu hardware accelerator target",
    "devices_per_node": "gpus gpus_per_node n_gpus",
    "nodes": "n_nodes num_nodes",
    "backward": "train training",
    "mode": "compile compiled",
    "runs": "n repeats repeat iterations steps",
    "rate": "qps rps requests_per_second",
    "watts": "watt tdp power",
    "memory_bytes": "memory memory_gb vram vram_gb budget budget_bytes",
    "budget_bytes": "memory memory_gb memory_bytes budget max_memory",
    "batches": "batch_sizes",
    "autocast": "amp mixed_precision",
    "dtype": "precision torch_dtype",
}
_GUESS_OF: dict[str, list[str]] = {}
for _argument, _others in _GUESSES.items():
    for _other in _others.split():
        _GUESS_OF.setdefault(_other, []).append(_argument)
_MOST = 5  # names of a list
_ALL = 12
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "single": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
_FLOATING = ("bfloat16", "float16", "float32", "float64")
_OTHERS = ("int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128")


def listed(names: Collection[str], near: Any = None) -> str:
    """Return names as a list; of more than twelve the five nearest to a text, or the first, and how many others.

    >>> listed(["macs", "params"]), listed([f"column{index}" for index in range(40)], "column7")
    ('macs, params', 'column7, column37, column27, column17, column9 and 35 more')
    """
    if len(names) <= _ALL:
        return ", ".join(names)
    similar = [] if near is None else get_close_matches(str(near), list(names), n=_MOST, cutoff=0.3)
    shown = [*similar, *(name for name in names if name not in similar)][:_MOST]
    return f"{', '.join(shown)} and {len(names) - len(shown)} more"


def nearest(name: Any, names: Collection[str]) -> str:
    """Return a suggestion to append to a message: similar names, or what there is.

    >>> nearest("layr1", ["layer1", "fc"]), nearest("decoder", ["layer1", "fc"])
    ("; did you mean 'layer1'?", "; expected one of 'layer1', 'fc'")
    """
    names = [other for other in names if other]
    quoted = [repr(other) for other in names]
    return close_to(name, names) or (f"; expected one of {listed(quoted, name)}" if names else "")


def _plain(name: str) -> str:
    """Return a name without case, spaces and marks."""
    return re.sub(r"[\W_]+", "", name).lower()


def choice_of(value: Any, names: Collection[str], argument: str, others: str = "") -> str:
    """Return the one of ``names`` that a value means, whatever its case, spaces, dashes and underscores.

    Args:
        value: what was passed.
        names: what there is to choose from.
        argument: name of the argument in messages.
        others: what else the argument takes, as the end of the list.

    Raises:
        InputError: the value is not one of them.

    >>> choice_of("SGD_Momentum", ["sgd", "sgd-momentum"], "optimizer")
    'sgd-momentum'
    """
    if isinstance(value, str):
        if value in names:
            return value
        meant = [name for name in names if _plain(name) == _plain(value)]
        if meant:
            return meant[0]
    choices = listed([repr(name) for name in names], value)
    hint = close_to(value, names) or close_to(value.lower(), names) if isinstance(value, str) else ""
    raise InputError(f"{argument} must be one of {choices}{others}, got {value!r:.80}{hint}")


def dtype_named(value: Any, argument: str, kind: str = "floating point ", end: str = "") -> torch.dtype:
    """Return the dtype that is passed as itself, or by its name in torch, or in papers.

    Args:
        value: what was passed.
        argument: name of the argument in messages.
        kind: ``"floating point "``, or an empty text for any dtype.
        end: what else the argument takes, as the end of the sentence.

    Raises:
        InputError: it is not such a dtype.

    >>> dtype_named("bf16", "dtype"), dtype_named("torch.float64", "dtype"), dtype_named("long", "dtype", "")
    (torch.bfloat16, torch.float64, torch.int64)
    """
    import torch

    name = value.removeprefix("torch.").lower() if isinstance(value, str) else None
    dtype = value if name is None else getattr(torch, _DTYPES.get(name, name), None)
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or not kind):
        return dtype
    hint = (
        "" if name is None else close_to(name, [*_FLOATING, *(_DTYPES if not kind else ()), *(() if kind else _OTHERS)])
    )
    raise InputError(
        f"{argument} must be a {kind}torch.dtype{end}, or its name such as 'bfloat16', got {value!r:.80}{hint}"
    )


def autocast_dtype(value: Any) -> torch.dtype:
    """Return the dtype, or the one with that name, to which ``torch.autocast`` is asked to cast.

    Raises:
        InputError: torch ignores it.

    >>> autocast_dtype("fp16")
    torch.float16
    """
    import torch

    dtype = dtype_named(value, "autocast")
    if dtype not in (torch.float16, torch.bfloat16):
        raise InputError(f"autocast must be torch.float16 or torch.bfloat16; torch.autocast ignores {dtype}")
    return dtype


def check_names(
    call: str, names: Collection[str], arguments: Collection[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise ``InputError`` for the first of ``names`` that a call does not take; it names the nearest one.

    Args:
        call: what the call is called in messages.
        names: what was passed.
        arguments: what the call takes.
        elsewhere: option of another call -> what to pass instead.

    >>> check_names("Plan", ["tp"], ["tensor", "data"])
    Traceback (most recent call last):
    modelsummary.errors.InputError: unknown option 'tp' of Plan; expected tensor, data; did you mean 'tensor'?
    """
    for name in names:
        if name not in arguments:
            if elsewhere and name in elsewhere:
                raise InputError(f"{name} is not an option of {call}; pass {elsewhere[name]}")
            guess = next((guess for guess in _GUESS_OF.get(str(name).lower(), ()) if guess in arguments), None)
            advice = f"; did you mean {guess!r}?" if guess is not None else close_to(name, arguments)
            options = f"; expected {', '.join(arguments)}" if arguments else "; it takes none"
            raise InputError(f"unknown option {name!r:.80} of {call}{options}{advice}")


def takes(
    call: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """Return a decorator of a function that refuses unknown keyword arguments with a guess, and missing ones.

    Args:
        call: what the function is called in messages.
        elsewhere: option of another call -> what to pass instead. Default: there are none.

    >>> @takes("doubled")
    ... def doubled(tensor=1):
    ...     return 2 * tensor
    >>> doubled(tensor=2)
    4
    """

    def decorated(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        signature = inspect.signature(function)
        parameters = signature.parameters.values()
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        arguments = [
            f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name
            for parameter in parameters
            if parameter.name != "self"
        ]

        @wraps(function)
        def checked(*args: _Args.args, **keywords: _Args.kwargs) -> _Result:
            if not is_open:
                check_names(call, keywords, arguments, elsewhere)
            try:
                signature.bind(*args, **keywords)
            except TypeError as error:
                options = f"expected {', '.join(arguments)}" if arguments else "expected no arguments"
                raise InputError(f"{call}: {error}; {options}") from None
            return function(*args, **keywords)

        checked.checks_names = True  # type: ignore[attr-defined]
        return checked

    return decorated


def methods_take_keywords(owner: _Class) -> _Class:
    """Return a class whose public methods refuse unknown keyword arguments as ``takes`` does, and missing ones.

    >>> @methods_take_keywords
    ... class Doubler:
    ...     def doubled(self, tensor):
    ...         return 2 * tensor
    >>> Doubler().doubled(tp=2)
    Traceback (most recent call last):
    modelsummary.errors.InputError: unknown option 'tp' of doubled; expected tensor; did you mean 'tensor'?
    """
    for name, method in list(vars(owner).items()):
        if name[0] != "_" and inspect.isfunction(method) and not hasattr(method, "checks_names"):
            setattr(owner, name, takes(name)(method))
    return owner


def takes_keywords(elsewhere: Mapping[str, str] | None = None) -> Callable[[_Class], _Class]:
    """Return a decorator of a class, as ``takes`` for its constructor."""

    def decorated(owner: _Class) -> _Class:
        constructor: Any = owner.__init__  # type: ignore[misc]
        owner.__init__ = takes(owner.__name__, elsewhere)(constructor)  # type: ignore[misc]
        return owner

    return decorated
