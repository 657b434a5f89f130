"""Every exception modelsummary raises on purpose, under one base class."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

__all__ = [
    "DataDependentError",
    "ForwardError",
    "InputError",
    "LayerNotFoundError",
    "MissingExtraError",
    "ModelFileError",
    "ModelSummaryError",
    "NotLiveError",
    "ProfilerError",
    "RegistrationError",
    "SplitError",
    "TraceError",
    "close_to",
    "printable",
]

_LONGEST = 400  # names in a broken file can have any length


def close_to(name: Any, known: Iterable[str]) -> str:
    """The names that may have been meant, to append to a message; empty if none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def printable(text: str) -> str:
    """Return the text with characters that are not printable as escapes: those of a file may command a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class ModelSummaryError(Exception):
    """Base class of the library's errors. Messages are one line of printable characters, whatever they echo."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(_one_line(each) if isinstance(each, str) else each for each in args))


def _one_line(text: str) -> str:
    return printable(re.sub(r"\s*\n\s*", " ", text).replace("\t", " "))


class InputError(ModelSummaryError, TypeError, ValueError, RuntimeError):
    """An argument is unusable; the message echoes it and says what to pass instead.

    It is a ``TypeError``, a ``ValueError`` and a ``RuntimeError``, so that code written for torchinfo catches it
    whichever it names.
    """


class NotLiveError(InputError, AttributeError):
    """Only a live model can do this: what was loaded, pickled or made from a file is data."""


class RegistrationError(ModelSummaryError, ValueError):
    """An operator formula was registered twice, or for something that is no operator."""


class LayerNotFoundError(ModelSummaryError, KeyError):
    """No layer has the requested fully qualified name; the message names close matches."""

    def __str__(self) -> str:  # KeyError prints the repr of its argument
        return str(self.args[0]) if self.args else ""


class MissingExtraError(ModelSummaryError, ImportError):
    """An optional library is not installed.

    Args:
        library: what is missing.
        extra: what to install it with.
    """

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; pip install 'torch-modelsummary[{extra}]'")


class ModelFileError(ModelSummaryError, ValueError):
    """A model's file is broken, too large, or says what cannot be; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:_LONGEST])


class DataDependentError(ModelSummaryError, RuntimeError):
    """Shape-only execution met an operator whose result needs the values of a tensor.

    Attributes:
        operator: name of that operator, for example ``aten._local_scalar_dense``.
    """

    def __init__(self, operator: str) -> None:
        super().__init__(f"{operator} needs the values of a tensor, and shape-only execution computes none")
        self.operator = operator

    def __reduce__(self) -> tuple[type[DataDependentError], tuple[str]]:
        return type(self), (self.operator,)


class ForwardError(ModelSummaryError, RuntimeError):
    """The model's forward raised. The original exception is ``__cause__``.

    Attributes:
        partial: the ``ModelStatistics`` up to the failing layer; None if nothing was recorded.
    """

    def __init__(self, message: str, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


class ProfilerError(ModelSummaryError, RuntimeError):
    """There is nothing to make a profile of."""


class SplitError(ModelSummaryError, RuntimeError):
    """A model cannot be split as asked, or a stage cannot run as it was split.

    Attributes:
        possible: the largest number of stages that is possible; None where it is not known.
    """

    def __init__(self, message: str, possible: int | None = None) -> None:
        super().__init__(message)
        self.possible = possible


class TraceError(ModelSummaryError, RuntimeError):
    """A model cannot be made a graph, or a graph cannot run with what it is given."""
