"""Match the tensors in a file of weights with the parameters and buffers of a live model, by name and shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from modelsummary.files.weights.stored import WeightStatistics
from modelsummary.units import grouped

__all__ = ["mismatches"]

_NAMES_SHOWN = 3


def mismatches(weights: WeightStatistics, model: nn.Module) -> list[str]:
    """Return one line per kind of difference between the tensors in a file and the tensors of a model.

    Names match if they are equal, also after the same prefix was added to all names on one side, as a model with a head
    holds its base model under a name. A parameter with several names needs one of them. If less than half of the
    file's names match, only shapes are compared: GGUF has names of its own.

    >>> from pathlib import Path
    >>> from modelsummary.files.budget import Budget
    >>> from modelsummary.files.weights.stored import StoredTensor, weight_statistics
    >>> stored = [StoredTensor("0.weight", (3, 2), "float16", 0, 12)]
    >>> mismatches(weight_statistics(stored, "Net", Path("net.safetensors"), Budget()), nn.Sequential(nn.Linear(2, 3)))
    ["1 tensors of the model are missing: '0.bias'", '1 tensors are float16 in the file and float32 in the model']
    """
    model_tensors, not_saved = _tensors_of(model), _not_saved(model)
    stored = {name: (tensor.shape or (), tensor.dtype) for name, tensor in weights.tensors.items()}
    renamed = _named_alike(stored, model_tensors)
    both = [name for name in renamed if name in model_tensors]
    if 2 * len(both) < len(stored):
        saved = {id(tensor): tuple(tensor.shape) for name, tensor in model_tensors.items() if name not in not_saved}
        return _by_shape([shape for shape, _ in stored.values()], list(saved.values()))
    matched = {id(model_tensors[name]) for name in both}
    lost = [name for name, tensor in model_tensors.items() if id(tensor) not in matched and name not in not_saved]
    extra = [name for name in renamed if name not in model_tensors]
    other = [name for name in both if renamed[name][0] != tuple(model_tensors[name].shape)]
    lines = _line(lost, "of the model are missing") + _line(extra, "of the file are not in the model")
    if other:
        first = other[0]
        shapes = f"{list(renamed[first][0])} in the file, {list(model_tensors[first].shape)} in the model"
        lines.append(f"{grouped(len(other))} tensors have other shapes: {first!r} is {shapes}")
    dtypes = Counter((renamed[name][1], str(model_tensors[name].dtype).removeprefix("torch.")) for name in both)
    return lines + [
        f"{grouped(count)} tensors are {there} in the file and {here} in the model"
        for (there, here), count in dtypes.items()
        if there != here
    ]


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers, a tied one under each of its names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def _not_saved(model: nn.Module) -> set[str]:
    """Return the names of buffers that a state dict leaves out."""
    return {
        f"{fqn}.{name}" if fqn else name
        for fqn, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def _named_alike(
    stored: Mapping[str, tuple[tuple[int | str, ...], str]], model_tensors: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int | str, ...], str]]:
    """Return the stored tensors under the prefix, added or removed, with which most names are the model's.

    Names are counted by their first part, in one pass: a file may have as many first parts as tensors.
    """
    common = sum(name in model_tensors for name in stored)
    added, removed = Counter[str](), Counter[str]()  # prefix -> names of the model's with it; how many more without it
    ambiguous: set[str] = set()  # prefixes without which two stored names are equal
    for name in model_tensors:
        prefix, rest = _divided(name)
        added[prefix] += rest in stored
    for name in stored:
        prefix, rest = _divided(name)
        removed[prefix] += (rest in model_tensors) - (name in model_tensors)
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


def _by_shape(stored_shapes: Sequence[tuple[int | str, ...]], model_shapes: Sequence[tuple[int, ...]]) -> list[str]:
    there, here = Counter(stored_shapes), Counter[tuple[int | str, ...]](model_shapes)
    common = (there & here).total()
    return [
        f"names differ from the model's; {grouped(common)} of {grouped(len(stored_shapes))} tensors have the shape of "
        f"one of the model's {grouped(len(model_shapes))}"
    ]


def _line(names: Sequence[str], what: str) -> list[str]:
    if not names:
        return []
    shown = ", ".join(repr(name[:80]) for name in names[:_NAMES_SHOWN])
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    return [f"{grouped(len(names))} tensors {what}: {shown}{more}"]
