"""``nn.Linear`` as products of tiles, for what runs them one by one."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelsummary.errors import InputError

__all__ = ["TiledLinear", "tile_linear"]

_M = TypeVar("_M", bound=nn.Module)


class TiledLinear(nn.Module):
    """What ``nn.Linear`` computes, in products of at most ``tile`` x ``tile`` weights.

    Weight and bias are those of a ``nn.Linear``, under the same names. Results and gradients are equal up to rounding:
    the order of sums is another.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        tile: largest size of a tile's sides; the last of a dimension has what remains.

    Raises:
        InputError: ``tile`` is no integer >= 1.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tile: int = 64,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(linear, tile)

    @classmethod
    def of(cls, linear: nn.Linear, tile: int) -> TiledLinear:
        """The same layer in tiles, with the very parameters of ``linear``."""
        tiled = cls.__new__(cls)
        nn.Module.__init__(tiled)
        tiled._take(linear, tile)
        return tiled.train(linear.training)

    def _take(self, linear: nn.Linear, tile: int) -> None:
        if type(tile) is not int or tile < 1:
            raise InputError(f"tile={tile!r}; expected an integer >= 1")
        self.in_features, self.out_features, self.tile = linear.in_features, linear.out_features, tile
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of shape (..., in_features) to (..., out_features); raises ``InputError`` for another shape."""
        if x.shape[-1:] != (self.in_features,):
            raise InputError(f"an input of size {list(x.shape)}; expected [..., {self.in_features}]")
        parts = x.split(self.tile, -1)
        columns = []
        for band in self.weight.split(self.tile, 0):
            products = [F.linear(part, tile) for part, tile in zip(parts, band.split(self.tile, 1), strict=True)]
            total = products[0]
            for product in products[1:]:
                total = total + product
            columns.append(total)
        result = torch.cat(columns, -1)
        return result if self.bias is None else result + self.bias

    def extra_repr(self) -> str:
        """What ``print`` shows of it."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, tile={self.tile}"


def tile_linear(module: _M, tile: int = 64) -> _M | TiledLinear:
    """Replace every ``nn.Linear`` in ``module`` by a ``TiledLinear`` with its parameters, in place.

    Subclasses of ``nn.Linear`` and layers with hooks stay as they are.

    Args:
        tile: largest size of a tile's sides.

    Returns:
        ``module``; where that is a ``nn.Linear`` itself, the layer in its place.

    Raises:
        InputError: ``module`` is no module, or ``tile`` no integer >= 1.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(module).__name__}: {module!r:.80}")
    if _is_plain(module):
        return TiledLinear.of(module, tile)  # type: ignore[arg-type]
    tiled: dict[nn.Module, TiledLinear] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, nn.Linear) and _is_plain(child):
                tiled[child] = tiled.get(child) or TiledLinear.of(child, tile)
                parent._modules[name] = tiled[child]
    return module


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks
