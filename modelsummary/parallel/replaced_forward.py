"""Replace the forward of one module, so that copies of the module work, too.

``to_code`` copies its source, so it uses torch alone.
"""

from __future__ import annotations

from functools import partial, wraps
from types import MethodType
from typing import Any

__all__ = ["replace_forward"]


def replace_forward(module: Any, around: Any) -> None:
    """Let a module call ``around(module, forward, *args, **kwargs)``.

    A copy of the module, such as the average of weights that a loop keeps, calls it with the copy and its forward.
    """
    whole = module.forward

    def unbound(_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs)

    @wraps(whole.__func__ if getattr(whole, "__self__", None) is module else unbound)
    def forward(bound_module: Any, /, *args: Any, **kwargs: Any) -> Any:
        return around(bound_module, partial(forward.__wrapped__, bound_module), *args, **kwargs)

    module.forward = MethodType(forward, module)
