"""Forwards that are replaced, and the style of a module whose forward calls functions with sizes of the whole model.

``to_code`` copies its source, so it uses torch alone.
"""

from __future__ import annotations

import math
from functools import partial, wraps
from types import MethodType
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

__all__ = ["LocalSizes", "SizesOfRank", "changed_leaves", "replace_forward"]


def replace_forward(module: Any, around: Any) -> None:
    """Let a module call ``around(module, forward, *args, **kwargs)``.

    A copy of the module, such as the average of weights that a loop keeps, calls it with the copy and its forward.
    """
    whole = module.forward

    def unbound(_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)

    @wraps(whole.__func__ if getattr(whole, "__self__", None) is module else unbound)
    def forward(bound_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return around(bound_module, partial(forward.__wrapped__, bound_module), *args, **kwargs)

    module.forward = MethodType(forward, module)


def changed_leaves(change: Any, value: Any) -> Any:
    """Return arguments with each of their leaves changed, also of slices."""
    if isinstance(value, (tuple, list)):
        parts = [changed_leaves(change, part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, dict):
        return {name: changed_leaves(change, part) for name, part in value.items()}
    if isinstance(value, slice):
        return slice(*changed_leaves(change, (value.start, value.stop, value.step)))
    return change(value)


class SizesOfRank(TorchFunctionMode):
    """Gives functions that are called with sizes of the whole model the sizes of one rank.

    Only calls are changed that torch would refuse, or that take the recorded numbers with a tensor of one rank.

    Args:
        calls: name of a function, and which of its numbers belong to a sharded dimension: their positions in its
            arguments, and their values in the whole model and on a rank.
        n_ranks: number of ranks.
    """

    def __init__(self, calls: Any, n_ranks: int) -> None:
        super().__init__()
        self.calls, self.n_ranks = calls, n_ranks

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        for call in self.calls:
            if call["name"] == name and len(args) > 1:
                args = self._view(call, args) if "dims" in call else self._numbers(call, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def _view(self, call: Any, args: Any) -> Any:
        """Change the sizes that take the place of the dimensions ``dims`` of a tensor."""
        tensor, sizes = args[0], list(args[1] if isinstance(args[1], (tuple, list)) else args[1:])
        (begin, end), (first, last), at = call["dims"], call["sizes"], call["at"]
        if (tensor.dim(), len(sizes)) != (call["ndim"], call["n_sizes"]) or sizes[at] == -1:
            return args
        total, after = math.prod(tensor.shape[begin:end]), sizes[first:last]
        if -1 not in after and math.prod(after) == total * self.n_ranks and sizes[at] % self.n_ranks == 0:
            sizes[at] //= self.n_ranks
        elif sizes[at] == call["whole"] and end - begin == 1 and total == call["local"]:
            sizes[at] //= self.n_ranks
            if -1 not in after and last - at == 2:  # the forward divided the width of a rank by all heads
                sizes[at + 1] = total // math.prod(sizes[first : at + 1])
        return (tensor, sizes)

    def _numbers(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Change numbers of a call whose tensor has ``local`` elements along the dimension ``at``, from the end."""
        tensor, *others = args
        if call["name"].startswith("split"):  # of the same sizes along another dimension
            dim = kwargs.get("dim", others[1] if len(others) > 1 else 0)
            if dim % tensor.dim() != tensor.dim() + call["at"]:
                return args
        leaves: list[Any] = []
        changed_leaves(leaves.append, others)
        size = tensor.shape[call["at"]] if tensor.dim() >= -call["at"] else 1
        if size != call["local"] or len(leaves) != call["n_leaves"]:
            return args
        if any(
            type(leaves[position]) is not int or leaves[position] != whole for position, whole, _ in call["numbers"]
        ):
            return args
        for position, _, local in call["numbers"]:
            leaves[position] = local
        changed = iter(leaves)
        return (tensor, *changed_leaves(lambda _: next(changed), others))


class LocalSizes(ParallelStyle):
    """A module whose forward takes sizes of the whole model, in calls that get the sizes of one rank.

    Args:
        calls: as ``SizesOfRank`` takes them.
    """

    def __init__(self, *, calls: Any) -> None:
        self.calls = calls

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        return self.wrap(module, device_mesh.size())

    def wrap(self, module: Any, n_ranks: int) -> Any:
        """Let the forward of a module run with the sizes of one rank."""

        def local_forward(_module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
            with SizesOfRank(self.calls, n_ranks):
                return forward(*args, **kwargs)

        replace_forward(module, local_forward)
        return module
