"""Record a forward: merge the traces of several runs of the same model.

One run does not show whether an integer is a constant or depends on the batch size or the mode. So the model is run at
other batch sizes and in the other mode, and the traces are merged. An integer that follows the batch size becomes
``BatchSize``, a constant that follows the mode becomes ``ModeChoice``. Tensors are the same value only if they are the
same object in every run (in evaluation ``dropout(x)`` is ``x``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from modelsummary.capture.devices import device_of
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operator_mode import Operators, Uncounted
from modelsummary.capture.run import running
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
from modelsummary.errors import in_short
from modelsummary.record.assignments import Unreadable, check_kept
from modelsummary.record.events import Event, Record, Value
from modelsummary.record.tensors import Foreign, Token
from modelsummary.record.trace_rules import WHOLE_LAYERS, TraceRules
from modelsummary.record.tracer import Tracer

__all__ = ["record", "record_once"]


def record(
    model: nn.Module,
    call: CallArguments,
    execution: str,
    batch_dim: int | None = None,
    rules: TraceRules = WHOLE_LAYERS,
) -> Iterator[Record]:
    """Record a forward of ``model``, leaving model, arguments and global state untouched.

    Args:
        execution: ``"shape"`` or ``"real"``, whichever is known to work.
        batch_dim: batch dimension of the inputs; None: 0 if the forward runs with another size there, else 1.
        rules: modules to open, and functions to substitute.

    Yields:
        The record over all runs. Then, if the model runs other calls at another batch size or in the other mode,
        records that hold only for the mode, the batch size, or both of this run. Then, if it decides by values of
        integers, the same records with these decisions opened; they hold for inputs with the same decisions.

    >>> from modelsummary.capture.inputs import call_arguments
    >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> call = call_arguments(model, (3, 4), (), {}, batch_dim=None, device=None, dtypes=None)
    >>> found = next(record(model, call, "shape"))
    >>> found.batch_size, [event.name for event in found.root.children]
    (3, ['0', '1'])
    """
    for opened in (rules, replace(rules, checks_decisions=True)):
        trace = _tracing(model, execution, opened)
        first = _Run(trace(call), None, is_other_mode=False)
        yield from _records(first, call, trace, batch_dim, execution)
        if not first.tracer.decides:
            return


def _records(first: _Run, call: CallArguments, trace: Trace, batch_dim: int | None, execution: str) -> Iterator[Record]:
    _check_assignments(first, call, trace)
    batches, dim, no_batch = _other_batches(first, call, trace, batch_dim, execution)
    modes, no_mode = _other_mode(batches[0][1] if batches else call, trace, batches[0][0].batch if batches else None)
    if batches:
        same_mode = [first, *(run for run, _ in batches)]
        without_one = [run for run in same_mode if run is first or run.batch != 1]
        variants = [(same_mode, 1)] if len(without_one) == len(same_mode) else [(same_mode, 1), (without_one, 2)]
        for others, why in [(modes, no_mode), ([], _NO_MODE)] if modes else [(modes, no_mode)]:
            for runs, smallest in variants:
                yield _merged([*runs, *others], dim, no_batch, why, smallest)
        no_batch = "it runs other calls at another batch size"
        modes, no_mode = _other_mode(call, trace, None)
    again = [first, _Run(trace(call), None, is_other_mode=False)]  # a second run shows which values are made anew
    if modes:
        yield _merged([*again, *modes], dim, no_batch, no_mode)
    yield _merged(again, dim, no_batch, no_mode or _NO_MODE)


def _check_assignments(first: _Run, call: CallArguments, trace: Trace) -> None:
    """Note the attributes that the forward assigns and does not depend on; a step of generation may read them.

    In both modes, the forward must run the same calls after another forward, and with ``Unreadable`` as their value.
    """
    assigned = frozenset().union(*(event.assigned for event in first.root.walk()))
    if not assigned:
        return
    plain = [first]
    with suppress(Exception):  # it has one mode only
        plain.append(_Run(trace(call, other_mode=True), None, is_other_mode=False))
    for run, other_mode in zip(plain, (False, True), strict=False):
        for given in ({"is_second": True}, {"unreadable": assigned}):
            try:
                again = _Run(trace(call, other_mode=other_mode, **given), None, is_other_mode=False)
                both = _merged([run, again], 0, "", _NO_MODE)
                pairs = list(zip(run.root.walk(), both.root.walk(), strict=True))
            except Exception:  # it reads the attributes, or runs other calls
                return
            if not all(_holds_for_both(one, merged) for one, merged in pairs):
                return
    first.unread = assigned


def _holds_for_both(one: Event, merged: Event) -> bool:
    """Return True if merging a second run left everything known that was known from one."""
    leaves = zip(*(leaves_of((each.args, each.kwargs, each.result)) for each in (one, merged)), strict=True)
    return all(isinstance(own, (Unknown, Foreign)) or not isinstance(leaf, Unknown) for own, leaf in leaves)


def record_once(
    model: nn.Module, call: CallArguments, execution: str, device: Any = None, rules: TraceRules = WHOLE_LAYERS
) -> Record:
    """Record one run of a forward, for its batch size and mode only; on shapes, tensors report ``device`` if given."""
    run = _Run(_tracing(model, execution, rules, device)(call), None, is_other_mode=False)
    return _merged([run], 0, "it was run at one batch size", _NO_MODE)


def _tracing(model: nn.Module, execution: str, rules: TraceRules = WHOLE_LAYERS, device: Any = None) -> Trace:
    modules = modules_of(model)
    own = device or device_of(tensors_of_modules(modules))

    def trace(
        call: CallArguments,
        *,
        other_mode: bool = False,
        is_second: bool = False,
        unreadable: frozenset[str] = frozenset(),
    ) -> Tracer:
        with running(modules, call, on_shapes=execution == "shape", grad=True, device=device) as (runner, args, kwargs):
            if is_second:
                with Operators(Uncounted(), runner):
                    model(*args, **kwargs)
            for fqn in unreadable:
                owner, _, name = fqn.rpartition(".")
                vars(model.get_submodule(owner))[name] = Unreadable()
            tracer = Tracer(model, runner, own, rules)
            tracer.run(args, kwargs, other_mode=other_mode)
            check_kept(model, unreadable)
        return tracer

    return trace


_NO_MODE = "it runs other calls in the other mode"


@dataclass
class _Run:
    tracer: Tracer
    batch: int | None
    is_other_mode: bool
    unread: frozenset[str] = frozenset()  # assigned attributes that no later forward depends on

    @property
    def root(self) -> Event:
        assert self.tracer.root is not None
        return self.tracer.root


Trace = Callable[..., Tracer]


def _other_batches(
    first: _Run, call: CallArguments, trace: Trace, batch_dim: int | None, execution: str
) -> tuple[list[tuple[_Run, CallArguments]], int, str]:
    """Return runs at other batch sizes and the batch dimension; without such runs, also the reason."""
    reason = "no input has a batch dimension"
    for dim in (0, 1) if batch_dim is None else (batch_dim,):
        size = call.size_along(dim)
        if size is None or size == 0:
            continue
        found: list[tuple[_Run, CallArguments]] = []
        try:
            # On shapes, which need no memory, the sizes of ``_far_batches`` show more than a second size nearby.
            for batch in (size + 1,) if execution == "shape" and size > 1 else (size + 1, 2 * size + 3):
                larger = call.with_batch(dim, size, batch)
                found.append((_Run(trace(larger), batch, is_other_mode=False), larger))
        except Exception as error:
            reason = f"batch size {batch} failed with {in_short(error)[:200]}"
            continue
        first.batch = size
        return found + _far_batches(size, dim, call, trace, execution), dim, ""
    return [], 0, reason


def _far_batches(
    size: int, dim: int, call: CallArguments, trace: Trace, execution: str
) -> list[tuple[_Run, CallArguments]]:
    """Return runs on shapes at a batch of 1 and at a large batch, which reveal expressions like ``max(B, 2)``.

    A batch of 1 may fail (batch normalisation in training); such a run is left out.
    """
    found = []
    for batch in sorted({1, size + 257} - {size}) if execution == "shape" else ():
        with suppress(Exception):
            far = call.with_batch(dim, size, batch)
            found.append((_Run(trace(far), batch, is_other_mode=False), far))
    return found


def _other_mode(call: CallArguments, trace: Trace, batch: int | None) -> tuple[list[_Run], str]:
    try:
        return [_Run(trace(call, other_mode=True), batch, is_other_mode=True)], ""
    except Exception as error:
        return [], f"the other mode failed with {in_short(error)[:200]}"


# ---------------------------------------------------------------------------------------------- merging


def _merged(runs: list[_Run], batch_dim: int, no_batch: str, no_other_mode: str, smallest_batch: int = 1) -> Record:
    root = _Merge(runs).event([run.root for run in runs], None)
    storages = [run.tracer.tensors.storages_of for run in runs]
    return Record(
        root=root,
        batch_size=None if no_batch else runs[0].batch,
        batch_dim=batch_dim,
        no_batch=no_batch,
        no_other_mode=no_other_mode,
        smallest_batch=smallest_batch,
        unread=runs[0].unread,
        storages_of={fqn: tuple(each.get(fqn, 0) for each in storages) for fqn in storages[0]},
    )


class _Merge:
    """The merging of traces, event by event."""

    def __init__(self, runs: Sequence[_Run]) -> None:
        self._batches = [run.batch for run in runs if not run.is_other_mode]
        self._mode_twin = None  # the run with the batch size of the run in the other mode
        if runs[-1].is_other_mode:
            self._mode_twin = next(
                index for index, run in enumerate(runs) if run.batch == runs[-1].batch or len(runs) == 2
            )
        self._values: dict[tuple[int, ...], Value] = {}
        self._unread = runs[0].unread

    def event(self, events: Sequence[Event], parent: Event | None) -> Event:
        first = events[0]
        if parent is None:
            self._define([(each.args, each.kwargs) for each in events])
        event = Event(first.fqn, first.function, None, None, parent, first.call_index)
        event.training, event.regions, event.is_decision = first.training, first.regions, first.is_decision
        event.args, event.kwargs = self._template([(each.args, each.kwargs) for each in events], first.training)
        event.checkpointed = self._constant([each.checkpointed for each in events], first.training)
        if isinstance(event.checkpointed, Unknown):
            event.args = (*event.args, event.checkpointed)
        event.grad, event.macs, event.reads_sizes = first.grad, first.macs, any(each.reads_sizes for each in events)
        event.dtype_bound = any(each.dtype_bound for each in events)
        event.writes = tuple(each.writes[0] for each in events)
        event.assigned = frozenset().union(*(each.assigned for each in events))
        event.obstacle = next((each.obstacle for each in events if each.obstacle), "")
        read = sorted(event.assigned - self._unread)
        if read:
            event.block(f"assigns its attribute {read[0].removeprefix(f'{event.fqn}.')!r}")
        difference = self._difference(events)
        if difference:
            event.block(difference)
        else:
            for children in zip(*(each.children for each in events), strict=True):
                event.children.append(self.event(children, event))
        results = [each.result for each in events]
        if not self._define(results):
            event.block("returns a result whose structure differs between runs")
        event.result = self._template(results, first.training)
        return event

    def _difference(self, events: Sequence[Event]) -> str:
        """Return how the calls inside an event differ between the runs; empty if they do not."""
        calls = [[(child.fqn, child.function) for child in each.children] for each in events]
        n_batches = len(self._batches)
        if any(each != calls[0] for each in calls[:n_batches]):
            return "makes other calls at another batch size"
        if self._mode_twin is not None and calls[-1] != calls[0]:
            return "makes different calls in train and in eval mode"
        if any(
            child.grad != other.grad
            for each in events[1:]
            for child, other in zip(events[0].children, each.children, strict=True)
        ):
            return "switches gradients on or off by batch size or mode"
        return ""

    # ------------------------------------------------------------------------------------- templates

    def _define(self, templates: Sequence[Any]) -> bool:
        """Make a value for every tensor in ``templates``; return False if their numbers of leaves differ."""
        every = [leaves_of(each) for each in templates]
        if len({len(leaves) for leaves in every}) != 1:
            return False
        for leaves in zip(*every, strict=True):
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
        )

    def _sizes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int | BatchSize | None, ...]:
        if len({len(shape) for shape in shapes}) != 1:
            return (None,) * len(shapes[0])
        every = [own[0] if len(set(own)) == 1 else self._by_batch(own) for own in zip(*shapes, strict=True)]
        return tuple(None if isinstance(size, Unknown) else size for size in every)

    def _template(self, templates: Sequence[Any], training: bool) -> Any:
        """Return the template that holds in every run."""
        every = [leaves_of(each) for each in templates]
        if len({len(leaves) for leaves in every}) != 1 or any(
            not same_structure(each, templates[0]) for each in templates[1:]
        ):
            return with_leaves(templates[0], [Unknown("arguments with varying structure")] * len(every[0]))
        return with_leaves(templates[0], [self._leaf(leaves, training) for leaves in zip(*every, strict=True)])

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
        own = leaves[: len(self._batches)]
        constant = own[0] if all(same_constant(each, own[0]) for each in own) else self._by_batch(own)
        if (
            self._mode_twin is None
            or same_constant(leaves[-1], leaves[self._mode_twin])
            or isinstance(constant, Unknown)
        ):
            return constant
        if isinstance(constant, BatchSize):
            return Unknown(f"{own[0]!r}, which depends on the batch size and the mode,")
        return ModeChoice(constant, leaves[-1]) if training else ModeChoice(leaves[-1], constant)

    def _by_batch(self, constants: Sequence[Any]) -> BatchSize | Unknown:
        if all(type(each) is int for each in constants) and len(constants) > 2:
            batches = [batch or 0 for batch in self._batches]
            for found in _linear(batches, constants):
                if all(found.at(batch) == each for batch, each in zip(batches, constants, strict=True)):
                    return found
        return Unknown(f"{constants[0]!r}, which becomes {constants[-1]!r} at another batch size,")


# Divisors of the batch size: a half, a third (of queries, keys and values), a quarter, an eighth.
_DIVISORS = (2, 3, 4, 8)
_FEWEST_FOR_FRACTIONS = 4  # number of batch sizes from which a fraction is inferred


def _linear(batches: Sequence[int], sizes: Sequence[int]) -> Iterator[BatchSize]:
    """Yield functions of the batch size that may give these sizes: linear ones, then fractions rounded down or up."""
    factor = (sizes[1] - sizes[0]) // (batches[1] - batches[0])
    yield BatchSize(factor, sizes[0] - factor * batches[0])
    if len(sizes) < _FEWEST_FOR_FRACTIONS:
        return
    widest = max(range(len(batches)), key=batches.__getitem__)
    rise, run = sizes[widest] - sizes[0], batches[widest] - batches[0]
    for divisor in _DIVISORS:
        factor = round(rise * divisor / run)
        for rounding in (0, divisor - 1):
            yield BatchSize(factor, rounding, divisor)
