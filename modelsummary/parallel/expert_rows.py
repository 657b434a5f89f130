"""Check that experts can take the tokens of other ranks.

Stacked experts must take each row of tokens by itself. A copy of the module runs on a few tokens, all of which go to
the first expert, and then on each pair of a token and an expert alone: the weighted sum must be the same. A capacity,
which drops tokens of an expert, makes a difference.

Of experts in a list, a forward must call all, as the rank of an expert waits for the tokens of the others. The model
runs once with all tokens at the first experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
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
from modelsummary.parallel.experts import ExpertList, StackedExperts, routing_of
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value
from modelsummary.record.tensors import Foreign

__all__ = ["Routing", "routing_by_row", "uncalled_experts"]

_TOKENS = 4


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


def routing_by_row(calls: Calls, stacked: StackedExperts, checked: set[Hashable]) -> Routing:
    """Return the arguments by which experts take tokens, each by itself. Raises ``Blocked`` if they do not.

    Args:
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
    _check_rows(calls, stacked, routing, checked)
    return routing


def _check_rows(calls: Calls, stacked: StackedExperts, routing: Routing, checked: set[Hashable]) -> None:
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
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # some products have no kernel for double precision
        try:
            whole, summed = _ran(calls, stacked, event, routing, tokens, numbers, dtype)
            break
        except Blocked:
            raise
        except Exception as error:
            if dtype is torch.bfloat16:
                why = f"{stacked.fqn} cannot be tried with a few tokens on the CPU: {in_short(error)}"
                raise Blocked(f"{why}; dispatch='all_reduce' works") from error
    if not are_close(whole, summed):
        raise Blocked(
            f"the result of {stacked.fqn} is not the weighted sum of what its experts make of each token by itself, as "
            "with a capacity that drops tokens; dispatch='all_reduce' works"
        )
    checked.add(kind)


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
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return what experts make of a few tokens, and the weighted sum of what they make of each token by itself."""
    generator = torch.Generator().manual_seed(0)

    def drawn(tensor: Tensor, shape: Any) -> Tensor:
        """Return values of a shape in the memory of one expert: the next one has the same values, eight places on."""
        if not tensor.is_floating_point():
            return torch.zeros(shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu().clone()
        strides = [*[8] * (len(shape) - 2), *[shape[-1]] * (len(shape) > 1), *[1] * bool(shape)]
        n_values = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        values = torch.randn(n_values, generator=generator, dtype=dtype)
        return (values / (shape[-1] if shape else 1) ** 0.5).as_strided(shape, strides)

    module, _, _ = twin_of(calls, stacked, drawn, 1)
    n_choices = prod(numbers.shape) // prod(tokens.shape[:-1])
    has_choices = len(numbers.shape) >= len(tokens.shape) or n_choices > 1

    def result(rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
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
        (out,) = tensors_of(module(*args, **kwargs))
        return out.flatten(0, -2)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
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
    return whole, torch.cat(parts).unflatten(0, (_TOKENS, n_choices)).sum(1)


# ---------------------------------------------------------------------------------------------------- lists


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
        if not (is_choice and isinstance(scores, Tensor) and scores.dim() and scores.shape[-1] in self.counts):
            return result
        numbers = result if isinstance(result, Tensor) else result[-1]
        if numbers.is_floating_point() or numbers.shape[: scores.dim() - 1] != scores.shape[:-1]:
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
    handles = []
    with running(modules_of(live.model), live.call, on_shapes=False, grad=False) as (_, args, kwargs):
        try:
            for expert in (expert for group in members.values() for expert in group):
                handles.append(expert.register_forward_pre_hook(lambda module, _args: n_calls.update([module])))
            with _FirstExperts({experts.number for experts in lists}):
                live.model(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
    why = "an expert without tokens is not called, and its rank waits for the tokens of all; calls without tokens work"
    return {fqn: why for fqn, group in members.items() if len({n_calls[expert] for expert in group}) > 1}


def _is_around(fqn: str, experts: ExpertList) -> bool:
    """Return True if a module holds these experts."""
    return f"{experts.fqn}.".startswith(f"{fqn}." if fqn else "")
