"""Collectives that run, and the bytes of their whole tensors, seen where they are dispatched."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Names of torch's operators -> the collective, and the argument that is the whole tensor; None: the result is.
WHOLE: dict[str, tuple[str, int | None]] = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_single_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}
HARMLESS = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of their whole tensors, by phase.

    Attributes:
        ran: ``(phase, operation)`` -> how often, and bytes.
        phase: of what runs; the caller sets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[tuple[str, str], tuple[int, int]] = {}
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its own dispatch comes here again, with the collectives
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "_schema", None) and func._schema.name
        if name in WHOLE:
            operation, place = WHOLE[name]
            place = None if operation == "all_to_all" and self.phase == "forward" else place  # what a rank gets
            tensor = result if place is None else args[place]
            tensor = tensor[0] if isinstance(tensor, (list, tuple)) else tensor
            count, nbytes = self.ran.get((self.phase, operation), (0, 0))
            self.ran[self.phase, operation] = (count + 1, nbytes + tensor.numel() * tensor.itemsize)
        elif name and "c10d" in name and not name.endswith(HARMLESS):
            raise AssertionError(f"{name} is not counted")
        return result


def of_step(model: Any, inputs: dict[str, Any] | tuple[Any, ...], loss_of: Any) -> dict[tuple[str, str], Any]:
    """Return the collectives of a forward and a backward."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    with Collectives() as seen:
        out = model(*args, **kwargs)
        seen.phase = "loss"
        loss = loss_of(out)
        seen.phase = "backward"
        loss.backward()
    model.zero_grad()
    return seen.ran


def of_plan(plan: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the collectives of a plan: of its layers and of its units."""
    found = dict(plan.collectives)
    for key, (count, nbytes) in plan.unit_collectives.items():
        before = found.get(key, (0, 0))
        found[key] = (before[0] + count, before[1] + nbytes)
    return found
