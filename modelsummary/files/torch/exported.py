"""Read an exported program without its weights, and without running anything in the file.

``torch.export.load`` restores sample inputs and some tensors with pickle, and evaluates texts as sympy expressions.
Here only the graph is read. Weights become meta tensors with the described sizes, and containers that other libraries
registered become tuples.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.errors import ModelFileError
from modelsummary.files.program import Stored
from modelsummary.files.torch.archive import Archive

__all__ = ["prepare", "read_exported", "stored_in"]

_CONFIGS = ("data/weights/", "data/constants/")
# The texts that torch writes for sizes, in sympy's notation (newer versions: ``srepr``): symbols, integers, functions
# of them, and powers of symbols only. torch evaluates these texts, and would compute a tower of powers of numbers.
_FUNCTIONS = (
    "Max Min Mod PythonMod FloorDiv CleanDiv CeilDiv CeilToInt FloorToInt TruncToInt RoundToInt ToFloat IntTrueDiv"
    " FloatTrueDiv Identity Piecewise Eq Ne Gt Ge Lt Le Equality Unequality StrictGreaterThan GreaterThan LessThan"
    " StrictLessThan And Or Not ModularIndexing Where Add Mul Integer Rational Tuple true false True False"
)
_SYMBOL = r"Symbol\('\w{1,40}'(?:, \w{1,20}=True)*\)"
_TOKEN = re.compile(
    rf"\s*(?:[suz][a-z]*\d{{1,9}}(?:\*\*\d(?!\d|\s*\*\*))?|{_SYMBOL}|Pow\({_SYMBOL}, Integer\(\d\)\)"
    rf"|(?:{'|'.join(_FUNCTIONS.split())})\b|\d{{1,19}}|//|[<>=!]=|[-+*/%(),<>&|~](?!\*))"
)
_NAME = re.compile(r"\w+")
_LONGEST = 10_000
_OPERATOR = re.compile(r"torch\.ops\.(?!higher_order\b)([a-z_]\w{0,80})\.(\w{1,80})")
_LIBRARIES = {"transformers": "transformers.integrations.moe", "torchvision": "torchvision"}  # whose import registers
_MODULES = "nn_module_stack"
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def prepare(archive: Archive) -> None:
    """Import what reading an archive needs: torch's reader, and the libraries that register operators named in it."""
    _torch.export_serializer()
    models = _models_in(archive)
    text = archive.read_data(models[0]) if len(models) == 1 else b""  # others are not read
    for namespace, library in _LIBRARIES.items():
        if f"torch.ops.{namespace}.".encode() in text:
            with suppress(ImportError):
                importlib.import_module(library)


def _models_in(archive: Archive) -> list[str]:
    return [name for name in archive.names if re.fullmatch(r"models/[^/]+\.json", name)]


def read_exported(archive: Archive) -> Any:
    """Return the ``torch.export.ExportedProgram`` in an archive, with parameters and buffers on meta.

    Raises:
        ModelFileError: the file is broken, has an older format, or holds a tensor that only a pickle can restore.
    """
    models = _models_in(archive)
    if len(models) != 1:
        contents = "no exported program" if not models else f"{len(models)} programs"
        hints = {
            "serialized_exported_program.json": "; save it again with torch >= 2.11",
            "constants.pkl": "; it is TorchScript: rename it to .pt",
        }
        hint = next((hint for name, hint in hints.items() if name in archive.names), "")
        raise ModelFileError(f"it holds {contents}{hint}")
    facts = archive.read_json(models[0])
    try:
        _prepare(facts)
        _forget_containers(facts)
        _forget_constraints(facts)
        weights, constants = (
            {key: tensor for name in _entries(archive, folder) for key, tensor in _tensors(archive.read_json(name))}
            for folder in _CONFIGS
        )
        serializer = _torch.export_serializer()

        with _torch.type_hints_once():
            return serializer.deserialize(
                serializer.SerializedArtifact(json.dumps(facts).encode(), weights, constants, b"")
            )
    except (ModelFileError, MemoryError):
        raise
    except Exception as error:  # any error of torch on a broken program
        raise ModelFileError(f"it is not an exported program: {type(error).__name__} {error}") from None


def stored_in(archive: Archive) -> Stored:
    """Return the elements and bytes of the weights and constants of an archive that ``read_exported`` could read.

    Tensors in one entry count once.
    """
    dtypes = _torch.serialized_dtypes()
    return archive.stored(
        {
            f"{folder}{facts['path_name']}": dtypes[facts["tensor_meta"]["dtype"]].itemsize
            for folder in _CONFIGS
            for name in _entries(archive, folder)
            for facts in archive.read_json(name)["config"].values()
        }
    )


def _entries(archive: Archive, folder: str) -> list[str]:
    return [name for name in archive.names if name.startswith(folder) and name.endswith(".json")]


def _prepare(facts: Any) -> None:
    """Check the parts that torch evaluates or looks up, and remove metadata that nothing here needs.

    Every text that torch evaluates must be a formula of sizes. Every operator must be registered; the known libraries
    that register theirs are imported. Of the metadata, reading the origin of each node takes longer than reading nodes.
    """
    missing = set()
    for entry in _dicts_in(facts):
        text = entry.get("expr_str", "0")
        if not isinstance(text, str) or not _is_formula(text):
            raise ModelFileError(f"expected a formula of sizes, got {str(text)[:80]!r}")
        match = _OPERATOR.match(str(entry.get("target", "")))
        if match is not None and not hasattr(getattr(torch.ops, match[1]), match[2]):
            missing.add(f"{match[1]}.{match[2]}")
        if "target" in entry and isinstance(entry.get("metadata"), dict):
            entry["metadata"] = {name: value for name, value in entry["metadata"].items() if name == _MODULES}
    if missing:
        name = min(missing)
        remedy = f"import the library that registers it, such as {name.partition('.')[0]}, before reading the file"
        raise ModelFileError(f"it uses the operator {name!r}, which torch does not know; {remedy}")


def _dicts_in(facts: Any) -> Iterator[dict[str, Any]]:
    pending = [facts]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)


def _is_formula(text: str) -> bool:
    position = 0
    while position < len(text.rstrip()):
        token = _TOKEN.match(text, position)
        if token is None or len(text) > _LONGEST:
            return False
        position = token.end()
    return True


def _forget_containers(facts: Any) -> None:
    """Turn containers that only another library, such as transformers, could restore into tuples."""
    signatures = [call["signature"] or {} for call in facts["graph_module"]["module_call_graph"]]
    for signature, key in (
        (signature, key) for signature in signatures for key in ("in_spec", "out_spec") if key in signature
    ):
        version, spec = json.loads(signature[key])
        pending = [spec]
        while pending:
            node = pending.pop()
            if node["type"] not in _CONTAINERS:
                node |= {"type": "builtins.tuple", "context": "null"}
            pending.extend(node["children_spec"])
        signature[key] = json.dumps([version, spec])


def _forget_constraints(facts: Any) -> None:
    """Remove the ranges of symbols that no formula names: torch makes a symbol of each."""
    named: set[str] = set()
    for entry in _dicts_in(facts["graph_module"]):
        named.update(_NAME.findall(entry.get("expr_str", "")))
    facts["range_constraints"] = {
        name: constraint for name, constraint in facts["range_constraints"].items() if name in named
    }


def _tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield name and meta tensor of each described weight; tied weights are one tensor."""
    dtypes = _torch.serialized_dtypes()

    tensors: dict[str, Tensor] = {}
    for name, facts in config["config"].items():
        described: Mapping[str, Any] | None = facts["tensor_meta"]
        if described is None:
            raise ModelFileError(f"tensor {name[:80]!r} is stored as a pickle, which is not run")
        sizes, strides = ([dim["as_int"] for dim in described[key]] for key in ("sizes", "strides"))
        description = f"{facts['path_name']} {described} {facts['is_param']}"
        if description not in tensors:
            tensor = torch.empty_strided(sizes, strides, dtype=dtypes[described["dtype"]], device="meta")
            trains = bool(described["requires_grad"])
            tensors[description] = nn.Parameter(tensor, trains) if facts["is_param"] else tensor
        yield name, tensors[description]
