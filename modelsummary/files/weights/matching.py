"""Match the tensors in a file of weights with a live model or another file, by name and shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from modelsummary.files.weights.stored import WeightStatistics
from modelsummary.units import grouped

__all__ = ["mismatches"]

_NAMES_SHOWN = 3
_MOST_PARTS = 8  # that all names of a file begin with; each takes a pass over the names


class _Tensor(NamedTuple):
    shape: tuple[int | str, ...]
    dtype: str
    identity: Hashable


def mismatches(weights: WeightStatistics, reference: nn.Module | WeightStatistics, name: str) -> list[str]:
    """Return one line per kind of difference between the tensors in a file and the ones of a model or of another file.

    Names match if they are equal, also after the same prefix was added to all names on one side, as a model with a head
    holds its base model under a name. What all names of a file begin with, such as ``"state_dict."`` or ``"module."``,
    need not match. A parameter with several names needs one of them. If less than half of the
    file's names match, only shapes are compared: GGUF has names of its own.

    Args:
        weights: the file.
        reference: the model, or the other file.
        name: what the reference is called.

    >>> from pathlib import Path
    >>> from modelsummary.files.budget import Budget
    >>> from modelsummary.files.weights.stored import StoredTensor, weight_statistics
    >>> weights = weight_statistics(
    ...     [StoredTensor("0.weight", (3, 2), "float16", 0, 12)], "Net", Path("net.safetensors"), Budget()
    ... )
    >>> mismatches(weights, nn.Sequential(nn.Linear(2, 3)), "the model")
    ["1 tensors of the model are missing: '0.bias'", '1 tensors are float16 in the file and float32 in the model']
    """
    tensors = _tensors_of(reference) if isinstance(reference, nn.Module) else _stored(reference)
    not_saved = _not_saved(reference) if isinstance(reference, nn.Module) else set[str]()
    stored = _stored(weights)
    renamed = _named_alike(stored, tensors)
    if 2 * sum(fqn in tensors for fqn in renamed) < len(stored):
        stored, tensors = _unwrapped(stored), tensors if isinstance(reference, nn.Module) else _unwrapped(tensors)
        renamed = _named_alike(stored, tensors)
    both = [fqn for fqn in renamed if fqn in tensors]
    if 2 * len(both) < len(stored):
        saved = {tensor.identity: tensor.shape for fqn, tensor in tensors.items() if fqn not in not_saved}
        return _by_shape([tensor.shape for tensor in stored.values()], list(saved.values()), name)
    matched = {tensors[fqn].identity for fqn in both}
    lost = [fqn for fqn, tensor in tensors.items() if tensor.identity not in matched and fqn not in not_saved]
    extra = [fqn for fqn in renamed if fqn not in tensors]
    other = [fqn for fqn in both if renamed[fqn].shape != tensors[fqn].shape]
    lines = _line(lost, f"of {name} are missing") + _line(extra, f"of the file are not in {name}")
    if other:
        first = other[0]
        shapes = f"{list(renamed[first].shape)} in the file, {list(tensors[first].shape)} in {name}"
        lines.append(f"{grouped(len(other))} tensors have other shapes: {first!r} is {shapes}")
    dtypes = Counter((renamed[fqn].dtype, tensors[fqn].dtype) for fqn in both)
    return lines + [
        f"{grouped(count)} tensors are {there} in the file and {here} in {name}"
        for (there, here), count in dtypes.items()
        if there != here
    ]


def _stored(weights: WeightStatistics) -> dict[str, _Tensor]:
    return {fqn: _Tensor(tensor.shape or (), tensor.dtype, fqn) for fqn, tensor in weights.tensors.items()}


def _tensors_of(model: nn.Module) -> dict[str, _Tensor]:
    """Return all parameters and buffers, a tied one under each of its names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {
        fqn: _Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), id(tensor)) for fqn, tensor in named
    }


def _not_saved(model: nn.Module) -> set[str]:
    """Return the names of buffers that a state dict leaves out."""
    return {
        f"{fqn}.{name}" if fqn else name
        for fqn, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def _unwrapped(tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Return the tensors without the parts that all names begin with, as long as names of modules are left."""
    for _ in range(_MOST_PARTS if tensors else 0):
        prefixes, rests = zip(*map(_divided, tensors), strict=True)
        if len(set(prefixes)) > 1 or not all("." in rest for rest in rests):
            break
        tensors = dict(zip(rests, tensors.values(), strict=True))
    return dict(tensors)


def _named_alike(stored: Mapping[str, _Tensor], tensors: Mapping[str, _Tensor]) -> dict[str, _Tensor]:
    """Return the stored tensors under the prefix, added or removed, with which most names are the model's.

    Names are counted by their first part, in one pass: a file may have as many first parts as tensors.
    """
    common = sum(name in tensors for name in stored)
    added: Counter[str] = Counter()  # prefix -> names of the others with it
    removed: Counter[str] = Counter()  # prefix -> how many more names match without it
    ambiguous: set[str] = set()  # prefixes without which two stored names are equal
    for name in tensors:
        prefix, rest = _divided(name)
        added[prefix] += rest in stored
    for name in stored:
        prefix, rest = _divided(name)
        removed[prefix] += (rest in tensors) - (name in tensors)
        if prefix and rest in stored:
            ambiguous.add(prefix)
    counts = {(prefix, False): count for prefix, count in added.items()}
    counts |= {(prefix, True): common + more for prefix, more in removed.items() if prefix not in ambiguous}
    most = max(counts.values(), default=0)
    if most <= common:
        return dict(stored)
    prefix, is_removed = min(choice for choice, count in counts.items() if count == most)
    return {name.removeprefix(prefix) if is_removed else prefix + name: entry for name, entry in stored.items()}


def _divided(name: str) -> tuple[str, str]:
    """Return the first part of a name with its dot, empty if there is none, and the rest."""
    first, dot, rest = name.partition(".")
    return (first + dot, rest) if dot else ("", name)


def _by_shape(
    stored_shapes: Sequence[tuple[int | str, ...]], shapes: Sequence[tuple[int | str, ...]], name: str
) -> list[str]:
    there, here = Counter(stored_shapes), Counter(shapes)
    common = (there & here).total()
    return [
        f"names differ from {name}'s; {grouped(common)} of {grouped(len(stored_shapes))} tensors have the shape of "
        f"one of {name}'s {grouped(len(shapes))}"
    ]


def _line(names: Sequence[str], what: str) -> list[str]:
    if not names:
        return []
    shown = ", ".join(repr(name[:80]) for name in names[:_NAMES_SHOWN])
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return [f"{grouped(len(names))} tensors {what}: {shown}{more}"]
