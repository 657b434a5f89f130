"""Another value for an attribute, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["swapped"]

_MISSING = object()


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Run the body with ``value`` as an attribute of a module, a class or an object.

    Afterwards the attribute is what ``owner`` itself held before. What it inherits is only covered by ``value``.

    >>> import torch
    >>> with swapped(torch.nn.Linear, "forward", lambda self, x: "swapped"):
    ...     torch.nn.Linear(2, 2)("x")
    'swapped'
    """
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
