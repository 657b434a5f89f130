"""Merge the traces of several runs of the same model into one record."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from modelsummary.capture.templates import (
    Attribute,
    BatchSize,
    ModeChoice,
    Unknown,
    leaves_of,
    same_constant,
    same_structure,
    with_leaves,
)
from modelsummary.record.events import Event, ObservedRun, Record, Value
from modelsummary.record.fingerprint import Fingerprint
from modelsummary.record.tensors import Foreign, Token
from modelsummary.record.tracer import Tracer

__all__ = ["Run", "alone", "merged"]


@dataclass
class Run:
    """One traced run.

    Attributes:
        batch: batch size; None if no input has one.
        unread: assigned attributes that no later forward depends on.
        fingerprint: the operators of a run on shapes; None for a real run.
    """

    tracer: Tracer
    batch: int | None
    is_other_mode: bool
    unread: frozenset[str] = frozenset()
    fingerprint: Fingerprint | None = None

    @property
    def root(self) -> Event:
        """The call of the model."""
        assert self.tracer.root is not None
        return self.tracer.root


def merged(runs: list[Run], batch_dim: int, smallest_batch: int = 1) -> Record:
    """Return the record over all runs, for the batch sizes and modes that they show; see ``Record`` for the others."""
    root = _Merge(runs).event([run.root for run in runs], None)
    storages = [run.tracer.tensors.storages_of for run in runs]
    batches = {run.batch for run in runs if run.batch is not None and not run.is_other_mode}
    widest = max((run for run in runs if not run.is_other_mode), key=lambda run: run.batch or 0)
    return Record(
        root=root,
        batch_size=runs[0].batch if len(batches) > 1 else None,
        batch_dim=batch_dim,
        no_other_mode=not any(run.is_other_mode for run in runs),
        smallest_batch=smallest_batch,
        unread=runs[0].unread,
        storages_of={fqn: tuple(storage.get(fqn, 0) for storage in storages) for fqn in storages[0]},
        observed=[
            ObservedRun(run.batch, run.is_other_mode, run.fingerprint)
            for run in (widest, *(run for run in runs if run.is_other_mode))
            if run.fingerprint is not None
        ],
        asks_gradients=any(run.tracer.asks_gradients for run in runs),
        first_run=weakref.ref(runs[0]),
    )


def alone(record: Record) -> Record | None:
    """Return the record of the first run alone, in which most calls can be opened.

    None if there may be more in another record: one that checks decisions, or one of runs that are gone.
    """
    run = record.first_run()
    return None if run is None or run.tracer.decides else merged([run], record.batch_dim)


class _Merge:
    """The merging of traces, event by event."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._batches = [run.batch for run in runs if not run.is_other_mode]
        self._has_mode, self._mode_batch = runs[-1].is_other_mode, runs[-1].batch or 0
        self._values: dict[tuple[int, ...], Value] = {}
        self._unread = runs[0].unread

    def event(self, events: Sequence[Event], parent: Event | None) -> Event:
        first = events[0]
        if parent is None:
            self._define([(call.args, call.kwargs) for call in events])
        event = Event(first.fqn, first.function, None, None, parent, first.call_index)
        event.training, event.regions, event.is_decision = first.training, first.regions, first.is_decision
        event.args, event.kwargs = self._template([(call.args, call.kwargs) for call in events], first.training)
        event.checkpointed = self._constant([call.checkpointed for call in events], first.training)
        event.unknown = next((call.unknown for call in events if call.unknown), ())
        if isinstance(event.checkpointed, Unknown):
            event.unknown += (event.checkpointed,)
        event.prepared = next((call.prepared for call in events if call.prepared), "")
        if event.prepared:
            event.unknown += (Unknown(f"another {event.prepared} by the code that calls it"),)
        event.grad, event.macs, event.reads_sizes = first.grad, first.macs, any(call.reads_sizes for call in events)
        event.dtype_bound = any(call.dtype_bound for call in events)
        event.writes = tuple(call.writes[0] for call in events)
        event.assigned = frozenset().union(*(call.assigned for call in events))
        event.obstacle = next((call.obstacle for call in events if call.obstacle), "")
        read = sorted(event.assigned - self._unread)
        if read:
            event.block(f"assigns its attribute {read[0].removeprefix(f'{event.fqn}.')!r}")
        difference = self._difference(events)
        if difference:
            event.block(difference)
        else:
            for children in zip(*(call.children for call in events), strict=True):
                event.children.append(self.event(children, event))
        results = [call.result for call in events]
        if not self._define(results):
            event.block("returns a result whose structure differs between runs")
        event.result = self._template(results, first.training)
        event.kept = self._template([call.kept for call in events], first.training)
        return event

    def _difference(self, events: Sequence[Event]) -> str:
        """Return how the calls inside an event differ between the runs; empty if they do not."""
        calls = [[(child.fqn, child.function) for child in event.children] for event in events]
        n_batches = len(self._batches)
        if any(call != calls[0] for call in calls[:n_batches]):
            return "makes other calls at another batch size"
        if self._has_mode and calls[-1] != calls[0]:
            return "makes different calls in train and in eval mode"
        if any(
            child.grad != other.grad
            for call in events[1:]
            for child, other in zip(events[0].children, call.children, strict=True)
        ):
            return "switches gradients on or off by batch size or mode"
        return ""

    # ------------------------------------------------------------------------------------- templates

    def _define(self, templates: Sequence[Any]) -> bool:
        """Make a value for every tensor in ``templates``; return False if their numbers of leaves differ."""
        leaf_lists = [leaves_of(template) for template in templates]
        if len({len(leaves) for leaves in leaf_lists}) != 1:
            return False
        for leaves in zip(*leaf_lists, strict=True):
            if all(isinstance(leaf, Token) for leaf in leaves):
                key = tuple(leaf.index for leaf in leaves)
                if key not in self._values:
                    self._values[key] = self._value(leaves)
        return True

    def _value(self, tokens: Sequence[Token]) -> Value:
        first = tokens[0]
        return Value(
            index=len(self._values),
            shape=first.shape,
            dtype=first.dtype,
            nbytes=first.nbytes,
            requires_grad=first.requires_grad,
            storages=tuple(token.storage for token in tokens),
            sizes=self._sizes([token.shape for token in tokens[: len(self._batches)]]),
            is_dynamic=any(token.is_dynamic for token in tokens),
            is_view=first.is_view,
        )

    def _sizes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int | BatchSize | None, ...]:
        if len({len(shape) for shape in shapes}) != 1:
            return (None,) * len(shapes[0])
        merged_sizes = [
            sizes[0] if len(set(sizes)) == 1 else self._by_batch(sizes) for sizes in zip(*shapes, strict=True)
        ]
        return tuple(None if isinstance(size, Unknown) else size for size in merged_sizes)

    def _template(self, templates: Sequence[Any], training: bool) -> Any:
        """Return the template that holds in every run."""
        leaf_lists = [leaves_of(template) for template in templates]
        if len({len(leaves) for leaves in leaf_lists}) != 1 or any(
            not same_structure(template, templates[0]) for template in templates[1:]
        ):
            return with_leaves(templates[0], [Unknown("arguments with varying structure")] * len(leaf_lists[0]))
        return with_leaves(templates[0], [self._leaf(leaves, training) for leaves in zip(*leaf_lists, strict=True)])

    def _leaf(self, leaves: Sequence[Any], training: bool) -> Any:
        first = leaves[0]
        if isinstance(first, Token):
            if not all(isinstance(leaf, Token) for leaf in leaves):
                return Unknown("a tensor that differs between runs")
            value = self._values.get(tuple(leaf.index for leaf in leaves))
            return value or Unknown("a tensor that differs between runs")
        if isinstance(first, Foreign):
            if all(isinstance(leaf, Foreign) and leaf.tensor is first.tensor for leaf in leaves):
                return first.tensor
            return Unknown("a tensor made outside of torch functions")
        if isinstance(first, Unknown):
            return first
        if isinstance(first, Attribute):
            return first if all(leaf == first for leaf in leaves) else Unknown("a parameter that differs between runs")
        return self._constant(leaves, training)

    def _constant(self, leaves: Sequence[Any], training: bool) -> Any:
        mode_leaves = leaves[: len(self._batches)]
        constant = (
            mode_leaves[0]
            if all(same_constant(leaf, mode_leaves[0]) for leaf in mode_leaves)
            else self._by_batch(mode_leaves)
        )
        if not self._has_mode or isinstance(constant, Unknown):
            return constant
        expected = constant.at(self._mode_batch) if isinstance(constant, BatchSize) else constant
        if same_constant(leaves[-1], expected):
            return constant
        if isinstance(constant, BatchSize):
            return Unknown(f"{mode_leaves[0]!r}, which depends on the batch size and the mode,")
        return ModeChoice(constant, leaves[-1]) if training else ModeChoice(leaves[-1], constant)

    def _by_batch(self, constants: Sequence[Any]) -> BatchSize | Unknown:
        if all(type(constant) is int for constant in constants) and len(constants) > 2:
            batches = [batch or 0 for batch in self._batches]
            for size in _linear(batches, constants):
                if all(size.at(batch) == constant for batch, constant in zip(batches, constants, strict=True)):
                    return size
        return Unknown(f"{constants[0]!r}, which becomes {constants[-1]!r} at another batch size,")


# Divisors of the batch size: a half, a third (of queries, keys and values), a quarter, an eighth.
_DIVISORS = (2, 3, 4, 8)
_FAR = 128  # a fraction is inferred from batch sizes that differ by more


def _linear(batches: Sequence[int], sizes: Sequence[int]) -> Iterator[BatchSize]:
    """Yield functions of the batch size that may give these sizes: linear ones, then fractions rounded down or up."""
    factor = (sizes[1] - sizes[0]) // (batches[1] - batches[0])
    yield BatchSize(factor, sizes[0] - factor * batches[0])
    if max(batches) - min(batches) < _FAR:
        return
    widest = max(range(len(batches)), key=batches.__getitem__)
    rise, run = sizes[widest] - sizes[0], batches[widest] - batches[0]
    for divisor in _DIVISORS:
        factor = round(rise * divisor / run)
        for rounding in (0, divisor - 1):
            yield BatchSize(factor, rounding, divisor)
