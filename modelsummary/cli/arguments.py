"""The values of the command line's options: text that a user typed, as what it means.

Each function raises ``argparse.ArgumentTypeError`` for anything else.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from modelsummary.errors import InputError, close_to
from modelsummary.units import parse_amount

if TYPE_CHECKING:
    import torch

__all__ = [
    "SOURCES",
    "Input",
    "Parser",
    "parse_budget",
    "parse_dtype",
    "parse_input",
    "parse_optimizer",
    "parse_settings",
]

SOURCES = (
    "torchvision:NAME, timm:NAME, NAME (torchvision's, else timm's), hf:CONFIG.json, package.module:factory,"
    " path/net.py:factory, or a file MODEL.onnx, .pt2, .pt, .safetensors, .gguf"
)

_VALUE = re.compile(r"(?P<name>[^=]+)==(?P<value>-?\d+(?:\.\d+)?|true|false)")
_INPUT = re.compile(r"(?:(?P<name>[^=]+)=)?(?P<size>\d+(?:,\d+)*)?(?::(?P<dtype>\w+))?")


Input: TypeAlias = "tuple[str | None, list[int] | torch.Tensor, torch.dtype | None]"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ``InputError``, which is printed as one line without the usage.

    Options have their full names.
    """

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise ``InputError``; of an unknown option, it names the closest known ones."""
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        raise InputError(f"{message}{close_to(unknown, self._option_string_actions) if unknown[:2] == '--' else ''}")


def parse_input(text: str) -> Input:
    """Return the name, the size or number, and the dtype of ``1,3,224,224``, ``ids=1,128:long`` or ``sr==16000``."""
    import torch

    value = _VALUE.fullmatch(text)
    if value is not None:
        return value["name"], torch.tensor(json.loads(value["value"])), None
    match = _INPUT.fullmatch(text)
    if match is None or not text:
        raise argparse.ArgumentTypeError(f"expected a size such as 1,3,224,224 or ids=1,128:long, got {text!r}")
    dtype = getattr(torch, match["dtype"], None) if match["dtype"] else None
    if match["dtype"] and not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"expected a dtype of torch, got {match['dtype']!r} in {text!r}")
    size = [int(dim) for dim in match["size"].split(",")] if match["size"] else []
    return match["name"], size, dtype


def parse_dtype(text: str) -> torch.dtype:
    """Return a floating point dtype by its name."""
    import torch

    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"expected a floating point dtype of torch such as bfloat16, got {text!r}")
    return dtype


def parse_optimizer(text: str) -> str:
    """Return what ``--memory`` predicts: ``inference``, ``none``, or the name of an optimizer, as torch writes it too.

    >>> parse_optimizer("AdamW")
    'adamw'
    """
    from modelsummary.memory.step_options import OPTIMIZERS

    modes = ["inference", "none", *OPTIMIZERS]
    if text.lower() not in modes:
        hint = close_to(text.lower(), modes)
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(modes)}, got {text!r}{hint}")
    return text.lower()


def parse_settings(text: str) -> dict[str, Any]:
    """Return the keyword arguments in a JSON object."""
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return settings


def parse_budget(text: str) -> int:
    """Return an amount with a prefix, such as ``4.1G``, as an integer."""
    amount = parse_amount(text)
    if amount is None:
        raise argparse.ArgumentTypeError(f"expected a number such as 25M, 4.1G or 16GiB, got {text!r}")
    return amount
