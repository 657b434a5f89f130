"""What is still wrong, with its reason; a test fails as soon as it holds."""

from __future__ import annotations

__all__ = ["KNOWN"]

KNOWN: dict[tuple[str, str], str] = {}
