"""A progress bar for work that may take long: on a terminal or in a notebook, after two seconds, on stderr; one line.

Output that is piped or logged has none, and neither has a machine without tqdm (the extra ``progress``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from modelsummary.tables import is_terminal

__all__ = ["counted", "followed"]

_AFTER_S = 2.0
_T = TypeVar("_T")
_shown: list[object] = []  # the bar: work within other work has none of its own


@contextmanager
def counted(what: str, unit: str, total: int | None = None) -> Iterator[Callable[[], object]]:
    """Run the body with a progress bar. Yield a function to call after each unit of work.

    Args:
        what: the work, which stands before the bar.
        unit: name of a unit of work.
        total: number of units; None: unknown, and the bar counts.

    >>> with counted("sum", "number", 3) as done:
    ...     for _ in range(3):
    ...         done()
    """
    if _shown or not _is_seen():
        yield _nothing
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a notebook without ipywidgets: tqdm writes text instead
            from tqdm.auto import tqdm
    except ImportError:
        yield _nothing
        return
    with tqdm(total=total, desc=what, unit=f" {unit}", delay=_AFTER_S, leave=False) as bar:
        _shown.append(bar)
        try:
            yield bar.update
        finally:
            _shown.remove(bar)


def followed(items: Sequence[_T], what: str, unit: str) -> Iterator[_T]:
    """Yield the items with a progress bar.

    >>> list(followed("ab", "letters", "letter"))
    ['a', 'b']
    """
    with counted(what, unit, len(items)) as done:
        for item in items:
            yield item
            done()


def _nothing() -> None:
    """Do nothing, where nobody sees a bar."""


def _is_seen() -> bool:
    """Return True if stderr is a terminal, or this process runs a notebook."""
    if is_terminal(sys.stderr):
        return True
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")
