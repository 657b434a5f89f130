"""Requests on shapes: the prompt and one further token, their operators and their memory; run once for each size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

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
from modelsummary.operators.kernels import Kernel, StepOperator
from modelsummary.serving.cache import CacheBytes, MakeCache, bytes_of_cache, cache_in
from modelsummary.serving.request import Request

__all__ = ["Encoded", "Phase", "PhaseTime", "Points", "run_request", "times_of"]

_CPU = torch.device("cpu")
_MOST_ELEMENTS = 2**25  # of positions and padding masks whose values are followed: batch x context
_MOST_OPERATORS = 10_000  # of the prompt of one run; about a second
_PROBES = (64, 128, 256)  # multiples of the chunks in which linear attention works
_FEW = _PROBES[-1]  # tokens that are always run
_ODDS = 0.5  # more operators of a longer prompt, as a fraction of the operators of a token: masks, but no loop
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


class PhaseTime(NamedTuple):
    """The time of a forward.

    Attributes:
        seconds: the time, with the collectives, which wait for the kernels.
        collective_seconds: the part of the collectives.
        limited_by: ``"compute"``, ``"memory"`` or ``"launches"`` of kernels, whichever most of the device's time goes
            to; ``"host"`` if dispatching takes longer, on this machine with operators that take no longer than that;
            ``"links"`` if collectives take longer than all kernels.
    """

    seconds: float
    collective_seconds: float
    limited_by: str


@dataclass(frozen=True)
class Phase:
    """One forward of a batch of requests: of their prompts (prefill), or of one further token of each (decode).

    What a block that stands for several equal ones calls and holds counts for all of them.

    Attributes:
        operators: its operators in order. Their ``row`` is the FQN of a block that stands for others, and the number of
            blocks that it counts for; None of other operators.
        n_calls: number of calls of modules.
        weight_bytes: bytes of parameters and buffers.
        workspace_bytes: bytes that it holds beside weights and cache at the peak.
        cache: the cache after it, of all requests.
        cache_storages: identities of the storages behind the cache, as operators name them.
        time: the time that it takes on a device; None: it was not asked for.
    """

    operators: list[StepOperator]
    n_calls: int
    weight_bytes: int
    workspace_bytes: int
    cache: CacheBytes
    cache_storages: frozenset[int] = frozenset()
    time: PhaseTime | None = None

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one time, weights and cache included."""
        return self.weight_bytes + self.cache.held_bytes + self.workspace_bytes

    @property
    def timed(self) -> PhaseTime:
        """The time that it takes, of a phase that was timed."""
        assert self.time is not None
        return self.time

    @property
    def seconds(self) -> float:
        """The seconds that it takes, of a phase that was timed."""
        return self.timed.seconds


def times_of(operator: StepOperator | Kernel) -> int:
    """Return for how many equal blocks an operator of a phase, or a kernel, counts."""
    return 1 if operator.row is None else operator.row[1]


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
    decodes: bool = True,
    times: Mapping[str, int] | None = None,
) -> list[Phase]:
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
        decodes: the last token runs, too.
        times: FQN of a block that counts for another number of equal ones than 1 -> the number.

    Returns:
        The phases that ran: prefill, and decode.

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
        run = _Run(model, request, shapes, times or {})
        with Operators(run.follow.around(shapes)):
            try:
                phases = run.run(kwargs, last if decodes else None, make_cache, context)
            except InputError:
                raise
            except Exception as error:
                reason = obstacle_of(shapes, error)
                suffix = "" if make_cache is None else " with the cache that was passed"
                raise InputError(f"serving {type(model).__name__} on shapes failed{suffix}: {reason}") from error
        reason = obstacle_of(shapes, None)
        if reason is not None:
            raise InputError(f"serving {type(model).__name__} cannot be predicted: {reason}")
        return phases


class _Run:
    """The state of one run."""

    def __init__(self, model: nn.Module, request: Request, shapes: ShapeOnly, times: Mapping[str, int]) -> None:
        self._model, self._request, self._shapes, self._times = model, request, shapes, times
        self._block_of = {id(model.get_submodule(fqn)): fqn for fqn in times}
        self._rows: dict[int, tuple[str, int]] = {}  # number of an operator -> the block that it is in, and its times
        self.follow = Observer()
        self._before: frozenset[int] = frozenset()
        self._held = self._weights = 0  # bytes of the weights on the shard, and of all equal blocks

    def run(
        self, kwargs: dict[str, Any], last: Tensor | None, make_cache: MakeCache | None, context: int
    ) -> list[Phase]:
        model, follow = self._model, self.follow
        follow.hold(model.parameters(), "params")
        follow.hold(model.buffers(), "buffers")
        held = list(tensors_in_attributes(modules_of(model)))
        follow.hold(held, "buffers")
        self._before = frozenset(map(id, held))
        self._held = follow.held()
        self._weights = self._held + self._not_held()
        follow.hold(tensors_of(kwargs), "inputs")
        with follow:
            if make_cache is not None:
                kwargs = {**kwargs, self._cache_name(): self._new_cache(make_cache, context)}
            name, cache, further, prefill = self._forward(kwargs)
            del kwargs
            if last is None:
                return [prefill]
            self._shapes.checks_indices_of = model  # the last token has the last position
            again = {self._request.tokens: last, name: cache, **further, **self._request.flags}
            _, _, _, decode = self._forward(again)
        return [prefill, decode]

    def _not_held(self) -> int:
        """Return the bytes of weights of the equal blocks that others stand for."""
        blocks: dict[int, str] = {}  # identity of a storage -> the one block that holds it; "" for others
        storages: dict[int, int] = {}
        named = [self._model.named_parameters, self._model.named_buffers] if self._times else []
        for fqn, tensor in chain.from_iterable(of_all(remove_duplicate=False) for of_all in named):
            storage = self.follow.of(tensor)
            if storage is not None:
                block = next((block for block in self._times if fqn.startswith(f"{block}.")), "")
                blocks[id(storage)] = block if blocks.get(id(storage), block) == block else ""
                storages[id(storage)] = storage.nbytes
        return sum((self._times.get(block, 1) - 1) * storages[key] for key, block in blocks.items())

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
        calls, times = 0, 1

        def counted(call_module: Callable[..., Any]) -> Callable[..., Any]:
            def count(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                nonlocal calls, times
                block = self._block_of.get(id(module))
                begin, around = len(follow.inside), times
                times = times if block is None else self._times[block]
                calls += times
                output = call_module(module, *args, **kwargs)
                times = around
                if block is not None:
                    row = block, self._times[block]
                    self._rows.update(dict.fromkeys(range(begin, len(follow.inside)), row))
                return output

            return count

        with calls_wrapped(counted):
            output = self._model(**kwargs)
        named_cache = cache_in(output, self._request.parameters)
        if named_cache is None:
            raise InputError(
                f"{type(self._model).__name__} returns no cache that it takes back: no field of its result is also an "
                "argument of its forward, as past_key_values is; return the cache and take it back under one name; "
                "of a model that answers in one forward, such as an encoder, ask estimate_latency() and memory()"
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
        operators = [
            StepOperator(run, "forward", self._rows.get(index))
            for index, run in enumerate(follow.log.runs[first:], start=first)
        ]
        alive = bytes_alive(follow.every, len(follow.inside))
        peak = max(alive[first:], default=0)
        cache, held = bytes_of_cache(named_cache[1], self._model, self._before, self._storage)
        storages = frozenset(id(follow.of(tensor)) for tensor in tensors_of(named_cache[1]))
        workspace = peak - self._held - held
        return *named_cache, further, Phase(operators, calls, self._weights, workspace, cache, storages)

    def _storage(self, tensor: Tensor) -> tuple[int, int]:
        """Return the bytes of the storage behind a tensor, and for how many equal blocks it counts."""
        storage = self.follow.of(tensor)
        if storage is None:
            return tensor.untyped_storage().nbytes(), 1
        _, times = self._rows.get(storage.born, ("", 1))
        return storage.nbytes, 1 if storage.kind else times


class Points:
    """Phases that are run when they are first asked for.

    A forward that works through its tokens one by one, or in chunks, has more operators for longer prompts. If a run
    would have too many, its figures follow the line through two shorter runs.

    Args:
        run: runs a batch of requests of a context on shapes, and tells their prefill, and if asked their decode.
        error: the largest difference between the times of few equal blocks, which run, and of all, as a fraction.

    Attributes:
        extrapolated_from: the longest context that was run if others were extrapolated, else None.
    """

    def __init__(self, run: Callable[[int, int, bool], list[Phase]], error: float = 0.0) -> None:
        self._run, self.error = run, error
        self._phases: dict[tuple[int, int], list[Phase]] = {}
        self._per_token = 0.0
        self.extrapolated_from: int | None = None

    def prefill(self, batch: int, context: int) -> Phase:
        """Return the forward of ``batch`` prompts of ``context - 1`` tokens."""
        return self._of(batch, context, decodes=False)[0]

    def decode(self, batch: int, context: int) -> Phase:
        """Return the forward of the last of ``context`` tokens of ``batch`` requests."""
        return self._of(batch, context, decodes=True)[1]

    def _of(self, batch: int, context: int, *, decodes: bool) -> list[Phase]:
        key = batch, context
        if len(self._phases.get(key, ())) < 1 + decodes:
            longest = self._longest(context)
            if context <= longest:
                self._phases[key] = self._run(batch, context, decodes)
            else:
                self._phases[key] = self._on_line(batch, context, longest, decodes=decodes)
        return self._phases[key]

    def _longest(self, context: int) -> int:
        """Return the longest context that may be run, a multiple of the chunks of linear attention."""
        if context <= _FEW:
            return context
        self._per_token = self._per_token or self._growth()
        if self._per_token * context <= _MOST_OPERATORS:
            return context
        return max(_FEW, int(_MOST_OPERATORS / self._per_token) // _FEW * _FEW)

    def _growth(self) -> float:
        """Return the operators that a prompt has more for each of its tokens, 0 as long as no run shows any.

        Masks and windows add operators once. Prompts that grow with each probe work through tokens or chunks; chunks
        that are longer than the probes show in the longest run, by as many operators as half a token has.
        """
        few, more = map(self._operators, _PROBES[:2])
        if more > few:
            more_again, tokens = self._operators(_PROBES[2]) - more, _PROBES[2] - _PROBES[1]
            if more_again > 0:
                return more_again / tokens
        batch, longest = max(self._phases, key=lambda key: key[1])
        many, of_one = (len(phase.operators) for phase in (self.prefill(batch, longest), self.decode(1, _PROBES[0])))
        return (many - more) / (longest - _PROBES[1]) if many - more > _ODDS * of_one else 0.0

    def _operators(self, context: int) -> int:
        """Return the number of operators of a prompt."""
        return len(self.prefill(1, context).operators)

    def _on_line(self, batch: int, context: int, longest: int, *, decodes: bool) -> list[Phase]:
        self.extrapolated_from = longest
        part = (context - longest) / (longest - longest // 2)
        lower, upper = (self._of(batch, tokens, decodes=decodes) for tokens in (longest // 2, longest))
        return [_between(*pair, part) for pair in zip(lower, upper, strict=False)]


def _between(lower: Phase, upper: Phase, part: float) -> Phase:
    """Return the phase on the line through two, at a part of their distance behind the upper one."""

    def of(low: float, high: float) -> float:
        return high + part * (high - low)

    early, late = lower.timed, upper.timed
    return replace(
        upper,
        cache=upper.cache._replace(
            nbytes=round(of(lower.cache.nbytes, upper.cache.nbytes)),
            held_bytes=round(of(lower.cache.held_bytes, upper.cache.held_bytes)),
        ),
        workspace_bytes=round(of(lower.workspace_bytes, upper.workspace_bytes)),
        time=late._replace(
            seconds=of(early.seconds, late.seconds),
            collective_seconds=of(early.collective_seconds, late.collective_seconds),
        ),
    )
