"""Make a plan from what a model does."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from modelsummary.capture.live import LiveModel
from modelsummary.errors import InputError
from modelsummary.parallel.derive import Derivation, Layer, derive
from modelsummary.parallel.local_check import Attribute, check_locally
from modelsummary.parallel.plan import LayerPlan, ParallelPlan
from modelsummary.parallel.regions import Calls
from modelsummary.record.runs import record_once

__all__ = ["make_plan"]


def make_plan(live: LiveModel, tensor: int = 1) -> ParallelPlan:
    """Return the plan."""
    calls = Calls(live.model, record_once(live.model, live.call, live.execution))
    derivation = derive(calls)
    check_divides(derivation, tensor)
    attributes = [Attribute(fqn, "inplace", True, False) for fqn in derivation.in_place]
    attributes += check_locally(live, derivation, tensor)
    layers = tuple(layer_plan(calls, layer, tensor) for layer in derivation.in_order())
    return ParallelPlan(tensor, layers, tuple(attributes), derivation.reasons)


def check_divides(derivation: Derivation, n_ranks: int) -> None:
    """Gather regions whose smaller extents do not divide; raise ``InputError`` where the largest does not."""
    for region in list(derivation.regions):
        if math.gcd(*region.sizes) % n_ranks:
            derivation.gather(region)
    for layer in list(derivation.layers.values()):
        weight: Any = derivation.calls.modules[layer.fqn]._parameters.get("weight")
        if layer.role != "norm" and weight.shape[layer.role == "row"] % n_ranks:
            del derivation.layers[layer.fqn]


_STYLES = {
    "column": "ColwiseParallel",
    "row": "RowwiseParallel",
    "embedding": "RowwiseParallel",
    "head": "ColwiseParallel",
    "norm": "SequenceParallel",
}


def layer_plan(calls: Calls, layer: Layer, n_ranks: int) -> LayerPlan:
    """Return how torch's styles say what a layer does."""
    module = calls.modules[layer.fqn]
    shards: dict[str, int | None] = {name: None for name, each in module._parameters.items() if each is not None}
    options: dict[str, Any] = {}
    if layer.role == "norm":
        options = {"sequence_dim": layer.dim, "use_local_output": True}
    elif layer.role in ("column", "head"):
        shards = dict.fromkeys(shards, 1 if isinstance(module, nn.Embedding) else 0)
        options = {"output_layouts": "Replicate()"} if layer.gathers else {}
    elif layer.role == "row":
        shards["weight"] = 1
        options = {"input_layouts": "Replicate()"} if layer.gathers else {}
    else:
        shards["weight"] = 0
        options = {"input_layouts": "Replicate()"}
    params = sum(
        module.get_parameter(name).numel() // (1 if dim is None else n_ranks) for name, dim in shards.items()
    )
    return LayerPlan(layer.fqn, _STYLES[layer.role], options, layer.role, shards, params)


_ = InputError
