"""Memory of a real training step on the CPU, from the events of torch's profiler, without each kernel's workspace.

A kernel's workspace is what it allocates and frees while it runs. The profiler nests events: the outermost event of an
operator that has a kernel of its own, and is not composed of others, is the call of that kernel. Memory that is born
and dies within one such call is workspace. No dispatch mode is on, since autograd does other things under one.
"""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function

from tests.zoo.example import Example

__all__ = ["RealStep", "loss_of", "real_step"]

_FORWARD = "## forward"


@dataclass(frozen=True)
class RealStep:
    """Bytes over what lived before the step.

    Attributes:
        held: after the forward and its loss.
        peak: the most at a time.
        peak_without_workspace: the same, leaving out what kernels allocate and free while they run.
        optimizer_state: of the optimizer's state, which lived before the step.
    """

    held: int
    peak: int
    peak_without_workspace: int
    optimizer_state: int


def tensors_in(value: Any, *, objects: bool = False) -> Iterator[torch.Tensor]:
    """All tensors in containers; with ``objects`` also those that objects hold, such as a cache."""
    seen: set[int] = set()

    def walk(each: Any) -> Iterator[torch.Tensor]:
        if id(each) in seen:
            return
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, dict):
            for inner in each.values():
                yield from walk(inner)
        elif isinstance(each, (list, tuple, set)):
            for inner in each:
                yield from walk(inner)
        elif objects and hasattr(each, "__dict__") and not isinstance(each, type):
            yield from walk(vars(each))

    yield from walk(value)


def loss_of(output: Any) -> torch.Tensor:
    """The sum of all that can be differentiated."""
    parts = [each.sum() for each in tensors_in(output) if each.requires_grad and each.dtype.is_floating_point]
    if not parts:
        raise ValueError("nothing in the result requires a gradient")
    return functools.reduce(torch.add, parts)


def real_step(example: Example, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> RealStep:
    """Run two steps and measure the second: the optimizer's state is then there already."""
    optimizer = make_optimizer([each for each in example.model.parameters() if each.requires_grad])
    args, kwargs = copy.deepcopy((example.args, example.kwargs))  # a cache among them is changed by a step
    loss_of(example.model(*args, **kwargs)).backward()
    optimizer.step()
    optimizer.zero_grad()
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors_in(optimizer.state)}
    del args, kwargs
    gc.collect()
    with profile(use_kineto=True, profile_memory=True) as traced:
        with record_function(_FORWARD):
            output = example()
            loss = loss_of(output)
        loss.backward()
        optimizer.step()
    return _measured(traced.kineto_results.experimental_event_tree(), sum(storages.values()))


def _measured(roots: Any, optimizer_state: int) -> RealStep:
    ends: list[int] = []
    changes: list[tuple[int, int, int, int]] = []  # time, address, bytes, call of a kernel
    stack = [(root, 0) for root in roots]
    while stack:
        event, kernel = stack.pop()
        if event.tag == _EventType.Allocation:
            if event.extra_fields.device.type == "cpu":
                changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, kernel))
            continue
        if event.tag == _EventType.TorchOp:
            if event.name == _FORWARD:
                ends.append(event.end_time_ns)
            if not kernel and _has_kernel(event.name):
                kernel = event.id
        stack.extend((child, kernel) for child in event.children)
    changes.sort(key=lambda change: change[0])
    workspace = _workspace(changes)
    held = peak = kept = kept_peak = after_forward = 0
    for number, (time, _, nbytes, _) in enumerate(changes):
        held += nbytes
        peak = max(peak, held)
        if number not in workspace:
            kept += nbytes
            kept_peak = max(kept_peak, kept)
        if time <= ends[0]:
            after_forward = held
    return RealStep(after_forward, peak, kept_peak, optimizer_state)


def _workspace(changes: list[tuple[int, int, int, int]]) -> set[int]:
    """Numbers of the events that allocate and free memory within one call of a kernel."""
    live: dict[int, int] = {}
    found: set[int] = set()
    for number, (_, address, nbytes, kernel) in enumerate(changes):
        if nbytes > 0:
            live[address] = number
            continue
        born = live.pop(address, None)
        if born is not None and kernel and changes[born][3] == kernel:
            found |= {born, number}
    return found


@functools.cache
def _has_kernel(name: str) -> bool:
    """Return True if an operator runs as one kernel, False if it is composed of others or is no operator."""
    if "::" not in name or name.startswith("autograd::"):
        return False
    overloads = [each for each in torch._C._dispatch_get_all_op_names() if each.split(".")[0] == name]
    composed = "CompositeImplicitAutograd"
    return bool(overloads) and not any(torch._C._dispatch_has_kernel_for_dispatch_key(o, composed) for o in overloads)
