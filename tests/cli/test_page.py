"""docs/agents.md says which keys the commands print."""

from __future__ import annotations

import pytest

from tests.cli.page import PAGE, with_table


@pytest.mark.filterwarnings("ignore")
def test_the_keys_are_those_printed():
    pytest.importorskip("transformers")
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m tests.cli"
