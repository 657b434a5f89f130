"""What a step really allocates on the CPU, from the events of torch's profiler: the truth to compare with."""

from __future__ import annotations

import gc

import torch
from torch.autograd.profiler import profile, record_function

from modelsummary.operators.tensor_bytes import inner_tensors


def real_memory(model, x, loss, make_optimizer):
    """Bytes over what lived before: held after forward, backward and step; and the peak. The second step counts."""
    optimizer = make_optimizer(model.parameters())
    loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()

    def step():
        with record_function("## forward"):
            output = model(x)
            value = loss(output)
        with record_function("## backward"):
            value.backward()
        with record_function("## step"):
            optimizer.step()

    return allocated(step)


def allocated(step):
    """Bytes over what lived before ``step``: held after each of its records whose name begins with ##; and the peak."""
    gc.collect()
    with profile(use_kineto=True, profile_memory=True) as traced:
        step()
    events = traced.kineto_results.events()
    ends = {event.end_ns(): event.name()[3:] for event in events if event.name().startswith("## ")}
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    found = {}
    for time, change in changes:
        for end in [end for end in ends if end < time]:
            found[ends.pop(end)] = held
        held += change
        peak = max(peak, held)
    found.update(dict.fromkeys(ends.values(), held))
    return found, peak


def alive():
    """Bytes of the storages of all tensors that Python knows, of distributed ones the local storages."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    own = [inner for each in tensors for inner in inner_tensors(each)]
    storages = [each.untyped_storage() for each in own if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each for each in storages if each.device.type != "meta"]
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def persistent(estimate):
    """What lives before the step."""
    return estimate.params + estimate.buffers + estimate.inputs + estimate.optimizer_state


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)
