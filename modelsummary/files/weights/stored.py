"""Tensors stored in a file of weights, as its header describes them, and their statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.program import Kind, Program, Scope, Stored, Tensor
from modelsummary.files.program_tree import ROW_BYTES
from modelsummary.files.statistics import FileStatistics
from modelsummary.units import grouped, scaled

__all__ = [
    "DEEPEST",
    "LONGEST_NAME",
    "MOST_DIMENSIONS",
    "StoredTensor",
    "WeightStatistics",
    "check_layout",
    "check_name",
    "weight_statistics",
]

MOST_DIMENSIONS = 64
LONGEST_NAME, DEEPEST = 1000, 100  # characters of a name, and modules or values within others
_TENSOR_STEPS, _MODULE_STEPS = 20, 5  # of a tensor, and of a module around it
_TENSOR_BYTES, _MODULE_BYTES = 700, 150  # of memory, next to the names
_STATISTICS = frozenset({"running_mean", "running_var"})  # buffers of torch's batch normalisation
_INTEGERS = frozenset("bool int64 uint64 int32 uint32 int16 uint16".split())  # dtypes of buffers
_NOTE = "a file of weights: it has no forward, and does not say which tensors are buffers"


class StoredTensor(NamedTuple):
    """A tensor in a file of weights.

    Attributes:
        name: fully qualified name.
        shape: sizes, in the order of torch.
        dtype: name of the element type, such as ``"bfloat16"`` or ``"Q4_K"``.
        begin: position of its first byte in the data of the file.
        nbytes: bytes of its data.
        storage: the storage and the strides, by which tensors are recognised as the same; None if no two can be.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int
    nbytes: int
    storage: tuple[str, tuple[int, ...]] | None = None


class WeightStatistics(FileStatistics):
    """The result of ``modelsummary.load`` for a file of weights: a tree of modules without a forward.

    Attributes:
        tensors: FQN -> the tensor, with its shape, dtype and bytes, in the order of the file.

    >>> stored = [StoredTensor("fc.weight", (2, 3), "bfloat16", 0, 12)]
    >>> stats = weight_statistics(stored, "Net", Path("net.safetensors"), Budget())
    >>> stats.tensors["fc.weight"].dtype, stats.total_params, stats.total_param_bytes
    ('bfloat16', 6, 12)
    >>> stats.bytes_by_dtype()
    {'bfloat16': 12}
    """

    def __init__(self, program: Program, path: Path, tensors: Mapping[str, Tensor], budget: Budget) -> None:
        super().__init__(program, path, budget)
        self.tensors = dict(tensors)
        dtypes = [f"{dtype} {scaled(nbytes, 'B')}" for dtype, nbytes in self.bytes_by_dtype().items()]
        self.remarks = [*self.remarks, *([f"By dtype: {', '.join(dtypes)}"] if dtypes else [])]

    def bytes_by_dtype(self) -> dict[str, int]:
        """Return dtype -> bytes of all tensors of that dtype, largest first."""
        totals: dict[str, int] = {}
        for tensor in self.tensors.values():
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


def check_name(name: str, tensors: Mapping[str, object]) -> None:
    """Raise ``ModelFileError`` for a name that no tensor can have, or that another tensor in ``tensors`` has."""
    if not name or len(name) > LONGEST_NAME or name.count(".") > DEEPEST:
        raise ModelFileError(
            f"a tensor's name must have 1 to {LONGEST_NAME} characters and at most {DEEPEST} dots, got {name[:80]!r}"
        )
    if name in tensors:
        raise ModelFileError(f"two tensors have the name {name[:80]!r}")


def check_layout(tensors: Iterable[StoredTensor], data_bytes: int) -> None:
    """Raise ``ModelFileError`` if a tensor lies outside of the data of its file, or overlaps with another."""
    last: StoredTensor | None = None
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.nbytes)):
        if tensor.begin + tensor.nbytes > data_bytes:
            end = grouped(tensor.begin + tensor.nbytes)
            raise ModelFileError(
                f"tensor {tensor.name[:80]!r} ends at byte {end} of the data, which has {grouped(data_bytes)} bytes"
            )
        if last is not None and tensor.nbytes and tensor.begin < last.begin + last.nbytes:
            raise ModelFileError(f"tensors {last.name[:80]!r} and {tensor.name[:80]!r} overlap")
        last = tensor if tensor.nbytes or last is None else last


def weight_statistics(
    stored: Sequence[StoredTensor],
    model: str,
    path: Path,
    budget: Budget,
    notes: Sequence[str] = (),
    held: Stored | None = None,
) -> WeightStatistics:
    """Return the statistics of stored tensors, with one module for each part of their names.

    Floating point and quantised tensors are parameters. Wider integers and the running statistics of batch norms are
    buffers.

    Args:
        model: name of the model's class or architecture; ``"Module"`` if it is not known.
        budget: what reading it may cost; each tensor and each module charges it.
        held: what the file holds; default: each tensor once.
    """
    prefixes = {entry.name.rpartition(".")[0] for entry in stored}
    around = {prefix: prefix.count(".") + 1 for prefix in prefixes if prefix}
    n_modules = sum(around.values())
    budget.spend(_TENSOR_STEPS * len(stored) + _MODULE_STEPS * n_modules)  # before the work, which takes seconds
    budget.take(_TENSOR_BYTES * len(stored) + _MODULE_BYTES * n_modules)
    budget.take(sum(len(prefix) * count // 2 for prefix, count in around.items()))
    budget.check_bytes(ROW_BYTES * len(around))
    tensors: dict[str, Tensor] = {}
    owned: dict[str, list[Tensor]] = {}
    shared: dict[tuple[object, ...], Tensor] = {}
    for entry in stored:
        prefix, _, name = entry.name.rpartition(".")
        trained = name not in _STATISTICS and entry.dtype not in _INTEGERS
        bits = -(-8 * entry.nbytes // max(prod(entry.shape), 1))
        kind: Kind = "parameter" if trained else "buffer"
        tensor = Tensor(name, entry.shape, entry.shape, entry.dtype, bits, kind, trained)
        tensor.nbytes = entry.nbytes  # blocks of quantised elements have fractions of bits per element
        if entry.storage is not None:
            tensor = shared.setdefault(entry[1:], tensor)
        tensors[entry.name] = tensor
        owned.setdefault(prefix, []).append(tensor)
    modules = [(_scopes(prefix.split(".") if prefix else []), inside) for prefix, inside in owned.items()]
    held = held or Stored(sum(prod(entry.shape) for entry in stored), sum(entry.nbytes for entry in stored))
    program = Program(model, [], [], [], owned=modules, notes=[_NOTE, *notes], stored=held)
    return WeightStatistics(program, path, tensors, budget)


def _scopes(parts: Sequence[str]) -> tuple[Scope, ...]:
    fqns = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    return tuple(Scope(fqn, fqn, "Module") for fqn in fqns)
