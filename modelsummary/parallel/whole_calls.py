"""Functions of integers that count tokens: positions, shifted labels, masks.

They follow from numbers and from integers that the model takes, and no gradient flows through them. Where the forward
needs the tokens of all ranks for them, a rank makes the tensors of all tokens and takes its part of the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modelsummary.capture.templates import Attribute, OwnDevice, leaves_of, map_template
from modelsummary.parallel.function_names import Families
from modelsummary.parallel.placements import Blocked, Shard
from modelsummary.parallel.plan_entries import WholeCall
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value, attributes_in, values_in
from modelsummary.record.tensors import Foreign

__all__ = ["CountedTokens", "whole_calls"]

_MASKED = -1e4  # what is added to a score whose key is not seen, at most
_LARGEST_MASK = 2**30


class CountedTokens:
    """The functions of a record whose results follow from integers that count tokens, and masks that do.

    Args:
        calls: of the record.
        length: tokens of the sequence.
        inputs: what the model takes that is cut along the sequence.
        local: the calls with a chunk of the tokens; empty if the forward does not run on one.

    Attributes:
        length: tokens of the sequence.
        masking: calls whose results nothing needs but a cache, and attentions that take causal masks of them.
    """

    def __init__(self, calls: Calls, length: int, inputs: Mapping[Value, Shard], local: Sequence[Event]) -> None:
        self._calls, self.length = calls, length
        pairs = zip(calls.events, local, strict=True) if len(calls.events) == len(local) else ()
        self._local = {one: two.result for one, two in pairs if one.name == two.name and isinstance(two.result, Value)}
        self._inputs = {value: shard for value, shard in inputs.items() if not value.dtype.is_floating_point}
        self._events = self._followed()
        self._masks = self._causal_masks()
        self.masking = self._only_for(self._masks)

    def _followed(self) -> frozenset[Event]:
        values: set[Value] = set(self._inputs)
        events = set()
        for event in self._calls.events:
            is_slice = self._slices(event)
            if is_slice or (_is_pure(event) and values.issuperset(_taken(event))):
                values.add(event.result)
                events.add(event)
        return frozenset(events)

    def _slices(self, event: Event) -> bool:
        """Return True for a slice of a table of the model, such as ``self.cos[:n]``, with a row for each token."""
        takes = [leaf for leaf in leaves_of((event.args, event.kwargs)) if isinstance(leaf, (Value, Tensor, Foreign))]
        is_slice = event.name in ("getitem", "narrow") and len(attributes_in(event.args)) == 1 and not takes
        return is_slice and isinstance(event.result, Value) and self.length in _integers(event)

    def makes_tokens(self, event: Event) -> bool:
        """Return True for a function that makes a tensor of the length of the sequence from numbers or a table."""
        return event in self._events and (_makes(event) or self._slices(event)) and self.length in _integers(event)

    def behind(self, event: Event) -> frozenset[Event]:
        """Return a call that may see all tokens, and the calls that make what it takes; empty for another call."""
        return frozenset(self._makers([event])) if event in self._events else frozenset()

    def numbering(self, leaf: Any, wholes: frozenset[Event]) -> frozenset[Event]:
        """Return the first calls behind a whole tensor whose results have tokens, and the calls that lead to them.

        Args:
            wholes: calls that see all tokens, of whose results each rank has its part.
        """

        def passes(_: Any, event: Event) -> bool:
            return event.fqn not in self._calls.linears and not _makes(event)

        makers = {maker for _, maker in self._calls.behind(leaf, through=passes) if maker is not None}
        behind = [maker for maker in makers if maker.fqn not in self._calls.linears]
        numbered: set[Value] = set()  # tensors that follow from one of the first calls
        first = []
        for event in sorted(behind, key=self._calls.position.__getitem__):
            follows = not numbered.isdisjoint(_taken(event))
            if not follows and event in self._events - wholes and self.part(event) is not None:
                first.append(event)
                follows = True
            numbered.update(values_in(event.result) if follows else ())
        return frozenset(self._makers(first))

    def _makers(self, events: Collection[Event]) -> Iterator[Event]:
        """Yield calls, and the calls that make what they take."""
        yield from events
        taken = (value for event in events for value in _taken(event))
        makers = self._calls.behind(*taken, through=lambda _, maker: maker in self._events and not _makes(maker))
        yield from (maker for _, maker in makers if maker in self._events)

    def part(self, event: Event) -> Shard | None:
        """Return the placement of the result of a call that sees all tokens; None if it has no tokens."""
        shape = event.result.shape
        local = self._local[event].shape if event in self._local else ()  # tells a batch of as many rows from tokens
        dims = [dim for dim, size in enumerate(shape) if size == self.length]
        if len(local) == len(shape):
            dims = [dim for dim in dims if local[dim] != shape[dim]]
        is_constant = _makes(event) and self.length not in _integers(event)
        return Shard(dims[0]) if len(dims) == 1 and not is_constant else None

    def gathered(self, wholes: Iterable[Event]) -> dict[Value, Shard]:
        """Return the inputs of which calls see all tokens."""
        taken = {value for event in wholes for value in _taken(event)}
        return {value: shard for value, shard in self._inputs.items() if value in taken}

    def compared(self, wholes: frozenset[Event], local: Sequence[Event], n_ranks: int) -> frozenset[Event]:
        """Return the calls that see all tokens, and the calls that take their results with a number of tokens.

        A forward decides by such a comparison, as of the sum of a mask with its number of elements.

        Args:
            wholes: calls that see all tokens.
            local: the calls with a chunk of the tokens.
        """
        compared = set(wholes)
        results = {event.result for event in wholes if self.part(event) is None}
        for one, two in zip(self._calls.events, local, strict=False):
            is_compared = one in self._events and not results.isdisjoint(_taken(one)) and _sizes(one, two, n_ranks)
            if is_compared and self.part(one) is None:
                compared.add(one)
                results.add(one.result)
        return frozenset(compared)

    # ------------------------------------------------------------------------------------------- masks

    def not_causal(self, event: Event) -> str:
        """Return what mask an attention takes, and what works, if it is not the causal one; else nothing."""
        mask = _mask_of(event)
        if mask in self._masks:
            return ""
        maker = self._calls.maker.get(mask) if isinstance(mask, Value) else None
        values = {mask}.union(*(_taken(before) for before in self._makers([maker] if maker is not None else [])))
        root = self._calls.record.root
        arguments = {**{f"argument {position}": value for position, value in enumerate(root.args)}, **root.kwargs}
        names = [name for name, value in arguments.items() if isinstance(value, Value) and value in values]
        if names:
            return f"a mask that follows from {', '.join(names)}, and torch's ring takes none; leaving it out works"
        return "a mask that is not known to be causal, and torch's ring takes no other; is_causal=True works"

    def _causal_masks(self) -> set[Any]:
        masks = {_mask_of(event) for event in self._calls.events} - {None}
        return {mask for mask in masks if isinstance(mask, (Value, Attribute)) and self._is_causal(mask)}

    def _is_causal(self, mask: Value | Attribute) -> bool:
        shape = self._calls.shape_of(mask) or ()
        if tuple(shape[-2:]) != (self.length,) * 2 or torch.Size(shape).numel() > _LARGEST_MASK:
            return False
        try:
            values = self._values(mask)
        except Blocked:
            return False
        causal = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        seen = values if values.dtype == torch.bool else values == 0
        hidden = ~values if values.dtype == torch.bool else values <= _MASKED
        return bool(((seen == causal) & (hidden == ~causal)).all())

    def _values(self, mask: Value | Attribute) -> Tensor:
        """Return the values of a tensor that follows from numbers and buffers. Raises ``Blocked`` for another one."""
        if isinstance(mask, Attribute):
            return self._buffer(mask)
        needed, events = {mask}, []
        for event in reversed(self._calls.events[: self._calls.position[self._maker(mask)] + 1]):
            if not event.is_module and isinstance(event.result, Value) and event.result in needed:
                if any(event.writes) or event.name in Families.RANDOM or event.result.requires_grad:
                    raise Blocked("it is not made of numbers")
                events.append(event)
                needed.update(() if _makes(event) else values_in((event.args, event.kwargs)))
        values: dict[Value, Tensor] = {}

        def value_of(event: Event, leaf: Any) -> Any:
            if isinstance(leaf, OwnDevice):
                return torch.device("cpu")
            if isinstance(leaf, Attribute):
                return self._buffer(leaf)
            if isinstance(leaf, Foreign):
                return leaf.tensor
            if isinstance(leaf, Value) and _makes(event):
                return torch.empty(0, dtype=leaf.dtype)
            if isinstance(leaf, Value) and leaf not in values:
                raise Blocked("it follows from what the model takes")
            return values[leaf] if isinstance(leaf, Value) else leaf

        with torch.no_grad():
            for event in reversed(events):
                assert event.function is not None
                change = partial(value_of, event)
                args, kwargs = map_template(change, event.args), map_template(change, event.kwargs)
                values[event.result] = event.function(*args, **kwargs)
        return values[mask]

    def _maker(self, value: Value) -> Event:
        maker = self._calls.maker.get(value)
        if maker is None:
            raise Blocked("it follows from what the model takes")
        return maker

    def _buffer(self, attribute: Attribute) -> Tensor:
        tensor = self._calls.tensor_of(attribute)
        if not isinstance(tensor, Tensor) or tensor.requires_grad or tensor.is_meta:
            raise Blocked("it follows from a parameter, or from a buffer without values")
        return tensor.detach().cpu()

    def _only_for(self, masks: set[Any]) -> frozenset[Event]:
        """Return the calls whose results reach nothing but these masks of attentions, or a cache."""
        only: set[Event] = set()
        for event in reversed(self._calls.events):
            if event.is_module or not isinstance(event.result, Value) or event.result in self._calls.returned:
                continue
            takers = self._calls.takers.get(event.result, ())
            if not takers and (event in self._events or event.is_decision or any(event.writes)):
                continue  # the forward may decide by it
            is_mask = event.result in masks
            if all(taker in only or (is_mask and _mask_of(taker) is event.result) for taker in takers):
                only.add(event)
        return frozenset(only)


def _is_pure(event: Event) -> bool:
    """Return True for a function of constants and values alone that returns one tensor without a gradient."""
    result = event.result
    if event.is_module or event.is_decision or any(event.writes) or event.name in Families.RANDOM:
        return False
    tensors = [leaf for leaf in leaves_of((event.args, event.kwargs)) if isinstance(leaf, (Tensor, Foreign))]
    return isinstance(result, Value) and not (
        result.requires_grad or tensors or attributes_in((event.args, event.kwargs))
    )


def _makes(event: Event) -> bool:
    """Return True for a function that makes a tensor from numbers; of a tensor it takes the dtype and device alone."""
    return event.name in Families.NUMBERING or (event.name in Families.FACTORIES and not event.name.endswith("_like"))


def _taken(event: Event) -> list[Value]:
    return [] if _makes(event) else values_in((event.args, event.kwargs))


def _integers(event: Event) -> list[int]:
    return [leaf for leaf in leaves_of((event.args, event.kwargs)) if type(leaf) is int]


def _mask_of(event: Event) -> Any:
    """Return the mask that an attention takes; None for no mask, and for another call."""
    if event.is_module or event.name != "scaled_dot_product_attention":
        return None
    return event.args[3] if len(event.args) > 3 else event.kwargs.get("attn_mask")


# ------------------------------------------------------------------------------------------- what is written


def whole_calls(
    calls: Calls, local: Sequence[Event], counting: CountedTokens, wholes: frozenset[Event], n_ranks: int
) -> tuple[WholeCall, ...]:
    """Return the calls that see the tokens of all ranks, in the order in which the forward of their module makes them.

    Args:
        local: the calls with a chunk of the tokens.
        counting: the functions of integers that count tokens.
        wholes: the calls that see all tokens.

    Raises:
        Blocked: a module makes other calls each time.
    """
    masked = {event.fqn for event in calls.events if _mask_of(event) is not None}
    changed = {event.fqn for event in wholes} | masked
    names = {(event.fqn, _name(event)) for event in wholes}
    whole_results = set(counting.gathered(wholes)) | {event.result for event in wholes}
    by_call: dict[Event, list[WholeCall]] = {}
    for one, two in zip(calls.events, local, strict=True):
        if one.is_module:
            continue
        caller = one.parent
        assert caller is not None
        while caller.parent is not None and caller.fqn not in changed:
            caller = caller.parent
        fqn, name = caller.fqn, _name(one)
        if (fqn, name) in names and (
            one in wholes or whole_results.intersection(_taken(one)) or counting.makes_tokens(one)
        ):
            part = counting.part(one) if one in wholes else None
            kind = "own" if one not in wholes else "whole" if part is None else "part"
            call = WholeCall(fqn, name, kind, _sizes(one, two, n_ranks), None if part is None else part.dim)
            by_call.setdefault(caller, []).append(call)
    by_fqn: dict[str, list[WholeCall]] = {}
    for caller, entries in by_call.items():
        if by_fqn.setdefault(caller.fqn, entries) != entries:
            raise Blocked(f"{caller.fqn} counts tokens in another way in each of its calls; the same calls work")
    causal = (WholeCall(fqn, "scaled_dot_product_attention", "causal") for fqn in sorted(masked))
    return (*(entry for entries in by_fqn.values() for entry in entries), *causal)


def _name(event: Event) -> str:
    """Return the name that a function has when it is called: records have public names, which may be of an alias."""
    assert event.function is not None
    is_property = event.function.kind == "get"
    return event.function.name if is_property else getattr(event.function.function, "__name__", "").strip("_")


def _sizes(one: Event, two: Event, n_ranks: int) -> tuple[int, ...]:
    """Return the positions of the numbers among the arguments of a call that count tokens."""
    pairs = zip(*(leaves_of((event.args, event.kwargs)) for event in (one, two)), strict=False)
    return tuple(
        position
        for position, (whole, part) in enumerate(pairs)
        if type(whole) is type(part) is int and whole != part and whole == part * n_ranks
    )
