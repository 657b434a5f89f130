"""Values of small tensors on shapes: those that follow from values which the model or its inputs have.

Masks and positions are such, and a forward may look at them. What operators make of known values is computed when
something asks for it, as mostly nothing does. Nothing here keeps a tensor of the run alive.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary.capture.values import map_leaves
from modelsummary.costs.operators import OpRule, tensors_in

__all__ = ["KnownValues"]

_CPU = torch.device("cpu")
# Largest tensors whose values are followed: enough for positions and masks, too small to cost time.
_MAX_ELEMENTS = 2**16
_MAX_ELEMENTS_OF_PARAMETER = 16


class _Value:
    """Values of one tensor.

    Attributes:
        tensor: the values, or None while they are deferred, or if they could not be computed.
        borrowed: they are the model's own, to be copied before they are used.
        made_by: the operator that makes them, if it was deferred; it lives as long as somebody may ask.
    """

    __slots__ = ("__weakref__", "borrowed", "made_by", "tensor")

    def __init__(self, tensor: Tensor | None, made_by: _Deferred | None = None, *, borrowed: bool = False) -> None:
        self.tensor, self.made_by, self.borrowed = tensor, made_by, borrowed


class _Deferred:
    """An operator on ``_Value``s whose results are known as soon as somebody asks for one."""

    __slots__ = ("__weakref__", "args", "func", "kwargs", "results")

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.results: list[weakref.ref[_Value]] = []


class _Known(NamedTuple):
    """A tensor of the run, its storage, and its values."""

    tensor: weakref.ref[Tensor]
    storage: int
    value: _Value


class KnownValues:
    """Follows the values behind tensors of a run; a tensor is known until it is overwritten with what is not."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by the id of the tensor
        self._by_storage: defaultdict[int, set[int]] = defaultdict(set)  # ids of known tensors with this storage
        self._owners: dict[int, tuple[Any, weakref.ref[Tensor]]] = {}  # the model's storages, kept alive -> first twin
        self._deferred: list[weakref.ref[_Deferred]] = []

    def borrow(self, twin: Tensor, tensor: Tensor, copy: bool = False) -> None:
        """``twin`` stands for a tensor of the model, if that is small enough to be followed.

        Tensors that share memory are not: a write to one would have to reach the others.
        """
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        most = _MAX_ELEMENTS_OF_PARAMETER if isinstance(tensor, nn.Parameter) else _MAX_ELEMENTS
        with _torch.DisableTorchFunction():  # a trace of the forward must not take this for a question of the model
            storage = tensor.untyped_storage()
        if storage._cdata in self._owners:
            first = self._owners[storage._cdata][1]()
            if first is not None:
                self._forget(id(first))
            return
        if copy:
            if tensor.numel() <= most:
                self._set(twin, _Value(tensor.detach().clone()))
            return
        self._owners[storage._cdata] = (storage, weakref.ref(twin))
        if tensor.numel() <= most and storage.nbytes() == tensor.nbytes:
            self._set(twin, _Value(tensor, borrowed=True))

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """The values of ``tensor`` are these. A tensor that is known stays as it is."""
        self._set(tensor, _Value(value))

    def _set(self, tensor: Tensor, value: _Value) -> None:
        key = id(tensor)
        if key not in self._known:
            storage = tensor.untyped_storage()._cdata
            self._known[key] = _Known(weakref.ref(tensor, lambda _: self._forget(key)), storage, value)
            self._by_storage[storage].add(key)

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            others = self._by_storage[known.storage]
            others.discard(key)
            if not others:
                del self._by_storage[known.storage]

    def cover(self, tensors: Iterable[Tensor]) -> bool:
        """All of these are known."""
        for tensor in tensors:
            known = self._known.get(id(tensor))
            if known is None or known.storage != tensor.untyped_storage()._cdata:  # .data = ... exchanges it
                return False
        return True

    def filled_in(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The arguments with values for tensors; None if they could not be computed."""
        self._compute_deferred()
        return _filled_in(*self._on_values(args, kwargs))

    def _on_values(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        on_values: tuple[Any, dict[str, Any]] = map_leaves(self._leaf, (args, kwargs))
        return on_values

    def _leaf(self, leaf: Any) -> Any:
        return self._known[id(leaf)].value if isinstance(leaf, Tensor) else leaf

    def value(self, tensor: Tensor) -> Tensor | None:
        """A copy of the values of ``tensor``; None if they are not known."""
        self._compute_deferred()
        known = self._known.get(id(tensor))
        value = None if known is None else _own(known.value)
        return None if value is None else value.clone()

    def _compute_deferred(self) -> None:
        """Run what was deferred and may still be asked for, in the order of the operators."""
        deferred, self._deferred = self._deferred, []
        for reference in deferred:
            each = reference()
            if each is not None:
                _compute(each)

    def follow(self, func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
        """An operator with known arguments ran on shapes; returns whether its results are known, too."""
        outputs = list(tensors_in(out))
        if sum(tensor.numel() for tensor in outputs) > _MAX_ELEMENTS:
            return False
        if not rule.writes:
            deferred = _Deferred(func, *self._on_values(args, kwargs))
            values = [_Value(None, deferred) for _ in outputs]
            deferred.results = list(map(weakref.ref, values))
            for tensor, value in zip(outputs, values, strict=True):
                self._set(tensor, value)
            self._deferred.append(weakref.ref(deferred))
            return True
        on_values = self.filled_in(args, kwargs)
        computed = _run(func, *on_values) if on_values is not None else []
        for tensor, values_of_it in zip(outputs, computed, strict=False):
            self.set(tensor, values_of_it)
        return bool(computed)

    def before_write(self, tensor: Tensor) -> None:
        """An operator is going to write to ``tensor``: what was deferred may need what stands there now."""
        if self._deferred and tensor.untyped_storage()._cdata in self._by_storage:
            self._compute_deferred()

    def overwritten(self, tensor: Tensor) -> None:
        """What is in the storage of ``tensor`` is not known any more."""
        for key in tuple(self._by_storage.get(tensor.untyped_storage()._cdata, ())):
            self._forget(key)


def _own(value: _Value) -> Tensor | None:
    """The values, copied before anything could write into the model's own."""
    if value.borrowed and value.tensor is not None:
        value.borrowed = False
        value.tensor = value.tensor.detach().to(_CPU, copy=True)
    return value.tensor


def _compute(deferred: _Deferred) -> None:
    """Run what was deferred; where that fails, its results are not known."""
    on_values = _filled_in(deferred.args, deferred.kwargs)
    computed = _run(deferred.func, *on_values) if on_values is not None else []
    for result, tensor in zip(deferred.results, computed, strict=False):
        value = result()
        if value is not None:
            value.tensor = tensor


def _filled_in(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    missing = False

    def fill(leaf: Any) -> Any:
        nonlocal missing
        if not isinstance(leaf, _Value):
            return leaf
        tensor = _own(leaf)
        missing = missing or tensor is None
        return tensor

    args, kwargs = map_leaves(fill, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = _CPU
    return None if missing else (args, kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    try:
        return list(tensors_in(func(*args, **kwargs)))
    except Exception:  # no CPU kernel for this dtype, say: the values stay unknown
        return []
