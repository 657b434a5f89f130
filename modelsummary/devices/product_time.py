"""Time of a matrix product: its result is cut into tiles, which run in waves over the units of the device.

Each tile works through the inner dimension after a start-up, which costs most where the inner dimension is short. The
fastest of several tile sizes counts, as cuBLAS and cuDNN choose; where tiles are few, the inner dimension is cut, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

__all__ = ["PARTS", "TILES", "Tiles", "product_seconds"]

Tiles = tuple[tuple[int, int], ...]
TILES: Tiles = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (32, 128),
    (128, 32),
    (32, 64),
    (64, 32),
)
PARTS = (1, 2, 4, 8, 16, 32)  # of the inner dimension
_EDGES_OF_LARGEST = sum(1 / size for size in TILES[0])  # for each element of its result
_UNIT_TILE = 128 * 128  # elements of the result that keep a unit busy


def product_seconds(
    sizes: tuple[int, int, int, int],
    rate: float,
    units: int,
    coefficients: Mapping[str, Any],
    bandwidth: float,
    tile_sizes: Tiles = TILES,
    part_counts: tuple[int, ...] = PARTS,
) -> float:
    """Return the least seconds of a product over tile sizes and cuts of its inner dimension.

    Args:
        sizes: batch, rows, columns, inner dimension.
        rate: operations per second of the whole device with the largest tiles.
        units: units that run tiles at the same time.
        coefficients: ``"edge"``: elements of an edge of a tile that cost as much as the operands they load;
            ``"start"``: elements of the inner dimension that a start-up takes; ``"alone"``: how much a small tile
            leaves a unit idle.
        bandwidth: bytes per second at which the results of parts are added up.
        tile_sizes, part_counts: the tiles, and the numbers of parts, that the library has.

    >>> coefficients = {"edge": 0.0, "start": 0.0}
    >>> product_seconds((1, 25600, 12800, 4096), 1e14, 100, coefficients, 1e12) / (2 * 25600 * 12800 * 4096 / 1e14)
    1.0
    """
    batch, m, n, k = sizes
    flush = 8.0 / bandwidth * batch * m * n
    unit_rate = rate / units
    edge, start, alone_power = (
        float(coefficients["edge"]),
        float(coefficients["start"]),
        float(coefficients.get("alone", 1.0)),
    )
    best = float("inf")
    for rows, columns in tile_sizes:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        edge_factor = (1 + edge * (1 / rows + 1 / columns)) / (1 + edge * _EDGES_OF_LARGEST)
        for parts in part_counts:
            # A part has at least 64 elements of the inner dimension, so a few small products are faster than slightly
            # shorter ones. Measured float32 products near such a step are met better with it than with a smooth model.
            if parts > 1 and (tiles * parts > 4 * units or k < 64 * parts):
                break
            tile = 2.0 * rows * columns * (k / parts + start) * edge_factor / unit_rate
            alone = tile * max(1.0, _UNIT_TILE / (rows * columns)) ** alone_power
            seconds = max(ceil(tiles * parts / units) * tile, alone) + (parts * flush if parts > 1 else 0.0)
            best = min(best, seconds)
    return best
