"""docs/as_called.md, made of the answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.as_called.features import ANSWERED, EQUAL, FEATURES, REFUSED, UNTOUCHED, Answer
from tests.as_called.known import KNOWN

__all__ = ["PAGE", "marks", "marks_of_page", "page"]

PAGE = Path(__file__).parents[2] / "docs" / "as_called.md"
_MARKS = {EQUAL: "=", ANSWERED: "+", REFUSED: "no"}
_WRONG = "x"

_HEAD = """# Models as people call them

Each row is a way to make or call a small model, each column a feature that was asked with its defaults.
`python -m tests.as_called` writes this page, and a test compares it with what happens.

| mark | meaning |
|---|---|
| = | equal to an independent figure: multiply-adds, torch's FLOPs, a real step, outputs |
| + | answered; nothing independent to compare with here |
| no | refused in one line with the reason, below |
| x | wrong, and known to be; below, too |

`memory` is what a training step holds after its forward; `tensor=2` and `shard=2` are parallel plans; `formula` is
compared at five times the batch, `json` and `diff` with the statistics themselves, `values` in the number of
gradients, and `compare_values` with the model itself. The model, its gradients and torch's global state are compared
before and after each row: all untouched.

"""


def marks(answers: Mapping[str, Answer]) -> list[str]:
    """Return the marks of a row, in the order of the features."""
    return [_MARKS.get(answers[name].verdict, _WRONG) for name in FEATURES]


def page(found: Mapping[str, Mapping[str, Answer]]) -> str:
    """Return the page."""
    lines = [f"| call | {' | '.join(FEATURES)} |", f"|---|{'---|' * len(FEATURES)}"]
    lines += [f"| {title} | {' | '.join(marks(answers))} |" for title, answers in found.items()]
    refused: dict[str, dict[str, list[str]]] = {}
    for title, answers in found.items():
        for name, answer in answers.items():
            if answer.verdict == REFUSED and name != UNTOUCHED:
                refused.setdefault(_short(answer.text), {}).setdefault(title, []).append(name)
    lines += ["", "## Reasons", "", "| refused | what it says |", "|---|---|"]
    for text, where in refused.items():
        lines.append(f"| {'; '.join(f'{title}: {_names(names)}' for title, names in where.items())} | {text} |")
    if KNOWN:
        lines += ["", "## Known to be wrong", "", "| call | feature | what happens |", "|---|---|---|"]
    lines += [f"| {title} | {name} | {reason} |" for (title, name), reason in KNOWN.items()]
    return _HEAD + "\n".join(lines) + "\n"


def marks_of_page(text: str) -> dict[str, list[str]]:
    """Return the marks of each row of a page."""
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    return {title: found for title, *found in rows if len(found) == len(FEATURES) and found != list(FEATURES)}


def _names(names: list[str]) -> str:
    return "everything" if len(names) == len(FEATURES) else ", ".join(names)


def _short(text: str) -> str:
    """Return a reason without the class of the error, and as a cell of a table."""
    return text.partition(": ")[2].replace("|", "\\|")[:400]
