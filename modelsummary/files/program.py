"""A program: a model as plain data, a list of operators in the order in which they run.

Every file format is read into a program: the nodes of an ONNX graph or exported program, the operators of a TorchScript
run. Traffic, storage of activations and the tree of modules are functions of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

from modelsummary.errors import InputError, ModelFileError, printable

__all__ = [
    "Activations",
    "GivenSizes",
    "Operation",
    "Program",
    "Scope",
    "Stored",
    "Tensor",
    "Traffic",
    "count_one_branch",
    "sizes_by_name",
]

GivenSizes = Mapping[str | int, Sequence[int]]
"""Sizes of inputs, by name or by position."""

Kind = Literal["input", "parameter", "buffer", "activation"]
_MOST = 2**63  # elements of a tensor, and runs of an operator: no address space holds more


@dataclass(eq=False, slots=True)
class Tensor:
    """One tensor; operations that use the same tensor hold the same object.

    Attributes:
        shape: integers, and names for open dimensions; None if unknown.
        size: the integers to count with; an open dimension counts as the number bound to it, or as 1. None if unknown.
        dtype: name of the element type, such as ``"float32"``.
        bits: bits per element.
        kind: role in the model; every constant other than a parameter is a ``"buffer"``.
        trainable: True for a parameter that requires a gradient.
        original: the parameter that this one repeats, such as by a transposed copy; both count as one parameter.
        numel: number of elements; 0 if the size is unknown.
        nbytes: bytes of storage; elements smaller than a byte are packed.

    >>> Tensor("x", ("batch", 3), (1, 3), "int4", 4).nbytes
    2
    """

    name: str
    shape: tuple[int | str, ...] | None
    size: tuple[int, ...] | None
    dtype: str
    bits: int
    kind: Kind = "activation"
    trainable: bool = False
    original: Tensor | None = None
    numel: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.name = printable(self.name)
        if self.shape is not None and any(isinstance(dim, str) and not dim.isprintable() for dim in self.shape):
            self.shape = tuple(printable(dim) if isinstance(dim, str) else dim for dim in self.shape)
        self.numel = prod(self.size) if self.size is not None else 0
        if self.size and min(self.size) < 0:
            raise ModelFileError(f"tensor {self.name[:80]!r} has the negative size {str(list(self.size))[:80]}")
        if self.numel >= _MOST:
            size = str(list(self.size or ()))[:80]
            raise ModelFileError(f"tensor {self.name[:80]!r} has the size {size}: 2**63 elements or more")
        self.nbytes = (self.numel * self.bits + 7) // 8

    @property
    def moved(self) -> int:
        """Bytes to read or write the tensor; 0 for a 0-d tensor, which is an operand of the instruction."""
        return self.nbytes if self.size else 0


class Scope(NamedTuple):
    """A module around operators, which becomes a row of the tree.

    Attributes:
        key: identity of the scope, equal for all its operators.
        fqn: fully qualified name of the module.
        class_name: name of the module's class.
    """

    key: str
    fqn: str
    class_name: str


@dataclass(eq=False)
class Operation:
    """One operator.

    Attributes:
        name: name of the node, unique in the program.
        op_type: such as ``"Conv"`` or ``"aten.conv2d"``; domains other than ONNX's stand in front.
        scopes: the modules around the operator, outermost first, without the model itself.
        inputs, outputs: tensors; optional inputs that are not given are left out.
        attributes: name -> value, including defaults and the values of small constant inputs.
        macs: multiply-adds of all ``repeats``.
        macs_expr: ``macs`` as a sympy expression if dimensions are open, else None.
        elementwise_ops: as in ``LayerInfo``.
        uncounted: name for the ledger if ``macs`` is incomplete, else None.
        repeats: number of runs; in the body of a loop, its iterations.
        is_free: True if it moves no data: a view, a question about shapes, or a container of other operators.
        aliases: True if its results share the storage of its first input: a view, or in place.
        gathers: True if it reads only the rows that it returns instead of its whole first input.
        executed: False in a branch that is not taken; such an operator counts nothing.
    """

    name: str
    op_type: str
    scopes: tuple[Scope, ...]
    inputs: list[Tensor]
    outputs: list[Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)
    macs: int = 0
    macs_expr: Any = None
    elementwise_ops: int = 0
    uncounted: str | None = None
    repeats: int = 1
    is_free: bool = False
    aliases: bool = False
    gathers: bool = False
    executed: bool = True

    def __post_init__(self) -> None:
        self.name, self.op_type = printable(self.name), printable(self.op_type)
        if self.repeats >= _MOST:
            raise ModelFileError(f"operator {self.name[:80]!r} runs 2**63 times or more")

    def reads(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each input once, with the bytes read from it in one run."""
        if self.is_free or not self.executed:
            return
        for position, tensor in enumerate(dict.fromkeys(self.inputs)):
            if self.gathers and position == 0:
                yield tensor, min(tensor.moved, sum(output.moved for output in self.outputs))
            else:
                yield tensor, tensor.moved

    @property
    def bytes_read(self) -> int:
        """Bytes read by all runs, without a buffer on the chip."""
        return self.repeats * sum(nbytes for _, nbytes in self.reads())

    @property
    def bytes_written(self) -> int:
        """Bytes written by all runs."""
        if self.is_free or not self.executed:
            return 0
        return self.repeats * sum(tensor.moved for tensor in self.outputs)


class Traffic(NamedTuple):
    """The bytes that one operator reads and writes."""

    layer: str
    read: int
    write: int


class Stored(NamedTuple):
    """Elements and bytes of the tensors whose data a file holds: parameters, buffers and constants."""

    elements: int
    nbytes: int


_NOTHING = Stored(0, 0)


class Activations(NamedTuple):
    """Storage of activations in bytes.

    Attributes:
        total: results of all operators, as if none were ever freed.
        peak: largest storage alive at one time. Inputs live until their last use, results from their operator to their
            last use, results of the model to the end.
        peak_at: name of the operator that runs at the peak; empty if the inputs alone are the peak.
    """

    total: int
    peak: int
    peak_at: str


@dataclass(eq=False)
class Program:
    """A model as operators.

    Attributes:
        name: class of the model, or name of the graph.
        inputs, outputs: tensors that the model takes and returns.
        operations: the operators in the order in which they run.
        unused: parameters and buffers that no operator uses.
        owned: modules listed in the file itself, with the tensors that they register; each gets a row.
        stored: the tensors whose data the file holds.
        constants: operator type -> number of operators that only hold a constant; they are not in ``operations``.
        notes: unknown figures, and why they are unknown.

    >>> x, y, z = (Tensor(name, (2, 3), (2, 3), "float32", 32) for name in "xyz")
    >>> steps = [Operation("a", "Relu", (), [x], [y]), Operation("b", "Neg", (), [y], [z])]
    >>> program = Program("Net", [x], [z], steps)
    >>> program.traffic()
    [Traffic(layer='a', read=24, write=24), Traffic(layer='b', read=24, write=24)]
    >>> program.activations()
    Activations(total=48, peak=48, peak_at='a')
    """

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    operations: list[Operation]
    unused: list[Tensor] = field(default_factory=list)
    owned: list[tuple[tuple[Scope, ...], list[Tensor]]] = field(default_factory=list)
    stored: Stored = _NOTHING
    constants: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def has_forward(self) -> bool:
        """True if the program has a forward, which may have no operators; False for modules alone."""
        return bool(self.operations or self.outputs or self.constants)

    def histogram(self) -> Counter[str]:
        """Return operator type -> number of occurrences in the program, most frequent first."""
        counts = Counter(operation.op_type for operation in self.operations) + self.constants
        return Counter(dict(counts.most_common()))

    def traffic(self, buffer_bytes: int = 0) -> list[Traffic]:
        """Return the traffic of each operator, in the order in which they run.

        Args:
            buffer_bytes: size of a buffer on the chip that keeps the tensors used last. A tensor in it is not read
                again. A tensor larger than the buffer bypasses it. Every result is written to memory.
        """
        held: OrderedDict[Tensor, int] = OrderedDict()
        free = buffer_bytes

        def keep(tensor: Tensor, nbytes: int) -> None:
            nonlocal free
            if not 0 < nbytes <= buffer_bytes:
                return
            free += held.pop(tensor, 0)  # an operator that works in place returns what it read
            while free < nbytes:
                free += held.popitem(last=False)[1]
            held[tensor] = nbytes
            free -= nbytes

        rows = []
        for operation in self.operations:
            if not operation.executed:
                continue
            read = 0
            for tensor, nbytes in operation.reads():
                if tensor in held:
                    held.move_to_end(tensor)
                else:
                    in_buffer = 0 < tensor.moved <= buffer_bytes
                    read += nbytes if in_buffer else nbytes * operation.repeats
                    if nbytes == tensor.moved:
                        keep(tensor, nbytes)
            if operation.bytes_written:
                for tensor in operation.outputs:
                    keep(tensor, tensor.moved)
            rows.append(Traffic(operation.name, read, operation.bytes_written))
        return rows

    def activations(self) -> Activations:
        """Return the storage of all activations, and its peak; a view shares the storage of its base."""
        executed = [operation for operation in self.operations if operation.executed]
        shown: dict[Tensor, Tensor] = {}  # a view -> its base
        last: dict[Tensor, int] = dict.fromkeys(self.inputs, 0)
        for position, operation in enumerate(executed):
            if operation.aliases and operation.inputs:
                base = shown.get(operation.inputs[0], operation.inputs[0])
                shown.update((tensor, base) for tensor in operation.outputs if tensor is not base)
            for tensor in (*operation.inputs, *operation.outputs):
                last[shown.get(tensor, tensor)] = position
        last.update((shown.get(tensor, tensor), len(executed)) for tensor in self.outputs)
        there = dict.fromkeys(self.inputs)
        total, live = 0, sum(tensor.nbytes for tensor in there)
        peak, peak_at = live, ""
        leaving: dict[int, list[Tensor]] = {}
        for tensor, position in last.items():
            leaving.setdefault(position, []).append(tensor)
        for position, operation in enumerate(executed):
            results = [tensor for tensor in operation.outputs if tensor not in shown and tensor not in there]
            there.update(dict.fromkeys(results))
            nbytes = sum(tensor.nbytes for tensor in results)
            total, live = total + nbytes, live + nbytes
            if live > peak:
                peak, peak_at = live, operation.name
            live -= sum(tensor.nbytes for tensor in leaving.get(position, ()) if tensor in there)
        return Activations(total, peak, peak_at)


def count_one_branch(branches: Mapping[str, Sequence[Operation]], taken: str | None = None) -> tuple[str, bool]:
    """Count the operators of one branch, and none of the other branches.

    Args:
        branches: name of each branch -> its operators.
        taken: the branch that runs; None if values decide: then the one with the most multiply-adds counts.

    Returns:
        The name of the branch that counts, and True if values decide and another branch has fewer multiply-adds.
    """
    costs = {name: sum(operation.macs for operation in branch) for name, branch in branches.items()}
    counted = taken or max(costs, key=costs.__getitem__, default="")
    for name, branch in branches.items():
        for operation in branch if name != counted else ():
            operation.executed, operation.macs, operation.macs_expr, operation.elementwise_ops = False, 0, None, 0
    return counted, taken is None and len(set(costs.values())) > 1


def sizes_by_name(
    inputs: Sequence[str], sizes: GivenSizes, described: Mapping[str, str] | None = None
) -> dict[str, Sequence[int]]:
    """Return the given sizes by the names of the inputs.

    Args:
        sizes: sizes of some inputs by name, or of all by position.
        described: name -> declared size, for messages.

    Raises:
        InputError: the model has no input of that name, or has more or fewer inputs than sizes.

    >>> sizes_by_name(["ids", "mask"], {0: (1, 8), 1: (8, 8)})
    {'ids': (1, 8), 'mask': (8, 8)}
    """
    shown = described or {}
    listed = ", ".join(f"{name[:80]!r} {shown.get(name, '')}".strip() for name in list(inputs)[:8]) or "none"
    if any(isinstance(key, int) for key in sizes):
        if len(sizes) != len(inputs):
            example = f"input={{{inputs[0][:80]!r}: {tuple(next(iter(sizes.values())))}}}" if inputs else "no input"
            raise InputError(
                f"expected one size for each of the inputs {listed}, got {len(sizes)}; or pass sizes by name: {example}"
            )
        return dict(zip(inputs, sizes.values(), strict=True))
    named_sizes = {str(name): size for name, size in sizes.items()}
    for name in named_sizes:
        if name not in inputs:
            raise InputError(f"the model has no input {name!r}; it has {listed}")
    return named_sizes
