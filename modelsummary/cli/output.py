"""What the command writes: its result, to the standard output or a file; words in red for a terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from modelsummary.views.terminal import shows_colours

__all__ = ["red", "write"]


def write(text: str, path: Path | None) -> None:
    """Print the text, or write it to a file."""
    if path is None:
        print(text)
    else:
        path.write_text(f"{text}\n", encoding="utf-8")


def red(text: str) -> str:
    """Return the text in red if standard error shows colours."""
    return f"\x1b[31m{text}\x1b[0m" if shows_colours(sys.stderr) else text
