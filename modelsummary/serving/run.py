"""Run a request on shapes: its prompt, and one further token, with their operators and their memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.execution.recurrent import fused_recurrent
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.module_calls import calls_wrapped
from modelsummary.capture.modules import modules_of, tensors_in_attributes
from modelsummary.capture.observer import Observer
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import no_collection, obstacle_of, running
from modelsummary.capture.trace import bytes_alive
from modelsummary.errors import InputError
from modelsummary.operators.kernels import StepOperator
from modelsummary.serving.cache import CacheBytes, MakeCache, bytes_of_cache, cache_in
from modelsummary.serving.request import Request

__all__ = ["Encoded", "Phase", "RequestRun", "run_request"]

_CPU = torch.device("cpu")
_MOST_ELEMENTS = 2**25  # of positions and padding masks whose values are followed: batch x context
_ENCODED, _ENCODER = "encoder_last_hidden_state", "encoder_outputs"


class Encoded(tuple[Tensor]):
    """The result of an encoder, as forwards take it back: a tuple, or an object with the name of its item.

    Other fields, such as ``attentions`` and ``router_logits``, are None, as encoders leave them unless asked.
    """

    @property
    def last_hidden_state(self) -> Tensor:
        """The hidden states after the last layer."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):  # libraries recognise named tuples and other protocols by such names
            raise AttributeError(name)


@dataclass(frozen=True)
class Phase:
    """One forward of a request.

    Attributes:
        operators: its operators in order.
        n_calls: number of calls of modules.
        peak_bytes: the most bytes alive at one time, weights and cache included.
        cache: the cache after it.
        cache_storages: identities of the storages behind the cache, as operators name them.
    """

    operators: list[StepOperator]
    n_calls: int
    peak_bytes: int
    cache: CacheBytes
    cache_storages: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RequestRun:
    """The run of a batch of requests on shapes.

    Attributes:
        prefill: the forward of the whole prompts.
        decode: the forward of the token after them.
        weight_bytes: bytes of parameters and buffers.
    """

    prefill: Phase
    decode: Phase
    weight_bytes: int


def run_request(
    model: nn.Module,
    request: Request,
    batch: int,
    context: int,
    *,
    dtype: torch.dtype | None = None,
    make_cache: MakeCache | None = None,
    device: torch.device | None = None,
    routes_evenly: bool = False,
) -> RequestRun:
    """Run ``batch`` prompts of ``context - 1`` tokens and the last token of the context on shapes.

    The model runs in evaluation mode and stays untouched.

    Args:
        model: the model.
        request: how it is called.
        batch: number of requests.
        context: tokens of each request that the cache holds at the end, at least 2.
        dtype: floating point dtype of parameters, buffers and inputs; None: their own.
        make_cache: makes the cache for the model and a number of tokens; None: the model makes its own.
        device: device whose kernels torch chooses; None: the CPU.
        routes_evenly: choices of experts fall on all in turn, as ``ShapeOnly.assume_values`` says.

    Raises:
        InputError: the forward returns no cache that it takes back, it needs values, or it fails for this context.
    """
    call = request.prompt(batch, context - 1)
    modules = modules_of(model)
    with (
        no_collection(),
        running(modules, call, on_shapes=True, grad=False, device=device or _CPU, dtype=dtype) as (shapes, _, kwargs),
        fused_recurrent(),
    ):
        assert isinstance(shapes, ShapeOnly)
        if routes_evenly:
            shapes.assume_values(kwargs)
        for module in modules:
            module.training = False  # restored with all attributes
        last = shapes.input(torch.empty((batch, 1), dtype=torch.int64, device="meta"))
        shapes.follow_values(_MOST_ELEMENTS)
        run = _Run(model, request, shapes)
        with Operators(run.follow.around(shapes)):
            try:
                request_run = run.run(kwargs, last, make_cache, context)
            except InputError:
                raise
            except Exception as error:
                reason = obstacle_of(shapes, error)
                suffix = "" if make_cache is None else " with the cache that was passed"
                raise InputError(f"serving {type(model).__name__} on shapes failed{suffix}: {reason}") from error
        reason = obstacle_of(shapes, None)
        if reason is not None:
            raise InputError(f"serving {type(model).__name__} cannot be predicted: {reason}")
        return request_run


class _Run:
    """The state of one run."""

    def __init__(self, model: nn.Module, request: Request, shapes: ShapeOnly) -> None:
        self._model, self._request, self._shapes = model, request, shapes
        self.follow = Observer()
        self._before: frozenset[int] = frozenset()

    def run(self, kwargs: dict[str, Any], last: Tensor, make_cache: MakeCache | None, context: int) -> RequestRun:
        model, follow = self._model, self.follow
        follow.hold(model.parameters(), "params")
        follow.hold(model.buffers(), "buffers")
        held = list(tensors_in_attributes(modules_of(model)))
        follow.hold(held, "buffers")
        self._before = frozenset(map(id, held))
        weights = follow.held()
        follow.hold(tensors_of(kwargs), "inputs")
        with follow:
            if make_cache is not None:
                kwargs = {**kwargs, self._cache_name(): self._new_cache(make_cache, context)}
            name, cache, further, prefill = self._forward(kwargs)
            del kwargs
            self._shapes.checks_indices_of = model  # the last token has the last position
            again = {self._request.tokens: last, name: cache, **further, **self._request.flags}
            _, _, _, decode = self._forward(again)
        return RequestRun(prefill, decode, weights)

    def _cache_name(self) -> str:
        names = self._request.parameters
        name = next((argument for argument in ("past_key_values", "cache_params", "cache") if argument in names), None)
        if name is None:
            raise InputError(f"{type(self._model).__name__} takes no cache; leave out cache=")
        return name

    def _new_cache(self, make_cache: MakeCache, context: int) -> Any:
        cache = make_cache(self._model, context)
        if cache is None:  # the forward would make its own
            raise InputError("the function passed as cache= must return an empty cache, got None")
        return cache

    def _forward(self, kwargs: dict[str, Any]) -> tuple[str, Any, dict[str, Any], Phase]:
        """Run the model; return the name of its cache, the cache, further arguments of the next call, and the facts."""
        follow, first = self.follow, len(self.follow.inside)
        calls = 0

        def counted(call_module: Callable[..., Any]) -> Callable[..., Any]:
            def count(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                return call_module(module, *args, **kwargs)

            return count

        with calls_wrapped(counted):
            output = self._model(**kwargs)
        named_cache = cache_in(output, self._request.parameters)
        if named_cache is None:
            raise InputError(
                f"{type(self._model).__name__} returns no cache that it takes back: no field of its result, such as "
                "past_key_values, is also an argument of its forward; return the cache and take it back under one name"
            )
        first_result = next(tensors_of(output), None)
        if first_result is not None and not first_result.numel():  # a slice of positions ended before the tokens
            raise InputError(
                f"{type(self._model).__name__} returns an empty tensor of shape {list(first_result.shape)}"
            )
        further = {}
        if _ENCODER in self._request.parameters:
            encoded = getattr(output, _ENCODED, None)
            further = {} if encoded is None else {_ENCODER: Encoded((encoded,))}
        operators = [StepOperator(run, "forward", None) for run in follow.log.runs[first:]]
        alive = bytes_alive(follow.every, len(follow.inside))
        peak = max(alive[first:], default=0)
        cache = bytes_of_cache(named_cache[1], self._model, self._before, self._storage_bytes)
        storages = frozenset(id(self.follow.of(tensor)) for tensor in tensors_of(named_cache[1]))
        return *named_cache, further, Phase(operators, calls, peak, cache, storages)

    def _storage_bytes(self, tensor: Tensor) -> int:
        storage = self.follow.of(tensor)
        return storage.nbytes if storage is not None else tensor.untyped_storage().nbytes()
