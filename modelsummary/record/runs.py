"""Record a forward: merge the traces of several runs of the same model.

One run does not show whether an integer is a constant or depends on the batch size or the mode. So the model is run at
other batch sizes and in the other mode, and the traces are merged. An integer that follows the batch size becomes
``BatchSize``, a constant that follows the mode becomes ``ModeChoice``. Tensors are the same value only if they are the
same object in every run (in evaluation ``dropout(x)`` is ``x``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from modelsummary.capture.devices import device_of
from modelsummary.capture.execution.real import RealExecution
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operator_mode import Operators, Uncounted
from modelsummary.capture.run import running
from modelsummary.capture.templates import Unknown, leaves_of
from modelsummary.errors import in_short
from modelsummary.record.call_comparison import check_effects, equal_calls, same_but_folded
from modelsummary.record.changes import Unreadable, check_kept
from modelsummary.record.copied_events import NotEqual
from modelsummary.record.events import EqualCalls, Event, Record
from modelsummary.record.folded_calls import FoldedCalls
from modelsummary.record.merging import Run, merged
from modelsummary.record.tensors import Foreign
from modelsummary.record.trace_rules import WHOLE_LAYERS, TraceRules
from modelsummary.record.tracer import Tracer

__all__ = ["kept_records", "record", "record_of", "record_once"]

Trace = Callable[..., Tracer]
_NO_MODE = "it runs other calls in the other mode"


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
        first = Run(trace(call), None, is_other_mode=False)
        _check_assignments(first, call, trace)
        equal = _folding(model, first, call, trace) if execution == "shape" else EqualCalls()
        for folds in (equal, None) if equal.first_of else (None,):
            # Whatever goes wrong when calls are left out, the runs with every call decide.
            with nullcontext() if folds is None else suppress(Exception):
                yield from _records(first, call, trace, batch_dim, execution, folds)
                break
        if not first.tracer.decides:
            return


def _folding(model: nn.Module, first: Run, call: CallArguments, trace: Trace) -> EqualCalls:
    """Return the calls that later runs may leave out; none if leaving them out changes what the other calls do.

    Three conditions make it sound to run only the first of equal calls:

    - Equal calls make the same calls in the first run, and what their modules hold is equal. If a later run reads an
      attribute in which they differ, or passes them other arguments, the later runs are repeated with every call.
    - They have no effect besides their result, in the first run and whenever the first of them runs again.
    - A run of the same input without the equal calls makes the same other calls.

    The first comparison of stages with the model, before they are returned, runs every call.
    """
    with suppress(Exception):
        equal = equal_calls(model, first.root, first.tracer.tensors)
        control = trace(call, equal=equal) if equal.first_of else None
        is_same = control is not None and control.root is not None and same_but_folded(first.root, control.root)
        if is_same and not equal.problem:
            return equal
    return EqualCalls()


def _records(
    first: Run,
    call: CallArguments,
    trace: Trace,
    batch_dim: int | None,
    execution: str,
    equal: EqualCalls | None,
) -> Iterator[Record]:
    """Yield the records of ``record``, made without the calls in ``equal``.

    Raises:
        NotEqual: these calls differ from the calls that should be equal.
    """
    trace = partial(trace, equal=equal)
    batches, dim, no_batch = _other_batches(first, call, trace, batch_dim, execution)
    modes, no_mode = _other_mode(batches[0][1] if batches else call, trace, batches[0][0].batch if batches else None)
    if equal is not None and equal.problem:
        raise NotEqual(equal.problem)
    if batches:
        same_mode = [first, *(run for run, _ in batches)]
        without_one = [run for run in same_mode if run is first or run.batch != 1]
        variants = [(same_mode, 1)] if len(without_one) == len(same_mode) else [(same_mode, 1), (without_one, 2)]
        for others, why in [(modes, no_mode), ([], _NO_MODE)] if modes else [(modes, no_mode)]:
            for runs, smallest in variants:
                yield merged([*runs, *others], dim, no_batch, why, smallest, equal)
        no_batch = "it runs other calls at another batch size"
        modes, no_mode = _other_mode(call, trace, None)
    again = [first, Run(trace(call), None, is_other_mode=False)]  # a second run shows which values are made anew
    if equal is not None and equal.problem:
        raise NotEqual(equal.problem)
    if modes:
        yield merged([*again, *modes], dim, no_batch, no_mode, equal=equal)
    yield merged(again, dim, no_batch, no_mode or _NO_MODE, equal=equal)


def _check_assignments(first: Run, call: CallArguments, trace: Trace) -> None:
    """Note the attributes that the forward assigns and does not depend on; a step of generation may read them.

    In both modes, the forward must run the same calls after another forward, and with ``Unreadable`` as their value.
    """
    assigned = frozenset().union(*(event.assigned for event in first.root.walk()))
    if not assigned:
        return
    plain = [first]
    with suppress(Exception):  # it has one mode only
        plain.append(Run(trace(call, other_mode=True), None, is_other_mode=False))
    for run, other_mode in zip(plain, (False, True), strict=False):
        for options in ({"is_second": True}, {"unreadable": assigned}):
            try:
                again = Run(trace(call, other_mode=other_mode, **options), None, is_other_mode=False)
                both = merged([run, again], 0, "", _NO_MODE)
                pairs = list(zip(run.root.walk(), both.root.walk(), strict=True))
            except Exception:  # it reads the attributes, or runs other calls
                return
            if not all(_holds_for_both(one, merged) for one, merged in pairs):
                return
    first.unread = assigned


def _holds_for_both(one: Event, merged: Event) -> bool:
    """Return True if merging a second run left everything known that was known from one."""
    leaves = zip(*(leaves_of((event.args, event.kwargs, event.result)) for event in (one, merged)), strict=True)
    return all(isinstance(traced, (Unknown, Foreign)) or not isinstance(leaf, Unknown) for traced, leaf in leaves)


def record_once(
    model: nn.Module, call: CallArguments, execution: str, device: Any = None, rules: TraceRules = WHOLE_LAYERS
) -> Record:
    """Record one run of a forward, for its batch size and mode only; on shapes, tensors report ``device`` if given."""
    run = Run(_tracing(model, execution, rules, device)(call), None, is_other_mode=False)
    return merged([run], 0, "it was run at one batch size", _NO_MODE)


def record_of(live: LiveModel, rules: TraceRules = WHOLE_LAYERS) -> Record:
    """Return the record of one run of a live model: the one that it keeps, if the model is unchanged since."""
    kept = live.kept(("record", id(rules)))
    if not kept:
        made = record_once(live.model, live.call, live.execution, rules=rules)
        kept["record"] = rules, made  # rules that are held have an id of their own
    record: Record = kept["record"][1]
    return record


def kept_records(live: LiveModel, execution: str) -> Iterator[Record]:
    """Yield what ``record`` yields; the live model keeps the first, which ``record_of`` then returns."""
    for made in record(live.model, live.call, execution, live.batch_dim):
        live.kept(("record", id(WHOLE_LAYERS))).setdefault("record", (WHOLE_LAYERS, made))
        yield made


def _tracing(model: nn.Module, execution: str, rules: TraceRules = WHOLE_LAYERS, device: Any = None) -> Trace:
    modules = modules_of(model)
    home = device or device_of(tensors_of_modules(modules))

    def trace(
        call: CallArguments,
        *,
        other_mode: bool = False,
        is_second: bool = False,
        unreadable: frozenset[str] = frozenset(),
        equal: EqualCalls | None = None,
    ) -> Tracer:
        with running(modules, call, on_shapes=execution == "shape", grad=True, device=device) as (runner, args, kwargs):
            if is_second:
                with Operators(Uncounted(), runner):
                    model(*args, **kwargs)
            for fqn in unreadable:
                owner, _, name = fqn.rpartition(".")
                vars(model.get_submodule(owner))[name] = Unreadable()
            folded = None if equal is None or isinstance(runner, RealExecution) else FoldedCalls(model, equal, runner)
            devices = (
                {home, runner.device} if isinstance(runner, ShapeOnly) else {home}
            )  # a run on meta reports the CPU
            tracer = Tracer(model, runner, devices, rules, folded)
            with nullcontext() if folded is None else folded.checked():
                tracer.run(args, kwargs, other_mode=other_mode)
            if equal is not None and tracer.root is not None:
                check_effects(equal, tracer.root, tracer.tensors)
            check_kept(model, unreadable)
        return tracer

    return trace


def _other_batches(
    first: Run, call: CallArguments, trace: Trace, batch_dim: int | None, execution: str
) -> tuple[list[tuple[Run, CallArguments]], int, str]:
    """Return runs at other batch sizes and the batch dimension; without such runs, also the reason."""
    reason = "no input has a batch dimension"
    for dim in (0, 1) if batch_dim is None else (batch_dim,):
        size = call.size_along(dim)
        if size is None or size == 0:
            continue
        accepted: list[tuple[Run, CallArguments]] = []
        try:
            # On shapes, which need no memory, the sizes of ``_far_batches`` show more than a second size nearby.
            for batch in (size + 1,) if execution == "shape" and size > 1 else (size + 1, 2 * size + 3):
                larger = call.with_batch(dim, size, batch)
                accepted.append((Run(trace(larger), batch, is_other_mode=False), larger))
        except Exception as error:
            reason = f"batch size {batch} failed with {in_short(error)[:200]}"
            continue
        first.batch = size
        return accepted + _far_batches(size, dim, call, trace, execution), dim, ""
    return [], 0, reason


def _far_batches(
    size: int, dim: int, call: CallArguments, trace: Trace, execution: str
) -> list[tuple[Run, CallArguments]]:
    """Return runs on shapes at a batch of 1 and at a large batch, which reveal expressions like ``max(B, 2)``.

    A batch of 1 may fail (batch normalisation in training); such a run is left out.
    """
    far_runs = []
    for batch in sorted({1, size + 257} - {size}) if execution == "shape" else ():
        with suppress(Exception):
            far = call.with_batch(dim, size, batch)
            far_runs.append((Run(trace(far), batch, is_other_mode=False), far))
    return far_runs


def _other_mode(call: CallArguments, trace: Trace, batch: int | None) -> tuple[list[Run], str]:
    try:
        return [Run(trace(call, other_mode=True), batch, is_other_mode=True)], ""
    except Exception as error:
        return [], f"the other mode failed with {in_short(error)[:200]}"
