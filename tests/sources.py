"""The files of the package, parsed once for the tests that read them."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import modelsummary

PACKAGE = Path(modelsummary.__file__).parent


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    """Return the syntax tree of each file of the package; parsing all of them takes a second or two."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
