"""The table of rules in docs/findings.md, written from the rules."""

from __future__ import annotations

from pathlib import Path

from modelsummary.findings import RULES

PAGE = Path(__file__).parents[2] / "docs/findings.md"
_HEADERS = ("Code", "Rule", "Level", "Finds")


def with_table(text: str) -> str:
    """Return the text of the page with the table as it is to be."""
    lines = text.splitlines()
    begin = lines.index(f"| {' | '.join(_HEADERS)} |")
    end = next(index for index in range(begin, len(lines)) if not lines[index].startswith("|"))
    rows = [_HEADERS, ("---",) * len(_HEADERS)]
    rows += [(code, f"`{RULES[code].name}`", RULES[code].level, RULES[code].meaning) for code in sorted(RULES)]
    lines[begin:end] = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
