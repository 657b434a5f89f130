"""Values of small tensors during a run on shapes, as far as they follow from values of the model or its inputs.

A forward may read the values of masks and positions. The results of operators on known values are computed only when
they are read, which is rare. This module keeps no tensor of the run alive.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelsummary.capture.containers import map_leaves
from modelsummary.capture.execution.shape_tensor import storage_of
from modelsummary.operators.operator_rules import OpRule, tensors_in

__all__ = ["MOST_ELEMENTS", "MOST_ELEMENTS_OF_PARAMETER", "KnownValues", "is_small"]

_CPU = torch.device("cpu")
# Largest tensors whose values are followed: enough for positions and masks, too small to cost time.
MOST_ELEMENTS = 2**16
MOST_ELEMENTS_OF_PARAMETER = 16


def is_small(tensor: Tensor) -> bool:
    """Return True if the values of a tensor of the model are followed; the values of weights never are.

    >>> is_small(torch.zeros(100)), is_small(nn.Parameter(torch.zeros(100)))
    (True, False)
    """
    return tensor.numel() <= (MOST_ELEMENTS_OF_PARAMETER if isinstance(tensor, nn.Parameter) else MOST_ELEMENTS)


class _Value:
    """The values of one tensor.

    Attributes:
        tensor: the values; None while they are deferred, or if they could not be computed.
        borrowed: whether ``tensor`` is the model's own, to be copied before it is used.
        made_by: the deferred operator that computes the values, kept alive as long as they may be read.
    """

    __slots__ = ("__weakref__", "borrowed", "made_by", "tensor")

    def __init__(self, tensor: Tensor | None, made_by: _Deferred | None = None, *, borrowed: bool = False) -> None:
        self.tensor, self.made_by, self.borrowed = tensor, made_by, borrowed


class _Deferred:
    """An operator on ``_Value``s that runs when one of its results is read."""

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
    """The known values of a run's tensors; a tensor is known until it is overwritten with unknown values.

    Attributes:
        most_elements: elements of the largest tensors whose values are followed.
    """

    most_elements = MOST_ELEMENTS

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}  # by the id of the tensor
        self._by_storage: defaultdict[int, set[int]] = defaultdict(set)  # ids of known tensors with this storage
        self._owners: dict[int, tuple[Any, weakref.ref[Tensor]]] = {}  # the model's storages, kept alive -> first twin
        self._deferred: list[weakref.ref[_Deferred]] = []

    def borrow(self, twin: Tensor, tensor: Tensor, copy: bool = False) -> None:
        """Note that ``twin`` has the values of ``tensor``, unless the tensor is too large.

        Tensors that share memory become unknown, as a write to one would have to reach the others.
        """
        if tensor.layout is not torch.strided or tensor.is_meta:
            return
        storage = storage_of(tensor)
        if storage._cdata in self._owners:
            first = self._owners[storage._cdata][1]()
            if first is not None:
                self._forget(id(first))
            return
        if copy:
            if is_small(tensor):
                self._set(twin, _Value(tensor.detach().to(_CPU, copy=True)))
            return
        self._owners[storage._cdata] = (storage, weakref.ref(twin))
        if is_small(tensor) and storage.nbytes() == tensor.nbytes:
            self._set(twin, _Value(tensor, borrowed=True))

    def set(self, tensor: Tensor, value: Tensor) -> None:
        """Note the values of ``tensor``. Values that are known already are kept."""
        self._set(tensor, _Value(value))

    def _set(self, tensor: Tensor, value: _Value) -> None:
        key = id(tensor)
        if key not in self._known:
            storage = tensor.untyped_storage()._cdata
            self._known[key] = _Known(weakref.ref(tensor, lambda _: self._forget(key)), storage, value)
            self._by_storage[storage].add(key)

    def _forget(self, key: int) -> None:
        entry = self._known.pop(key, None)
        if entry is not None:
            others = self._by_storage[entry.storage]
            others.discard(key)
            if not others:
                del self._by_storage[entry.storage]

    def cover(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if the values of all ``tensors`` are known."""
        for tensor in tensors:
            entry = self._known.get(id(tensor))
            if entry is None and tensor.numel() == 0 and tensor.layout is torch.strided:
                self.set(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU))
            elif entry is None or entry.storage != tensor.untyped_storage()._cdata:  # ``.data = ...`` replaces it
                return False
        return True

    def filled_in(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Return the arguments with values for tensors; None if the values could not be computed."""
        self._compute_deferred()
        return _filled_in(*self._on_values(args, kwargs))

    def _on_values(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        on_values: tuple[Any, dict[str, Any]] = map_leaves(self._leaf, (args, kwargs))
        return on_values

    def _leaf(self, leaf: Any) -> Any:
        return self._known[id(leaf)].value if isinstance(leaf, Tensor) else leaf

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of the values of ``tensor``; None if they are not known."""
        self._compute_deferred()
        entry = self._known.get(id(tensor))
        value = None if entry is None else _own(entry.value)
        return None if value is None else value.clone()

    def _compute_deferred(self) -> None:
        """Run the deferred operators whose results may still be read, in their order."""
        deferred, self._deferred = self._deferred, []
        for reference in deferred:
            operator = reference()
            if operator is not None:
                _compute(operator)

    def follow(self, func: Any, rule: OpRule, args: Any, kwargs: dict[str, Any], out: Any) -> bool:
        """Follow an operator with known arguments that ran on shapes; return True if its results are known, too."""
        outputs = list(tensors_in(out))
        elements = sum(tensor.numel() for tensor in outputs)
        if elements > self.most_elements:
            return False
        if not elements and not rule.writes:  # nothing to compute
            return True
        if not rule.writes:
            deferred = _Deferred(func, *self._on_values(args, kwargs))
            values = [_Value(None, deferred) for _ in outputs]
            deferred.results = list(map(weakref.ref, values))
            for tensor, value in zip(outputs, values, strict=True):
                self._set(tensor, value)
            self._deferred.append(weakref.ref(deferred))
            return True
        on_values = self.filled_in(args, kwargs)
        computed = _run(func, *on_values) if on_values is not None else None
        for tensor, result in zip(outputs, computed or (), strict=False):
            self.set(tensor, result)
        return computed is not None  # an operator that returns nothing wrote into the values

    def before_write(self, tensor: Tensor) -> None:
        """Run the deferred operators before an operator writes to ``tensor``, as they may read its current values."""
        if self._deferred and tensor.untyped_storage()._cdata in self._by_storage:
            self._compute_deferred()

    def overwritten(self, tensor: Tensor) -> None:
        """Forget the values in the storage of ``tensor``."""
        for key in tuple(self._by_storage.get(tensor.untyped_storage()._cdata, ())):
            self._forget(key)


def _own(value: _Value) -> Tensor | None:
    """Return the values; the first time, copy values that belong to the model, so that nothing writes to them."""
    if value.borrowed and value.tensor is not None:
        value.borrowed = False
        value.tensor = value.tensor.detach().to(_CPU, copy=True)
    return value.tensor


def _compute(deferred: _Deferred) -> None:
    """Run a deferred operator; if that fails, its results stay unknown."""
    on_values = _filled_in(deferred.args, deferred.kwargs)
    computed = (_run(deferred.func, *on_values) if on_values is not None else None) or ()
    deferred.args, deferred.kwargs = (), {}  # its arguments may be the last to hold large values
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


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor] | None:
    try:
        return list(tensors_in(func(*args, **kwargs)))
    except Exception:  # for example, this dtype has no CPU kernel: the values stay unknown
        return None
