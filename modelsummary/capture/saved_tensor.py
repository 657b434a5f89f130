"""A tensor that is kept for the backward, and the check that nothing changes it in between."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from modelsummary.capture.execution.shape_tensor import without_history

__all__ = ["SavedTensor"]


class SavedTensor(NamedTuple):
    """A tensor that autograd saves, packed by ``saved_tensors_hooks``.

    Torch itself compares versions only if no hooks are set.

    Attributes:
        tensor: the tensor without its history: with it, a node that saves its own result would keep itself alive
            through ``grad_fn``.
        version: how often the tensor had changed in place when it was saved.

    >>> import torch
    >>> tensor = torch.ones(2)
    >>> saved = SavedTensor.of(tensor)
    >>> tensor = tensor.add_(1)
    >>> saved.unpack()
    Traceback (most recent call last):
    RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: ...
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> SavedTensor:
        """Return a tensor as it is now."""
        return cls(without_history(tensor), tensor._version)

    def unpack(self) -> Tensor:
        """Return the tensor. Raise torch's error if it has changed in place since it was saved."""
        now = self.tensor._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.dtype} {list(self.tensor.shape)}] is at version {now}; expected version "
                f"{self.version} instead"
            )
        return self.tensor
