"""The error of a forward that raised while it was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from modelsummary.errors import ForwardError, ModelSummaryError, in_short

__all__ = ["as_forward_error"]


@contextmanager
def as_forward_error(model: nn.Module) -> Iterator[None]:
    """Record a forward in the body. Raise ``ForwardError`` if it raises anything but the library's own errors.

    >>> with as_forward_error(nn.ReLU()):
    ...     raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation")
    Traceback (most recent call last):
    modelsummary.errors.ForwardError: the forward of ReLU failed when it was recorded with gradients, ...
    """
    try:
        yield
    except ModelSummaryError:
        raise
    except Exception as error:
        raise ForwardError(
            f"the forward of {type(model).__name__} failed when it was recorded with gradients, as in training: "
            f"{in_short(error)}; change the forward, or freeze what needs no gradient"
        ) from error
