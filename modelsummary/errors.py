"""All exceptions that modelsummary raises on purpose, under one base class."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any

__all__ = [
    "DataDependentError",
    "FormulaError",
    "ForwardError",
    "InputError",
    "LayerNotFoundError",
    "MissingExtraError",
    "ModelFileError",
    "ModelSummaryError",
    "NotLiveError",
    "ProfilerError",
    "RegistrationError",
    "ShapeMismatchError",
    "SplitError",
    "StepError",
    "TraceError",
    "UndividedError",
    "check_flags",
    "check_integers",
    "close_to",
    "harmless",
    "in_short",
    "is_number",
    "printable",
]

_HIDDEN = ("modelsummary", "torch", "IPython")  # packages
_LONGEST = 400  # characters of a message: names in a broken file can have any length


def close_to(name: Any, names: Iterable[str]) -> str:
    """Return a suggestion of similar names to append to a message; empty if no name is close.

    >>> close_to("layr1", ["layer1", "fc"])
    "; did you mean 'layer1'?"
    """
    close = difflib.get_close_matches(str(name), list(names), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def is_number(value: Any) -> bool:
    """Return True if a value is a finite integer or float; truth values are not.

    >>> is_number(2), is_number(True), is_number(float("nan")), is_number("2")
    (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -inf < value < inf


def check_flags(**values: Any) -> None:
    """Raise ``InputError`` for a value that is not a bool."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InputError(f"{name} must be True or False, got {value!r:.80}")


def check_integers(least: int = 1, /, **values: Any) -> None:
    """Raise ``InputError`` for a value that is not an integer >= ``least``.

    >>> check_integers(tensor=0)
    Traceback (most recent call last):
    modelsummary.errors.InputError: tensor must be an integer >= 1, got 0
    """
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise InputError(f"{name} must be an integer >= {least}, got {value!r:.80}")


def in_short(error: BaseException) -> str:
    """Return the type of an error and the first line of its message, without a full stop; without one, its line.

    >>> in_short(ValueError("expected 3 channels."))
    'ValueError: expected 3 channels'
    """
    first = str(error).strip().partition("\n")[0].rstrip(".")
    if not first and (frames := traceback.extract_tb(error.__traceback__)):
        first = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def printable(text: str) -> str:
    """Return the text with unprintable characters as escapes: a name in a file may hold commands to a terminal."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


_ACTS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # categories of Unicode: controls, directions, surrogates, separators


def harmless(text: str) -> str:
    r"""Return a text of one or more lines with characters that act on a terminal or page as escapes; tabs stay.

    >>> harmless("a\x1b[31m\nb")
    'a\\x1b[31m\nb'
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t" and unicodedata.category(character) in _ACTS
        else character
        for character in text
    )


class ModelSummaryError(Exception):
    """Base class of the library's errors. A message is one line of printable characters, whatever it echoes.

    >>> issubclass(InputError, ModelSummaryError)
    True
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(_one_line(argument) if isinstance(argument, str) else argument for argument in args))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: frames outside of this package, torch and IPython; the cause first."""
        files = [sys.modules[name].__file__ for name in _HIDDEN if name in sys.modules]
        folders = ("<string>", *(f"{Path(file).parent}{os.sep}" for file in files if file))
        lines = []
        for error in filter(None, (self.__cause__, self)):
            frames = traceback.extract_tb(error.__traceback__)
            outside = [frame for frame in frames if not frame.filename.startswith(folders)]
            lines += [*traceback.format_list(outside), *traceback.format_exception_only(error)]
        return [line.rstrip("\n") for line in lines]


def _one_line(text: str) -> str:
    return printable(re.sub(r"\s*\n\s*", " ", text).replace("\t", " "))


class InputError(ModelSummaryError, TypeError, ValueError, RuntimeError):
    """Error for an unusable argument; the message echoes it and says what to pass instead.

    It is a ``TypeError``, a ``ValueError`` and a ``RuntimeError``, so that code written for torchinfo catches it
    under any of these names.

    >>> import torch, modelsummary
    >>> modelsummary.Statistics(torch.nn.Linear(4, 2), (1, -4))
    Traceback (most recent call last):
    modelsummary.errors.InputError: input size (1, -4) holds -4; sizes are integers >= 0, such as (1, 3, 224, 224)
    """


class UndividedError(InputError):
    """Error for a plan of tensor parallelism that can divide no layer.

    Attributes:
        reasons: FQN of a layer -> why it is not divided.
    """

    def __init__(self, message: str, reasons: Mapping[str, str]) -> None:
        super().__init__(message)
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type[UndividedError], tuple[str, dict[str, str]]]:
        return type(self), (str(self), self.reasons)


class NotLiveError(InputError, AttributeError):
    """Error for a method that needs a live model, called on statistics that were loaded or read from a file."""


class RegistrationError(ModelSummaryError, ValueError):
    """Error for a formula registered twice, or for something other than an operator."""


class LayerNotFoundError(ModelSummaryError, KeyError):
    """Error for a fully qualified name that no layer has; the message names close matches.

    >>> import torch, modelsummary
    >>> modelsummary.Statistics(torch.nn.Sequential(torch.nn.Linear(4, 2)), (1, 4))["1"]
    Traceback (most recent call last):
    modelsummary.errors.LayerNotFoundError: no layer named '1' in Sequential; expected one of '0'
    """

    def __str__(self) -> str:  # KeyError prints the repr of its argument
        return str(self.args[0]) if self.args else ""


class MissingExtraError(ModelSummaryError, ImportError):
    """Error for an optional library that is not installed.

    Args:
        library: name of the missing library.
        extra: name of the extra that installs it.

    >>> print(MissingExtraError("matplotlib", "plot"))
    matplotlib is not installed; pip install 'torch-modelsummary[plot]'
    """

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed; pip install 'torch-modelsummary[{extra}]'")


class ModelFileError(ModelSummaryError, ValueError):
    """Error for a model file that is broken, too large or contradictory; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split())[:_LONGEST])


class ShapeMismatchError(ModelFileError):
    """Error for operators of a file that cannot take the sizes of their inputs; sizes that a user gave may be why."""


class DataDependentError(ModelSummaryError, RuntimeError):
    """Error of a shape-only run that met an operator whose result depends on the values of a tensor.

    Attributes:
        operator: name of the operator, for example ``aten._local_scalar_dense``.
    """

    def __init__(self, operator: str) -> None:
        super().__init__(f"{operator} needs the values of a tensor, and shape-only execution computes none")
        self.operator = operator

    def __reduce__(self) -> tuple[type[DataDependentError], tuple[str]]:
        return type(self), (self.operator,)


class ForwardError(ModelSummaryError, RuntimeError):
    """Error for a model whose forward raised. The original exception is ``__cause__``.

    Attributes:
        partial: the ``ModelStatistics`` up to the failing layer; None if nothing was recorded.

    >>> import torch, modelsummary
    >>> try:
    ...     modelsummary.Statistics(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(4, 2)), (1, 5))
    ... except ForwardError as error:
    ...     [row.fqn for row in error.partial if row.executed]
    ['0', '1']
    """

    def __init__(self, message: str, partial: Any = None) -> None:
        super().__init__(message)
        self.partial = partial


class FormulaError(ModelSummaryError, ValueError):
    """Error for a figure that has no formula in the sizes of the inputs; the message gives the reason."""


class ProfilerError(ModelSummaryError, RuntimeError):
    """Error for a profile of a run in which nothing was recorded."""


class SplitError(ModelSummaryError, RuntimeError):
    """Error for a model that cannot be split as requested, or a stage that cannot run as it was split.

    Attributes:
        possible: the largest possible number of stages; None if it is not known.
    """

    def __init__(self, message: str, possible: int | None = None) -> None:
        super().__init__(message)
        self.possible = possible


class StepError(ModelSummaryError, RuntimeError):
    """Error for a step whose forward, loss, backward or optimizer raised. The original exception is ``__cause__``.

    Attributes:
        message: what failed, without the remedy.
        phase: ``"forward"``, ``"loss"``, ``"backward"``, or ``"step"`` for the optimizer's.
        line: file and line of the model's code to change; None if it is not known.
        remedy: what to do, the end of the message; empty if the original exception says all.

    >>> import torch, modelsummary
    >>> stats = modelsummary.Statistics(torch.nn.Linear(4, 2), (1, 4))
    >>> try:
    ...     stats.memory(loss=lambda out: out.loss)
    ... except StepError as error:
    ...     print(error)
    the loss of the step failed: AttributeError: ...; loss takes the model's result and returns the scalar ...
    """

    def __init__(
        self, message: str, phase: str = "forward", line: tuple[str, int] | None = None, remedy: str = ""
    ) -> None:
        super().__init__(f"{message}; {remedy}" if remedy else message)
        self.message, self.phase, self.line, self.remedy = message, phase, line, remedy

    def __reduce__(self) -> tuple[type[StepError], tuple[str, str, tuple[str, int] | None, str]]:
        return type(self), (self.message, self.phase, self.line, self.remedy)


class TraceError(ModelSummaryError, RuntimeError):
    """Error for a model that cannot be traced to a graph, or a graph that cannot run with its arguments."""
