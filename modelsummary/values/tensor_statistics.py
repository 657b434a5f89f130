"""Statistics of the elements of one tensor, taken where it is: a device waits once for many tensors."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf, isnan, nan, sqrt
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from modelsummary import _torch
from modelsummary._torch import FakeTensor
from modelsummary.operators.tensor_bytes import stored_tensors

__all__ = [
    "BoundsAndSums",
    "Readings",
    "Readout",
    "TensorStatistics",
    "as_plain",
    "bounds_and_sums_of",
    "bounds_of",
    "elements_of",
    "is_read_in_parts",
    "norm_of_finite",
    "unseen",
    "widened",
]

_SAMPLE = 4096
_LOWEST, _HIGHEST, _PER_OCTAVE = -44, 20, 2  # of the histogram: powers of two
_BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE
_COUNTS = _BINS + 2  # of a sample: zeros, the bins, NaN
_TOGETHER = 64  # samples whose elements are counted by the same operators
_CACHED = 2**17  # elements of a part that a cache holds
_LARGE = 1e15  # squares of larger float32 elements may overflow when they are added up
_CANCELS = 0.03  # a standard deviation below this part of the mean is lost in float32
_NARROW = frozenset({torch.float16, torch.bfloat16, torch.float32})
_Reading = TypeVar("_Reading")
_PLAIN = frozenset({Tensor, nn.Parameter})
_UNUSUAL = frozenset({torch.bool}) | {
    getattr(torch, name) for name in dir(torch) if name.startswith("float8") or name.startswith("float4")
}


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of the elements of a tensor. NaN and Inf are counted, and left out of the other figures.

    Attributes:
        shape, dtype: of the tensor.
        mean, std: of the finite elements; ``std`` is of the population. Of a complex tensor, of its real and imaginary
            parts.
        abs_max: largest finite absolute value.
        nans, infs: number of elements.
        zeros: share of elements that are zero, 0 to 1: of a regular sample of at most 4,096 elements.
        histogram: absolute values of this sample, in half octaves from 2^-44 to 2^20; smaller and larger ones are in
            the first and the last.

    >>> import torch
    >>> statistics = TensorStatistics.of(torch.tensor([0.0, -3.0, 3.0, float("nan")]))
    >>> statistics.mean, statistics.abs_max, statistics.zeros, statistics.nans
    (0.0, 3.0, 0.25, 1)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    mean: float
    std: float
    abs_max: float
    zeros: float
    nans: int
    infs: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorStatistics:
        """Return the statistics of a tensor with values; an accelerator waits for them."""
        statistics: list[TensorStatistics] = []
        readout = Readout()
        with unseen():
            readout.add(tensor, statistics.append)
            readout.fetch()
        return statistics[0]

    @classmethod
    def at_once(cls, tensor: Tensor) -> TensorStatistics | None:
        """Return the statistics of a tensor with values; None on a device that waits for them."""
        return None if is_waiting(tensor.device) else cls.of(tensor)

    @property
    def is_finite(self) -> bool:
        """Return True if no element is NaN or Inf."""
        return not (self.nans or self.infs)

    @property
    def norm(self) -> float:
        """The 2-norm of the finite elements.

        >>> import torch
        >>> round(TensorStatistics.of(torch.tensor([3.0, 4.0])).norm, 5)
        5.0
        """
        return sqrt(max(0, self.elements - self.nans - self.infs) * (self.mean**2 + self.std**2))

    def quantile(self, share: float) -> float:
        """Return the absolute value below which a share of the elements is, from the histogram: within a factor 1.4.

        Elements are taken to be spread evenly in a half octave, so that quantiles of smooth distributions are closer.

        Args:
            share: 0 to 1.

        >>> import torch
        >>> TensorStatistics.of(torch.full((100,), 4.0)).quantile(0.5)
        4.756828460010884
        """
        wanted, below = share * sum(self.histogram), 0
        for index, count in enumerate(self.histogram):
            if count and below + count >= wanted:
                return float(2 ** (_LOWEST + (index + (wanted - below) / count) / _PER_OCTAVE))
            below += count
        return nan

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data, with three quantiles for the histogram."""
        names = ("mean", "std", "abs_max", "zeros", "nans", "infs", "norm")
        quantiles = {f"abs_p{percent}": self.quantile(percent / 100) for percent in (5, 50, 95)}
        return {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            **{name: getattr(self, name) for name in names},
            **quantiles,
        }


def unseen() -> ExitStack:
    """Return a context in which statistics are taken: no mode, autograd or autocast sees their operators."""
    stack = ExitStack()
    for context in (torch.no_grad, _torch.DisableTorchFunction, _torch.DisableTorchDispatch, _torch.DisableAutocast):
        stack.enter_context(context())
    return stack


def as_plain(tensor: Tensor) -> Tensor | None:
    """Return the tensor that holds the elements of a tensor; None if no tensor holds just these, or it has no values.

    A distributed tensor has its shard, a sparse tensor its values; a quantised weight has no such tensor. Zeros that
    autograd makes for gradients of gradients have no memory.

    >>> as_plain(torch.eye(3).to_sparse())
    tensor([1., 1., 1.])
    """
    if type(tensor) not in _PLAIN:
        if type(tensor) is FakeTensor or tensor.is_nested or tensor.is_quantized:
            return None
        if hasattr(type(tensor), "__tensor_flatten__"):
            inner = stored_tensors(tensor)
            return as_plain(inner[0]) if len(inner) == 1 and inner[0] is not tensor else None
    if tensor.layout is not torch.strided:
        if tensor.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr):
            return None
        tensor = stored_tensors(tensor)[-1]
    has_none = tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor()
    return None if has_none or _torch.is_transformed(tensor) else tensor


def elements_of(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor in a dtype that can be compared: complex ones as real and imaginary parts.

    >>> elements_of(torch.tensor([1 + 2j])).tolist()
    [[1.0, 2.0]]
    """
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype in _UNUSUAL else tensor


def widened(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor in the widest dtype of its device."""
    return elements_of(tensor).to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def norm_of_finite(elements: Tensor) -> Tensor:
    """Return the 2-norm of the finite elements, on the device.

    >>> norm_of_finite(torch.tensor([3.0, 4.0, float("inf")]))
    tensor(5.)
    """
    norm: Tensor = torch.linalg.vector_norm(torch.where(torch.isfinite(elements), elements, 0))
    return norm


def bounds_of(elements: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element, on the device; NaN if an element is NaN."""
    low, high = torch.aminmax(elements)
    return low, high


class BoundsAndSums(NamedTuple):
    """What a reading of all elements of a tensor gives.

    Attributes:
        low, high: smallest and largest element; NaN if one is NaN.
        sums: sum of the elements and of their squares, in float32; None if they were not read.
    """

    low: float
    high: float
    sums: tuple[float, float] | None = None


def is_read_in_parts(x: Tensor) -> bool:
    """Return True for elements of which one reading gives bounds and sums: many, on the CPU, in at most float32."""
    return x.numel() > _CACHED and x.dtype in _NARROW and not is_waiting(x.device)


def bounds_and_sums_of(x: Tensor) -> BoundsAndSums:
    """Return bounds and sums of elements on the CPU; many are read once, in parts that fit a cache.

    >>> import torch
    >>> bounds_and_sums_of(torch.tensor([3.0, -4.0]))
    BoundsAndSums(low=-4.0, high=3.0, sums=(-1.0, 25.0))
    """
    flat = _in_memory_order(x) if is_read_in_parts(x) else None
    low, high, total, squares = inf, -inf, 0.0, 0.0
    for part in (x,) if flat is None else flat.split(_CACHED):
        least, most = (bound.item() for bound in bounds_of(part))
        if isnan(least):
            return BoundsAndSums(nan, nan)
        low, high = min(low, least), max(high, most)
        if x.dtype in _NARROW:
            sums = _sums(part)
            total, squares = total + sums[0], squares + sums[1]
    return BoundsAndSums(low, high, (total, squares) if x.dtype in _NARROW else None)


def is_waiting(device: torch.device) -> bool:
    """Return True if reading a number waits for the device."""
    return device.type != "cpu"


class Readings(Generic[_Reading]):
    """What is read of tensors: once of each, until an operator writes it."""

    def __init__(self, read: Callable[[Tensor], _Reading]) -> None:
        self._read = read
        self._latest: dict[int, tuple[Any, int, _Reading]] = {}  # by tensor, with its version

    def of(self, tensor: Tensor) -> _Reading | None:
        """Return what is read of a tensor; None if it has no elements that can be read."""
        plain = as_plain(tensor)
        if plain is None:
            return None
        version = -1 if tensor.is_inference() else tensor._version
        latest = self._latest.get(id(tensor))
        if latest is None or latest[0]() is not tensor or latest[1] != version:
            latest = self._latest[id(tensor)] = weakref.ref(tensor), version, self._read(plain)
        return latest[2]

    def forget(self) -> None:
        """Read all tensors again from now on."""
        self._latest.clear()


class Readout:
    """Numbers that are computed on devices; each device waits for them once, when they are fetched.

    On the CPU, where nothing waits, they are received at once, apart from statistics: samples of many tensors are
    counted together.
    """

    def __init__(self) -> None:
        self._pending: defaultdict[torch.device, list[tuple[list[Tensor], Callable[[list[float]], object]]]]
        self._pending = defaultdict(list)
        self._samples: defaultdict[torch.device, list[tuple[Tensor, Callable[[list[float]], object]]]]
        self._samples = defaultdict(list)

    def receive(self, tensors: list[Tensor], receive: Callable[[list[float]], object]) -> None:
        """Call ``receive`` with the elements of tensors of one device, at once or when they are fetched."""
        device = tensors[0].device
        if is_waiting(device):
            self._pending[device].append((tensors, receive))
        else:
            receive(_numbers(tensors))

    def fetch(self) -> None:
        """Receive all numbers: one copy from each device."""
        for device in list(self._samples):
            self._count(device)
        pending, self._pending = self._pending, defaultdict(list)
        for waiting in pending.values():
            parts = [part.reshape(-1) for tensors, _ in waiting for part in tensors]
            by_dtype: dict[torch.dtype, list[int]] = {}
            for index, part in enumerate(parts):
                by_dtype.setdefault(part.dtype, []).append(index)
            order = [index for indices in by_dtype.values() for index in indices]
            joined = [torch.cat([parts[index] for index in indices]) for indices in by_dtype.values()]
            numbers = torch.cat([widened(part) for part in joined]).tolist()
            values: dict[int, list[float]] = {}
            begin = 0
            for index in order:
                values[index] = numbers[begin : begin + parts[index].numel()]
                begin += parts[index].numel()
            index = 0
            for tensors, receive in waiting:
                receive([number for part in range(index, index + len(tensors)) for number in values[part]])
                index += len(tensors)

    def add(
        self,
        tensor: Tensor,
        receive: Callable[[TensorStatistics], object],
        earlier: BoundsAndSums | None = None,
    ) -> None:
        """Call ``receive`` with the statistics of a plain tensor, when they are fetched or before.

        Args:
            earlier: what an earlier reading of its elements gave.
        """
        shape, dtype = tuple(tensor.shape), tensor.dtype
        x = elements_of(tensor)
        size = x.numel()
        if not size:
            receive(TensorStatistics(shape, dtype, 0, nan, nan, nan, nan, 0, 0, ()))
            return
        figures = [] if is_waiting(x.device) else _figures_of_finite(x, earlier or bounds_and_sums_of(x))
        if not figures:
            self.receive(_figures(x), figures.extend)

        def received(counts: list[float]) -> None:
            finite, nans, *numbers = figures
            largest, mean, std = numbers if finite else (nan, nan, nan)
            zeros, *bins, _ = map(int, counts)
            bins[0] += zeros
            infs, share = size - int(finite) - int(nans), zeros / sum(counts)
            receive(TensorStatistics(shape, dtype, size, mean, std, largest, share, int(nans), infs, tuple(bins)))

        self._samples[x.device].append((sample_of(x, _SAMPLE), received))
        if len(self._samples[x.device]) >= _TOGETHER:
            self._count(x.device)

    def _count(self, device: torch.device) -> None:
        """Count the zeros and the histograms of the samples from a device."""
        samples = self._samples.pop(device)
        counts = _counts([sample for sample, _ in samples])

        def received(numbers: list[float]) -> None:
            for index, (_, receive) in enumerate(samples):
                receive(numbers[index * _COUNTS : (index + 1) * _COUNTS])

        self.receive([counts], received)


def _figures(x: Tensor) -> list[Tensor]:
    """Return the number of finite elements and of NaN, and largest, mean and deviation of the finite, on the device."""
    is_finite = torch.isfinite(x)
    finite = is_finite.sum()
    wide = widened(x)
    finite_values = torch.where(is_finite, wide, 0)
    mean = finite_values.sum() / finite
    std = norm_of_finite(wide - mean) / finite.to(wide.dtype).sqrt()
    return [finite, torch.isnan(x).sum(), finite_values.abs().amax(), mean, std]


def _figures_of_finite(x: Tensor, reading: BoundsAndSums) -> list[float]:
    """Return the same from a reading of all elements; nothing where it does not tell, or not closely enough."""
    low, high, sums = reading
    size, largest = x.numel(), max(abs(low), abs(high))
    if not (largest < _LARGE and x.dtype in _NARROW):
        return []
    if low == high:
        return [size, 0, largest, low, 0.0]
    total, squares = sums or _sums(x)
    mean = total / size
    variance = squares / size - mean * mean
    return [size, 0, largest, mean, sqrt(variance)] if variance > (_CANCELS * mean) ** 2 else []


def _sums(x: Tensor) -> tuple[float, float]:
    """Return the sum of the elements and of their squares."""
    flat = x.reshape(-1).float()
    return flat.sum().item(), torch.dot(flat, flat).item()


def _in_memory_order(x: Tensor) -> Tensor | None:
    """Return the elements as they are in memory; None if there are gaps between them."""
    order = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
    dense = x.permute(order) if x.dim() > 1 else x
    return dense.reshape(-1) if dense.is_contiguous() else None


def _counts(samples: list[Tensor]) -> Tensor:
    """Return for each sample the number of zeros, the histogram of other elements, and the number of NaN."""
    elements = torch.cat(samples)
    sizes = torch.tensor([len(sample) for sample in samples])
    first = torch.arange(0, len(samples) * _COUNTS, _COUNTS).repeat_interleave(sizes).to(elements.device)
    octaves = elements.float().abs().log2_().clamp_(_LOWEST, _HIGHEST)
    columns = octaves.sub_(_LOWEST).mul_(_PER_OCTAVE).clamp_(max=_BINS - 1).add_(1)
    columns.nan_to_num_(nan=_BINS + 1).masked_fill_(elements == 0, 0)
    return torch.bincount(first.add_(columns.long()), minlength=len(samples) * _COUNTS)


def sample_of(x: Tensor, most: int) -> Tensor:
    """Return a copy of a regular sample of at most ``most`` elements, in the order of memory.

    The step is odd, so that it meets all columns of a matrix.

    >>> sample_of(torch.arange(10), most=4)
    tensor([0, 3, 6, 9])
    """
    step = -(-x.numel() // most) | 1
    flat = _in_memory_order(x)
    flat = _spread(x, most) if flat is None else flat
    return flat[::step].clone() if flat.numel() > most else flat.clone()


def _spread(x: Tensor, most: int) -> Tensor:
    """Return a sample of a tensor whose elements have gaps in memory, such as a slice, without copying it whole."""
    while x.numel() > most:
        dim = max(range(x.dim()), key=x.size)
        x = x[(slice(None),) * dim + (slice(None, None, 3),)]
    return x.reshape(-1)


def _numbers(tensors: Sequence[Tensor]) -> list[float]:
    return [number for tensor in tensors for number in tensor.reshape(-1).tolist()]
