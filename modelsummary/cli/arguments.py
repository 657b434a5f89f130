"""The values of the command line's options: text that a user typed, as what it means.

Each function raises ``argparse.ArgumentTypeError`` for anything else.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from modelsummary.errors import InputError, close_to
from modelsummary.keywords import choice_of, dtype_named
from modelsummary.units import parse_amount, parse_bytes

if TYPE_CHECKING:
    import torch

__all__ = [
    "SOURCES",
    "Input",
    "Parser",
    "parse_budget",
    "parse_count",
    "parse_dtype",
    "parse_input",
    "parse_lengths",
    "parse_memory",
    "parse_name",
    "parse_percentage",
    "parse_settings",
]

SOURCES = (
    "torchvision:NAME, timm:NAME, NAME (torchvision's, else timm's), hf:CONFIG.json, hf:ORG/NAME,"
    " package.module:factory, path/net.py:factory, or a file MODEL.onnx, .pt2, .pt, .pth, .safetensors, .gguf"
)

_NUMBER = re.compile(r"(?P<name>[^=]+)==(?P<value>-?\d+(?:\.\d+)?|true|false)")
_SETTINGS = """ such as '{"num_classes": 10}'"""
_PERCENTAGE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_OPTION = re.compile(r"-(?![\d.])\S+")  # not a negative number
_INPUT = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<size>\d+(?:,\d+)*)?(?::(?P<dtype>\w+))?")

_Value = TypeVar("_Value")
Input: TypeAlias = "tuple[str | None, list[int] | torch.Tensor, torch.dtype | None]"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ``InputError``, which is printed as one line without the usage.

    Options have their full names. An unknown option is named before a missing one is asked for.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def group(self, title: str) -> argparse._ArgumentGroup:
        """Return the group of options with this title, which is made if there is none."""
        groups = (group for group in self._action_groups if group.title == title)
        return next(groups, None) or self.add_argument_group(title)

    def error(self, message: str) -> NoReturn:
        """Raise ``InputError``."""
        is_missing = message.endswith("required: MODEL")
        raise InputError(f"{message}; such as modelsummary resnet18 --input 1,3,224,224" if is_missing else message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; raise ``InputError`` for an argument that the command does not have."""
        if self._subparsers is None:  # else a command has the options
            self._check_options(args or ())
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def _check_options(self, arguments: Sequence[str]) -> None:
        for argument in takewhile("--".__ne__, arguments):
            option = argument.partition("=")[0]
            if _OPTION.fullmatch(option) and option not in self._option_string_actions:
                self.error(f"{self.prog} has no option {option}{close_to(option, self._option_string_actions)}")


def parse_input(text: str) -> Input:
    """Return the name, the size or number, and the dtype of ``1,3,224,224``, ``ids=1,128:long`` or ``sr==16000``."""
    import torch

    value = _NUMBER.fullmatch(text)
    if value is not None:
        return value["name"], torch.tensor(json.loads(value["value"])), None
    match = _INPUT.fullmatch(re.sub(r"\s+", "", text))
    if match is None or not text:
        raise argparse.ArgumentTypeError(f"expected a size such as 1,3,224,224 or ids=1,128:long, got {text!r}")
    dtype = _parsed(dtype_named, match["dtype"], f"the end of {text!r}", "") if match["dtype"] else None
    size = [int(dim) for dim in match["size"].split(",")] if match["size"] else []
    return match["name"], size, dtype


def parse_dtype(text: str) -> torch.dtype:
    """Return a floating point dtype by its name."""
    return _parsed(dtype_named, text, "it")


def _parsed(function: Callable[..., _Value], *args: Any) -> _Value:
    """Return what a function returns; raise ``argparse.ArgumentTypeError`` for its ``InputError``."""
    try:
        return function(*args)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_name(*names: str, listed: str = "") -> Callable[[str], str]:
    """Return a function that accepts one of the names, in any case.

    Args:
        listed: module and name of a list of further names, which is imported when an option is parsed.

    >>> parse_name("train", "eval")("Eval"), parse_name(listed="operators.kernels.MODES")("compiled")
    ('eval', 'compiled')
    """

    def parse(text: str) -> str:
        module, _, name = listed.rpartition(".")
        further = getattr(import_module(f"modelsummary.{module}"), name) if listed else ()
        return _parsed(choice_of, text, [*names, *further], "it")

    return parse


def parse_lengths(text: str) -> int | tuple[int, int]:
    """Return a number of tokens, or the least and the most of ``LEAST:MOST``.

    >>> parse_lengths("300"), parse_lengths("100:500")
    (300, (100, 500))
    """
    try:
        least, *most = map(int, text.split(":"))
        if len(most) < 2:
            return (least, *most) if most else least  # type: ignore[return-value]
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number of tokens, or LEAST:MOST such as 100:500, got {text!r}")


def parse_settings(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a JSON object."""
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object{_SETTINGS}, got {text!r}: {error}") from None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object{_SETTINGS}, got {text!r}")
    return settings


def parse_budget(text: str) -> int:
    """Return an amount with a prefix, such as ``4.1G``, as an integer."""
    amount = parse_amount(text)
    if amount is None:
        flops = "; a multiply-add is two FLOPs, so 4 GFLOPs are 2G" if "flop" in text.lower() else ""
        raise argparse.ArgumentTypeError(f"expected a number such as 25M, 4.1G or 16GiB, got {text!r}{flops}")
    return amount


def parse_memory(text: str) -> int:
    """Return a number of bytes, such as ``16GiB``; a small one without a unit is refused."""
    return _parsed(parse_bytes, text, "it")


def parse_percentage(text: str) -> Fraction:
    """Return a percentage as a share.

    >>> parse_percentage("2.5%")
    Fraction(1, 40)
    """
    match = _PERCENTAGE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a percentage such as 5%, got {text!r}")
    return Fraction(match[1]) / 100


def parse_count(text: str, least: int = 1) -> int:
    """Return an integer of at least ``least``, such as a number of tokens.

    >>> parse_count("8192")
    8192
    """
    try:
        count = int(text)
        if count < least:
            raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
        return count
    except ValueError:
        amount = parse_amount(text)
        hint = "" if amount is None else f"; did you mean {amount}?"
        raise argparse.ArgumentTypeError(f"expected an integer such as 2 or 8192, got {text!r}{hint}") from None
