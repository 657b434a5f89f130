"""``nn.Linear`` as products of tiles, for hardware that multiplies small matrices."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelsummary.errors import InputError, check_integers

__all__ = ["TiledLinear", "tile_linear"]

_M = TypeVar("_M", bound=nn.Module)


class TiledLinear(nn.Module):
    """An ``nn.Linear`` computed in products of at most ``tile`` x ``tile`` weights.

    Weight and bias have the shapes and names of an ``nn.Linear``. Results and gradients are equal up to rounding, since
    sums are taken in another order.

    Args:
        in_features, out_features, bias, device, dtype: as for ``nn.Linear``.
        tile: largest side of a tile, in elements. Default: 64. The last tile of a dimension may be smaller.

    Raises:
        InputError: ``tile`` is not an integer >= 1.

    >>> layer = TiledLinear(100, 70, tile=32)
    >>> layer.weight.shape, layer(torch.rand(2, 100)).shape
    (torch.Size([70, 100]), torch.Size([2, 70]))
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
        """Return a tiled layer that uses the parameters of ``linear`` themselves.

        >>> linear = nn.Linear(6, 4)
        >>> TiledLinear.of(linear, tile=2).weight is linear.weight
        True
        """
        tiled = cls.__new__(cls)
        nn.Module.__init__(tiled)
        tiled._take(linear, tile)
        return tiled.train(linear.training)

    def _take(self, linear: nn.Linear, tile: int) -> None:
        check_integers(tile=tile)
        self.in_features, self.out_features, self.tile = linear.in_features, linear.out_features, tile
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (..., in_features) to (..., out_features); raise ``InputError`` for another shape."""
        if x.shape[-1:] != (self.in_features,):
            raise InputError(f"expected an input of size [..., {self.in_features}], got {list(x.shape)}")
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
        """Return the arguments that ``print`` shows."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, tile={self.tile}"


def tile_linear(module: _M, tile: int = 64) -> _M | TiledLinear:
    """Replace every ``nn.Linear`` in ``module`` in place by a ``TiledLinear`` with the same parameters.

    Subclasses of ``nn.Linear`` and layers with hooks are left unchanged.

    Args:
        module: the module, which is changed.
        tile: largest side of a tile, in elements. Default: 64.

    Returns:
        ``module``, or a new ``TiledLinear`` if ``module`` itself is an ``nn.Linear``.

    Raises:
        InputError: ``module`` is not a module, or ``tile`` is not an integer >= 1.

    >>> tile_linear(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), tile=2)
    Sequential(
      (0): TiledLinear(in_features=6, out_features=4, bias=True, tile=2)
      (1): ReLU()
    )
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"module must be a torch.nn.Module, got {type(module).__name__}: {module!r:.80}")
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
