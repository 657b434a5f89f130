"""Activation checkpointing of chosen modules and segments of a model, and saved tensors that move to the host."""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from modelsummary.capture.offloading import Offloading, offloaded
from modelsummary.capture.templates import make_object
from modelsummary.capture.trace import Trace
from modelsummary.errors import InputError
from modelsummary.keywords import nearest
from modelsummary.units import number_of

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "AppliedCheckpoint",
    "apply_checkpoint",
    "check_kept",
    "checked_numbers",
    "checkpoint_options",
    "checkpointed",
    "copied",
    "is_checkpointed",
    "keeping",
    "kept_results",
    "result_name",
    "segment_of",
]

# Hooks that a user sets for saved tensors see what a checkpoint keeps as well, where torch offers the choice.
_SEES_HOOKS = {"respect_saved_tensors_hooks": True}
_OPTIONS = {
    "use_reentrant": False,
    **(_SEES_HOOKS if _SEES_HOOKS.keys() <= inspect.signature(checkpoint).parameters.keys() else {}),
}


class AppliedCheckpoint:
    """Modules that run under activation checkpointing until ``undo()``, or until the end of a ``with`` block.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> with apply_checkpoint(model, ["0"]):
    ...     "forward" in vars(model[0])
    True
    >>> "forward" in vars(model[0])
    False
    """

    def __init__(self, forwards: Sequence[tuple[nn.Module, Callable[..., Any] | None]]) -> None:
        self._forwards = list(forwards)  # modules, and the forward that each had in its own attributes

    def undo(self) -> None:
        """Run the modules as before; does nothing if it was called already."""
        while self._forwards:
            module, forward = self._forwards.pop()
            if forward is None:
                del module.forward
            else:
                module.forward = forward

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def apply_checkpoint(
    model: nn.Module,
    fqns: Iterable[str] | Mapping[str, Iterable[str]],
    *,
    offload: Mapping[str, Iterable[int]] | None = None,
) -> AppliedCheckpoint:
    """Run modules of ``model`` under non-reentrant activation checkpointing from now on.

    Gradients, names, parameters and state dicts do not change. A module that changes its arguments, such as a cache of
    keys and values, runs again with copies of what they were before.

    Args:
        model: the model, changed in place.
        fqns: names of modules. ``"features[4:8]"`` is one segment, children 4 to 7 of the ``nn.Sequential`` called
            ``features``; only the input of the segment is kept. A mapping gives names of the results that each module
            keeps beside its input: ``"aten.addmm.default#1"`` is what its second call of this operator returns.
        offload: name of a module -> numbers of the tensors that move to the host until the backward, of all tensors
            that autograd saves in a call of the module, parameters included; of a module in ``fqns``, of all tensors
            that its checkpoint keeps: first its inputs. Default: none.

    Returns:
        What undoes it.

    Raises:
        InputError: a module, segment or operator does not exist, or segments overlap; the model is not changed.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> applied = apply_checkpoint(model, ["[0:2]"])
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
    kept = kept_results(fqns if isinstance(fqns, Mapping) else chosen)
    modules = dict(model.named_modules())
    moved = checked_numbers(offload)
    segments: defaultdict[str, list[range]] = defaultdict(list)
    for fqn in chosen:
        container, segment = segment_of(fqn)
        if container not in modules:
            raise InputError(f"checkpoint names {fqn!r}, but the model has no such module{nearest(fqn, modules)}")
        if segment is not None:
            _check_segment(fqn, modules[container], segment, segments[container])
            segments[container].append(segment)
    for fqn in moved:
        if fqn not in modules:
            raise InputError(f"offload names {fqn!r}, but the model has no such module{nearest(fqn, modules)}")
    for container, fqn in {segment_of(fqn)[0]: fqn for fqn in (*moved, *chosen)}.items():
        if container in segments and container in chosen:
            raise InputError(f"checkpoint names {fqn!r} and all of {container!r}; pass only one of them")
        if is_checkpointed(modules[container]):
            raise InputError(f"{fqn!r} is checkpointed already; call undo() of what apply_checkpoint returned for it")
    return _applied(modules, kept, segments, moved)


def _applied(
    modules: Mapping[str, nn.Module],
    kept: Mapping[str, tuple[str, ...]],
    segments: Mapping[str, Sequence[range]],
    moved: Mapping[str, frozenset[int]],
) -> AppliedCheckpoint:
    forwards = []
    for fqn in kept:
        if fqn in modules:
            forwards.append((modules[fqn], vars(modules[fqn]).get("forward")))
            modules[fqn].forward = partial(checkpointed, modules[fqn].forward, checkpoint_options(kept[fqn]))
    for container, parts in segments.items():
        forwards.append((modules[container], vars(modules[container]).get("forward")))
        kept_by_segment = [(part, kept[f"{container}[{part.start}:{part.stop}]"]) for part in parts]
        modules[container].forward = partial(_in_segments, modules[container], kept_by_segment)
    offloading = Offloading()
    for fqn, numbers in moved.items():
        forwards.append((modules[fqn], vars(modules[fqn]).get("forward")))
        modules[fqn].forward = partial(offloaded, modules[fqn].forward, offloading, numbers)
    return AppliedCheckpoint(forwards)


def checked_numbers(offload: Any) -> dict[str, frozenset[int]]:
    """Return the numbers of the saved tensors of each module that move to the host.

    Raises:
        InputError: ``offload`` is something else.
    """
    if offload is not None and not isinstance(offload, Mapping):
        raise InputError(f"offload must map names of modules to numbers of saved tensors, got {offload!r:.80}")
    moved = {}
    for fqn, items in (offload or {}).items():
        numbers: list[Any] = [*items] if isinstance(items, Iterable) else [None]
        if not isinstance(fqn, str):
            raise InputError(f"offload must map names of modules to numbers of saved tensors, got {fqn!r:.80}")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise InputError(
                f"offload must give numbers of saved tensors of {fqn!r}, such as [0, 2], got {items!r:.80}"
            )
        moved[fqn] = frozenset(numbers)
    return moved


def checkpoint_options(kept: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of ``checkpoint`` for a region that keeps some of its results."""
    if not kept:
        return {**_OPTIONS}
    options = {**_OPTIONS, "context_fn": partial(keeping, kept)}
    if "respect_saved_tensors_hooks" in options:  # hooks refuse what was written in place after it was kept
        options["respect_saved_tensors_hooks"] = not any("_." in name for name in kept)
    return options


def result_name(operator: object, number: int) -> str:
    """Return the name of what a call of an operator in a region returns, with the number of the call.

    >>> import torch
    >>> result_name(torch.ops.aten.mm.default, 0)
    'aten.mm.default#0'
    """
    return f"{operator}#{number}"


def keeping(kept: Iterable[str]) -> Any:
    """Return the contexts of ``checkpoint`` in which the results of these names are kept, and the others are not.

    An operator whose name ends in an underscore writes in place: what it wrote into was kept before, and changes then.
    """
    counts: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}  # before torch 2.14, both passes ask
    names = frozenset(kept)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        number = counts[context.is_recompute][operator]
        counts[context.is_recompute][operator] += 1
        is_kept = f"{operator}#{number}" in names
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=any("_." in name for name in names))


def checkpointed(forward: Callable[..., Any], options: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a forward under ``checkpoint`` with these options.

    When it runs again, its arguments are copies of what they were before the first run, as that may have changed them.
    """
    if torch.compiler.is_compiling():  # traces one run, and has its own checks of what it changes
        return checkpoint(forward, *args, **options, **kwargs)
    tensors = [arg if isinstance(arg, Tensor) else None for arg in args]
    others = [None if isinstance(arg, Tensor) else arg for arg in args]
    before = copied((others, kwargs))
    first_run = [(others, kwargs)]

    def run(*tensors: Any) -> Any:
        others, named = first_run.pop() if first_run else copied(before)
        return forward(*(x if y is None else y for x, y in zip(others, tensors, strict=True)), **named)

    return checkpoint(run, *tensors, **options)


def copied(value: Any, copies: dict[int, Any] | None = None, objects_left: int = 3) -> Any:
    """Return a copy of nested containers and plain objects; tensors, modules and functions in them are shared.

    Args:
        copies: id of a value -> its copy; filled.
        objects_left: how deep objects are copied; those inside are shared.

    >>> cache = {"lengths": [1, 2]}
    >>> before = copied(cache)
    >>> cache["lengths"].append(3)
    >>> before
    {'lengths': [1, 2]}
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    if isinstance(value, tuple):
        items = [copied(inner, copies, objects_left) for inner in value]
        return value if all(map(is_, items, value)) else tuple.__new__(kind, items)
    if isinstance(value, (list, dict, set, deque)):
        result: Any = copy(value)
        copies[id(value)] = result
        pairs = value.items() if isinstance(value, dict) else () if isinstance(value, set) else enumerate(value)
        for key, inner in pairs:
            result[key] = copied(inner, copies, objects_left)
        return result
    attributes = getattr(value, "__dict__", None)
    makes: Any = kind.__new__
    is_plain = makes is object.__new__ and not callable(value) and not hasattr(kind, "__del__")
    if attributes is None or not is_plain or objects_left == 0:
        return value
    result = copies[id(value)] = make_object(kind, attributes)
    for name, inner in attributes.items():
        vars(result)[name] = copied(inner, copies, objects_left - 1)
    return result


def is_checkpointed(module: nn.Module | None) -> bool:
    """Return True if a module, or a segment of it, runs under activation checkpointing."""
    forward = vars(module).get("forward") if module is not None else None
    return isinstance(forward, partial) and forward.func in (checkpointed, _in_segments, offloaded)


_SEGMENT = re.compile(r"(?P<container>.*)\[(?P<first>\d+):(?P<end>\d+)\]")


def segment_of(fqn: str) -> tuple[str, range | None]:
    """Return the name of a module and None, or the container of a segment and the numbers of its children.

    >>> segment_of("features.3"), segment_of("features[4:8]")
    (('features.3', None), ('features', range(4, 8)))
    """
    match = _SEGMENT.fullmatch(fqn)
    return (match["container"], range(int(match["first"]), int(match["end"]))) if match else (fqn, None)


_RESULT = re.compile(r"(?P<operator>[^#]+)#(?P<number>\d+)")


def kept_results(checkpoint: Mapping[str, Any] | Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of the results that each module keeps: none if only the modules are named.

    Raises:
        InputError: they are not a list, or one of them cannot be the name of a result: torch has no such operator.
    """
    kept: dict[str, tuple[str, ...]] = {}
    for fqn, names in (checkpoint if isinstance(checkpoint, Mapping) else dict.fromkeys(checkpoint, ())).items():
        if not isinstance(names, Iterable):
            raise InputError(
                f"checkpoint must have a list of names of results for {fqn!r:.80}, got {names!r:.80}; an empty one "
                "keeps none"
            )
        kept[fqn] = tuple(names)
        for name in kept[fqn]:
            match = _RESULT.fullmatch(name) if isinstance(name, str) else None
            parts = match["operator"].split(".") if match else []
            if match is None or (len(parts) == 3 and not _is_operator(*parts)):
                raise InputError(
                    f"checkpoint keeps {name!r:.80} in {fqn!r}, which names no operator of torch and the number of "
                    "its call; pass a list of names such as 'aten.mm.default#0'"
                )
    return kept


def _is_operator(namespace: str, name: str, overload: str) -> bool:
    return hasattr(getattr(getattr(torch.ops, namespace), name, None), overload)


def check_kept(checkpoint: Iterable[tuple[str, Iterable[str]]], trace: Trace) -> None:
    """Raise ``InputError`` if a module keeps the result of a call of an operator that it does not make.

    Args:
        checkpoint: the modules, each with the names of what it keeps.
        trace: a step in which they ran under their checkpoints.
    """
    for fqn, names in checkpoint:
        container, _ = segment_of(fqn)
        counts: Counter[str] = Counter()  # the most in one call of the module
        for call in trace.calls:
            if call.key[0] == container:
                counts |= Counter(str(operator.run.call.func) for operator in trace.operators[call.begin : call.end])
        for name in names:
            operator, _, number = name.rpartition("#")
            if int(number) >= counts[operator]:
                times = number_of(counts[operator], "time")
                raise InputError(
                    f"checkpoint keeps {name!r} in {fqn!r}, which calls {operator} {times}; "
                    "names hold for the device, dtypes and sizes of the plan that they come from"
                )


def _check_segment(fqn: str, container: nn.Module, segment: range, others: Iterable[range]) -> None:
    if type(container).forward is not nn.Sequential.forward:
        raise InputError(f"checkpoint names {fqn!r}, but a {type(container).__name__} is not an nn.Sequential")
    n_children = len(container._modules)
    if not segment or segment.stop > n_children:
        raise InputError(f"checkpoint names {fqn!r}, but the container has children 0 to {n_children - 1}")
    if any(set(segment) & set(other) for other in others):
        raise InputError(f"checkpoint names {fqn!r}, which overlaps another segment")


def _in_segments(container: nn.Module, segments: Sequence[tuple[range, tuple[str, ...]]], x: Any) -> Any:
    """Run the children of an ``nn.Sequential``, with its segments checkpointed."""
    children = list(container.children())
    segment_at = {segment.start: (segment, kept) for segment, kept in segments}
    position = 0
    while position < len(children):
        if position not in segment_at:
            x = children[position](x)
            position += 1
        else:
            segment, kept = segment_at[position]
            x = checkpointed(partial(_run, children[segment.start : segment.stop]), checkpoint_options(kept), x)
            position = segment.stop
    return x


def _run(children: Iterable[nn.Module], x: Any) -> Any:
    for child in children:
        x = child(x)
    return x
