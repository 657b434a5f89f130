"""Libraries that are optional: each is imported where it is used, and its absence says how to install it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from modelsummary.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

__all__ = ["Records", "axes_for", "data_frame", "needs"]


@contextmanager
def needs(library: str, extra: str) -> Iterator[None]:
    """Return a context for the import of a library, which raises ``MissingExtraError`` if it is not installed.

    >>> with needs("absent", "plot"):
    ...     import absent
    Traceback (most recent call last):
    modelsummary.errors.MissingExtraError: absent is not installed; pip install 'torch-modelsummary[plot]'
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(library, extra) from error


def axes_for(ax: Axes | None, **options: Any) -> Axes:
    """Return the axes to draw on: ``ax``, or new axes with options of ``pyplot.subplots``.

    Raises:
        InputError: ``ax`` is something else.
        MissingExtraError: matplotlib is not installed.
    """
    with needs("matplotlib", "plot"):
        from matplotlib import pyplot
        from matplotlib.axes import Axes
    axes: Axes = pyplot.subplots(**options)[1] if ax is None else ax
    if not isinstance(axes, Axes):
        raise InputError(f"ax must be matplotlib Axes, as pyplot.subplots() returns them, got {ax!r:.80}")
    return axes


def data_frame(records: list[dict[str, Any]]) -> pandas.DataFrame:
    """Return records as a ``pandas.DataFrame``. Raise ``MissingExtraError`` if pandas is not installed."""
    with needs("pandas", "pandas"):
        import pandas
    frame: pandas.DataFrame = pandas.DataFrame(records)
    return frame


class Records(ABC):
    """A result with rows as plain dicts."""

    @abstractmethod
    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict per row."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return the records as a ``pandas.DataFrame``.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_records())
