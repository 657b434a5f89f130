"""What is redistributed where it enters or leaves a module: gathered, cut, or made a ``DTensor``.

Each column-parallel layer reduces the gradient of its input over the ranks. Where query, key and value take the same
tensor, and it is the input of a module around them, or the result of a module that nothing else takes, one reduction is
enough: the tensor is prepared, made a ``DTensor`` once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from modelsummary.capture.templates import leaves_of
from modelsummary.parallel.layer_plans import layout
from modelsummary.parallel.placements import Shard
from modelsummary.parallel.plan_entries import LayerPlan
from modelsummary.parallel.record_calls import Calls
from modelsummary.record.events import Event, Value, values_in

if TYPE_CHECKING:
    from modelsummary.parallel.sequence import Chunks

__all__ = ["Redistribution", "prepared_inputs", "prepared_outputs", "redistribution_plan", "results_of"]


class Redistribution(NamedTuple):
    """A tensor that is gathered, cut, or made a ``DTensor`` where it enters or leaves a module.

    Attributes:
        fqn: of the module.
        is_input: where the tensor enters the module, else where it leaves.
        position: of the tensor among the positional arguments, or among the results; a name for a keyword argument.
        before, after: the placement in front of it and behind it; None: whole.
    """

    fqn: str
    is_input: bool
    position: int | str
    before: Shard | None
    after: Shard | None

    def tensor(self, event: Event) -> Any:
        """Return the tensor in a call of the module; None if the call does not have it."""
        if isinstance(self.position, str):
            return event.kwargs.get(self.position)
        tensors = event.args if self.is_input else results_of(event)
        return tensors[self.position] if len(tensors) > self.position else None


def results_of(event: Event) -> list[Any]:
    """Return what a module returns, alone or in a tuple; nothing for a tuple of one, which torch's style unpacks."""
    result = event.result
    if isinstance(result, tuple):
        return list(result) if len(result) > 1 else []
    return [result]


def redistribution_plan(calls: Calls, redistribution: Redistribution, *, is_local: bool = True) -> LayerPlan:
    """Return the plan of a module at whose boundary a tensor is gathered, cut, or made a ``DTensor``.

    Args:
        is_local: the module gets, or returns, a plain tensor.
    """
    fqn, is_input, position, *placements = redistribution
    event, *_ = calls.spans[fqn][0]
    kind, style = ("input", "PrepareModuleInput") if is_input else ("output", "PrepareModuleOutput")
    options: dict[str, Any] = {}
    for name, placement in zip(("", "desired_"), placements, strict=True):
        written = layout(placement)
        if isinstance(position, str):
            options[f"{name}{kind}_kwarg_layouts"] = {position: written}
        else:
            count = len(event.args if is_input else results_of(event))
            options[f"{name}{kind}_layouts"] = tuple(written if index == position else None for index in range(count))
    return LayerPlan(fqn, style, {**options, "use_local_output": is_local}, kind, {}, 0)


# ------------------------------------------------------------------------------------------------ prepared

_Prepared = tuple[Redistribution, tuple[str, ...]]  # a tensor, and the layers that take it


def prepared_inputs(
    calls: Calls, layers: Mapping[str, LayerPlan], chunks: Chunks | None = None, *, least: int = 2
) -> dict[Redistribution, tuple[str, ...]]:
    """Return inputs of modules that only column-parallel layers take, ``least`` of them or more -> these layers.

    One layer is enough if the input is a chunk of the sequence: the module then sees the whole sequence. A tensor that
    a call takes as several arguments is not prepared: torch would prepare each argument, and reduce its gradient.
    """
    by_argument: dict[tuple[str, int | str, int], list[_Prepared]] = {}
    for event in calls.entered:
        if event.parent is None or event.fqn in layers:
            continue
        for position, value in (*enumerate(event.args), *event.kwargs.items()):
            taken = [leaf for leaf in leaves_of((event.args, event.kwargs)) if leaf is value]
            if not isinstance(value, Value) or len(taken) > 1:
                continue
            columns = _columns_alone(calls, layers, event, value)
            placement = None if chunks is None else chunks.placement_at(value, calls.entered[event][0])
            if len(columns) >= (least if placement is None else 1):
                redistribution = Redistribution(event.fqn, True, position, placement, None)
                by_argument.setdefault((event.fqn, position, len(event.args)), []).append((redistribution, columns))
    prepared: dict[Redistribution, tuple[str, ...]] = {}
    for redistribution, columns in _merged(calls, by_argument.values()):
        # Outer modules come first; inner ones need not prepare the same input again.
        if not any(set(columns) & set(outer) for outer in prepared.values()):
            prepared[redistribution] = columns
    return prepared


def prepared_outputs(
    calls: Calls, layers: Mapping[str, LayerPlan], done: Iterable[str], blocks: Sequence[str]
) -> dict[Redistribution, tuple[str, ...]]:
    """Return results of modules that only column-parallel layers of the same block take, two or more -> these layers.

    No stage of a pipeline begins within a block, so no ``DTensor`` crosses.

    Args:
        done: FQNs of layers whose input is prepared.
        blocks: FQNs of the repeated blocks.
    """
    done = set(done)
    by_module: dict[str, list[_Prepared]] = {}
    for event, value in ((event, event.result) for event in (*calls.entered, *calls.events) if event.is_module):
        if event.parent and isinstance(value, Value) and value.requires_grad and event.fqn not in layers:
            takers = calls.takers.get(value, ())
            columns = tuple(taker.fqn for taker in takers if taker.is_module and _is_column(layers, taker.fqn))
            is_alone = len(columns) == len(takers) >= 2 and done.isdisjoint(columns)
            if is_alone and _in_one_block((event.fqn, *columns), blocks) and _is_made_by(calls, event, value):
                redistribution = Redistribution(event.fqn, False, 0, None, None)
                by_module.setdefault(event.fqn, []).append((redistribution, columns))
    prepared: dict[Redistribution, tuple[str, ...]] = {}
    for redistribution, columns in _merged(calls, by_module.values()):
        if columns not in prepared.values():
            prepared[redistribution] = columns
    return prepared


def _is_made_by(calls: Calls, event: Event, value: Value) -> bool:
    """Return True if a module, or what it calls, makes a value, which the model does not return."""
    maker = calls.maker.get(value)
    begin, end = calls.span(event)
    is_returned = value in calls.kept or value in values_in(calls.record.root.result)
    return maker is not None and begin <= calls.position[maker] < end and not is_returned


def _in_one_block(fqns: Sequence[str], blocks: Sequence[str]) -> bool:
    return any(all(fqn.startswith(f"{block}.") for fqn in fqns) for block in blocks)


def _is_column(layers: Mapping[str, LayerPlan], fqn: str) -> bool:
    return fqn in layers and layers[fqn].role in ("column", "head")


def _merged(calls: Calls, groups: Iterable[Sequence[_Prepared]]) -> Iterator[_Prepared]:
    """Yield the calls of each module as one, unless they differ, or its layers take other tensors, too.

    Of tensors that are not prepared, each layer would reduce the gradient itself.
    """
    for group in groups:
        redistribution, columns = group[0]
        takes_nothing_else = all(
            calls.n_calls[fqn] == n_times * len(group) for fqn, n_times in Counter(columns).items()
        )
        are_all = len(group) == calls.n_calls[redistribution.fqn]
        if are_all and takes_nothing_else and len({columns for _, columns in group}) == 1:
            yield group[0]


def _columns_alone(calls: Calls, layers: Mapping[str, LayerPlan], module: Event, value: Value) -> tuple[str, ...]:
    """Return the column-parallel layers in a call that take a value; none if anything else in the call takes it."""
    begin, end = calls.entered[module]
    columns: list[str] = []
    for event in calls.events[begin:end]:
        if value in values_in((event.args, event.kwargs)):
            if not event.is_module or not _is_column(layers, event.fqn):
                return ()
            columns.append(event.fqn)
    if any(value in values_in(inner.result) for inner in (module, *module.children)):
        return ()
    return tuple(columns)
