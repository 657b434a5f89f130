"""Check that experts can be divided over ranks, and that they can take the tokens of other ranks.

Stacked experts run as each rank has them, one rank after the other, and are compared with the whole module. Where the
forward runs on shapes, the kinds of results are checked. Where it needs values, results and gradients are compared as
well.

To take tokens of other ranks, stacked experts must take each row of tokens by itself. A copy of the module runs on a
few tokens, all of which go to the first expert, and then on each pair of a token and an expert alone: the weighted sum
must be the same. A capacity, which drops tokens of an expert, makes a difference. The last rank runs on tokens of its
own experts, and must return what the whole module does.

Of experts in a list, each must take each row by itself, too: a copy runs on a few tokens, and on each token alone. A
forward must call all, as the rank of an expert waits for the tokens of the others. The model runs once with all tokens
at the first experts.

Dropout is left out of the runs on a few tokens, as it is drawn anew for each.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelsummary._torch import FakeTensorMode, tree_leaves
from modelsummary.capture.containers import map_tensors, tensors_of
from modelsummary.capture.devices import device_of
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of
from modelsummary.capture.run import running
from modelsummary.capture.templates import Attribute, map_template
from modelsummary.errors import InputError, in_short
from modelsummary.parallel.expert_shards import ExpertShards
from modelsummary.parallel.experts import ExpertList, StackedExperts, routing_of
from modelsummary.parallel.placements import Blocked
from modelsummary.parallel.rank_model import copied
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value, values_in
from modelsummary.record.tensors import Foreign

__all__ = [
    "Routing",
    "arguments_of",
    "mixing_experts",
    "routing_by_row",
    "runs_divided",
    "uncalled_experts",
]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_CLOSE = 1e-3  # of the largest element: sums in another order, in single precision


def arguments_of(live: LiveModel, fqns: Sequence[str]) -> dict[str, list[Arguments]]:
    """Return copies of what modules are called with, where the forward needs values; else nothing."""
    arguments: dict[str, list[Arguments]] = {}
    if live.execution != "real" or not fqns:
        return arguments

    def note(fqn: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments.setdefault(fqn, []).append(
            map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), (args, kwargs))
        )

    run = running(modules_of(live.model), live.call, on_shapes=False, grad=True)
    with run as (_, args, kwargs), ExitStack() as hooks:
        for fqn in fqns:
            module = live.model.get_submodule(fqn)
            hooks.enter_context(module.register_forward_pre_hook(partial(note, fqn), with_kwargs=True))
        live.model(*args, **kwargs)
    return arguments


def runs_divided(
    calls: Calls, stacked: StackedExperts, n_ranks: int, arguments: list[Arguments] | None
) -> StackedExperts:
    """Return experts with the parameters of which a rank may have a part. Raises ``Blocked``.

    Parameters with as many rows as experts that hold something else, such as the weight of a router, stay whole.

    Args:
        arguments: of its calls, where it needs values.
    """
    module = calls.modules[stacked.fqn]
    if not stacked.events:
        return stacked
    names = stacked.parameters
    try:
        return _checked(calls, stacked, n_ranks, arguments)
    except Blocked as blocked:
        kept = tuple(name for name in names if module.get_parameter(name).dim() >= 3)
        if kept == names:
            raise
        try:
            best = _checked(calls, _with(stacked, kept), n_ranks, arguments)
        except Blocked:
            raise blocked from None
    for name in (name for name in names if name not in kept):
        try:
            best = _checked(calls, _with(stacked, (*best.parameters, name)), n_ranks, arguments)
        except Blocked:
            continue
    return best


def _with(stacked: StackedExperts, parameters: tuple[str, ...]) -> StackedExperts:
    """Return stacked experts of which only some parameters are divided."""
    others = tuple(name for name in stacked.parameters if name not in parameters)
    return replace(stacked, parameters=parameters, shared=(*stacked.shared, *others))


def _checked(calls: Calls, stacked: StackedExperts, n_ranks: int, arguments: list[Arguments] | None) -> StackedExperts:
    if arguments is None:
        first_and_last = {0, n_ranks - 1}
        kinds = {
            _on_shapes(calls, stacked, event, n_ranks, rank) for event in stacked.events for rank in first_and_last
        }
    else:
        kinds = {_compared(calls, stacked, inputs, n_ranks) for inputs in arguments}
    if len(kinds) > 1:
        raise Blocked(f"the calls of {stacked.fqn} return different parts of the experts; equal calls work")
    (results,) = kinds
    if not any(results):
        raise Blocked(f"the results of {stacked.fqn} do not depend on parameters that can be divided")
    return stacked


def _on_shapes(calls: Calls, stacked: StackedExperts, event: Event, n_ranks: int, rank: int) -> tuple[str, ...]:
    """Return the kinds of results of one rank, from a run on shapes; in half precision if they do not run in their own.

    On shapes torch has no grouped product of float32, which its kernels take.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it prints a traceback
    is_disabled, logger.disabled = logger.disabled, True
    try:
        return _kinds_on_shapes(calls, stacked, event, n_ranks, rank, None)
    except Blocked as blocked:
        with suppress(Blocked):
            return _kinds_on_shapes(calls, stacked, event, n_ranks, rank, torch.bfloat16)
        raise blocked from None
    finally:
        logger.disabled = is_disabled


def _kinds_on_shapes(
    calls: Calls, stacked: StackedExperts, event: Event, n_ranks: int, rank: int, precision: torch.dtype | None
) -> tuple[str, ...]:
    """Return the kinds of results of one rank.

    Args:
        precision: of floating point tensors; None: their own.
    """

    def dtype_of(tensor: Any) -> torch.dtype:
        dtype: torch.dtype = tensor.dtype
        return precision if precision is not None and dtype.is_floating_point else dtype

    module = calls.modules[stacked.fqn]
    device = device_of([*module.parameters()])
    with FakeTensorMode(allow_non_fake_inputs=True):

        def fake(leaf: Any) -> Any:
            tensor = calls.tensor_of(leaf)
            if tensor is None:
                return leaf
            grad = isinstance(leaf, Value) and leaf.requires_grad and leaf.dtype.is_floating_point
            return torch.empty(tuple(tensor.shape), dtype=dtype_of(tensor), device=device, requires_grad=grad)

        def empty(tensor: Tensor, shape: Any) -> Tensor:
            return torch.empty(shape, dtype=dtype_of(tensor), device=device)

        args, kwargs = map_template(fake, event.args), map_template(fake, event.kwargs)
        ran = _run(calls, stacked, (args, kwargs), n_ranks, rank, empty)
        _backward(ran.contributions)
    expected, shapes = [
        [tuple(tensor.shape) for tensor in tensors] for tensors in (values_in(event.result), ran.contributions)
    ]
    if len(shapes) != len(expected):
        raise Blocked(f"{stacked.fqn} returns tensors in an object; a tensor, tuple, list or dict works")
    if shapes != expected:
        raise Blocked(f"{stacked.fqn} returns {expected}, and {shapes} where a rank has a part of its experts")
    return tuple(ran.results)


@dataclass
class _Ran:
    """What one rank made.

    Attributes:
        results: what makes each result whole.
        contributions: what the rank adds to each, in its whole shape.
        shards: its chunks of parameters.
        others: the other parameters.
    """

    results: list[str]
    contributions: list[Tensor]
    shards: list[Tensor]
    others: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """Return the results, and the gradients of what all ranks have."""
        return [*(tensor.detach() for tensor in self.contributions), *self.gradients(self.others)]

    @staticmethod
    def gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in tensors]


def _twin_of(
    calls: Calls, stacked: StackedExperts, chunk_of: Any, n_ranks: int
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Return a copy of a module, its parameters that are divided, and the others.

    Args:
        chunk_of: function of a tensor and the shape of the rank's chunk, that returns the tensor of the copy.
    """
    module = calls.modules[stacked.fqn]
    divided = {id(module.get_parameter(name)) for name in stacked.parameters}
    others = {id(parameter): parameter for parameter in calls.model.parameters()}
    others |= {id(buffer): chunk_of(buffer, buffer.shape) for buffer in module.buffers()}

    def like(parameter: Tensor) -> Tensor:
        rows, *sizes = parameter.shape or (1,)
        is_shard = id(parameter) in divided
        chunk: Tensor = chunk_of(parameter, (rows // n_ranks, *sizes) if is_shard else parameter.shape)
        return chunk

    try:
        twin = copied(module, like, others)
    except InputError as error:
        raise Blocked(f"{stacked.fqn}: {error}") from error
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    shards = [twin.get_parameter(name) for name, _ in module.named_parameters() if name in stacked.parameters]
    shard_ids = set(map(id, shards))
    return twin, [*shards], [parameter for parameter in twin.parameters() if id(parameter) not in shard_ids]


def _whole(calls: Calls, stacked: StackedExperts, arguments: Arguments, dtype: torch.dtype | None, seed: int) -> _Ran:
    """Run a copy of the whole module."""
    twin, shards, others = _twin_of(calls, stacked, _chunks(0, dtype), 1)
    args, kwargs = _copied(arguments, dtype)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        result = twin(*args, **kwargs)
    results = [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
    _backward(results)
    return _Ran([], results, shards, [*others, *_entered(args, kwargs)])


def _chunks(rank: int, dtype: torch.dtype | None) -> Any:
    def chunk_of(tensor: Tensor, shape: Any) -> Tensor:
        chunk = tensor.detach() if tensor.shape == shape else tensor.detach().narrow(0, rank * shape[0], shape[0])
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return chunk.to(kind, copy=True)

    return chunk_of


def _copied(arguments: Arguments, dtype: torch.dtype | None) -> Arguments:
    def copied(tensor: Tensor) -> Tensor:
        leaf: Tensor = _chunks(0, dtype)(tensor, tensor.shape)
        return leaf.requires_grad_(tensor.requires_grad)

    result: Arguments = map_tensors(copied, arguments)
    return result


def _entered(args: Any, kwargs: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_of((args, kwargs)) if tensor.requires_grad]


def _plus(one: Tensor, other: Tensor) -> Tensor:
    return one + other if one.is_floating_point() else one


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Return True if two results are equal apart from the order of sums in their precision."""
    if not one.is_floating_point() or not one.numel():
        return one.shape == other.shape
    close = 1e-6 if one.dtype == torch.float64 else _CLOSE if one.dtype == torch.float32 else 30 * _CLOSE
    return one.shape == other.shape and bool((one - other).abs().max() <= close * one.abs().max().clamp(min=1e-6))


def _run(calls: Calls, stacked: StackedExperts, arguments: Arguments, n_ranks: int, rank: int, chunk_of: Any) -> _Ran:
    """Run a copy of the module with the experts of one rank. Raises ``Blocked``.

    Args:
        chunk_of: as for ``twin_of``.
    """
    twin, shards, others = _twin_of(calls, stacked, chunk_of, n_ranks)
    args, kwargs = arguments
    protected = [*tensors_of((args, kwargs)), *twin.buffers()]
    mode = ExpertShards(rank, n_ranks, shards, protected, strict=True)
    try:
        with torch.enable_grad(), mode:
            result = twin(*args, **kwargs)
        held = [tensor for module in twin.modules() for tensor in vars(module).values() if isinstance(tensor, Tensor)]
        if any(mode.kind(tensor) for tensor in held):
            raise Blocked(f"{stacked.fqn} keeps results of experts in an attribute; returning them works")
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return _Ran(
            [_OPERATIONS[mode.kind(leaf)] for leaf in leaves],
            [mode.sum_of(leaf) for leaf in leaves],
            shards,
            [*others, *_entered(args, kwargs)],
        )
    except ExpertShards.Refused as refused:
        raise Blocked(f"in {stacked.fqn}, {refused}") from None
    except Blocked:
        raise
    except Exception as error:
        raise Blocked(
            f"the forward of {stacked.fqn} does not run on a part of its experts: {in_short(error)}"
        ) from error


_OPERATIONS = {"": "", "shard": "all_gather", "rows": "all_reduce", "sum": "all_reduce"}


def _backward(results: Sequence[Tensor]) -> None:
    losses = [
        (
            result
            * torch.linspace(0.5, 1.5, result.numel(), device=result.device, dtype=result.dtype).view(result.shape)
        ).sum()
        for result in results
        if result.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()


def _compared(calls: Calls, stacked: StackedExperts, arguments: Arguments, n_ranks: int) -> tuple[str, ...]:
    """Return the kinds of results, after comparing the sum over all ranks with the whole module, and gradients."""
    for dtype in (torch.float64, None):  # some products have no kernel for double precision
        try:
            whole, again = (_whole(calls, stacked, arguments, dtype, seed) for seed in (0, 1))
            break
        except Exception as error:
            if dtype is None:
                raise Blocked(f"the forward of {stacked.fqn} cannot be repeated: {in_short(error)}") from error
    rans = [
        _run(calls, stacked, _copied(arguments, dtype), n_ranks, rank, _chunks(rank, dtype)) for rank in range(n_ranks)
    ]
    for ran in rans:
        _backward(ran.contributions)
    sums = [reduce(_plus, parts) for parts in zip(*(ran.tensors() for ran in rans), strict=True)]
    sums += [torch.cat(parts) for parts in zip(*(ran.gradients(ran.shards) for ran in rans), strict=True)]
    expected, other = ([*ran.tensors(), *ran.gradients(ran.shards)] for ran in (whole, again))
    if all(map(_are_close, expected, other)) and not all(map(_are_close, expected, sums)):  # else it is random
        raise Blocked(f"the sum over the ranks of what {stacked.fqn} computes differs from what it computes as a whole")
    return tuple(rans[0].results)


# ------------------------------------------------------------------------------------------------------- rows of tokens


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
    if not _are_close(whole, summed):
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
    module, _, _ = _twin_of(calls, stacked, _draws(generator, dtype), 1)
    drawn, n_local = _draws(torch.Generator().manual_seed(0), dtype), stacked.number // n_ranks

    def last_chunk(tensor: Tensor, shape: Any) -> Tensor:
        values = drawn(tensor, tensor.shape)
        return values if values.shape == shape else values[-n_local:]

    last, shards, _ = _twin_of(calls, stacked, last_chunk, n_ranks)
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
    if _are_close(whole, rows):
        return ""
    return (
        f"the result of {event.fqn} is not what it makes of each token by itself, as with a norm over tokens, or with "
        "random numbers; dispatch='all_reduce' works"
    )


def _ran_by_row(calls: Calls, event: Event, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what an expert of a list makes of a few tokens, and what it makes of each alone, as rows."""
    generator = torch.Generator().manual_seed(0)
    alone = StackedExperts(event.fqn, 1, (), (), (), (event,))
    module, _, _ = _twin_of(calls, alone, _draws(generator, dtype), 1)
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
