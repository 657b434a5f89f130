"""The package, its messages and its docs are written in plain English.

Refused are idioms that once made every page hard to read: a negated noun for a verb ("is no number"), a pronoun for the
thing ("that of the model"), "a" for "per" ("a line a call").
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READ = sorted(
    path
    for folder, pattern in [
        ("modelsummary", "**/*.py"),
        ("docs", "*.md"),
        ("examples", "*.py"),
        ("tools", "*.py"),
        ("benchmarks", "*.py"),
        ("benchmarks", "*.md"),
        (".", "*.md"),
    ]
    for path in (ROOT / folder).glob(pattern)
)
NOUN = r"(stage|rank|call|line|row|device|module|element|channel|run|step|kind|process|layer|node|operator|token|block)"
REFUSED = {
    "negate the verb: 'is not a number'": r"\b(is|are|was|were|be|been) no (?!longer\b|more\b|different\b)\w+",
    "repeat the noun instead of 'that of', 'those of'": r"\b(that|those) of\b",
    "repeat the noun instead of 'those that'": r"\bthose (that|which|who)\b",
    "say 'one per call'": rf"\b(one|two|three|a|an) (\w+ )?an? {NOUN}\b",
    "say 'expensive', 'slowest'": r"\bdear(er|est)?\b",
    "name what happens: replaced, replayed, falls back": r"\b(give|gives|gave|given|giving) way\b",
    "say 'in place of', 'instead of', or what replaces what": r"\bin the place of\b",
    "say 'that many'": r"\bno so many\b",
    "say 'must', 'should' or 'will'": r"\bshall\b",
    "name who learns what": r"\bhears? (of|about|why|that)\b",
}


@pytest.mark.parametrize("advice", REFUSED)
def test_idioms(advice):
    pattern = re.compile(REFUSED[advice])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in READ
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, advice + "\n" + "\n".join(found)


def test_the_patterns_find_what_they_are_for():
    said = "'2' is no number; that of the model; those that run; a row a call; the dearest; gives way"
    said += "; in the place of it; no so many; it shall hear of this"
    assert all(re.search(pattern, said) for pattern in REFUSED.values())
