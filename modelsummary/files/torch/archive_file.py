"""Load a torch archive as statistics: TorchScript, or the tensors of a checkpoint that ``torch.save`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from modelsummary.errors import InputError, ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.statistics import FileStatistics
from modelsummary.files.torch.archive import Archive
from modelsummary.files.torch.script_file import ScriptFile, check_storage, tensors_in
from modelsummary.files.torch.script_pickle import ScriptTensor, read_pickle
from modelsummary.files.torch.script_run import run_script
from modelsummary.files.weights.stored import StoredTensor, WeightStatistics, check_name, weight_statistics

__all__ = ["load_archive"]

_BEST_PACKED = 6  # times as long is code without its packing; comments pack better, and do nothing
_DEEPEST_CALL = 60  # calls within calls
_STEPS = 4_000_000
_REFUSAL = (
    "which is neither a tensor nor plain data, and is not run; if you trust the file, save its tensors alone: "
    "checkpoint = torch.load(path, weights_only=False), then torch.save(checkpoint.state_dict(), 'weights.pt') if it "
    "is a module, and torch.save(checkpoint['state_dict'], 'weights.pt') if it is a dict with such a key"
)


def load_archive(path: Path, inputs: Mapping[str | int, Any], *, run: bool) -> FileStatistics:
    """Return the statistics of the TorchScript module or the checkpoint in a file: modules, parameters and buffers.

    Args:
        inputs: sizes, tensors, or lists of them, in the order of the arguments or by name.
        run: interpret the module's code on inputs of these sizes, to count its operators.

    Raises:
        InputError: only one of ``inputs`` and ``run`` was given, or the module does not run on these sizes.
        ModelFileError: the file is broken or holds other objects, or its code does more than compute.
    """
    archive = Archive(path)
    if "constants.pkl" not in archive.names:
        if any(name.startswith("models/") for name in archive.names):
            raise ModelFileError("it is an exported program; rename it to .pt2")
        if any(name.endswith(".py") for name in archive.names):
            raise ModelFileError("it has code as TorchScript has, and no entry constants.pkl; it is damaged")
        if run or inputs:
            raise InputError(
                "input= and run= need a forward, which the weights in the file do not have; leave them out"
            )
        return _checkpoint(archive, path, _budget_of(archive))
    if run and not inputs:
        raise InputError("run=True needs the sizes of the inputs: load(path, input, run=True)")
    if inputs and not run:
        raise InputError("input= needs a run of the file, which is code; pass run=True (--run) to run it")
    budget = _budget_of(archive)
    file = ScriptFile(archive, budget)
    program = file.program()
    if run:
        listed, program = program, run_script(file, inputs, budget)
        program.owned, program.stored = listed.owned, listed.stored
    return FileStatistics(program, path, budget)


def _checkpoint(archive: Archive, path: Path, budget: Budget) -> WeightStatistics:
    """Return the statistics of the tensors in a checkpoint; a tensor within dicts and lists has a dotted name."""
    contents = read_pickle(archive.read_data("data.pkl"), budget=budget, refusal=_REFUSAL)
    stored: dict[str, StoredTensor] = {}
    itemsizes: dict[str, int] = {}  # by storage
    for name, tensor in tensors_in("", [contents] if isinstance(contents, ScriptTensor) else contents):
        check_name(name, stored)
        check_storage(name, tensor, archive)
        itemsize = itemsizes[tensor.storage] = tensor.dtype.itemsize
        dtype, begin = str(tensor.dtype).removeprefix("torch."), tensor.offset * itemsize
        identity = tensor.storage, tensor.stride
        stored[name] = StoredTensor(name, tensor.size, dtype, begin, prod(tensor.size) * itemsize, identity)
    if not stored:
        raise ModelFileError(f"{path.name} holds no tensor; pass a file of a state_dict, such as torch.save writes")
    return weight_statistics(list(stored.values()), "Module", path, budget, held=archive.stored(itemsizes))


def _budget_of(archive: Archive) -> Budget:
    """Return what reading and running the program in an archive may cost, in all passes together."""
    is_code = {name: name.endswith((".py", ".pkl")) for name in archive.names}
    code = sum(min(archive.size(name), _BEST_PACKED * archive.packed_size(name)) for name in is_code if is_code[name])
    stored = sum(archive.size(name) for name in is_code if not is_code[name])
    return Budget(
        seconds=1.5 + 2e-6 * code + 2e-8 * stored,
        steps=_STEPS + 2 * code,
        bytes=256 * 2**20 + 2 * stored,
        depth=_DEEPEST_CALL,
    )
