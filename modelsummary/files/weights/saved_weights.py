"""Read names, shapes and dtypes of a checkpoint that ``torch.save`` wrote; its pickle is untrusted and never run."""

from __future__ import annotations

from math import prod
from pathlib import Path

from modelsummary.files.budget import Budget
from modelsummary.files.torch.archive import Archive
from modelsummary.files.torch.script_file import check_storage, stored_in, tensors_in
from modelsummary.files.torch.script_pickle import ScriptTensor, read_pickle
from modelsummary.files.weights.stored import StoredTensor, WeightStatistics, check_name, weight_statistics

__all__ = ["load_checkpoint"]

_REFUSAL = (
    "which is neither a tensor nor plain data, and is not run; if you trust the file, save its tensors alone: "
    "checkpoint = torch.load(path, weights_only=False), then torch.save(checkpoint.state_dict(), 'weights.pt') if it "
    "is a module, and torch.save(checkpoint['state_dict'], 'weights.pt') if it is a dict with such a key"
)


def load_checkpoint(archive: Archive, path: Path, budget: Budget) -> WeightStatistics:
    """Return the statistics of the tensors in a checkpoint; a tensor within dicts and lists has a dotted name.

    Raises:
        ModelFileError: the file is broken, or holds objects other than tensors and plain data.
    """
    contents = read_pickle(archive.read_data("data.pkl"), budget=budget, refusal=_REFUSAL)
    tensors: dict[str, ScriptTensor] = {}
    for name, tensor in tensors_in("", [contents] if isinstance(contents, ScriptTensor) else contents):
        check_name(name, tensors)
        check_storage(name, tensor, archive)
        tensors[name] = tensor
    stored = [_stored_tensor(name, tensor) for name, tensor in tensors.items()]
    return weight_statistics(stored, "Module", path, budget, held=stored_in(archive, tensors.values()))


def _stored_tensor(name: str, tensor: ScriptTensor) -> StoredTensor:
    begin, nbytes = tensor.offset * tensor.dtype.itemsize, prod(tensor.size) * tensor.dtype.itemsize
    return StoredTensor(
        name, tensor.size, str(tensor.dtype).removeprefix("torch."), begin, nbytes, (tensor.storage, tensor.stride)
    )
