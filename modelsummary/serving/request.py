"""The calls of a request: the forward of its prompt, and the forward of one further token."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.inputs import CallArguments, InputSize
from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError
from modelsummary.serving.cache import parameters_of

__all__ = ["Request", "request_of"]

_DECODER_TOKENS = "decoder_input_ids"
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Request:
    """How a model is called to serve.

    Attributes:
        tokens: name of the argument that holds the tokens.
        others: further arguments, with a batch of ``recorded_batch``: the input of an encoder.
        recorded_batch: batch size of ``others``.
        parameters: names of the arguments of the forward.
        left_out: names of recorded inputs that requests do not have.
    """

    tokens: str
    others: CallArguments
    recorded_batch: int
    parameters: frozenset[str]
    left_out: tuple[str, ...] = ()

    @property
    def flags(self) -> dict[str, Any]:
        """Arguments that make the forward return its cache, and the logits of the last token alone."""
        flags = {"use_cache": True, "logits_to_keep": 1}
        # decoders of transformers hand it on; since 5.24 their cache is called ``cache``
        takes_cache = not self.parameters.isdisjoint(("past_key_values", "cache"))
        passed_on = {"use_cache"} if "kwargs" in self.parameters and takes_cache else set()
        return {name: value for name, value in flags.items() if name in self.parameters | passed_on}

    def prompt(self, batch: int, length: int) -> CallArguments:
        """Return the call for ``batch`` prompts of ``length`` tokens, and ``others`` for as many requests."""
        tokens = InputSize((batch, length), torch.int64)
        call = self.others
        if call.kwargs and batch != self.recorded_batch:
            call = call.with_batch(0, self.recorded_batch, batch)
        return replace(call, kwargs={**call.kwargs, self.tokens: tokens, **self.flags})


def request_of(live: LiveModel) -> Request:
    """Return how the model is called to serve, from the recorded call.

    The tokens are ``decoder_input_ids`` where the forward takes them, else the first input of integers with a batch and
    a length. The recorded input of an encoder keeps its length.

    Raises:
        InputError: no input holds tokens.

    >>> from modelsummary import Statistics
    >>> class Net(nn.Embedding):
    ...     def forward(self, ids, state=None): ...
    >>> stats = Statistics(Net(8, 4), torch.zeros(1, 5, dtype=torch.long))
    >>> request_of(stats.live).prompt(2, 7).kwargs
    {'ids': InputSize(shape=(2, 7), dtype=torch.int64)}
    """
    arguments = _named(live.model, live.call)
    names = parameters_of(live.model)
    tokens = (
        _DECODER_TOKENS
        if _DECODER_TOKENS in names
        else next((name for name, value in arguments.items() if _is_tokens(value)), None)
    )
    if tokens is None:
        raise InputError(
            f"serving needs an input of tokens, of shape (batch, length) and dtype torch.long; the recorded inputs are "
            f"{', '.join(arguments) or 'none'}"
        )
    kept: dict[str, Any] = {}
    if tokens == _DECODER_TOKENS:
        kept = {
            name: _without_data(value)
            for name, value in arguments.items()
            if name != tokens and not name.startswith("decoder_")
        }
    tensors = [value for value in kept.values() if isinstance(value, (Tensor, InputSize))]
    batch = tensors[0].shape[0] if tensors else 1
    others = CallArguments((), kept, live.call.device)
    left = [name for name, value in arguments.items() if isinstance(value, (Tensor, InputSize)) and name not in kept]
    return Request(tokens, others, batch, names, tuple(name for name in left if name != tokens))


def _named(model: nn.Module, call: CallArguments) -> dict[str, Any]:
    """Return the recorded arguments by name, except for None."""
    bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return {name: value for name, value in named.items() if value is not None}


def _without_data(value: Any) -> Any:
    """Return the size of a floating point tensor, so that the features of many requests are not allocated."""
    is_plain = type(value) is Tensor and value.is_floating_point()
    return InputSize(tuple(value.shape), value.dtype) if is_plain else value


def _is_tokens(value: Any) -> bool:
    return isinstance(value, (Tensor, InputSize)) and len(value.shape) == 2 and value.dtype in _INTEGERS
