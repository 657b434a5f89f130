"""Name the file in the errors of reading it: readers say what is wrong, and callers know the path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelsummary.errors import InputError, ModelFileError

__all__ = ["reading"]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Return a context in which a file is read, whose errors begin with its path.

    Raises:
        InputError: an argument does not fit the file.
        ModelFileError: the file is broken, or the system cannot read it.

    >>> with reading(Path("net.pt")):
    ...     raise ModelFileError("it is truncated")
    Traceback (most recent call last):
    modelsummary.errors.ModelFileError: 'net.pt': it is truncated
    """
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (InputError, ModelFileError) as error:
        kind = InputError if isinstance(error, InputError) else ModelFileError
        raise kind(f"{str(path)!r}: {error}") from None
