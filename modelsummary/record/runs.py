"""Record a forward: merge the traces of several runs of the same model.

One run does not show whether an integer is a constant or depends on the batch size or the mode. So the model is run at
other batch sizes and in the other mode, and the traces are merged. An integer that follows the batch size becomes
``BatchSize``, a constant that follows the mode becomes ``ModeChoice``. Tensors are the same value only if they are the
same object in every run (in evaluation ``dropout(x)`` is ``x``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from modelsummary.capture.devices import device_of
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.inputs import CallArguments
from modelsummary.capture.live import LiveModel
from modelsummary.capture.modules import modules_of, tensors_of_modules
from modelsummary.capture.operator_mode import Operators
from modelsummary.capture.run import arguments_in, running
from modelsummary.capture.templates import Marker, Unknown, leaves_of
from modelsummary.errors import ForwardError, ModelSummaryError, in_short
from modelsummary.record.changes import Unreadable, check_kept
from modelsummary.record.events import Event, Record
from modelsummary.record.fingerprint import fingerprint_of
from modelsummary.record.merging import Run, merged
from modelsummary.record.tensors import Foreign
from modelsummary.record.trace_rules import WHOLE_LAYERS, TraceRules
from modelsummary.record.tracer import Tracer

__all__ = ["forward_errors", "kept_records", "record", "record_of", "record_once"]

TraceRun = Callable[..., Run]


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

    >>> from modelsummary.capture.input_data import call_arguments
    >>> from modelsummary.capture.modules import ModelParts
    >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    >>> call = call_arguments(ModelParts.of(model), (3, 4), (), {})
    >>> recorded = next(record(model, call, "shape"))
    >>> recorded.batch_size, [event.name for event in recorded.root.children]
    (3, ['0', '1'])
    """
    for opened in (rules, replace(rules, checks_decisions=True)):
        trace = _tracing(model, execution, opened)
        first = trace(call)
        if _is_settled(first, call, trace, batch_dim):
            trace = partial(trace, after=call)
            first = trace(call)
        else:
            _check_assignments(first, call, trace)
        yield from _records(first, call, trace, batch_dim, execution)
        if not first.tracer.decides:
            return


def _records(
    first: Run, call: CallArguments, trace: TraceRun, batch_dim: int | None, execution: str
) -> Iterator[Record]:
    """Yield the records of ``record``: of all runs first, of runs at the first batch size last."""
    batches, dim = _other_batches(first, call, trace, batch_dim, execution)
    if batches:
        assert first.batch is not None
        # At a batch size of its own, the other mode also confirms what was inferred from the sizes before. If the calls
        # depend on the batch size, the other mode of this one will be asked for.
        is_alike = all(run.batch == 1 or _calls(run.root) == _calls(first.root) for run in batches)
        for batch in (4 * first.batch + 3, batches[-1].batch or 0) if is_alike else (first.batch,):
            modes = _other_mode(_at_batch(call, dim, first, batch), trace, batch)
            if modes:
                break
        variants = [([first, *batches], 1)]
        yield merged([first, *batches, *modes], dim)
        above_one = [run for run in (first, *batches) if run is first or run.batch != 1]
        if len(above_one) <= len(batches):
            with suppress(Exception):  # three sizes show what is linear
                variants.append(([*above_one, trace(_at_batch(call, dim, first, first.batch + 1), first.batch + 1)], 2))
                yield merged([*variants[1][0], *modes], dim, 2)
        for runs, smallest in variants if modes else ():
            yield merged(runs, dim, smallest)
    if not batches or is_alike:
        modes = _other_mode(call, trace, None)
    if modes:  # it shows which values are made anew, too
        both = merged([first, *modes], dim)
        if not both.mode_choices():
            yield both
            modes = []
    again = [first, trace(call)]  # a constant that differs here does not follow the mode
    if modes:
        yield merged([*again, *modes], dim)
    yield merged(again, dim)


def _calls(root: Event) -> list[tuple[str, Any]]:
    """Return the modules and functions that a forward calls, in order."""
    return [(event.fqn, event.function) for event in root.walk()]


def _is_settled(first: Run, call: CallArguments, trace: TraceRun, batch_dim: int | None) -> bool:
    """Return True if the forward assigns attributes once, which follow neither from the batch size nor from the mode.

    A classifier of transformers assigns ``config.problem_type`` when it is first called with labels. In both modes, and
    at another batch size, a forward after the one of ``call`` must run the same calls as one before it.
    """
    if not any(event.assigned for event in first.root.walk()):
        return False
    fresh = [(first, call, False)]
    with suppress(Exception):  # it has one mode only
        fresh.append((trace(call, other_mode=True), call, True))
    for dim in (0, 1) if batch_dim is None else (batch_dim,):
        size = call.size_along(dim)
        if size:
            with suppress(Exception):  # this dimension is not the batch
                other = call.with_batch(dim, size, size + 1)
                fresh.append((trace(other), other, False))
                break
    for run, arguments, other_mode in fresh:
        try:
            later = trace(arguments, other_mode=other_mode, after=call)
        except Exception:  # what it assigned holds for the first call alone
            return False
        if any(event.assigned for event in later.root.walk()) or not _runs_alike(run, later):
            return False
    return True


def _check_assignments(first: Run, call: CallArguments, trace: TraceRun) -> None:
    """Note the attributes that the forward assigns and does not depend on; a step of generation may read them.

    In both modes, the forward must run the same calls after another forward, and with ``Unreadable`` as their value.
    """
    assigned = frozenset().union(*(event.assigned for event in first.root.walk()))
    if not assigned:
        return
    runs = [first]
    with suppress(Exception):  # it has one mode only
        runs.append(trace(call, other_mode=True))
    for run, other_mode in zip(runs, (False, True), strict=False):
        for options in ({"after": call}, {"unreadable": assigned}):
            try:
                repeated = trace(call, other_mode=other_mode, **options)
            except Exception:  # it reads the attributes
                return
            if not _runs_alike(run, repeated):
                return
    first.unread = assigned


def _runs_alike(run: Run, repeated: Run) -> bool:
    """Return True if a repeated run has the calls of a run, and what was known from one is known from both."""
    try:
        both = merged([replace(member, is_other_mode=False) for member in (run, repeated)], 0)
        pairs = list(zip(run.root.walk(), both.root.walk(), strict=True))
    except Exception:  # other calls
        return False
    return all(_holds_for_both(event, merged_event) for event, merged_event in pairs)


def _holds_for_both(event: Event, merged_event: Event) -> bool:
    """Return True if merging a second run left everything known that was known from one.

    Objects that each run makes anew, such as a cache, differ by identity alone; what they do shows in the calls.
    """
    pairs = [(event.args, merged_event.args), (event.kwargs, merged_event.kwargs), (event.result, merged_event.result)]
    leaves = [pair for sides in pairs for pair in zip(*map(leaves_of, sides), strict=True)]
    return all(
        isinstance(traced, (Unknown, Foreign)) or not isinstance(leaf, Unknown) or _has_identity_alone(traced)
        for traced, leaf in leaves
    )


def _has_identity_alone(value: Any) -> bool:
    equality: Any = type(value).__eq__
    return not isinstance(value, Marker) and equality is object.__eq__


def record_once(
    model: nn.Module, call: CallArguments, execution: str, device: Any = None, rules: TraceRules = WHOLE_LAYERS
) -> Record:
    """Record one run of a forward, for its batch size and mode only; on shapes, tensors report ``device`` if given."""
    return merged([_tracing(model, execution, rules, device)(call)], 0)


def record_of(live: LiveModel, rules: TraceRules = WHOLE_LAYERS) -> Record:
    """Return the record of one run of a live model: the one that it keeps, if the model is unchanged since."""
    memo = live.kept(("record", id(rules)))
    if not memo:
        with forward_errors(live.model):
            recorded = record_once(live.model, live.call, live.execution, rules=rules)
        memo["record"] = rules, recorded  # rules that are held have an id of their own
    result: Record = memo["record"][1]
    return result


def kept_records(live: LiveModel, execution: str) -> Iterator[Record]:
    """Yield what ``record`` yields. The live model keeps the first with all calls, which ``record_of`` then returns."""
    with forward_errors(live.model):
        for recorded in record(live.model, live.call, execution, live.batch_dim):
            first: Run = recorded.first_run()
            decides = any(event.is_decision for event in recorded.root.walk())
            if not decides and _calls(recorded.root) == _calls(first.root):
                live.kept(("record", id(WHOLE_LAYERS))).setdefault("record", (WHOLE_LAYERS, recorded))
            yield recorded


@contextmanager
def forward_errors(model: nn.Module) -> Iterator[None]:
    """Record a forward in the body. Raise ``ForwardError`` if it raises anything but the library's own errors.

    >>> with forward_errors(nn.ReLU()):
    ...     raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation")
    Traceback (most recent call last):
    modelsummary.errors.ForwardError: the forward of ReLU failed when it was recorded with gradients, ...
    """
    try:
        yield
    except ModelSummaryError:
        raise
    except Exception as error:
        raise ForwardError(
            f"the forward of {type(model).__name__} failed when it was recorded with gradients, as in training: "
            f"{in_short(error)}; change the forward, or freeze what needs no gradient"
        ) from error


def _tracing(model: nn.Module, execution: str, rules: TraceRules = WHOLE_LAYERS, device: Any = None) -> TraceRun:
    modules = modules_of(model)
    home = device or device_of(tensors_of_modules(modules))
    watches_draws = False

    def trace(
        call: CallArguments,
        batch: int | None = None,
        *,
        other_mode: bool = False,
        after: CallArguments | None = None,
        unreadable: frozenset[str] = frozenset(),
    ) -> Run:
        nonlocal watches_draws
        prepared = running(modules, after or call, on_shapes=execution == "shape", grad=True, device=device)
        with prepared as (runner, first_args, first_kwargs):
            args, kwargs = first_args, first_kwargs
            if after is not None:
                with Operators(runner):
                    model(*first_args, **first_kwargs)
                args, kwargs = arguments_in(runner, modules, call)
            for fqn in unreadable:
                owner, _, name = fqn.rpartition(".")
                vars(model.get_submodule(owner))[name] = Unreadable()
            devices = {home}
            if isinstance(runner, ShapeOnly):
                devices.add(runner.device)  # a run on meta reports the CPU
                runner.log = []
            tracer = Tracer(model, runner, devices, rules, watches_draws=watches_draws)
            out = tracer.run(args, kwargs, other_mode=other_mode)
            if rules.follows_kept:
                tracer.note_kept(modules, args, kwargs)
            fingerprint = fingerprint_of(runner, out) if isinstance(runner, ShapeOnly) else None
            check_kept(model, unreadable)
        if tracer.draws and not watches_draws:  # the next run shows in which module
            watches_draws = True
            return trace(call, batch, other_mode=other_mode, after=after, unreadable=unreadable)
        return Run(tracer, batch, other_mode, fingerprint=fingerprint)

    return trace


def _at_batch(call: CallArguments, dim: int, first: Run, batch: int) -> CallArguments:
    assert first.batch is not None
    return call.with_batch(dim, first.batch, batch)


def _other_batches(
    first: Run, call: CallArguments, trace: TraceRun, batch_dim: int | None, execution: str
) -> tuple[list[Run], int]:
    """Return two runs at other batch sizes and the batch dimension; no runs if the batch size cannot change.

    On shapes, which need no memory, a batch of 1 and a large batch reveal expressions like ``max(B, 2)``. A run with
    one of them may fail (batch normalisation in training); a size nearby replaces it.
    """
    for dim in (0, 1) if batch_dim is None else (batch_dim,):
        size = call.size_along(dim)
        if size is None or size == 0:
            continue
        runs: list[Run] = []
        for batch in sorted({1, size + 257} - {size}) if execution == "shape" else ():
            with suppress(Exception):
                runs.append(trace(call.with_batch(dim, size, batch), batch))
        try:
            for batch in (size + 1, 2 * size + 3)[len(runs) :]:
                runs.append(trace(call.with_batch(dim, size, batch), batch))
        except Exception:  # this dimension is not the batch
            continue
        first.batch = size
        return runs, dim
    return [], 0


def _other_mode(call: CallArguments, trace: TraceRun, batch: int | None) -> list[Run]:
    try:
        return [trace(call, batch, other_mode=True)]
    except Exception:  # it has one mode only
        return []
