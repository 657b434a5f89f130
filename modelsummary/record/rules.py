"""What a tracer looks into, and what it calls in place of what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch.utils.checkpoint
from torch import nn

__all__ = ["WHOLE_LAYERS", "TraceRules", "checkpoints_opened", "is_layer"]

# Opened where a cut falls inside. (nn.TransformerEncoderLayer is not: in evaluation it is one kernel of its own.)
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


def is_layer(module: nn.Module) -> bool:
    """A layer of torch: its forward is one operator, and nothing is won by looking inside."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)


@dataclass(frozen=True)
class TraceRules:
    """What a tracer does with modules and functions.

    Attributes:
        is_whole: tells of a module that its inside is not looked at.
        substitutes: function -> what is called and traced in its place.
        shapes: function -> what makes its result when it runs on shapes; the call stays one of the function.
        layer_shapes: class of a module that is whole -> what makes its result, called with the module.
        checks_decisions: where a forward on shapes decides by values that are known there (of a mask of integers, say),
            note what it asked and the answer, to be checked when the calls are repeated; else it keeps a module whole.
        opens_checkpoints: what runs under activation checkpointing is traced like all else, and its region noted;
            else it keeps a module whole.
    """

    is_whole: Callable[[nn.Module], bool] = is_layer
    substitutes: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    shapes: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    layer_shapes: Mapping[type, Callable[..., Any]] = field(default_factory=dict)
    opens_checkpoints: bool = False
    checks_decisions: bool = False

    def without(self, function: Any) -> TraceRules:
        """These rules, with nothing in place of ``function``."""
        return replace(self, substitutes={key: each for key, each in self.substitutes.items() if key != function})


WHOLE_LAYERS = TraceRules()

# What surrounds the function under non-reentrant checkpointing: a generator that yields once. (2.13 has the first.)
_GENERATORS = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")


@contextmanager
def checkpoints_opened(region: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[None]:
    """Context in which ``torch.utils.checkpoint`` runs its function plainly, inside of ``region()``."""
    library = torch.utils.checkpoint
    originals = {name: getattr(library, name) for name in _GENERATORS if hasattr(library, name)}

    def plainly(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        with region():
            yield

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        with region():
            return function(*args)

    for name in originals:
        setattr(library, name, plainly)
    library.CheckpointFunction.apply = apply  # its own one, in front of that of all autograd functions
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(library, name, original)
        del library.CheckpointFunction.apply
