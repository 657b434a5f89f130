"""A live model with the arguments of its call, from which it can be run again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of
from modelsummary.capture.state.process_state import surroundings

__all__ = ["LiveModel"]

_STATE = object()  # key of the state in which the model was observed
_MOST_QUESTIONS, _MOST_ITEMS = 8, 1000
_CONSTANTS = frozenset({int, float, str, bool, type(None), torch.dtype, torch.device})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})


@dataclass(frozen=True)
class LiveModel:
    """A model and the arguments of its call; functions of other packages take it to run the model again.

    Attributes:
        model: the model without the wrappers of ``torch.compile`` and data parallelism.
        call: arguments of its forward.
        execution: ``"shape"`` or ``"real"``, whichever is known to work.
        batch_dim: batch dimension of the inputs; None if it was not given.
        compiled: the compiled model that was passed, which is timed instead; None if there is none.
        added: FQN of a module that the forward adds to the model; None if there is none.
        traces: what was observed and recorded of it so far; see ``kept``.
    """

    model: nn.Module
    call: CallArguments
    execution: str
    batch_dim: int | None = None
    compiled: nn.Module | None = None
    added: str | None = None
    traces: dict[Any, dict[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    def kept(self, question: Any) -> dict[Any, Any]:
        """Return the dict of what is kept of runs that answer a question, empty for a new one.

        The model may be changed between two questions. What ran before a change is dropped: of modules, their modes and
        attributes, of tensors, and of settings of the process.
        """
        try:
            hash(question)
        except TypeError:  # a loss that cannot be compared
            return {}
        now = surroundings(), [(id(module), type(module), _facts(vars(module))) for module in modules_of(self.model)]
        arguments = _facts((self.call.args, self.call.kwargs))
        if self.traces.get(_STATE, {}).get("now") != (now, arguments):
            self.traces.clear()
            self.traces[_STATE] = {"now": (now, arguments)}
        while len(self.traces) > _MOST_QUESTIONS:
            del self.traces[next(key for key in self.traces if key is not _STATE)]
        return self.traces.setdefault(question, {})

    @property
    def uninitialized(self) -> str | None:
        """What the first forward makes: the shape of a lazy parameter, or a module; None if all are there."""
        if self.added is not None:
            return f"the forward adds module {self.added!r}"
        lazy = next((fqn for fqn, parameter in self.model.named_parameters() if is_lazy(parameter)), None)
        return None if lazy is None else f"parameter {lazy!r} is not initialised"


def _facts(value: Any, depth: int = 4) -> Any:
    """Return what may decide a run, to be compared: constants, identities, and how often tensors were written."""
    kind = type(value)
    if kind in _CONSTANTS:
        return value
    if kind in _CONTAINERS and not value:  # such as the hooks of most modules
        return kind
    if isinstance(value, Tensor):
        version = None if value.is_inference() else value._version
        shape = None if is_lazy(value) else value.shape
        return id(value), version, value.requires_grad, shape, value.dtype, value.device
    inside: Any = ()
    if isinstance(value, dict):
        inside = tuple(value), value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = (), value
    elif not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__"):
        inside = tuple(vars(value)), vars(value).values()
    if not inside or not depth or len(inside[1]) > _MOST_ITEMS:
        return id(value), kind, len(inside[1]) if inside else 0
    return kind, inside[0], [item if type(item) in _CONSTANTS else _facts(item, depth - 1) for item in inside[1]]
