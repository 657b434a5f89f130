"""The first steps of a training loop, as allocations over time: one observed step, repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from modelsummary.capture.trace import BEFORE_THE_STEP, Storage, Trace
from modelsummary.memory.fused_storages import storages_in_time
from modelsummary.memory.replay import MemoryBlock
from modelsummary.memory.timeline import Workspaces, library_workspaces, workspace_of_each

__all__ = ["first_steps"]

_STEPS = 3


def first_steps(trace: Trace, workspaces: Workspaces | None) -> Iterator[MemoryBlock]:
    """Yield what a loop allocates: the model, its inputs, and the steps; operators count as seconds.

    The first step makes the state of the optimizer. Gradients are freed when the next step begins, results when their
    step ends.
    """
    n_operators = len(trace.operators)
    begins = [1 + step * n_operators for step in range(_STEPS)]
    update = begins[0] + next((begin for name, begin in trace.phases if name == "step"), 0)
    for storage in _in_order_of_names(trace, [storage for storage in trace.storages if _is_older(storage)]):
        begin = update if storage.kind == "optimizer_state" else 0
        if storage.died is None or storage.died > 0:
            yield _block(
                trace, storage, storage.born, begin, None if storage.died is None else begins[0] + storage.died
            )
    written, times = storages_in_time(trace)
    during = sorted((storage for storage in written if not _is_older(storage)), key=lambda storage: storage.born)
    makers = {storage.identity: storage.born for storage in trace.storages}
    spaces = workspace_of_each(trace, workspaces)
    for begin in begins:
        end_of_step = begin + n_operators
        for storage in during:
            end = end_of_step if storage.died is None else begin + storage.died
            stays = storage.kind == "grads" and storage.died is None and begin == begins[-1]
            yield _block(trace, storage, makers[storage.identity], begin + storage.born, None if stays else end)
        for index, nbytes in enumerate(spaces):
            name = _name_of(trace, index)
            yield MemoryBlock(0, "workspace", name, nbytes, begin + times[index], begin + times[index] + 1)
    for library, nbytes, first in library_workspaces(trace, workspaces):
        yield MemoryBlock(0, "workspace", library, nbytes, begins[0] + first)


def _is_older(storage: Storage) -> bool:
    """Return True if a storage was made before the first operator of the step."""
    return storage.born < 0 or storage.kind in BEFORE_THE_STEP


def _in_order_of_names(trace: Trace, storages: Sequence[Storage]) -> list[Storage]:
    """Return storages with the ones of the model first, as ``model.to("cuda")`` moves them: children before parents."""
    orders: dict[int, int] = {}
    for name in _moved(list(trace.tensors)):
        orders.setdefault(trace.tensors[name], len(orders))
    return sorted(storages, key=lambda storage: orders.get(storage.identity, len(orders)))


def _moved(names: Sequence[str]) -> list[str]:
    """Return the names of tensors in the order in which ``nn.Module.to`` visits them.

    >>> _moved(["scale", "first.weight", "first.norm.weight", "second.weight"])
    ['first.norm.weight', 'first.weight', 'second.weight', 'scale']
    """
    by_child: dict[str, list[str]] = {}
    for name in names:
        child, dot, inner = name.partition(".")
        by_child.setdefault(child if dot else "", []).append(inner if dot else name)
    last = by_child.pop("", [])
    return [f"{child}.{name}" for child, inside in by_child.items() for name in _moved(inside)] + last


def _block(trace: Trace, storage: Storage, maker: int, begin: int, end: int | None) -> MemoryBlock:
    name = _name_of(trace, maker) if maker >= 0 else storage.kind
    return MemoryBlock(
        0, storage.kind, storage.kind if storage.kind in BEFORE_THE_STEP else name, storage.nbytes, begin, end
    )


def _name_of(trace: Trace, index: int) -> str:
    """Return the name of an operator, and of the module that ran it."""
    if index >= len(trace.operators):
        return ""
    run, phase, row = trace.operators[index]
    return f"{run.call.name}, {phase} of {row[0] or 'the model'}" if row is not None else f"{run.call.name}, {phase}"
