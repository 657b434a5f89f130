"""Call the functions of a region on the shapes of one rank, where the forward runs on real data only.

Which tokens an expert takes depends on values, which a copy on shapes does not have.
"""

from __future__ import annotations

from typing import Any

import torch

from modelsummary.capture.containers import tensors_of
from modelsummary.capture.templates import Attribute, map_template
from modelsummary.parallel.placements import local_shape
from modelsummary.parallel.record_calls import Calls
from modelsummary.parallel.regions import Region
from modelsummary.record.events import Event, Value, values_in
from modelsummary.record.tensors import Foreign

__all__ = ["runs_on_shards"]


def runs_on_shards(calls: Calls, region: Region, n_ranks: int) -> bool:
    """Return True if each function of a region, called with what one rank holds, returns what one rank has to hold.

    A module that reads sizes may compute with the size of a shard, which its record does not show: the answer is False.
    """
    callers = {event.parent for event in region.functions if event.parent is not None}
    return not any(caller.reads_sizes for caller in callers) and all(
        _is_local(calls, event, region, n_ranks) for event in region.functions
    )


def _is_local(calls: Calls, event: Event, region: Region, n_ranks: int) -> bool:
    placements = region.placements
    if event.function is None:
        return False

    def on_meta(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            shape = local_shape(leaf.shape, placements.get(leaf), n_ranks)
            return torch.empty(shape, dtype=leaf.dtype, device="meta")
        if isinstance(leaf, Attribute):
            tensor = calls.tensor_of(leaf)
            shape = local_shape(calls.shape_of(leaf) or (), region.parameters.get(leaf.fqn), n_ranks)
            return torch.empty(shape, dtype=getattr(tensor, "dtype", None), device="meta")
        return torch.empty_like(leaf.tensor, device="meta") if isinstance(leaf, Foreign) else leaf

    try:
        result = event.function(*map_template(on_meta, event.args), **map_template(on_meta, event.kwargs))
    except Exception:  # a shape does not fit
        return False
    expected = [local_shape(value.shape, placements.get(value), n_ranks) for value in values_in(event.result)]
    return [tuple(tensor.shape) for tensor in tensors_of(result)] == expected
