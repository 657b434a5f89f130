"""Name the file in the errors of reading it: readers say what is wrong, and callers know the path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelsummary.errors import InputError, ModelFileError

__all__ = ["reading"]

_PAGE = "it is a page of the web; download the file itself"
_STARTS = {  # first bytes of a file -> what it is and what to do
    b"": "it is empty; download or save it again",
    b"version https://git-lfs": "it is a pointer of Git LFS; fetch its content with git lfs pull",
    b"<!doctype": _PAGE,
    b"<html": _PAGE,
    b"PK": "it begins like an archive of torch; rename it to .pt, or .pt2 if torch.export wrote it",
    b"GGUF": "it begins like a GGUF file; rename it to .gguf",
}
_ENDINGS = {b"PK": (".pt", ".pt2", ".pth", ".ckpt", ".bin"), b"GGUF": (".gguf",)}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Return a context in which a file is read, whose errors begin with its path.

    They end with what to do if the file is empty, cut short, or begins like one of another format.

    Raises:
        InputError: an argument does not fit the file.
        ModelFileError: the file is broken, or the system cannot read it.

    >>> with reading(Path("net.pt")):
    ...     raise ModelFileError("it has no modules")
    Traceback (most recent call last):
    modelsummary.errors.ModelFileError: 'net.pt': it has no modules
    """
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (InputError, ModelFileError) as error:
        kind = InputError if isinstance(error, InputError) else ModelFileError
        hint = _hint(path, str(error)) if kind is ModelFileError else ""
        raise kind(f"{str(path)!r}: {error}{hint}") from None


def _hint(path: Path, reason: str) -> str:
    """Return what to do with a file that is empty, cut short, or begins like one with another ending."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return ""
    text = start.lstrip().lower()
    start = text if text.startswith(b"<") else start
    for first, hint in _STARTS.items():
        if (start.startswith(first) if first else not start) and path.suffix.lower() not in _ENDINGS.get(first, ()):
            return f"; {hint}"
    return "; download or save it again" if "truncated" in reason else ""
