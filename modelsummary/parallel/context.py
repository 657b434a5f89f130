"""Context parallelism: each rank has a chunk of the tokens, and torch's ring attention sees all chunks.

``torch.distributed.tensor.experimental.context_parallel`` replaces ``F.scaled_dot_product_attention``. Everything else
must do with the tokens of a chunk what it does with all of them: the record is followed from inputs that are cut along
the sequence, and is compared with a forward of one chunk. Tables with a row for each token, such as rotary
positions, are cut, too, if they are buffers. Functions of integers that count tokens, such as positions and shifted
labels, get the tokens of all ranks (``modelsummary.parallel.whole_calls``).
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from modelsummary.capture.inputs import CallArguments, InputTensor
from modelsummary.capture.live import LiveModel
from modelsummary.capture.templates import Attribute
from modelsummary.errors import InputError
from modelsummary.parallel.expert_check import routing_by_row
from modelsummary.parallel.experts import find_experts
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.local_check import calls_of_chunk, chunk_failure
from modelsummary.parallel.placements import Blocked, Partial, Placement, Shard, WrongPlacement
from modelsummary.parallel.propagation import Propagation, first_complete
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.whole_calls import CountedTokens, whole_calls
from modelsummary.record.events import Event, Value, values_in

__all__ = ["chunk_of", "length_of", "ring_plan", "with_tokens"]

_TOKENS = Shard(2)  # of queries, keys and values: [batch, heads, tokens, features]
_LOSS = Partial("avg")  # a rank's share of it
_MOST_ATTEMPTS = 100


def length_of(call: CallArguments) -> int:
    """Return the tokens of a call's first input; 0 if it holds neither token numbers nor features of tokens."""
    tensors: list[InputTensor] = []

    def note(tensor: InputTensor) -> tuple[int, ...]:
        tensors.append(tensor)
        return tensor.shape

    call.with_shapes(note)
    is_sequence = bool(tensors) and len(tensors[0].shape) == (3 if tensors[0].is_floating else 2)
    return tensors[0].shape[1] if is_sequence else 0


def chunk_of(call: CallArguments, n_ranks: int, whole: Collection[int | str] = ()) -> CallArguments:
    """Return a call with the tokens of one rank.

    Args:
        whole: positions and names of arguments that keep the tokens of all ranks.
    """
    return with_tokens(call, length_of(call) // n_ranks, whole)


def with_tokens(call: CallArguments, tokens: int, whole: Collection[int | str] = ()) -> CallArguments:
    """Return a call with another number of tokens.

    Args:
        whole: positions and names of arguments that stay as they are.
    """
    length = length_of(call)

    def shape_of(tensor: InputTensor) -> tuple[int, ...]:
        shape = tensor.shape
        dim = None if tensor.argument in whole else _token_dim(shape, length)
        return shape if dim is None else (*shape[:dim], tokens, *shape[dim + 1 :])

    return call.with_shapes(shape_of)


def _token_dim(shape: tuple[int, ...], length: int) -> int | None:
    """Return the dimension of the tokens in an input: the second, or the only one; None if it has no tokens.

    >>> _token_dim((2, 8, 64), 8), _token_dim((8,), 8), _token_dim((2, 64), 8)
    (1, 0, None)
    """
    dim = min(1, len(shape) - 1)
    return dim if dim >= 0 and shape[dim] == length else None


def ring_plan(live: LiveModel, calls: Calls, n_ranks: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what has to be cut so that the model runs on chunks of the sequence, as fields of ``ParallelPlan``.

    The second result has the FQNs of the modules that call ``scaled_dot_product_attention``.

    Raises:
        InputError: it does not run on them, or the ranks do not divide the sequence.
    """
    name = f"context={n_ranks}: {type(live.model).__name__}"
    if torch.__version__ < "2.14":
        raise InputError(f"{name} needs torch >= 2.14, got {torch.__version__}: torch's ring attention is a prototype")
    length = length_of(live.call)
    if not length:
        raise InputError(
            f"{name} has no sequence to cut: its first input is neither token numbers [batch, length] nor features "
            "[batch, length, width]; record it with one of them first, or pass context=1"
        )
    if length % n_ranks:
        raise InputError(
            f"context={n_ranks} does not divide the {length} tokens of the recorded input; torch's ring attention "
            f"takes equal chunks, and two for each rank if it is causal, so record a multiple of {2 * n_ranks}"
        )
    inputs = values_in((calls.record.root.args, calls.record.root.kwargs))
    dims = {value: _token_dim(value.shape, length) for value in inputs}
    starts = {value: Shard(dim) for value, dim in dims.items() if dim is not None}
    local, why = calls_of_chunk(live, calls, chunk_of(live.call, n_ranks), {}, n_ranks)
    counting = CountedTokens(calls, length, starts, local)
    mixtures = _mixtures(calls)
    chunks = first_complete(_Tokens(calls, starts, counting, mixtures), _MOST_ATTEMPTS)
    if chunks.refused is not None:
        raise InputError(f"{name} does not run on chunks of the sequence: {chunks.refused}")
    if not chunks.attentions:
        raise InputError(
            f"{name} calls no scaled_dot_product_attention, which torch's ring attention replaces; pass "
            f"data={n_ranks}, or context=1"
        )
    is_causal = all(chunks.attentions.values())
    if is_causal and length % (2 * n_ranks):
        raise InputError(
            f"context={n_ranks} does not divide the {length} tokens of the recorded input into two pieces for each "
            f"rank, with which torch balances causal attention; record a multiple of {2 * n_ranks}"
        )
    if chunks.tables:
        local, why = calls_of_chunk(live, calls, chunk_of(live.call, n_ranks), chunks.tables, n_ranks)
    wholes = counting.compared(chunks.wholes, local, n_ranks)
    inside = (calls.events[slice(*calls.entered[mixture.event])] for mixture in mixtures.values())
    exempt = wholes | counting.masking | set(chain.from_iterable(inside))
    why = why or chunk_failure(calls, local, chunks.shards, exempt, n_ranks)
    if why:
        raise InputError(f"{name} does not do the same with a chunk of the sequence: {why}")
    try:
        whole = whole_calls(calls, local, counting, wholes, n_ranks)
        arguments = _arguments(live.model, calls, counting.gathered(wholes))
    except Blocked as blocked:
        raise InputError(f"{name} does not do the same with a chunk of the sequence: {blocked}") from blocked
    tables = tuple(sorted(chunks.tables.items()))
    return {
        "tables": tables, "is_causal": is_causal, "tokens": length, "token_arguments": arguments, "whole_calls": whole,
    }, tuple(chunks.attentions)  # fmt: skip


def _arguments(model: nn.Module, calls: Calls, gathered: Mapping[Value, Shard]) -> tuple[tuple[str, int | None], ...]:
    """Return the names of the tensors that a model takes, and the dimension of each that is gathered.

    Raises:
        Blocked: a tensor that has to be gathered is inside of another argument.
    """
    root = calls.record.root
    bound: dict[str, Any] = {}
    for name, argument in inspect.signature(model.forward).bind_partial(*root.args, **root.kwargs).arguments.items():
        bound |= argument if isinstance(argument, dict) else {name: argument}
    tensors = {name: argument for name, argument in bound.items() if isinstance(argument, Value)}
    inside = next((value for value in gathered if value not in tensors.values()), None)
    if inside is not None:
        raise Blocked(
            f"a function needs all tokens of a tensor of the shape {list(inside.shape)} inside of an argument; a "
            "tensor that is an argument itself works"
        )
    return tuple((name, gathered[argument].dim if argument in gathered else None) for name, argument in tensors.items())


class Mixture(NamedTuple):
    """A call of experts that take each token by itself.

    Attributes:
        event: the call.
        taken: tokens, numbers of their experts, and weights.
    """

    event: Event
    taken: tuple[Any, ...]


def _mixtures(calls: Calls) -> dict[Event, Mixture]:
    """Return the first function of each call of stacked experts that take each token by itself -> the call."""
    mixtures, checked = {}, set[Hashable]()
    for stacked in find_experts(calls).stacked:
        with suppress(Blocked):
            routing = routing_by_row(calls, stacked, 1, checked)
            for event in stacked.events:
                arguments = {**dict(enumerate(event.args)), **event.kwargs}
                first = calls.events[calls.entered[event][0]]
                mixtures[first] = Mixture(event, tuple(arguments[key] for key in routing))
    return mixtures


class _Averaged(frozenset[Any]):
    """All tensors: the gradients of what is whole are averaged over the ranks, as for parameters."""

    def __contains__(self, leaf: object) -> bool:
        return True


class _Tokens(Propagation):
    """Chunks of the sequence, from the inputs to the results of the model.

    Args:
        counting: the functions of integers that count tokens.
        mixtures: first function of experts that take each token by itself -> their call.
        wholes: of these, the calls that see the tokens of all ranks.

    Attributes:
        attentions: FQN of the module that calls an attention -> whether it is causal.
    """

    dimension: ClassVar[str] = "the sequence"
    tensor: ClassVar[str] = "chunk of the sequence"

    def __init__(
        self,
        calls: Calls,
        placements: Mapping[Any, Placement],
        counting: CountedTokens,
        mixtures: Mapping[Event, Mixture],
        wholes: frozenset[Event] = frozenset(),
    ) -> None:
        super().__init__(calls, placements)
        self._starts, self._counting, self.wholes = dict(placements), counting, wholes
        self._mixtures = mixtures
        self.attentions: dict[str, bool] = {}

    @property
    def tables(self) -> dict[str, int]:
        """FQN of each buffer that is cut -> the dimension of the tokens."""
        return {
            leaf.fqn: placement.dim
            for leaf, placement in self._starts.items()
            if isinstance(leaf, Attribute) and isinstance(placement, Shard)
        }

    def run(self) -> None:
        """Follow the record. Raises ``Blocked``."""
        self.follow(0, len(self.calls.events))
        self.placements = {leaf: shard for leaf, shard in self.placements.items() if shard != _LOSS}  # it may be kept
        self.check_results(())

    def takes_norm(self, event: Event, placement: Shard) -> bool:  # noqa: ARG002
        """Return True for a layer of torch; the functions of another norm are followed one by one."""
        return event not in self.calls.entered

    def apply_rule(self, event: Event, reduced: Any = ()) -> None:  # noqa: ARG002
        """Give the results of a call the placements that its rule says. Raises ``Blocked``."""
        super().apply_rule(event, _Averaged())

    def begins_or_ends(self, event: Event) -> bool:
        """Pass layers, attentions, experts, calls that see all tokens, and the loss, of which a rank has its share."""
        if event in self._mixtures:
            self._experts(self._mixtures[event])
            return True
        if event in self.wholes:
            part = self._counting.part(event)
            if part is not None:
                self.place(event.result, part)
            return True
        chunks = self.sharded(event)
        if not chunks or event in self._counting.masking:
            return True
        if _LOSS in chunks.values():
            return False
        module = self.calls.modules[event.fqn] if event.is_module else None
        if isinstance(module, nn.MultiheadAttention):
            raise Blocked(
                f"{event.fqn or 'the model'} is an nn.MultiheadAttention, whose fast path calls no "
                "scaled_dot_product_attention, which torch's ring attention replaces; a module that calls it works"
            )
        if self.calls.is_linear(event) or (isinstance(module, nn.Embedding) and module.max_norm is None):
            self._layer_of_tokens(event, chunks)
        elif event.is_module or event.is_decision:
            return self.call_of(event).name == "cross_entropy" and self._loss(event)
        elif event.name == "scaled_dot_product_attention":
            self._attention(event)
        elif event.name in Families.PRODUCTS and sum(isinstance(leaf, Value) for leaf in chunks) > 1:
            raise Blocked(
                f"{event.name}() in {event.fqn or 'the model'} multiplies tokens by tokens, as attention written as "
                "products does, and a rank has a part of the tokens; F.scaled_dot_product_attention works (in "
                "transformers: attn_implementation='sdpa')"
            )
        else:
            return event.name == "cross_entropy" and self._loss(event)
        return True

    def _layer_of_tokens(self, event: Event, chunks: Mapping[Any, Placement]) -> None:
        """Pass a linear layer or an embedding, which takes each token by itself."""
        self.calls.check_hooks(event)
        ((value, placement),) = chunks.items()
        assert isinstance(placement, Shard)
        if self.calls.is_linear(event) and placement.dim == len(value.shape) - 1:
            raise Blocked(f"{event.fqn} works along the sequence; a layer of the features works")
        for result in values_in(event.result):
            self.place(result, placement)

    def _experts(self, mixture: Mixture) -> None:
        """Pass experts that take each token by itself. Raises ``Blocked``."""
        tokens, *others = (self.placement(value) for value in mixture.taken)
        if any(placement != tokens for placement in others):
            raise Blocked(f"{mixture.event.fqn} takes tokens and expert numbers of other tokens; the same chunks work")
        if tokens is not None:
            self.place(mixture.event.result, tokens)
        self.position = self.calls.entered[mixture.event][1] - 1

    def _attention(self, event: Event) -> None:
        call = self.call_of(event)
        is_causal = bool(call.argument(5, "is_causal", False))
        if call.argument(3, "attn_mask") is not None:
            why = self._counting.not_causal(event)
            if why:
                raise Blocked(f"{call.at} takes {why}")
            is_causal = True
        parts = [call.operand(position, name) for position, name in enumerate(("query", "key", "value"))]
        shape = next((part.shape for part in parts if len(part.shape) != 4), None)
        if shape is not None:
            raise Blocked(f"{call.at} takes {list(shape)}; [batch, heads, tokens, features] works")
        if any(part.shard != _TOKENS for part in parts):
            raise Blocked(
                f"{call.at} takes chunks of the sequence beside whole queries, keys or values; attention of one "
                "sequence to itself works"
            )
        self.attentions[event.fqn] = is_causal and self.attentions.get(event.fqn, True)
        for result in values_in(event.result):
            self.place(result, _TOKENS)

    def _loss(self, event: Event) -> bool:
        """Pass a cross-entropy of the logits of tokens: a rank's share of it, which the ranks average."""
        call = self.call_of(event)
        logits, labels = call.operand(0, "input"), call.operand(1, "target")
        module = self.calls.modules[event.fqn] if event.is_module else None
        reduction = call.argument(6, "reduction", "mean") if module is None else getattr(module, "reduction", "")
        dim = None if logits.shard is None else logits.shard.dim
        if dim is None or len(labels.shape) == len(logits.shape):
            raise Blocked(
                f"{call.at} takes whole logits, or probabilities of classes; logits of the tokens and numbers of "
                "classes work"
            )
        if labels.shard is None:
            raise call.wrong(labels, Shard(max(0, dim - 1)))
        if logits.shard != labels.shard._replace(dim=labels.shard.dim + (labels.shard.dim > 0)):
            raise Blocked(f"{call.at} takes logits and labels of other tokens; the same chunks work")
        if reduction not in ("mean", "sum"):
            raise Blocked(f"{call.at} returns a loss for each token; reduction='mean' or 'sum' works")
        for result in values_in(event.result):
            self.place(result, _LOSS)
        return True

    # ----------------------------------------------------------------------------------------- tables

    def others(self, refused: Blocked) -> Iterator[_Tokens]:
        """Yield the propagation in which the table that met a chunk is cut, or in which more calls see all tokens."""
        assert self.event is not None
        if not isinstance(refused, WrongPlacement) or not refused.of_whole:
            yield from self._with(self._counting.behind(self.event))
            return
        numbering = self._counting.numbering(refused.value, self.wholes)
        table = self._table_behind(refused.value) if numbering <= self.wholes else None
        if table is not None:
            starts = {**self._starts, table[0]: table[1]}
            yield _Tokens(self.calls, starts, self._counting, self._mixtures, self.wholes)
            return
        yield from self._with(numbering)
        self.refused = self.meets_whole(
            refused.value, "a tensor that follows from torch.arange(length), or that is passed as an input, works"
        )

    def _with(self, calls: frozenset[Event]) -> Iterator[_Tokens]:
        """Yield the propagation in which these calls see all tokens, too, if it is another one."""
        if not calls <= self.wholes:
            yield _Tokens(self.calls, self._starts, self._counting, self._mixtures, self.wholes | calls)

    def _table_behind(self, leaf: Any) -> tuple[Attribute, Shard] | None:
        """Return the buffer with a row for each token that functions make a tensor of, and its placement."""
        for source, _ in self.calls.behind(leaf, through=lambda _, maker: not maker.is_module):
            if isinstance(source, Attribute):
                shape = getattr(self._buffer(source), "shape", ())
                dims = [dim for dim, size in enumerate(shape) if size == self._counting.length]
                if len(dims) == 1 and source not in self._starts:
                    return source, Shard(dims[0])
        return None

    def _buffer(self, attribute: Attribute) -> Any:
        owner, _, name = attribute.fqn.rpartition(".")
        module = self.calls.modules.get(owner)
        return None if module is None else module._buffers.get(name)
