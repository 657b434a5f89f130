"""Read an exported program without its weights, and without running anything that is in the file.

``torch.export.load`` restores the sample inputs and some tensors with pickle, and evaluates texts as sympy expressions.
Here the graph alone is read; weights become meta tensors from their descriptions, and containers of other libraries
among arguments and results become tuples.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.errors import ModelFileError
from modelsummary.files.torch.archive import Archive

__all__ = ["read_exported"]

_CONFIGS = ("data/weights/", "data/constants/")
# What torch writes into sizes, as sympy prints it (newer versions by ``srepr``): symbols, whole numbers, functions of
# them, and powers of symbols only, since a tower of numbers would be computed. The texts are evaluated.
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
_LONGEST = 10_000
_OPERATOR = re.compile(r"torch\.ops\.(?!higher_order\b)([a-z_]\w{0,80})\.(\w{1,80})")
_LIBRARIES = {"transformers": "transformers.integrations.moe", "torchvision": "torchvision"}  # whose import registers
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")


def read_exported(path: Path) -> Any:
    """The ``torch.export.ExportedProgram`` in a file; its parameters and buffers are on meta.

    Raises:
        ModelFileError: the file is broken, of an older format, or holds what only a pickle can restore.
    """
    archive = Archive(path)
    models = [name for name in archive.names if re.fullmatch(r"models/[^/]+\.json", name)]
    if len(models) != 1:
        found = "no exported program" if not models else f"{len(models)} programs"
        hints = {
            "serialized_exported_program.json": "; save it again with a newer torch",
            "constants.pkl": "; it is TorchScript: give it the ending .pt",
        }
        hint = next((hint for name, hint in hints.items() if name in archive.names), "")
        raise ModelFileError(f"{str(path)!r} holds {found}{hint}")
    facts = archive.read_json(models[0])
    _check_expressions(facts, path)
    _check_operators(facts, path)
    try:
        _forget_containers(facts)
        weights, constants = (
            {key: tensor for name in _entries(archive, folder) for key, tensor in _tensors(archive.read_json(name))}
            for folder in _CONFIGS
        )
        serializer = _torch.export_serializer()

        with _torch.type_hints_once():
            return serializer.deserialize(
                serializer.SerializedArtifact(json.dumps(facts).encode(), weights, constants, b"")
            )
    except ModelFileError as error:
        raise ModelFileError(f"{str(path)!r}: {error}") from None
    except Exception as error:  # whatever a program that is none makes torch raise
        raise ModelFileError(f"{str(path)!r} is no exported program: {type(error).__name__} {error}") from None


def _entries(archive: Archive, folder: str) -> list[str]:
    return [name for name in archive.names if name.startswith(folder) and name.endswith(".json")]


def _check_expressions(facts: Any, path: Path) -> None:
    """Every text that torch will evaluate is a formula of sizes, and no other code."""
    pending = [facts]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            text = each.get("expr_str", "0")
            if not isinstance(text, str) or not _is_formula(text):
                raise ModelFileError(f"{str(path)!r} has {str(text)[:80]!r} in the place of a formula of sizes")
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)


def _check_operators(facts: Any, path: Path) -> None:
    """Every operator is registered: those of a few libraries are when they are imported."""
    pending, missing = [facts], set()
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            found = _OPERATOR.match(str(each.get("target", "")))
            if found is not None and not _is_registered(found[1], found[2]):
                missing.add(f"{found[1]}.{found[2]}")
        pending.extend(each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
    if missing:
        name = min(missing)
        remedy = f"import the library that has it, {name.partition('.')[0]} say, before reading the file"
        raise ModelFileError(f"{str(path)!r} uses the operator {name!r}, which torch does not know; {remedy}")


def _is_registered(namespace: str, name: str) -> bool:
    if namespace in _LIBRARIES and not hasattr(getattr(torch.ops, namespace), name):
        with suppress(ImportError):
            importlib.import_module(_LIBRARIES[namespace])
    return hasattr(getattr(torch.ops, namespace), name)


def _is_formula(text: str) -> bool:
    place = 0
    while place < len(text.rstrip()):
        token = _TOKEN.match(text, place)
        if token is None or len(text) > _LONGEST:
            return False
        place = token.end()
    return True


def _forget_containers(facts: Any) -> None:
    """Make tuples of containers that only the library which registered them, transformers say, could restore."""
    signatures = [each["signature"] or {} for each in facts["graph_module"]["module_call_graph"]]
    for signature, key in ((each, key) for each in signatures for key in ("in_spec", "out_spec") if key in each):
        version, spec = json.loads(signature[key])
        pending = [spec]
        while pending:
            each = pending.pop()
            if each["type"] not in _CONTAINERS:
                each |= {"type": "builtins.tuple", "context": "null"}
            pending.extend(each["children_spec"])
        signature[key] = json.dumps([version, spec])


def _tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Name -> meta tensor, from the descriptions of weights; tied weights are one tensor."""
    dtypes = _torch.export_serializer()._SERIALIZE_TO_TORCH_DTYPE

    known: dict[str, Tensor] = {}
    for name, facts in config["config"].items():
        described: Mapping[str, Any] | None = facts["tensor_meta"]
        if described is None:
            raise ModelFileError(f"{name[:80]!r} can only be restored by a pickle, which is not run")
        sizes, strides = ([dim["as_int"] for dim in described[key]] for key in ("sizes", "strides"))
        place = f"{facts['path_name']} {described} {facts['is_param']}"
        if place not in known:
            tensor = torch.empty_strided(sizes, strides, dtype=dtypes[described["dtype"]], device="meta")
            trains = bool(described["requires_grad"])
            known[place] = nn.Parameter(tensor, trains) if facts["is_param"] else tensor
        yield name, known[place]
