"""Search the code of TorchScript for parameters and buffers, and for access to the outside; never run it."""

from __future__ import annotations

import re
from typing import NamedTuple

from modelsummary.errors import ModelFileError
from modelsummary.files.torch.archive import Archive

__all__ = ["ScriptClass", "check_code", "classes_of"]

_CLASS = re.compile(r"^class (\w+)\((\w+)\):|^  __(parameters|buffers)__ = \[(.*)\]$", re.MULTILINE)
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')

# Operators and functions that reach files, processes and other machines.
_REACHES_OUT = re.compile(
    r"\b(?:from_file|rpc\w*|dist_rpc|c10d\w*|_c10d\w*)\b|\b(?:torch|aten)\s*\.\s*(?:save|load|_?print\w*|import_ir)\b"
)
_NAMESPACES = re.compile(r"(?<![\w.])ops\s*\.\s*(\w+)|\btorch\s*\.\s*classes\s*\.\s*(\w+)")
_KNOWN = frozenset(
    "aten prim quantized _quantized quantized_decomposed prepacked sparse mkldnn mkldnn_prepacked onednn xnnpack"
    " torchvision rnn nnapi cuda profiler prims inductor higher_order static_runtime".split()
)
_GETATTR = re.compile(r"\bgetattr\s*\((?!\s*[\w.()]+\s*,\s*\"[^\"\\]*\"\s*\))")


class ScriptClass(NamedTuple):
    """A class in the code of an archive: its base class, and the names of its parameters and buffers."""

    base: str
    parameters: frozenset[str]
    buffers: frozenset[str]


def classes_of(archive: Archive) -> dict[str, ScriptClass]:
    """Return the classes by full name, such as ``__torch__.torch.nn.modules.linear.Linear``."""
    classes: dict[str, ScriptClass] = {}
    none: frozenset[str] = frozenset()
    for name in _code_in(archive):
        module = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
        last = ""
        for own, base, kind, listed in _CLASS.findall(archive.read(name).decode(errors="replace")):
            if own:
                last = f"{module}.{own}"
                classes[last] = ScriptClass(base, none, none)
            elif last:
                names = frozenset(_TEXT.findall(listed))
                known = classes[last]
                is_parameters = kind == "parameters"
                classes[last] = ScriptClass(
                    known.base, names if is_parameters else known.parameters, known.buffers if is_parameters else names
                )
    return classes


def check_code(archive: Archive) -> None:
    """Raise ``ModelFileError`` if the code could reach files, processes or other machines when torch runs it."""
    for name in archive.names:
        if name.lower() == "model.json":
            raise ModelFileError(
                f"{str(archive.path)!r} is TorchScript from before torch 1.6; save it with a newer torch"
            )
    for name in _code_in(archive):
        code = archive.read(name).decode(errors="replace")
        found = _REACHES_OUT.search(code) or _GETATTR.search(code)
        said = found[0] if found is not None else None
        for namespace in _NAMESPACES.finditer(code):
            if (namespace[1] or namespace[2]) not in _KNOWN:
                said = said or namespace[0]
        if said is not None:
            raise ModelFileError(
                f"{str(archive.path)!r}: its code has {said[:80]!r}, which can reach outside; it is not run"
            )


def _code_in(archive: Archive) -> list[str]:
    return [name for name in archive.names if name.lower().endswith(".py")]
