"""Check that experts can take the tokens of other ranks.

Stacked experts must take each row of tokens by itself. A copy of the module runs on a few tokens, all of which go to
the first expert, and then on each pair of a token and an expert alone: the weighted sum must be the same. A capacity,
which drops tokens of an expert, makes a difference. The last rank runs on tokens of its own experts, and must return
what the whole module does.

Of experts in a list, each must take each row by itself, too: a copy runs on a few tokens, and on each token alone. A
forward must call all, as the rank of an expert waits for the tokens of the others. The model runs once with all tokens
at the first experts.

Dropout is left out of these runs of copies, as it is drawn anew for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of
from modelsummary.capture.run import running
from modelsummary.capture.templates import Attribute, map_template
from modelsummary.errors import in_short
from modelsummary.parallel.expert_check import are_close, twin_of
from modelsummary.parallel.expert_shards import ExpertShards
from modelsummary.parallel.experts import ExpertList, StackedExperts, routing_of
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value
from modelsummary.record.tensors import Foreign

__all__ = ["Routing", "mixing_experts", "routing_by_row", "uncalled_experts"]

_TOKENS = 4
_DROPS = "dropout"  # in the names of torch's functions that set random elements to zero


class Routing(NamedTuple):
    """The arguments by which experts take tokens: positions or names.

    Attributes:
        tokens: of the tokens.
        numbers: of the numbers of the experts that each token goes to.
        weights: of the weights of these experts.
    """

    tokens: int | str
    numbers: int | str
    weights: int | str


def routing_by_row(calls: Calls, stacked: StackedExperts, n_ranks: int, checked: set[Hashable]) -> Routing:
    """Return the arguments by which experts take tokens, each by itself. Raises ``Blocked`` if they do not.

    Args:
        n_ranks: that share out the experts.
        checked: kinds of experts of which this is known; another kind is added.
    """
    if not stacked.events:
        raise Blocked(
            "the forward does not call it, so nothing says how it takes tokens; an input that reaches it works"
        )
    routes = {routing_of(event) for event in stacked.events}
    if len(routes) != 1:
        raise Blocked(
            f"the calls of {stacked.fqn} take expert numbers and weights as different arguments; equal arguments work"
        )
    ((numbers, weights),) = routes
    tokens = [key for key in stacked.summed if key != weights]
    if len(tokens) != 1:
        raise Blocked(f"{stacked.fqn} takes {len(tokens)} tensors besides expert numbers and weights; one works")
    routing = Routing(tokens[0], numbers, weights)
    _check_rows(calls, stacked, routing, n_ranks, checked)
    return routing


def _check_rows(calls: Calls, stacked: StackedExperts, routing: Routing, n_ranks: int, checked: set[Hashable]) -> None:
    """Raise ``Blocked`` for experts whose result is not the weighted sum of what they make of each token by itself."""
    event, kind = stacked.events[0], (_kind(calls.modules[stacked.fqn]), routing)
    if kind in checked:
        return
    arguments: dict[Any, Any] = {**dict(enumerate(event.args)), **event.kwargs}
    tokens, numbers = arguments[routing.tokens], arguments[routing.numbers]
    others = [key for key, value in arguments.items() if isinstance(value, (Value, Foreign)) and key not in routing]
    if others:
        raise Blocked(f"{stacked.fqn} takes the tensor {others[0]!r}, too; tokens, expert numbers and weights work")
    if not isinstance(event.result, Value) or event.result.shape[:-1] != tokens.shape[:-1]:
        raise Blocked(f"{stacked.fqn} does not return a row for each token; a tensor of the shape of the tokens works")
    if any(not tensor.dim() for tensor in map(calls.modules[stacked.fqn].get_parameter, stacked.shared)):
        raise Blocked(
            f"{stacked.fqn} has a parameter without dimensions, which FSDP cannot shard; one of one element works"
        )
    whole, summed = _in_widest(stacked.fqn, partial(_ran, calls, stacked, event, routing, tokens, numbers, n_ranks))
    if not are_close(whole, summed):
        raise Blocked(
            f"the result of {stacked.fqn} is not the weighted sum of what its experts make of each token by itself, as "
            "with a capacity that drops tokens, or with random numbers; dispatch='all_reduce' works"
        )
    checked.add(kind)


def _in_widest(fqn: str, run: Callable[[torch.dtype], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the two results of a run in the widest dtype in which it runs. Raises ``Blocked`` if it runs in none."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # some products have no kernel for double precision
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), _WithoutDropout():
                return run(dtype)
        except Blocked:
            raise
        except Exception as error:
            failed = error
    why = f"{fqn} cannot be tried with a few tokens on the CPU: {in_short(failed)}"
    raise Blocked(f"{why}; dispatch='all_reduce' works") from failed


class _WithoutDropout(TorchFunctionMode):
    """Lets dropout return what it takes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _DROPS in getattr(function, "__name__", ""):
            return args[0] if args else (kwargs or {})["input"]
        return function(*args, **(kwargs or {}))


def _kind(module: nn.Module) -> Hashable:
    """Return what equal experts have in common: class, shapes, and attributes; integers may number the layers."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    attributes = [(name, value) for name, value in vars(module).items() if isinstance(value, (float, bool, str))]
    return type(module), shapes, tuple(attributes)


def _ran(
    calls: Calls,
    stacked: StackedExperts,
    event: Event,
    routing: Routing,
    tokens: Value,
    numbers: Value,
    n_ranks: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what experts make of a few tokens, and the same by other ways.

    It is the weighted sum of what they make of each token by itself, and for tokens of its own experts what the last
    rank makes of them.
    """
    generator = torch.Generator().manual_seed(0)
    module, _, _ = twin_of(calls, stacked, _draws(generator, dtype), 1)
    drawn, n_local = _draws(torch.Generator().manual_seed(0), dtype), stacked.number // n_ranks

    def last_chunk(tensor: Tensor, shape: Any) -> Tensor:
        values = drawn(tensor, tensor.shape)
        return values if values.shape == shape else values[-n_local:]

    last, shards, _ = twin_of(calls, stacked, last_chunk, n_ranks)
    mode = ExpertShards(n_ranks - 1, n_ranks, shards, alone=True)
    n_choices = prod(numbers.shape) // prod(tokens.shape[:-1])
    has_choices = len(numbers.shape) >= len(tokens.shape) or n_choices > 1

    def result(rows: Tensor, experts: Tensor, weights: Tensor, *, is_last: bool = False) -> Tensor:
        shape = [*[1] * (len(numbers.shape) - 1 - has_choices), *experts.shape[: 1 + has_choices]]
        values = {
            routing.tokens: rows.view(*[1] * (len(tokens.shape) - 2), *rows.shape),
            routing.numbers: experts.view(shape).to(numbers.dtype),
            routing.weights: weights.view(shape),
        }

        def other(leaf: Any) -> Any:
            return torch.zeros(calls.shape_of(leaf) or (), dtype=dtype) if isinstance(leaf, Attribute) else leaf

        args = tuple(values.get(key, map_template(other, value)) for key, value in enumerate(event.args))
        kwargs = {key: values.get(key, map_template(other, value)) for key, value in event.kwargs.items()}
        with mode if is_last else nullcontext():
            (out,) = tensors_of((last if is_last else module)(*args, **kwargs))
        summed: Tensor = mode.sum_of(out)
        return summed.flatten(0, -2)

    rows = torch.randn(_TOKENS, tokens.shape[-1], generator=generator, dtype=dtype)
    weights = torch.rand(_TOKENS, n_choices, generator=generator, dtype=dtype) + 0.2
    others = torch.arange(_TOKENS)[:, None] + torch.arange(n_choices - 1)
    experts = torch.cat([torch.zeros(_TOKENS, 1, dtype=torch.long), 1 + others % (stacked.number - 1)], 1)
    whole = result(rows, experts, weights)
    parts = [
        result(rows[n, None], experts[n, None, k, None], torch.ones(1, 1, dtype=dtype)) * weights[n, k]
        for n in range(_TOKENS)
        for k in range(n_choices)
    ]
    of_last = rows, stacked.number - 1 - torch.arange(_TOKENS)[:, None] % n_local, weights[:, :1]
    summed = torch.cat(parts).unflatten(0, (_TOKENS, n_choices)).sum(1)
    return torch.cat([whole, result(*of_last)]), torch.cat([summed, result(*of_last, is_last=True)])


def _draws(generator: torch.Generator, dtype: torch.dtype) -> Callable[[Tensor, Any], Tensor]:
    """Return a function that draws the values of a parameter or buffer."""

    def drawn(tensor: Tensor, shape: Any) -> Tensor:
        """Return values of a shape in the memory of one expert: the next one has the same values, eight places on."""
        if not tensor.is_floating_point():
            return torch.zeros(shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu().clone()
        strides = [*[8] * (len(shape) - 2), *[shape[-1]] * (len(shape) > 1), *[1] * bool(shape)]
        n_values = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        values = torch.randn(n_values, generator=generator, dtype=dtype)
        return (values / (shape[-1] if shape else 1) ** 0.5).as_strided(shape, strides)

    return drawn


# ---------------------------------------------------------------------------------------------------- lists


def mixing_experts(calls: Calls, lists: Sequence[ExpertList]) -> dict[str, str]:
    """Return FQN of a list whose experts do not take each row by itself -> why that is refused."""
    failures: dict[Hashable, str] = {}  # kind of an expert -> why; empty for one that does
    reasons: dict[str, str] = {}
    for experts in lists:
        for event in experts.events:
            kind = _kind(calls.modules[event.fqn]), len(event.args[0].shape)
            if kind not in failures:
                failures[kind] = _mixes(calls, event)
            if failures[kind]:
                reasons.setdefault(experts.fqn, failures[kind])
    return reasons


def _mixes(calls: Calls, event: Event) -> str:
    """Return why an expert of a list does not take each row by itself; empty if it does."""
    try:
        whole, rows = _in_widest(event.fqn, partial(_ran_by_row, calls, event))
    except Blocked as blocked:
        return str(blocked)
    if are_close(whole, rows):
        return ""
    return (
        f"the result of {event.fqn} is not what it makes of each token by itself, as with a norm over tokens, or with "
        "random numbers; dispatch='all_reduce' works"
    )


def _ran_by_row(calls: Calls, event: Event, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what an expert of a list makes of a few tokens, and what it makes of each alone, as rows."""
    generator = torch.Generator().manual_seed(0)
    alone = StackedExperts(event.fqn, 1, (), (), (), (event,))
    module, _, _ = twin_of(calls, alone, _draws(generator, dtype), 1)
    (taken,) = event.args
    x = torch.randn(*[2] * (len(taken.shape) - 1), taken.shape[-1], generator=generator, dtype=dtype)
    rows = x.reshape(-1, x.shape[-1])
    return module(x).reshape(len(rows), -1), torch.cat([module(row[None]) for row in rows])


class _FirstExperts(TorchFunctionMode):
    """Lets all tokens choose the first experts.

    Args:
        counts: numbers of experts among which a forward chooses.
    """

    def __init__(self, counts: Collection[int]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        scores = next(iter((*args, *(kwargs or {}).values())), None)
        is_choice = getattr(function, "__name__", "") in ("topk", "sort", "argsort", "max", "argmax")
        if not (is_choice and isinstance(scores, Tensor) and scores.is_floating_point() and scores.dim()):
            return result
        numbers = result if isinstance(result, Tensor) else result[-1]
        is_of_experts = scores.shape[-1] in self.counts and numbers.shape[: scores.dim() - 1] == scores.shape[:-1]
        if numbers.is_floating_point() or not is_of_experts:
            return result
        has_dim = numbers.dim() == scores.dim()
        first = torch.arange(numbers.shape[-1], device=numbers.device) if has_dim else torch.zeros_like(numbers)
        first = first.expand_as(numbers).contiguous()
        if isinstance(result, Tensor):
            return first
        values = scores.gather(-1, first if has_dim else first[..., None])
        return type(result)((values if has_dim else values[..., 0], first))


def uncalled_experts(live: LiveModel, calls: Calls, lists: Sequence[ExpertList]) -> dict[str, str]:
    """Return FQN of a list of which a forward does not call all experts equally often -> why that is refused."""
    if live.execution != "real":
        chosen = {event.fqn for event in calls.events if event.name in ("where", "nonzero", "masked_select")}
        why = "which experts are called may depend on values, of which the model has none; load its weights first"
        return {experts.fqn: why for experts in lists if any(_is_around(fqn, experts) for fqn in chosen)}
    n_calls: Counter[nn.Module] = Counter()
    members = {experts.fqn: list(live.model.get_submodule(experts.fqn).children()) for experts in lists}
    run = running(modules_of(live.model), live.call, on_shapes=False, grad=False)
    with run as (_, args, kwargs), ExitStack() as hooks:
        for expert in (expert for group in members.values() for expert in group):
            hooks.enter_context(expert.register_forward_pre_hook(lambda module, _args: n_calls.update([module])))
        try:
            with _FirstExperts({experts.number for experts in lists}):
                live.model(*args, **kwargs)
        except Exception as error:
            why = f"the forward raises with all tokens at the first experts ({in_short(error)})"
            return dict.fromkeys(members, f"{why}; dispatch='all_reduce' works")
    why = "an expert without tokens is not called, and its rank waits for the tokens of all; calls without tokens work"
    return {fqn: why for fqn, group in members.items() if len({n_calls[expert] for expert in group}) > 1}


def _is_around(fqn: str, experts: ExpertList) -> bool:
    """Return True if a module holds these experts."""
    return f"{experts.fqn}.".startswith(f"{fqn}." if fqn else "")
