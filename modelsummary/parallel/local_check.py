"""Run the model as one rank has it, on shapes: every value must have the shape that its layout says.

A forward that writes the number of heads, or a width, into a view gets the wrong shape from a local tensor. Where the
number is an attribute of the module, that attribute is divided; where nothing helps, the region is refused.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary.capture.live import LiveModel
from modelsummary.capture.templates import leaves_of
from modelsummary.errors import InputError
from modelsummary.parallel.calls import Calls
from modelsummary.parallel.derive import Derivation
from modelsummary.parallel.layouts import Sharded
from modelsummary.parallel.regions import Region
from modelsummary.record.events import Event, Value, values_in
from modelsummary.record.runs import record_once

__all__ = ["Attribute", "check_locally"]

_MOST_OPTIONS = 32


@dataclass(frozen=True)
class Attribute:
    """An integer attribute of a module that is divided by the number of ranks.

    Attributes:
        fqn: of the module.
        name: of the attribute.
        whole, local: its value before and after.
    """

    fqn: str
    name: str
    whole: int
    local: int


def check_locally(live: LiveModel, derivation: Derivation, n_ranks: int) -> list[Attribute]:
    """Demote the regions whose forward does not run on local tensors; return the attributes that have to change."""
    chosen: list[Attribute] = []
    groups = _groups(derivation.regions)
    options = [_options(derivation.calls, regions, n_ranks) for regions in groups]
    first = [each[0] for each in options]
    if not groups or _runs(live, derivation, groups, first, n_ranks):
        return list(chain(*first))
    for regions, ways in zip(groups, options, strict=True):
        way = next((each for each in ways if _runs(live, derivation, [regions], [each], n_ranks)), None)
        if way is None:
            for region in regions:
                derivation.gather(region)
        else:
            chosen += way
    return chosen


def _groups(regions: Sequence[Region]) -> list[list[Region]]:
    """Regions of equal blocks together: they differ by numbers in their names."""
    groups: defaultdict[tuple[str, ...], list[Region]] = defaultdict(list)
    for region in regions:
        groups[tuple(re.sub(r"\d+", "*", fqn) for fqn in region.columns)].append(region)
    return list(groups.values())


def _options(calls: Calls, regions: Sequence[Region], n_ranks: int) -> list[list[Attribute]]:
    """Yield sets of attributes to divide, the smallest first: their values equal the extent of a sharded dimension."""
    found: defaultdict[str, list[Attribute]] = defaultdict(list)
    for region in regions:
        written = {leaf for event in region.functions for leaf in leaves_of((event.args, event.kwargs))}
        for fqn in dict.fromkeys(event.fqn for event in region.functions):
            for name, value in vars(calls.modules[fqn]).items():
                if type(value) is int and value in region.sizes and value in written and value % n_ranks == 0:
                    found[name].append(Attribute(fqn, name, value, value // n_ranks))
    names = list(found)
    subsets = chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))
    return [[each for name in subset for each in found[name]] for subset in islice(subsets, _MOST_OPTIONS)]


def _runs(
    live: LiveModel,
    derivation: Derivation,
    groups: Sequence[Sequence[Region]],
    attributes: Sequence[Sequence[Attribute]],
    n_ranks: int,
) -> bool:
    """Return True if the model, sharded in these regions alone, does the same on local shapes."""
    regions = [region for group in groups for region in group]
    twin = local_model(derivation.calls, regions, list(chain(*attributes)), n_ranks)
    try:
        record = record_once(twin, live.call, live.execution)
    except Exception:  # a shape does not fit
        return False
    layouts: dict[Value, Sharded] = {}
    for region in regions:
        layouts.update(region.layouts)
    other = Calls(twin, record).events
    own = derivation.calls.events
    return len(own) == len(other) and all(
        _agree(one, two, layouts, n_ranks) for one, two in zip(own, other, strict=True)
    )


def _agree(one: Event, two: Event, layouts: dict[Value, Sharded], n_ranks: int) -> bool:
    """Return True if two events are the same but for the extents of what is sharded."""
    if (one.fqn, one.function and one.function.name) != (two.fqn, two.function and two.function.name):
        return False
    floats = [[leaf for leaf in leaves_of((each.args, each.kwargs)) if type(leaf) is float] for each in (one, two)]
    if floats[0] != floats[1]:
        return False
    if one.is_decision and one.result != two.result:
        return False
    pairs = zip(values_in(one.result), values_in(two.result), strict=False)
    return all(local_shape(whole.shape, layouts.get(whole), n_ranks) == part.shape for whole, part in pairs)


def local_shape(shape: Sequence[int], layout: Sharded | None, n_ranks: int) -> tuple[int, ...]:
    """Return the shape of what one rank holds of a tensor."""
    if layout is None:
        return tuple(shape)
    return tuple(size // n_ranks if dim == layout.dim else size for dim, size in enumerate(shape))


def local_model(calls: Calls, regions: Sequence[Region], attributes: Sequence[Attribute], n_ranks: int) -> nn.Module:
    """Return a copy of the model with the parameters of one rank on meta; the copy shares the model's buffers.

    Raises:
        InputError: the model cannot be copied.
    """
    cut: dict[int, int] = {}  # id of a parameter -> dimension that is divided
    for region in regions:
        for fqn in region.columns:
            module = calls.modules[fqn]
            for parameter in module.parameters():
                cut[id(parameter)] = 1 if isinstance(module, nn.Embedding) else 0
        for fqn in region.rows:
            cut[id(calls.modules[fqn].weight)] = 1
    memo: dict[int, Any] = {}
    for tensor in calls.model.buffers():
        memo[id(tensor)] = tensor
    for parameter in calls.model.parameters():
        layout = Sharded(cut[id(parameter)]) if id(parameter) in cut else None
        memo[id(parameter)] = _empty(parameter, local_shape(parameter.shape, layout, n_ranks))
    try:
        twin = copy.deepcopy(calls.model, memo)
    except Exception as error:
        raise InputError(f"the model cannot be copied, which checking a plan needs: {error!r:.200}") from error
    for each in attributes:
        setattr(twin.get_submodule(each.fqn), each.name, each.local)
    return twin


def _empty(parameter: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    made = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(made, requires_grad=parameter.requires_grad)
