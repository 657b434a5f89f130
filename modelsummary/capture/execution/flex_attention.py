"""``torch.nn.attention.flex_attention`` without compiling.

Called outside ``torch.compile`` it compiles itself, so that a dispatch mode cannot see its operators, and it refuses
tensors on meta. Computing its shapes needs neither.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from modelsummary._torch import swapped

__all__ = ["plain_flex_attention"]

_MODULE = "torch.nn.attention.flex_attention"
_STOPS_COMPILING = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"  # since torch 2.9


@contextmanager
def plain_flex_attention() -> Iterator[None]:
    """Run the body with a ``flex_attention`` that calls its operator without compiling, on tensors of any device."""
    module = sys.modules.get(_MODULE)
    changes: dict[str, Any] = {_STOPS_COMPILING: True, "_validate_device": _accept}
    with ExitStack() as stack:
        for name, value in changes.items():
            if module is not None and name in vars(module):
                stack.enter_context(swapped(module, name, value))
        yield


def _accept(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Replace the check that refuses tensors on meta, and gradients on a CPU."""
