"""``KernelTable``: measured times of operator calls on one machine, and predictions for calls that were not measured.

An entry is one operator call (``OperatorCall.key``): its seconds with the parameters in the last level of the cache,
its seconds with the parameters in memory, and the bytes that its kernel allocates and frees while it runs. A machine
has slower minutes, so a call may be measured in several visits, of which the median counts. A call that is not in the
table is predicted from its neighbours: the measured time of a neighbour divided by its roofline gives the efficiency of
such calls.
"""

from __future__ import annotations

import json
import os
import platform
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import chain
from math import exp, inf, log
from pathlib import Path
from statistics import median
from typing import Any

import torch

from modelsummary.errors import InputError
from modelsummary.operators.operator_work import Work

__all__ = ["Entry", "KernelTable", "Machine", "cache_folder", "device_here", "machine_of", "table_of"]

_VERSION = 2
_VISITS = ("visits", "cold_visits")
_VISITS_KEPT = 50
_NEIGHBOURS = 4
_NEAR = 2.0  # largest distance, in powers of two, of a neighbour that counts as interpolation
_OTHER_OPERATOR = 1.0  # squared distance added for another operator of the class


def cache_folder() -> Path:
    """Return the folder of the kernel tables: ``$MODELSUMMARY_CACHE``, or ``modelsummary`` in the user's cache."""
    folder = os.environ.get("MODELSUMMARY_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) if folder else Path(base) / "modelsummary"


@dataclass(frozen=True)
class Machine:
    """The machine of a table: a device, a number of threads and a version of torch."""

    device: str
    threads: int
    torch_version: str

    @property
    def path(self) -> Path:
        """The path of its table."""
        name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.device}-{self.threads}-torch-{self.torch_version}")
        return cache_folder() / "kernels" / f"{name.strip('-')}.json"


@dataclass
class Entry:
    """One measured operator call.

    Attributes:
        name, op_class, dtype, sizes, flops, nbytes: as in ``Work``.
        seconds: time with all arguments in the last level of the cache; None if not measured.
        cold_seconds: time with the parameters in memory; None if not measured.
        workspace: bytes that its kernel allocates beside its results; None if not measured.
        visits, cold_visits: the times measured in each visit, the latest last; ``seconds`` and ``cold_seconds`` are
            their medians.

    >>> entry = Entry("aten.relu", "elementwise", "float32", [8], 8, 64)
    >>> for seconds in (2e-6, 5e-6, 3e-6):
    ...     entry.visit(seconds)
    >>> entry.seconds
    3e-06
    """

    name: str
    op_class: str
    dtype: str
    sizes: list[int]
    flops: int
    nbytes: int
    seconds: float | None = None
    cold_seconds: float | None = None
    workspace: int | None = None
    visits: list[float] = field(default_factory=list)
    cold_visits: list[float] = field(default_factory=list)

    def visit(self, seconds: float | None = None, cold_seconds: float | None = None) -> None:
        """Add the times of one visit; None for a time that it did not measure."""
        if seconds is not None:
            self.seconds = _after_visit(self.visits, seconds)
        if cold_seconds is not None:
            self.cold_seconds = _after_visit(self.cold_visits, cold_seconds)

    @property
    def figures(self) -> list[float]:
        """All its numbers: sizes, work, seconds and bytes."""
        measured = [figure for figure in (self.seconds, self.cold_seconds, self.workspace) if figure is not None]
        return [*measured, *self.sizes, self.flops, self.nbytes, *self.visits, *self.cold_visits]

    @classmethod
    def of(cls, work: Work) -> Entry:
        """Return the entry of a kernel that was not measured yet."""
        dtype = str(work.dtype).removeprefix("torch.")
        return cls(work.name, work.op_class, dtype, list(work.sizes), work.flops, work.nbytes)


@dataclass
class KernelTable:
    """Measured operator calls of one machine.

    Attributes:
        machine: the machine.
        entries: ``OperatorCall.key`` -> entry.
        facts: speeds that the machine reaches (``"flops_per_second"``, ``"bytes_per_second"``), seconds of the host
            for a ``"view"`` and the ``"next_view"`` after it, a ``"module"`` call, an ``"operator"``, and an autograd
            node in the forward (``"node"``) and the backward (``"engine"``), and ``"cache_bytes"`` of the last level.
        visits: name of a fact -> the figure of each visit; facts are their medians.
    """

    machine: Machine
    entries: dict[str, Entry] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    visits: dict[str, list[float]] = field(default_factory=dict)
    _spaces: dict[tuple[str, str], list[Entry]] = field(default_factory=dict, repr=False)
    _groups: dict[tuple[str, str, bool], list[tuple[Entry, list[float], float]]] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def load(cls, machine: Machine) -> KernelTable:
        """Return the stored table of a machine; an empty one if there is none.

        A damaged file, or a file of another machine or version, is ignored with a warning that names it.
        """
        path = machine.path
        if not path.exists():
            return cls(machine)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["version"] != _VERSION or stored["machine"] != asdict(machine):
                raise ValueError("another machine or version wrote it")
            entries = {key: Entry(**entry) for key, entry in stored["entries"].items()}
            visits = {name: [float(value) for value in values] for name, values in stored["visits"].items()}
            facts = {name: float(value) for name, value in stored["facts"].items()}
            _check_figures([facts.values(), *visits.values(), *(entry.figures for entry in entries.values())])
            return cls(machine, entries, facts, visits)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"the kernel table {path} is ignored: {reason:.120}; calibrate again", stacklevel=2)
            return cls(machine)

    def save(self) -> Path:
        """Write the table into the user's cache directory and return the path."""
        path = self.machine.path
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {
            key: {
                name: value
                for name, value in asdict(entry).items()
                if value is not None and (value or name not in _VISITS)
            }
            for key, entry in self.entries.items()
        }
        contents: dict[str, Any] = {"version": _VERSION, "machine": asdict(self.machine), "facts": self.facts}
        contents |= {"visits": self.visits, "entries": entries}
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(contents), encoding="utf-8")
        unfinished.replace(path)
        return path

    def workspace(self, key: str, work: Work) -> int | None:
        """Return the bytes that a call allocates beside its results; None if no call of its operator was measured.

        If the call itself was not measured, scale the workspace of the operator's nearest call by the bytes moved.
        """
        entry = self.entries.get(key)
        if entry is not None and entry.workspace is not None:
            return entry.workspace
        dtype = str(work.dtype).removeprefix("torch.")
        if (work.name, dtype) not in self._spaces:
            same_operator = [
                other for other in self.entries.values() if (other.name, other.dtype) == (work.name, dtype)
            ]
            self._spaces[work.name, dtype] = [other for other in same_operator if other.workspace is not None]
        features = _features(work.sizes, work.flops, work.nbytes)

        def distance(other: Entry) -> float:
            return sum(
                (a - b) ** 2 for a, b in zip(features, _features(other.sizes, other.flops, other.nbytes), strict=False)
            )

        nearest = min(self._spaces[work.name, dtype], key=distance, default=None)
        if nearest is None:
            return None
        return round((nearest.workspace or 0) * work.nbytes / max(nearest.nbytes, 1))

    def seconds(self, key: str | None, work: Work, *, cold: bool) -> tuple[float, str]:
        """Return the seconds of a call and their source: ``"measured"``, ``"interpolated"`` or ``"fit"``.

        Args:
            key: key of the call; None for a kernel of several calls.
            work: work of the call.
            cold: the parameters of the model are not in the cache.
        """
        entry = self.entries.get(key) if key is not None else None
        if entry is not None:
            seconds = entry.cold_seconds if cold and entry.cold_seconds is not None else entry.seconds
            seconds = seconds if seconds is not None else entry.cold_seconds
            if seconds is not None:
                return seconds, "measured"
        return self._from_neighbours(work, cold)

    def _bound(self, flops: int, nbytes: int) -> float:
        """Return the seconds of some work by the speeds that this machine reaches, dispatch included."""
        facts = self.facts
        computing = flops / facts.get("flops_per_second", 1e11)
        moving = nbytes / facts.get("bytes_per_second", 1e10)
        return facts.get("operator", 2e-6) + computing + moving

    def _from_neighbours(self, work: Work, cold: bool) -> tuple[float, str]:
        """Return the roofline times the mean inefficiency of the nearest calls of the class, and its source."""
        bound = self._bound(work.flops, work.nbytes)
        group = self._group(work.op_class, str(work.dtype).removeprefix("torch."), cold)
        if not group:
            return bound, "fit"
        work_features = _features(work.sizes, work.flops, work.nbytes)
        neighbours = []
        for entry, features, inefficiency in group:
            distance = sum((a - b) ** 2 for a, b in zip(work_features, features, strict=False))
            distance += 0.0 if entry.name == work.name else _OTHER_OPERATOR
            neighbours.append((distance, inefficiency, entry.name == work.name))
        neighbours.sort()
        nearest = neighbours[:_NEIGHBOURS]
        weights = [1 / (distance + 0.05) for distance, _, _ in nearest]
        mean = sum(weight * neighbour[1] for weight, neighbour in zip(weights, nearest, strict=True)) / sum(weights)
        is_near = nearest[0][2] and nearest[0][0] < _NEAR**2
        return bound * exp(mean), "interpolated" if is_near else "fit"

    def _group(self, op_class: str, dtype: str, cold: bool) -> list[tuple[Entry, list[float], float]]:
        """Return the measured calls of a class with their features and the logarithm of their inefficiency."""
        key = (op_class, dtype, cold)
        if key not in self._groups:
            entries = [entry for entry in self.entries.values() if (entry.op_class, entry.dtype) == (op_class, dtype)]
            group = []
            for entry in entries:
                seconds = entry.cold_seconds if cold and entry.cold_seconds is not None else entry.seconds
                seconds = seconds if seconds is not None else entry.cold_seconds
                if seconds:
                    features = _features(entry.sizes, entry.flops, entry.nbytes)
                    group.append((entry, features, log(seconds / self._bound(entry.flops, entry.nbytes))))
            self._groups[key] = group
        return self._groups[key]

    def add(self, key: str, entry: Entry) -> None:
        """Put an entry into the table; it replaces an earlier one."""
        self.entries[key] = entry
        self._groups.clear()
        self._spaces.clear()

    def add_facts(self, facts: Mapping[str, float]) -> None:
        """Add the facts of one visit."""
        for name, value in facts.items():
            self.facts[name] = _after_visit(self.visits.setdefault(name, []), value)


def _check_figures(groups: Iterable[Iterable[float]]) -> None:
    """Raise ``ValueError`` unless all figures are finite numbers from 0 on."""
    for figure in chain.from_iterable(groups):
        if not isinstance(figure, (int, float)) or not 0 <= figure < inf:
            raise ValueError(f"expected numbers from 0 on, got {figure!r}")


def _after_visit(visits: list[float], figure: float) -> float:
    """Add the figure of a visit; return the median of the visits."""
    visits.append(figure)
    del visits[:-_VISITS_KEPT]
    return median(visits)


def _features(sizes: Iterable[int], flops: int, nbytes: int) -> list[float]:
    """Return sizes, FLOPs and bytes as powers of two."""
    return [log(max(value, 1)) / log(2) for value in (flops, nbytes, *sizes)]


def device_here(device: torch.device | str | None) -> torch.device:
    """Return a device of this machine whose kernels can be measured: the CPU, or CUDA.

    Raises:
        InputError: the device is another one, or not present.

    >>> device_here(None)
    device(type='cpu')
    """
    try:
        torch_device = torch.device(device or "cpu")
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device must be 'cpu' or 'cuda', got {device!r}: {str(error).splitlines()[0]}") from None
    if torch_device.type not in ("cpu", "cuda") or (torch_device.type == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"device must be 'cpu', or 'cuda' if it is available, got {device!r}")
    return torch_device


def machine_of(device: torch.device) -> Machine:
    """Return the machine of a device: its name, the number of threads and the version of torch."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.node()} {_cpu_name()}"
    return Machine(name, torch.get_num_threads() if device.type == "cpu" else 0, torch.__version__)


@lru_cache(maxsize=1)
def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def table_of(device: torch.device) -> KernelTable:
    """Return the table of this machine for reading; it is empty if the machine was never calibrated.

    Calls share one object until the file changes, as reading a large table takes as long as a prediction. To fill a
    table, load it with ``KernelTable.load``.
    """
    machine = machine_of(device)
    try:
        status = machine.path.stat()
    except OSError:
        return KernelTable(machine)
    return _loaded(machine, machine.path, (status.st_mtime_ns, status.st_size, status.st_ino))


@lru_cache(maxsize=2)
def _loaded(machine: Machine, path: Path, version: tuple[int, ...]) -> KernelTable:  # noqa: ARG001
    return KernelTable.load(machine)
