"""Tensors that autograd saves, moved to the host until the backward needs them.

The transfers run on a stream of their own, while the device computes. Numbers tell which tensors of a module move: the
first tensor that autograd saves in a call of the module has the number 0; parameters count, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from modelsummary._torch import top_saved_tensors_hooks

__all__ = ["HostStorage", "Offloading", "SavedView", "offloaded", "to_device", "to_host"]


def to_host(elements: Tensor, stream: Any) -> tuple[Tensor, Any]:
    """Return a copy of a tensor in pinned memory of the host, and the event after which it is there.

    Args:
        elements: the tensor; on the CPU, the copy lies in other memory.
        stream: stream of the device that copies; None on the CPU.
    """
    if stream is None:
        return elements.clone(), None
    device = torch.get_device_module(elements.device)
    copy = torch.empty(elements.shape, dtype=elements.dtype, device="cpu", pin_memory=True)
    stream.wait_stream(device.current_stream(elements.device))
    with device.stream(stream):
        copy.copy_(elements, non_blocking=True)
        return copy, stream.record_event()


def to_device(copy: Tensor, device: torch.device, stream: Any) -> tuple[Tensor, Any]:
    """Return a tensor of the host on a device, and the event after which it is there; arguments as for ``to_host``."""
    if stream is None:
        return copy.clone(), None
    module = torch.get_device_module(device)
    elements = torch.empty(copy.shape, dtype=copy.dtype, device=device)
    stream.wait_stream(module.current_stream(device))  # memory that it got may still be in use there
    with module.stream(stream):
        elements.copy_(copy, non_blocking=True)
        return elements, stream.record_event()


class HostStorage:
    """A storage that autograd saves: on the device, on the host, or on its way.

    Args:
        elements: its elements as a vector.
        before: the storage that was sent before it.
        stream: stream that copies; None on the CPU.

    Attributes:
        nbytes: its bytes.
        before: reference to the storage that was sent before it.
        n_saved: how often autograd has saved it, less how often the backward has asked for it.
    """

    def __init__(self, elements: Tensor, before: Any, stream: Any) -> None:
        self.nbytes, self.before, self.n_saved = elements.nbytes, before, 0
        self._device, self._stream = elements.device, stream
        self._elements: Tensor | None = elements
        self._event: Any = None  # of the transfer that was begun last
        self._copy, self._event = to_host(elements, stream)

    def _wait(self) -> None:
        """Let the device wait for the last transfer."""
        if self._event is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)
            self._event = None

    def let_go(self) -> None:
        """Free the memory of the device, once the host has the elements."""
        self._wait()
        self._elements = None

    def fetch(self) -> Tensor:
        """Begin to move the elements back, unless they are on the device, and return them."""
        if self._elements is None:
            self._elements, self._event = to_device(self._copy, self._device, self._stream)
        return self._elements

    def returned(self) -> Tensor:
        """Return the elements for one of the nodes that saved them; the last one frees their memory."""
        elements = self.fetch()
        self._wait()
        self.n_saved -= 1
        if self.n_saved <= 0:
            self._elements = None
        return elements

    def __del__(self) -> None:
        self._wait()  # memory that a transfer still writes is not for others


class SavedView(NamedTuple):
    """A saved tensor whose storage moves to the host."""

    storage: HostStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> Tensor:
        """Return the tensor."""
        elements = self.storage.returned()
        elements = elements if elements.dtype == self.dtype else elements.view(self.dtype)
        return elements.as_strided(self.size, self.stride, self.offset)


class Offloading:
    """The storages that the modules of a model move to the host.

    A storage that is sent stays on the device until as many bytes were sent after it as one call of a module sends at
    most, so that transfers have the time of one module. As far ahead, storages return in the backward, in reverse.
    """

    def __init__(self) -> None:
        self._leaving: deque[Any] = deque()  # references to storages
        self._last: Any = None
        self._most = 0  # bytes that one call sends
        self._streams: dict[torch.device, Any] = {}

    def __reduce__(self) -> Any:
        return type(self), ()  # a copy of the model moves storages of its own

    def call(self, forward: Callable[..., Any], numbers: Collection[int], args: Any, kwargs: Any) -> Any:
        """Return the result of a forward; the tensors of these numbers that it saves move to the host."""
        outer = None if top_saved_tensors_hooks is None else top_saved_tensors_hooks(False)
        sent: dict[tuple[int, int], tuple[Any, HostStorage]] = {}  # of this call, by storage and version
        n_saved = n_bytes = 0

        def pack(tensor: Tensor) -> Any:
            nonlocal n_saved, n_bytes
            n_saved += 1
            if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
                return tensor if outer is None else outer[0](tensor)
            storage = tensor.untyped_storage()
            key = storage._cdata, tensor._version
            reference, entry = sent.get(key, (lambda: None, None))
            if entry is None or reference() is not storage:
                n_elements, rest = divmod(storage.nbytes(), tensor.itemsize)
                if n_saved - 1 not in numbers or rest or tensor.is_conj() or tensor.is_neg():
                    return tensor if outer is None else outer[0](tensor)
                entry = self._send(tensor.detach().as_strided((n_elements,), (1,), 0))
                sent[key] = ref(storage), entry
                n_bytes += entry.nbytes
                self._most = max(self._most, n_bytes)
                self._let_go()
            entry.n_saved += 1
            return SavedView(entry, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, SavedView):
                return packed if outer is None else outer[1](packed)
            with torch.no_grad():  # a checkpoint that runs again has gradients enabled
                tensor = packed.unpack()
                self._fetch_before(packed.storage)
                return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    def _send(self, elements: Tensor) -> HostStorage:
        device = elements.device
        if device.type != "cpu" and device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        storage = HostStorage(elements, self._last, self._streams.get(device))
        self._last = ref(storage)
        self._leaving.append(self._last)
        return storage

    def _let_go(self) -> None:
        """Free the memory of storages that have had their time to leave."""
        storages = [storage for storage in (reference() for reference in self._leaving) if storage is not None]
        nbytes = sum(storage.nbytes for storage in storages)
        while storages and nbytes > self._most:
            storage = storages.pop(0)
            nbytes -= storage.nbytes
            storage.let_go()
        self._leaving = deque(map(ref, storages))

    def _fetch_before(self, storage: HostStorage) -> None:
        """Begin to move storages back that the backward needs after this one."""
        nbytes = 0
        while (earlier := None if storage.before is None else storage.before()) is not None:
            nbytes += earlier.nbytes
            if nbytes > self._most:
                return
            if earlier.n_saved > 0:
                earlier.fetch()
            storage = earlier


def offloaded(
    forward: Callable[..., Any], offloading: Offloading, numbers: Collection[int], /, *args: Any, **kwargs: Any
) -> Any:
    """Return the result of a forward; the tensors of these numbers that autograd saves in it move to the host."""
    if torch.compiler.is_compiling():
        raise RuntimeError("modules that move saved tensors to the host run eagerly; undo() the plan before compiling")
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return offloading.call(forward, numbers, args, kwargs)
