"""The style of a module whose forward calls functions with sizes of the whole model, such as ``view(B, T, C)``.

``to_code`` copies its source, so it uses torch alone.
"""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor.parallel import ParallelStyle
from torch.overrides import TorchFunctionMode

from modelsummary.parallel.replaced_forward import replace_forward

__all__ = ["LocalSizes", "SizesOfRank"]


class SizesOfRank(TorchFunctionMode):
    """Gives functions that are called with sizes of the whole model the sizes of one rank.

    Only calls are changed that torch would refuse, or that take the recorded numbers with a tensor of one rank.

    Args:
        calls: name of a function, and which of its sizes belong to a sharded dimension.
        n_ranks: number of ranks.
    """

    def __init__(self, calls: Any, n_ranks: int) -> None:
        super().__init__()
        self.calls, self.n_ranks = calls, n_ranks

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "").strip("_")
        for call in self.calls:
            if call["name"] == name and len(args) > 1:
                args = getattr(self, f"of_{call['kind']}")(call, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def of_view(self, call: Any, args: Any, _kwargs: Any) -> Any:
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

    @staticmethod
    def _is_local(tensor: Any, call: Any) -> bool:
        """Return True if a tensor has the dimension ``at``, of the size of one rank."""
        return bool(tensor.dim() >= -call["at"] and tensor.shape[call["at"]] == call["local"])

    def of_expand(self, call: Any, args: Any, _kwargs: Any) -> Any:
        """Change the size of the dimension ``at``, counted from the end."""
        tensor, sizes = args[0], list(args[1] if isinstance(args[1], (tuple, list)) else args[1:])
        is_local = len(sizes) == call["n_sizes"] and self._is_local(tensor, call)
        if is_local and sizes[call["at"]] == call["local"] * self.n_ranks:
            sizes[call["at"]] = call["local"]
        return (tensor, sizes)

    def of_copies(self, call: Any, args: Any, _kwargs: Any) -> Any:
        """Change the number of copies of the dimension ``at``, counted from the end, that has one element."""
        tensor, *others = args
        if call["n_sizes"] == 1:
            is_whole = others[0] == call["whole"] and tensor.shape[call["at"]] == 1
            return (tensor, others[0] // self.n_ranks, *others[1:]) if is_whole else args
        sizes = list(others[0] if isinstance(others[0], (tuple, list)) else others)
        if len(sizes) == call["n_sizes"] and sizes[call["at"]] == call["whole"]:
            sizes[call["at"]] //= self.n_ranks
        return (tensor, sizes)

    def of_split(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Change the sizes of the parts of the dimension ``at``, counted from the end."""
        tensor, sizes, *others = args
        dim = others[0] if others else kwargs.get("dim", 0)
        if dim not in (call["at"], tensor.dim() + call["at"]) or tensor.shape[dim] != call["local"]:
            return args
        is_whole = (tuple(sizes) if isinstance(sizes, (tuple, list)) else sizes) == call["whole"]
        return (tensor, list(call["sizes"]), *others) if is_whole else args

    def of_slice(self, call: Any, args: Any, _kwargs: Any) -> Any:
        """Change the slice that takes a part of the dimension ``at``, counted from the end."""
        tensor, index = args
        parts = list(index) if isinstance(index, tuple) else [index]
        if not self._is_local(tensor, call) or len(parts) != call["n_parts"]:
            return args
        part = parts[call["part"]]
        if isinstance(part, slice) and [part.start, part.stop] == list(call["whole"]):
            parts[call["part"]] = slice(*call["bounds"])
        return (tensor, tuple(parts))


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
