"""Read the headers of safetensors files, which are untrusted; the data of tensors are never read.

A file is the length of the header in 8 bytes, the header in JSON, and the data. The header gives the dtype, the shape
and the place of each tensor. Several files may share an index, which says in which of them each tensor is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelsummary.errors import ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.file_errors import reading
from modelsummary.files.weights.stored import (
    MOST_DIMENSIONS,
    StoredTensor,
    WeightStatistics,
    check_layout,
    check_name,
    weight_statistics,
)
from modelsummary.units import grouped

__all__ = ["INDEX", "load_index", "load_safetensors", "read_header", "statistics_of_parts", "tensors_of_header"]

INDEX = ".safetensors.index.json"
_LARGEST_HEADER = 32 * 2**20  # bytes
_STEPS = 2  # of a value in JSON
_JSON_BYTES = {b"{": 250, b"[": 60, b",": 60, b":": 60}  # of memory, for each of these characters
_FILE_STEPS = 100  # of opening a file
_DTYPES = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F4": ("float4_e2m1fn", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
}


def load_safetensors(path: Path) -> WeightStatistics:
    """Return the statistics of the tensors in a safetensors file, from its header.

    Raises:
        ModelFileError: the file is broken, truncated, or contradicts itself.
    """
    budget = Budget.of_size(path.stat().st_size)
    return weight_statistics(list(read_header(path, budget).values()), "Module", path, budget)


def load_index(path: Path) -> WeightStatistics:
    """Return the statistics of the tensors in all files that an index names, from their headers.

    Raises:
        ModelFileError: the index or a file is broken, a file is missing, or they contradict each other.
    """
    size = path.stat().st_size
    if size > _LARGEST_HEADER:
        raise ModelFileError(f"it has {grouped(size)} bytes; an index has at most {grouped(_LARGEST_HEADER)}")
    budget = Budget.of_size(size)
    with path.open("rb") as file:
        index = _json(file.read(_LARGEST_HEADER), budget)
    return statistics_of_parts(index, lambda name: _part(path, name, budget), path, budget)


def statistics_of_parts(
    index: Any, part: Callable[[str], dict[str, StoredTensor]], path: Path, budget: Budget
) -> WeightStatistics:
    """Return the statistics of the tensors in all files that an index names.

    Args:
        index: the index, which may contradict itself.
        part: returns the tensors in the file of a name.

    Raises:
        ModelFileError: the index and the files contradict each other.
    """
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError("'weight_map' must map names of tensors to names of files")
    stored: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        budget.spend(_FILE_STEPS)
        for fqn, tensor in part(name).items():
            check_name(fqn, stored)
            if weight_map.get(fqn) != name:
                raise ModelFileError(f"tensor {fqn[:80]!r} is in {name[:80]!r}, which the index denies")
            stored[fqn] = tensor
    missing = next((fqn for fqn in weight_map if fqn not in stored), None)
    if missing is not None:
        raise ModelFileError(f"tensor {missing[:80]!r} is not in {weight_map[missing][:80]!r}")
    return weight_statistics([stored[fqn] for fqn in weight_map], "Module", path, budget, _wrong_total(index, stored))


def _part(index: Path, name: str, budget: Budget) -> dict[str, StoredTensor]:
    """Return the tensors in a file that an index names; the file must lie beside the index."""
    if not name or name in (".", "..") or any(character in name for character in "/\\:\0") or len(name) > 255:
        raise ModelFileError(f"it names the file {name[:80]!r}; files must lie beside the index")
    path = index.parent / name
    if not path.is_file():
        raise ModelFileError(f"it names the file {name[:80]!r}, which does not exist")
    with reading(path):
        return read_header(path, budget)


def _wrong_total(index: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return a note if the index declares another number of bytes than the files have."""
    facts = index.get("metadata")
    declared = facts.get("total_size") if isinstance(facts, dict) else None
    total = sum(tensor.nbytes for tensor in stored.values())
    if declared is None or declared == total:
        return []
    return [f"the index declares {str(declared)[:40]} bytes, the files have {grouped(total)}"]


def read_header(path: Path, budget: Budget) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name, from its header.

    Raises:
        ModelFileError: the file is broken, truncated, or contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelFileError(
                "it is not a safetensors file, or is truncated: it declares a header of "
                f"{grouped(length)} bytes and has {grouped(size)} bytes"
            )
        if length > _LARGEST_HEADER:
            raise ModelFileError(
                f"it has a header of {grouped(length)} bytes; more than {grouped(_LARGEST_HEADER)} are not read"
            )
        header = file.read(length)
    return tensors_of_header(_json(header, budget), size - 8 - length)


def _json(data: bytes, budget: Budget) -> Any:
    """Return the value of JSON text, in which the keys of an object differ."""
    budget.spend(_STEPS * data.count(b","))
    budget.take(sum(nbytes * data.count(character) for character, nbytes in _JSON_BYTES.items()))
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except ModelFileError:  # a ValueError, too
        raise
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number with too many digits
        raise ModelFileError(f"the header is not JSON: {str(error)[:100]}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ModelFileError(f"two entries of an object have the name {twice[:80]!r}")
    return entries


def tensors_of_header(header: Any, data_bytes: int | None = None) -> dict[str, StoredTensor]:
    """Return the tensors that a header describes, by name.

    Args:
        data_bytes: bytes of data behind the header; None if they are not known.

    Raises:
        ModelFileError: the header contradicts itself or the data.
    """
    if not isinstance(header, dict):
        raise ModelFileError(f"the header must be a JSON object, got {type(header).__name__}")
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        check_name(name, tensors)
        tensors[name] = _tensor(name, entry)
    end = max((tensor.begin + tensor.nbytes for tensor in tensors.values()), default=0)
    data_bytes = end if data_bytes is None else data_bytes
    check_layout(tensors.values(), data_bytes)
    if end != data_bytes or sum(tensor.nbytes for tensor in tensors.values()) != data_bytes:
        raise ModelFileError(f"the tensors do not fill the {grouped(data_bytes)} bytes of data")
    return tensors


def _tensor(name: str, entry: Any) -> StoredTensor:
    """Return the tensor that an entry of a header describes."""
    entry = entry if isinstance(entry, dict) else {}
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    dtype = entry.get("dtype")
    if not _are_sizes(shape) or len(shape) > MOST_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelFileError(f"tensor {name[:80]!r} must have a shape and two data_offsets, got {entry!r:.120}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ModelFileError(f"tensor {name[:80]!r} has the unknown dtype {dtype!r:.40}")
    dtype_name, bits = _DTYPES[dtype]
    begin, end = offsets
    for size in shape:
        bits *= size
        if bits > 2**67 and 0 not in shape:  # more than 2 ** 64 bytes
            break
    if bits % 8 or end - begin != bits // 8:
        raise ModelFileError(
            f"tensor {name[:80]!r} of shape {str(shape)[:80]} in {dtype} does not need the {end - begin} bytes that it "
            "declares"
        )
    return StoredTensor(name, tuple(shape), dtype_name, begin, end - begin)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
