"""``KernelTable``: measured times of operator calls on one machine, and predictions for calls that were not measured.

An entry is one operator call (``OperatorCall.key``): its seconds, and the bytes that its kernel allocates and frees
while it runs. A machine has slower minutes, so a call may be measured in several visits, of which the median counts. A
call that is not in the table is predicted from its neighbours: the measured time of a neighbour divided by its roofline
gives the efficiency of such calls.
"""

from __future__ import annotations

import json
import os
import platform
import re
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, islice
from math import exp, inf, log
from operator import itemgetter, mul
from pathlib import Path
from statistics import median

import torch

from modelsummary.errors import InputError
from modelsummary.operators.operator_work import Work

__all__ = ["HOST_CALLS", "Entry", "KernelTable", "Machine", "cache_folder", "device_here", "machine_of", "table_of"]

# What the host does: it dispatches operators, views too, calls modules, records and runs nodes of autograd, updates
# parameters, asks the policy of a selective checkpoint at each operator, launches kernels from C++, and in a compiled
# step from Python.
HOST_CALLS = (
    *("operator", "backward operator", "view", "module", "node", "parameter", "policy"),
    *("launch", "compiled kernel"),
)
_VERSION = 3
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
        workspace: bytes that its kernel allocates beside its results; None if not measured.
        visits: the seconds measured in each visit, the latest last.

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
    workspace: int | None = None
    visits: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """The median of the visits; None if it was not measured."""
        return median(self.visits) if self.visits else None

    def visit(self, seconds: float) -> None:
        """Add the seconds of one visit."""
        self.visits = [*self.visits, seconds][-_VISITS_KEPT:]

    @property
    def figures(self) -> list[float]:
        """All its numbers: sizes, work, seconds and bytes."""
        return [self.workspace or 0, *self.sizes, self.flops, self.nbytes, *self.visits]

    @cached_property
    def features(self) -> list[float]:
        """FLOPs, bytes and sizes as powers of two, whose distance tells which calls are alike."""
        return _features(self.sizes, self.flops, self.nbytes)

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
        facts: speeds that the machine reaches (``"flops_per_second"``, ``"bytes_per_second"``), and seconds of the host
            for an ``"operator"``.
    """

    machine: Machine
    entries: dict[str, Entry] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    _groups: dict[str, list[Entry]] = field(default_factory=dict, repr=False)

    @property
    def host(self) -> float:
        """Seconds that the host needs to dispatch one operator."""
        return self.facts.get("operator", 2e-6)

    @property
    def host_seconds(self) -> dict[str, float]:
        """What the host takes in eager mode: kind of call, one of ``HOST_CALLS`` -> seconds.

        Each takes about as long as dispatching an operator. The optimizer's Python was not measured.
        """
        return {**dict.fromkeys(HOST_CALLS, self.host), "parameter": 0.0}

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
            facts = {name: float(value) for name, value in stored["facts"].items()}
            _check_figures([facts.values(), *(entry.figures for entry in entries.values())])
            return cls(machine, entries, facts)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"the kernel table {path} is ignored: {reason:.120}; calibrate again", stacklevel=2)
            return cls(machine)

    def save(self) -> Path:
        """Write the table into the user's cache directory and return the path."""
        path = self.machine.path
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {key: asdict(entry) for key, entry in self.entries.items()}
        contents = {"version": _VERSION, "machine": asdict(self.machine), "facts": self.facts, "entries": entries}
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
        nearest = next((other for _, other in self._neighbours(work) if other.name == work.name), None)
        if nearest is None:
            return None
        return round((nearest.workspace or 0) * work.nbytes / max(nearest.nbytes, 1))

    def seconds(self, key: str | None, work: Work) -> tuple[float, str]:
        """Return the seconds of a call and their source: ``"measured"``, ``"interpolated"`` or ``"fit"``.

        Args:
            key: key of the call; None for a kernel of several calls.
            work: work of the call.
        """
        entry = self.entries.get(key) if key is not None else None
        if entry is not None and entry.seconds is not None:
            return entry.seconds, "measured"
        return self._from_neighbours(work)

    def _bound(self, work: Work | Entry) -> float:
        """Return the seconds of some work by the speeds that this machine reaches, dispatch included."""
        return self.host + self.computing(work) + self.moving(work)

    def computing(self, work: Work | Entry) -> float:
        """Return the seconds that the multiply-adds of a kernel take, by the speed that this machine reaches."""
        return work.flops / self.facts.get("flops_per_second", 1e11)

    def moving(self, work: Work | Entry) -> float:
        """Return the seconds that moving the bytes of a kernel takes, by the speed that this machine reaches."""
        return work.nbytes / self.facts.get("bytes_per_second", 1e10)

    def _from_neighbours(self, work: Work) -> tuple[float, str]:
        """Return the roofline times the mean inefficiency of the nearest calls of the class, and its source."""
        alike = (pair for pair in self._neighbours(work) if pair[1].op_class == work.op_class and pair[1].seconds)
        nearest = list(islice(alike, _NEIGHBOURS))
        if not nearest:
            return self._bound(work), "fit"
        weights = [1 / (distance + 0.05) for distance, _ in nearest]
        inefficiencies = [log((entry.seconds or 1.0) / self._bound(entry)) for _, entry in nearest]
        mean = sum(map(mul, weights, inefficiencies)) / sum(weights)
        distance, entry = nearest[0]
        is_near = entry.name == work.name and distance < _NEAR**2
        return self._bound(work) * exp(mean), "interpolated" if is_near else "fit"

    def _neighbours(self, work: Work) -> list[tuple[float, Entry]]:
        """Return the entries of the dtype with their squared distance, the nearest first."""
        dtype = str(work.dtype).removeprefix("torch.")
        if dtype not in self._groups:
            self._groups[dtype] = [entry for entry in self.entries.values() if entry.dtype == dtype]
        features = _features(work.sizes, work.flops, work.nbytes)

        def distance(entry: Entry) -> float:
            squares = sum((a - b) ** 2 for a, b in zip(features, entry.features, strict=False))
            return squares + (0.0 if entry.name == work.name else _OTHER_OPERATOR)

        return sorted(((distance(entry), entry) for entry in self._groups[dtype]), key=itemgetter(0))

    def add(self, key: str, entry: Entry) -> None:
        """Put an entry into the table; it replaces an earlier one."""
        self.entries[key] = entry
        self._groups.clear()


def _check_figures(groups: Iterable[Iterable[float]]) -> None:
    """Raise ``ValueError`` unless all figures are finite numbers from 0 on."""
    for figure in chain.from_iterable(groups):
        if not isinstance(figure, (int, float)) or not 0 <= figure < inf:
            raise ValueError(f"expected numbers from 0 on, got {figure!r}")


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
        raise InputError(
            f"device must be 'cpu', or 'cuda' if it is available, got {device!r}; calls on other devices are "
            "predicted, not measured: pass a name such as 'A100' to estimate_latency"
        )
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
