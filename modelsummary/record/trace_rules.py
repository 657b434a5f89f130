"""Rules of a tracer: the modules that it opens, and the functions that it substitutes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch.utils.checkpoint
from torch import nn

from modelsummary._torch import CHECKPOINT_GENERATORS, CHECKPOINT_INPUTS, swapped

__all__ = ["WHOLE_LAYERS", "TraceRules", "checkpoints_opened", "is_layer", "is_of_checkpointing"]

# Opened if a cut falls inside. nn.TransformerEncoderLayer is not, as in evaluation it is one fused kernel.
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
    """Return True for a layer of torch that is not a container: opening it would gain nothing.

    >>> is_layer(nn.Linear(4, 2)), is_layer(nn.Sequential())
    (True, False)
    """
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)


@dataclass(frozen=True)
class TraceRules:
    """The treatment of modules and functions by a tracer.

    Attributes:
        is_whole: returns True for a module that is not opened.
        substitutes: function -> function that is called and traced instead.
        shapes: function -> function that makes its result on shapes; the trace holds the original function.
        layer_shapes: class of a whole module -> function that makes its result, called with the module.
        follows_kept: note the tensors that objects hold behind the forward: attributes, lists that hooks fill.
        checks_decisions: if a forward on shapes decides by known values (of a mask of integers, say), note the question
            and its answer, to be checked when the calls are repeated; otherwise the module stays whole.
        opens_checkpoints: trace calls under activation checkpointing like all others, and note their region; otherwise
            the module stays whole.
    """

    is_whole: Callable[[nn.Module], bool] = is_layer
    substitutes: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    shapes: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    layer_shapes: Mapping[type, Callable[..., Any]] = field(default_factory=dict)
    opens_checkpoints: bool = False
    follows_kept: bool = False
    checks_decisions: bool = False

    def without(self, function: Any) -> TraceRules:
        """Return these rules without the substitute of ``function``."""
        return replace(
            self, substitutes={key: substitute for key, substitute in self.substitutes.items() if key != function}
        )


WHOLE_LAYERS = TraceRules()


def is_of_checkpointing(function: Any) -> bool:
    """Return True for a call that torch's checkpointing makes itself: before torch 2.13, it saves inputs by a function.

    It looks at the caller of its caller, so only ``__torch_function__`` may ask about a function.

    Args:
        function: class of an autograd function, or another function.
    """
    library = torch.utils.checkpoint.__name__
    if isinstance(function, type):
        return (function.__module__, function.__qualname__) == (library, CHECKPOINT_INPUTS)
    return function is torch.empty and sys._getframe(2).f_globals.get("__name__") == library


@contextmanager
def checkpoints_opened(region: Callable[[], AbstractContextManager[None]] = nullcontext) -> Iterator[None]:
    """Return a context in which ``torch.utils.checkpoint`` runs its function without checkpointing, in ``region()``."""
    library = torch.utils.checkpoint

    def plainly(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        with region():
            yield

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        with region():
            return function(*args)

    with ExitStack() as stack:
        for name in CHECKPOINT_GENERATORS:
            if hasattr(library, name):
                stack.enter_context(swapped(library, name, plainly))
        stack.enter_context(swapped(library.CheckpointFunction, "apply", apply))
        yield
