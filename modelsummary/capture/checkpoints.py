"""Activation checkpointing of chosen modules and segments of a model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from modelsummary.errors import InputError, close_to

__all__ = ["apply_checkpoint", "is_checkpointed", "segment_of"]


def apply_checkpoint(model: nn.Module, fqns: Iterable[str]) -> None:
    """Run modules of ``model`` under non-reentrant activation checkpointing from now on.

    Gradients, names, parameters and state dicts do not change.

    Args:
        model: the model, changed in place.
        fqns: names of modules. ``"features[4:8]"`` is one segment, children 4 to 7 of the ``nn.Sequential`` called
            ``features``; only the input of the segment is kept.

    Raises:
        InputError: a module or segment does not exist, or segments overlap; the model is not changed.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> apply_checkpoint(model, ["[0:2]"])
    >>> model(torch.ones(4, 2)).sum().backward()
    >>> model[0].weight.grad.shape
    torch.Size([3, 2])
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}: {model!r:.80}")
    if isinstance(fqns, str):
        raise InputError(f"fqns must be a list of module names, got one name; pass [{fqns!r}]")
    chosen = list(dict.fromkeys(fqns)) if isinstance(fqns, Iterable) else [fqns]
    if not all(isinstance(fqn, str) for fqn in chosen):
        raise InputError(f"fqns must be a list of module names, got {fqns!r}")
    modules = dict(model.named_modules())
    segments: defaultdict[str, list[range]] = defaultdict(list)
    for fqn in chosen:
        container, segment = segment_of(fqn)
        if container not in modules:
            raise InputError(f"checkpoint names {fqn!r}, but the model has no such module{close_to(fqn, modules)}")
        if segment is not None:
            _check_segment(fqn, modules[container], segment, segments[container])
            segments[container].append(segment)
    for fqn in {segment_of(fqn)[0]: fqn for fqn in chosen}.values():
        container, _ = segment_of(fqn)
        if container in segments and container in chosen:
            raise InputError(f"checkpoint names {fqn!r} and all of {container!r}; pass only one of them")
        if is_checkpointed(modules[container]):
            raise InputError(f"{fqn!r} is checkpointed already")
    for fqn in chosen:
        if fqn in modules:
            modules[fqn].forward = partial(checkpoint, modules[fqn].forward, use_reentrant=False)
    for container, parts in segments.items():
        modules[container].forward = partial(_in_segments, modules[container], parts)


def is_checkpointed(module: nn.Module | None) -> bool:
    """Return True if a module, or a segment of it, runs under activation checkpointing."""
    forward = vars(module).get("forward") if module is not None else None
    return isinstance(forward, partial) and forward.func in (checkpoint, _in_segments)


_SEGMENT = re.compile(r"(?P<container>.*)\[(?P<first>\d+):(?P<end>\d+)\]")


def segment_of(fqn: str) -> tuple[str, range | None]:
    """Return the name of a module and None, or the container of a segment and the numbers of its children.

    >>> segment_of("features.3"), segment_of("features[4:8]")
    (('features.3', None), ('features', range(4, 8)))
    """
    match = _SEGMENT.fullmatch(fqn)
    return (match["container"], range(int(match["first"]), int(match["end"]))) if match else (fqn, None)


def _check_segment(fqn: str, container: nn.Module, segment: range, others: Iterable[range]) -> None:
    if type(container).forward is not nn.Sequential.forward:
        raise InputError(f"checkpoint names {fqn!r}, but a {type(container).__name__} is not an nn.Sequential")
    n_children = len(container._modules)
    if not segment or segment.stop > n_children:
        raise InputError(f"checkpoint names {fqn!r}, but the container has children 0 to {n_children - 1}")
    if any(set(segment) & set(other) for other in others):
        raise InputError(f"checkpoint names {fqn!r}, which overlaps another segment")


def _in_segments(container: nn.Module, segments: Sequence[range], x: Any) -> Any:
    """Run the children of an ``nn.Sequential``, with its segments checkpointed."""
    children = list(container.children())
    segment_at = {segment.start: segment for segment in segments}
    position = 0
    while position < len(children):
        segment = segment_at.get(position)
        if segment is None:
            x = children[position](x)
            position += 1
        else:
            x = checkpoint(_run, children[segment.start : segment.stop], x, use_reentrant=False)
            position = segment.stop
    return x


def _run(children: Iterable[nn.Module], x: Any) -> Any:
    for child in children:
        x = child(x)
    return x
