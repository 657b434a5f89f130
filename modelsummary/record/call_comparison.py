"""Find module calls of a run that are equal to an earlier one, so that later runs need not repeat them.

Two calls are equal if they made the same calls, with the same constants, on tensors of the same kind, and if their
modules have the same state. A forward can reach its arguments and its module, so it would do the same again for both.
Attributes in which the modules differ (the number of the layer) are listed: a later run must not read them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.execution.known_values import is_small
from modelsummary.capture.modules import named_modules
from modelsummary.capture.templates import (
    Attribute,
    OwnDevice,
    Unknown,
    leaves_of,
    same_constant,
    same_structure,
)
from modelsummary.record.events import EqualCalls, Event
from modelsummary.record.tensors import CONSTANTS, Foreign, TensorsOfRun, Token

__all__ = ["check_effects", "equal_calls", "is_constant", "same_but_folded"]

_FEWEST_CALLS = 400  # inside equal calls: below, running them takes less time than comparing them
_MOST_KINDS = 16  # distinct siblings of one class that a call is compared with
_DEPTH = 4
_CONSTANTS = (*CONSTANTS, torch.device, torch.Size, OwnDevice)
_TENSORS = ("_parameters", "_buffers")


def is_constant(leaf: Any) -> bool:
    """Return True if a leaf of an argument is a plain value, which no code can change.

    >>> is_constant(2), is_constant(object())
    (True, False)
    """
    return isinstance(leaf, _CONSTANTS)


def equal_calls(model: nn.Module, root: Event, tensors: TensorsOfRun) -> EqualCalls:
    """Return the equal calls among the calls that one module makes.

    Args:
        root: the trace of one run.
        tensors: the tensors of the run.
    """
    equal, times = EqualCalls(), _Times(root, tensors)
    modules = dict(named_modules(model))
    pending, n_calls = [root], 0
    while pending:
        kinds: defaultdict[Any, list[Event]] = defaultdict(list)
        repeated: set[Event] = set()
        for call in pending.pop().children:
            if not (call.is_module and call.children and times.is_closed(call)):
                continue
            alike = kinds[type(modules[call.fqn]), len(call.children), call.macs]
            first = next((earlier for earlier in alike if _are_equal(earlier, call, modules, equal)), None)
            if first is not None:
                equal.first_of[call.fqn] = first.fqn
                n_calls += sum(1 for _ in call.walk())
                repeated.add(first)
            elif len(alike) < _MOST_KINDS:
                alike.append(call)
        pending += [call for alike in kinds.values() for call in alike if call not in repeated]
    return equal if n_calls >= _FEWEST_CALLS else EqualCalls()


def check_effects(equal: EqualCalls, root: Event, tensors: TensorsOfRun) -> None:
    """Note if the first of equal calls has an effect besides its result in another run."""
    times, firsts = _Times(root, tensors), set(equal.first_of.values())
    for event in root.walk():
        if event.is_module and event.fqn in firsts and not times.is_closed(event):
            equal.block(f"calls {event.fqn!r}, which has effects")


class _Times:
    """The order of the calls of a run, and the first and last use of each tensor."""

    def __init__(self, root: Event, tensors: TensorsOfRun) -> None:
        self._of_model = set(tensors.storages_of.values())
        self._calls = Counter(event.fqn for event in root.walk() if event.is_module)
        self._span: dict[Event, tuple[int, int]] = {}
        self._first: dict[Token, int] = {}
        self._last: dict[Token, int] = {}
        self._made_at: dict[int, int] = {}  # memory -> first use of a tensor in it
        self._visit(root, 0)

    def _visit(self, root: Event, now: int) -> None:
        pending: list[tuple[Event, bool]] = [(root, False)]
        while pending:
            event, is_over = pending.pop()
            now += 1
            for leaf in leaves_of(event.result if is_over else (event.args, event.kwargs)):
                if isinstance(leaf, Token):
                    self._first.setdefault(leaf, now)
                    self._made_at.setdefault(leaf.storage, now)
                    self._last[leaf] = now
            if is_over:
                self._span[event] = self._span[event][0], now
                continue
            self._span[event] = now, now
            pending.append((event, True))
            pending.extend((child, False) for child in reversed(event.children))

    def is_closed(self, call: Event) -> bool:
        """Return True if a call has no effect besides its result, which has memory of its own."""
        begin, end = self._span[call]
        if any(event.is_module and self._calls[event.fqn] > 1 for event in call.walk()):
            return False
        result = [leaf for leaf in leaves_of(call.result) if isinstance(leaf, Token)]
        taken = {leaf for leaf in leaves_of((call.args, call.kwargs)) if isinstance(leaf, Token)}
        inside: set[Token] = set()
        for event in call.walk():
            if event.obstacle or event.assigned or event.regions:
                return False
            for leaf in leaves_of(event.result):
                if isinstance(leaf, Token) and leaf not in taken:
                    if self._first[leaf] <= begin:
                        return False  # a tensor that it was not given
                    inside.add(leaf)
        if any(self._last[token] > end for token in inside.difference(result)):
            return False
        storages = [token.storage for token in dict.fromkeys(result) if token not in taken]
        changed = storages + [storage for event in call.walk() for storage in event.writes[0]]
        is_foreign = any(
            isinstance(leaf, Foreign) for event in call.walk() if event.writes[0] for leaf in _inputs(event)
        )
        is_new = all(self._made_at.get(storage, begin + 1) > begin for storage in changed)
        return is_new and not is_foreign and self._of_model.isdisjoint(changed) and len(set(storages)) == len(storages)


def _inputs(event: Event) -> list[Any]:
    return leaves_of((event.args, event.kwargs))


# -------------------------------------------------------------------------------------------- comparison


def same_but_folded(one: Event, other: Event) -> bool:
    """Return True if two runs of the same call are equal, except for the calls that the second one left out."""
    return _Renaming("", "", same_run=False).is_same_call(one, other)


def _are_equal(one: Event, other: Event, modules: Mapping[str, nn.Module], found: EqualCalls) -> bool:
    """Return True if two calls are equal, and note the attributes in which their modules differ."""
    if not _Renaming(one.fqn, other.fqn).is_same_call(one, other):
        return False
    differing: list[tuple[str, str]] = []
    for inner in _names_below(modules[one.fqn]):
        path = f"{one.fqn}.{inner}".rstrip("."), f"{other.fqn}.{inner}".rstrip(".")
        both = modules.get(path[0]), modules.get(path[1])
        if both[0] is None or both[1] is None:
            return False  # a shared module has another name
        names = _differing(both[0], both[1])
        if names is None:
            return False
        differing += [(path[0], name) for name in names]
    for fqn, name in differing:
        found.differing[fqn].add(name)
    return True


def _names_below(module: nn.Module) -> Iterator[str]:
    return (name for name, _ in module.named_modules(remove_duplicate=False))


class _Renaming:
    """The names and tensors of one call, and the names and tensors that another call has instead."""

    def __init__(self, one: str, other: str, *, same_run: bool = True) -> None:
        self._one, self._other, self._same_run = one, other, same_run
        self._tokens: dict[Token, Token] = {}
        self._taken: set[Token] = set()
        self._memory: dict[int, int] = {}

    def _named(self, fqn: str) -> str:
        inside = fqn == self._one or fqn.startswith(f"{self._one}.")
        return self._other + fqn[len(self._one) :] if inside else fqn

    def is_same_call(self, one: Event, other: Event) -> bool:
        """Return True if two calls of modules are equal, down to the last call inside them."""
        return self._same(one, other, is_outermost=True)

    def _same(self, one: Event, other: Event, *, is_outermost: bool = False) -> bool:
        return (
            self._named(one.fqn) == other.fqn
            and (bool(other.equal_to) or one.reads_sizes is other.reads_sizes)
            and _facts(one) == _facts(other)
            and self._same_template((one.args, one.kwargs), (other.args, other.kwargs), is_new=is_outermost)
            and (bool(other.equal_to) or self._same_children(one.children, other.children))
            and self._same_template(one.result, other.result, is_new=True)
        )

    def _same_children(self, own: Sequence[Event], others: Sequence[Event]) -> bool:
        return len(own) == len(others) and all(map(self._same, own, others))

    def _same_template(self, one: Any, other: Any, *, is_new: bool) -> bool:
        if not same_structure(one, other):
            return False
        return all(self._same_leaf(*pair, is_new=is_new) for pair in zip(leaves_of(one), leaves_of(other), strict=True))

    def _same_leaf(self, one: Any, other: Any, *, is_new: bool) -> bool:
        if isinstance(one, Token):
            return isinstance(other, Token) and self._same_token(one, other, is_new=is_new)
        if isinstance(one, Attribute):
            return isinstance(other, Attribute) and other.fqn == self._named(one.fqn)
        if isinstance(one, Foreign):
            return isinstance(other, Foreign) and one.tensor is other.tensor
        if isinstance(one, Unknown):
            return not self._same_run and one == other
        return same_constant(one, other) and (is_constant(one) or not self._same_run)

    def _same_token(self, one: Token, other: Token, *, is_new: bool) -> bool:
        """Return True if the tensors correspond: they did before, or are equal, or do from now on."""
        if one in self._tokens:
            return self._tokens[one] is other
        if self._memory.setdefault(one.storage, other.storage) != other.storage:
            return False
        if one is other:  # a tensor from outside
            return other not in self._taken
        facts = [
            (token.shape, token.dtype, token.nbytes, token.requires_grad, token.is_tainted, token.is_dynamic)
            for token in (one, other)
        ]
        if not is_new or other in self._taken or facts[0] != facts[1] or one.is_dynamic:
            return False
        self._tokens[one] = other
        self._taken.add(other)
        return True


def _facts(event: Event) -> tuple[Any, ...]:
    """Return what two calls must have in common besides names, tensors and constants."""
    kind = event.function, event.call_index, event.is_decision, event.checkpointed
    return *kind, event.grad, event.training, event.dtype_bound


# ------------------------------------------------------------------------------------------------- state


def _differing(one: nn.Module, other: nn.Module) -> list[str] | None:
    """Return the attributes in which two modules differ; None if they cannot do the same."""
    kind, mine, others = type(one), vars(one), vars(other)
    if kind is not type(other) or kind.__getattribute__ is not object.__getattribute__:
        return None
    if any(vars(base).get("__slots__") for base in kind.__mro__):  # attributes that ``vars`` does not show
        return None
    if mine.keys() != others.keys() or _children(one) != _children(other):
        return None
    for name in _TENSORS:
        if mine[name].keys() != others[name].keys():
            return None
        if not all(map(_same_tensor, mine[name].values(), others[name].values())):
            return None
    names = mine.keys() - {"_modules", *_TENSORS}
    return [name for name in names if not _is_alike(mine[name], others[name], _DEPTH)]


def _children(module: nn.Module) -> list[tuple[str, bool]]:
    """Return the name of each child, and whether it is None."""
    return [(name, child is None) for name, child in module._modules.items()]


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    """Return True if a run on shapes cannot tell two tensors apart: it follows the values of small ones."""
    if one is None or other is None or one is other:
        return one is other
    facts = [
        (type(tensor), tensor.shape, tensor.layout, tensor.dtype, tensor.device, tensor.requires_grad)
        for tensor in (one, other)
    ]
    if facts[0] != facts[1] or one.layout is not torch.strided or vars(one) or vars(other):
        return False
    if one.stride() != other.stride():
        return False
    return one.is_meta or not is_small(one) or torch.equal(one.detach(), other.detach())


def _is_alike(one: Any, other: Any, depth: int) -> bool:
    """Return True if code that reads one value or the other does the same with it."""
    kind = type(one)
    if one is other:
        return True
    if kind is not type(other) or not depth:
        return False
    if is_constant(one):
        return same_constant(one, other)
    alike = partial(_is_alike, depth=depth - 1)
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict) and type(one).__module__ in ("builtins", "collections"):
        return list(one) == list(other) and all(map(alike, one.values(), other.values()))
    if kind is partial:
        return alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    return isinstance(one, (set, frozenset)) and all(map(is_constant, one)) and bool(one == other)
