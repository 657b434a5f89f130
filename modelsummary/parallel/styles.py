"""Styles of tensor parallelism that torch lacks, for modules whose functions take parameters.

``to_code`` copies their source, so they use torch alone.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["LocalParallel", "ReduceGradient"]


class LocalParallel(ParallelStyle):
    """A module that runs on the local shards of its own parameters.

    Args:
        shards: name of a parameter -> its placement.
        once: names of parameters that only the first rank adds, because the results are summed.
        summed: positions of arguments whose gradients are summed over the ranks; names for keyword arguments.
        sums_result: the result is summed over the ranks.
    """

    def __init__(
        self,
        *,
        shards: dict[str, Any],
        once: tuple[str, ...] = (),
        summed: tuple[Any, ...] = (),
        sums_result: bool = False,
    ) -> None:
        self.shards, self.once, self.summed, self.sums_result = shards, once, summed, sums_result

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        for name in (*self.shards, *self.once):
            parameter = module.get_parameter(name)
            placement = self.shards.get(name, Replicate())
            made = distribute_tensor(parameter, device_mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))
        forward = module.forward

        @wraps(forward)
        def local_forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._summed(args, kwargs, device_mesh)
            whole = {name: module._parameters[name] for name in (*self.shards, *self.once)}
            module._parameters.update(self._local(whole, device_mesh))
            try:
                result = forward(*args, **kwargs)
            finally:
                module._parameters.update(whole)
            if not self.sums_result:
                return result
            return DTensor.from_local(result, device_mesh, [Partial()], run_check=False).full_tensor()

        module.forward = local_forward
        return module

    def _local(self, whole: dict[str, Any], device_mesh: Any) -> dict[str, Any]:
        """Return the local tensors that replace the parameters during the forward."""
        found = {name: whole[name].to_local() for name in self.shards}
        is_first = device_mesh.get_local_rank() == 0
        for name in self.once:
            found[name] = whole[name].to_local(grad_placements=[Partial()]) * (1 if is_first else 0)
        return found

    def _summed(self, args: Any, kwargs: dict[str, Any], device_mesh: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments, with the gradients of some of them summed over the ranks."""
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        for name in self.summed:
            if isinstance(given[name], torch.Tensor) and given[name].is_floating_point():
                whole = DTensor.from_local(given[name], device_mesh, [Replicate()], run_check=False)
                given[name] = whole.to_local(grad_placements=[Partial()])
        return tuple(given[place] for place in range(len(args))), {name: given[name] for name in kwargs}


class ReduceGradient(ParallelStyle):
    """A layer whose result, or parts of it, all heads share: their gradients are summed over the ranks.

    Args:
        parts: start and end of each part, along the last dimension, in order.
    """

    def __init__(self, *, parts: Any) -> None:
        self.parts = parts

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        def sum_gradients(_module: Any, _args: Any, result: Any) -> Any:
            pieces, place = [], 0
            for start, stop in self.parts:
                whole = DTensor.from_local(result[..., start:stop], device_mesh, [Replicate()], run_check=False)
                pieces += [result[..., place:start], whole.to_local(grad_placements=[Partial()])]
                place = stop
            return torch.cat([*pieces, result[..., place:]], dim=-1)

        module.register_forward_hook(sum_gradients)
        return module
