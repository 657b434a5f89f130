"""Write the table of docs/findings.md: ``python -m tests.findings``."""

from __future__ import annotations

from tests.findings.page import PAGE, with_table

PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
