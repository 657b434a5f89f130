"""Values of small meta tensors: those that follow from values which the model or its inputs have.

Masks and positions are such, and a forward may look at them. What operators make of known values is computed when
something asks for it, as mostly nothing does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary.capture.structure import map_tensors
from modelsummary.op_costs import OpRule, tensors_in

__all__ = ["KnownValues"]

_CPU = torch.device("cpu")
# Largest tensors whose values are followed: enough for positions and masks, too small to cost time.
_MAX_ELEMENTS = 2**16
_MAX_ELEMENTS_OF_PARAMETER = 16


class _Deferred(NamedTuple):
    """An operator whose results are known as soon as somebody computes them."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: list[Tensor]


class KnownValues:
    """Follows the values behind meta tensors; a tensor is known until it is overwritten with what is not."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Tensor, Tensor | None]] = {}  # id -> meta tensor, values; None while deferred
        self._storages: dict[int, Any] = {}  # id -> storage of the meta tensor; .data = ... exchanges it
        self._owners: dict[int, tuple[Any, Tensor]] = {}  # storages of the model -> kept alive, first meta tensor
        self._in_use: set[int] = set()  # the storages of all that are or were known
        self._borrowed: set[int] = set()  # ids of meta tensors whose values belong to the model
        self._overwritten: dict[int, Any] = {}  # meta storages (kept alive) that lost what was known of them
        self._deferred: list[_Deferred] = []

    def borrow(self, meta: Tensor, tensor: Tensor, copy: bool = False) -> None:
        """``meta`` stands for a tensor of the model, if that is small enough to be followed.

        Tensors that share memory are not: a write to one would have to reach the others.
        """
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        with torch._C.DisableTorchFunction():  # a trace of the forward must not take this for a question of the model
            storage = tensor.untyped_storage()
        first = self._owners.setdefault(storage._cdata, (storage, meta))[1]
        if first is not meta:
            self._forget(first)
            return
        most = _MAX_ELEMENTS_OF_PARAMETER if isinstance(tensor, nn.Parameter) else _MAX_ELEMENTS
        if tensor.numel() <= most and storage.nbytes() == tensor.nbytes:
            self.set(meta, tensor.detach().clone() if copy else tensor)
            if not copy:
                self._borrowed.add(id(meta))

    def _forget(self, meta: Tensor) -> None:
        self._compute()
        self._values.pop(id(meta), None)
        self._borrowed.discard(id(meta))

    def set(self, meta: Tensor, value: Tensor | None) -> None:
        """The values of ``meta`` are these; None: they are deferred. A tensor that is known stays as it is."""
        if id(meta) not in self._values:
            self._values[id(meta)] = (meta, value)
            self._storages[id(meta)] = meta.untyped_storage()
            self._in_use.add(meta.untyped_storage()._cdata)

    def cover(self, tensors: Iterable[Tensor]) -> bool:
        """All of these are known."""
        for tensor in tensors:
            if id(tensor) not in self._values:
                return False
            storage = tensor.untyped_storage()._cdata
            if storage in self._overwritten or storage != self._storages[id(tensor)]._cdata:
                return False
        return True

    def filled_in(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The arguments with values for tensors; None if they could not be computed."""
        self._compute()
        if any(id(tensor) not in self._values for tensor in tensors_in((args, kwargs))):
            return None
        return self._with_values(args, kwargs)

    def value(self, meta: Tensor) -> Tensor | None:
        """A copy of the values of ``meta``; None if they are not known."""
        self._compute()
        found = self._values.get(id(meta))
        return None if found is None or found[1] is None else found[1].clone()

    def follow(self, func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
        """An operator with known arguments ran on meta; returns whether its results are known, too."""
        outputs = list(tensors_in(out))
        if sum(tensor.numel() for tensor in outputs) > _MAX_ELEMENTS:
            return False
        if not rule.writes:
            for meta in outputs:
                self.set(meta, None)
            self._deferred.append(_Deferred(func, args, kwargs, outputs))
            return True
        values = self.filled_in(args, kwargs)
        return values is not None and self._run(func, values, outputs)

    def before_write(self, tensor: Tensor) -> None:
        """An operator is going to write to ``tensor``: what was deferred may need what stands there now."""
        if self._deferred and tensor.untyped_storage()._cdata in self._in_use:
            self._compute()

    def overwritten(self, tensor: Tensor) -> None:
        """What is in the storage of ``tensor`` is not known any more."""
        if self._values:
            storage = tensor.untyped_storage()
            self._overwritten[storage._cdata] = storage

    def _compute(self) -> None:
        """Do what was deferred, in the order of the operators; what fails is not known."""
        deferred, self._deferred = self._deferred, []
        for func, args, kwargs, outputs in deferred:
            known = all(id(tensor) in self._values for tensor in tensors_in((args, kwargs)))
            if not (known and self._run(func, self._with_values(args, kwargs), outputs)):
                for meta in outputs:
                    del self._values[id(meta)]

    def _with_values(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs = map_tensors(self._own_value, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        return args, kwargs

    def _own_value(self, meta: Tensor) -> Tensor:
        """The values of a known tensor, copied before anything could write into the model's own."""
        value = self._values[id(meta)][1]
        assert value is not None
        if id(meta) in self._borrowed:
            self._borrowed.discard(id(meta))
            value = value.detach().to(_CPU, copy=True)
            self._values[id(meta)] = (meta, value)
        return value

    def _run(self, func: Any, values: tuple[Any, dict[str, Any]], outputs: Sequence[Tensor]) -> bool:
        try:
            computed = list(tensors_in(func(*values[0], **values[1])))
        except Exception:  # no CPU kernel for this dtype, say: the values stay unknown
            return False
        for meta, value in zip(outputs, computed, strict=False):
            if self._values.get(id(meta), (meta, None))[1] is None:
                self._values.pop(id(meta), None)
                self.set(meta, value)
        return bool(computed)
