"""The public API changes only on purpose: it is compared with its text in ``public_api.txt``."""

from __future__ import annotations

import difflib

from tests.public_api import FILE, text


def test_the_public_api_is_the_one_that_was_written_down():
    changed = list(
        difflib.unified_diff(FILE.read_text(encoding="utf-8").splitlines(), text().splitlines(), n=0, lineterm="")
    )
    changed = [line for line in changed if not line.startswith("@@")]
    assert not changed, "\n".join([*changed, "If this is wanted, run: python -m tests.public_api"])
