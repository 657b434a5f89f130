"""Views that a forward gives sizes of the whole model, which a rank with a part of the heads does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

from torch.overrides import TorchFunctionMode

from modelsummary.parallel.regions import Region
from modelsummary.record.events import values_in

__all__ = ["LocalViews", "Views", "fewest_views", "whole_views"]

# Name of the function and sizes as they are written -> sizes with -1 for the sharded one.
Views = Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]]
_FUNCTIONS = ("view", "reshape")
_MOST_VIEWS = 4  # each subset of them may need a run


def whole_views(regions: Iterable[Region]) -> Views:
    """Return the sizes of the regions' views that are written as a number where the result is sharded."""
    found: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    for region in regions:
        for event in region.functions:
            sizes = _sizes(event.args) if event.name in _FUNCTIONS else ()
            for result in values_in(event.result) if sizes else ():
                layout, shape = region.layouts.get(result), result.shape
                if layout is not None and sizes[layout.dim] != -1:
                    found[event.name, sizes] = (*shape[: layout.dim], -1, *shape[layout.dim + 1 :])
    return found


def fewest_views(views: Views, works: Callable[[Views], bool]) -> Views:
    """Return the fewest of the views with which it works; none if it does not even work with all."""
    if not views or len(views) > _MOST_VIEWS or not works(views):
        return {}
    subsets = chain.from_iterable(combinations(views.items(), size) for size in range(1, len(views)))
    return next((dict(each) for each in subsets if works(dict(each))), views)


class LocalViews(TorchFunctionMode):
    """A mode that runs views with other sizes, as if the forward had written these."""

    def __init__(self, views: Views) -> None:
        super().__init__()
        self._views = views

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        name = getattr(function, "__name__", "")
        if name in _FUNCTIONS:
            sizes = self._views.get((name, _sizes(args)))
            args = args if sizes is None else (args[0], sizes)
        return function(*args, **(kwargs or {}))


def _sizes(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the sizes that a view is called with; none if they are not numbers."""
    sizes = args[1:] if len(args) != 2 or isinstance(args[1], int) else args[1]
    is_sizes = isinstance(sizes, (tuple, list)) and all(type(each) is int for each in sizes)
    return tuple(sizes) if is_sizes else ()
