"""The subject of a report: the model, the sizes of its inputs and its dtype, as the first words of what is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from modelsummary.layer_info import LayerInfo, Sizes

__all__ = ["dtype_name", "dtype_of", "subject_of"]

_NAMED = 3  # inputs


def subject_of(root: LayerInfo, dtype: torch.dtype | str | None = None, autocast: torch.dtype | None = None) -> str:
    """Return the class of a model, the sizes of its inputs, and the dtype of its parameters.

    Args:
        root: row of the model.
        dtype: dtype in which it runs; None: the one that most of its parameters have, if these are there to tell.
        autocast: dtype of ``torch.autocast`` around the forward; None: there is none.

    >>> from modelsummary import Statistics
    >>> stats = Statistics(nn.Linear(4, 8), (2, 4))
    >>> subject_of(stats.root), subject_of(stats.root, autocast=torch.bfloat16)
    ('Linear, [2, 4], float32', 'Linear, [2, 4], float32, autocast bfloat16')
    """
    inputs = list(_inputs(root.input_size)) if root.executed else []
    more = [f"{len(inputs) - _NAMED} more inputs"] if len(inputs) > _NAMED else []
    cast = [] if autocast is None else [f"autocast {dtype_name(autocast)}"]
    if dtype is None and root.module is not None:
        dtype = dtype_of(root.module)
    dtypes = [] if dtype is None else [dtype_name(dtype)]
    return ", ".join([root.class_name, *inputs[:_NAMED], *more, *dtypes, *cast])


def _inputs(sizes: Sizes, name: str = "") -> Iterator[str]:
    """Yield the shape of each tensor, with the name of its argument if it has one."""
    if isinstance(sizes, Mapping):
        for argument, inner in sizes.items():
            yield from _inputs(inner, str(argument))
    elif isinstance(sizes, tuple):
        for inner in sizes:
            yield from _inputs(inner, name)
    elif sizes is not None:
        shape = f"[{', '.join(map(str, sizes))}]" if isinstance(sizes, list) else sizes
        yield f"{name} {shape}" if name else shape


def dtype_of(model: nn.Module | None) -> torch.dtype:
    """Return the most frequent floating point dtype of the parameters, by elements; float32 if there are none.

    >>> dtype_of(nn.Linear(4, 8).half())
    torch.float16
    """
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters() if model is not None else ():
        if parameter.dtype.is_floating_point and not is_lazy(parameter):
            elements[parameter.dtype] += parameter.numel()
    return max(elements, key=lambda dtype: elements[dtype], default=torch.float32)


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype without its module.

    >>> dtype_name(torch.bfloat16), dtype_name("tf32")
    ('bfloat16', 'tf32')
    """
    return str(dtype).removeprefix("torch.")
