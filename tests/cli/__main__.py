"""Write the table of docs/agents.md: ``python -m tests.cli``."""

from __future__ import annotations

from tests.cli.page import PAGE, with_table

PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
