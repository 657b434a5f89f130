"""The public API as text: each public name with its signature, each public method and attribute of a class.

``python -m tests.public_api`` writes it to ``tests/public_api.txt``, which a test compares with the package.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import modelsummary

FILE = Path(__file__).with_suffix(".txt")
PAGES = sorted((Path(__file__).parents[1] / "docs/api").glob("*.md"))


def text() -> str:
    """Return the API: every name that the package exports or the pages of the API list, in the order of the names."""
    known = {f"modelsummary.{name}": getattr(modelsummary, name) for name in modelsummary.__all__}
    module = "modelsummary"
    listed = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)", listed, re.MULTILINE):
        if kind == "currentmodule":
            module = name
        elif kind.startswith("auto") and kind != "automodule":
            path, _, last = (name if name.startswith("modelsummary.") else f"{module}.{name}").rpartition(".")
            if f"modelsummary.{last}" not in known:
                known[f"{path}.{last}"] = _found(path, last)
    return "\n".join(line for name in sorted(known) for line in _described(name, known[name])) + "\n"


def _found(path: str, name: str) -> Any:
    """Return an attribute of a module, or of a class in a module."""
    try:
        return getattr(import_module(path), name)
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(getattr(import_module(module), owner), name)


def _described(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base not in (object, tuple))
        yield f"class {name}{f' < {bases}' if bases else ''}"
        yield from (f"    {line}" for line in sorted(_members(value)))
    elif inspect.ismodule(value):
        yield f"module {name}"
    else:
        yield f"{name}{_signature(value)}"


def _members(owner: type) -> Iterator[str]:
    """Yield the public attributes that the package defines, and the signature of the constructor."""
    if issubclass(owner, enum.Enum):
        yield from (f"{each.name} = {each.value!r}" for each in owner)
        return
    if not issubclass(owner, BaseException) or "__init__" in vars(owner):
        yield f"__init__{_signature(owner)}"
    if is_dataclass(owner):
        yield from (f"{each.name}: {each.type}" for each in fields(owner) if not each.name.startswith("_"))
    seen = {each.name for each in fields(owner)} if is_dataclass(owner) else set()
    for base in owner.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("modelsummary") else ():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if callable(plain):
                kind = f"{type(value).__name__} " if plain is not value else ""
                yield f"{kind}{name}{_signature(plain)}"
            else:
                yield name


def _signature(value: Any) -> str:
    try:
        return re.sub(r" at 0x\w+", "", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(...)"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
