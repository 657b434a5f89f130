"""Check whether a forward depends on attributes that it assigns."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["Unreadable", "check_kept"]


class Unreadable:
    """A replacement for an attribute that a forward must not depend on: any use of it raises."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the forward reads an attribute that it must not depend on")

    __bool__ = __len__ = __iter__ = __call__ = __getitem__ = __contains__ = __getattr__ = _fail
    __eq__ = _fail
    __torch_function__: Any = classmethod(_fail)  # type: ignore[arg-type]
    __hash__ = object.__hash__


def check_kept(model: nn.Module, unreadable: frozenset[str]) -> None:
    """Raise ``RuntimeError`` if an unreadable value was moved to another attribute, where a forward may read it."""
    for owner, module in model.named_modules() if unreadable else ():
        for name, value in vars(module).items():
            if f"{owner}.{name}".lstrip(".") not in unreadable and _has_unreadable(value, steps=3):
                raise RuntimeError(f"the forward moves the value of another attribute to {name!r}")


def _has_unreadable(value: Any, steps: int) -> bool:
    if isinstance(value, Unreadable):
        return True
    if not steps or isinstance(value, (nn.Module, Tensor)):
        return False
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return any(_has_unreadable(each, steps - 1) for each in (*inner, *getattr(value, "__dict__", {}).values()))
