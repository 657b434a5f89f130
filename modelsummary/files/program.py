"""A model as a list of operators in the order in which they run, as plain data.

What a file holds is such a list: the nodes of an ONNX graph, of an exported program, of a TorchScript run. Traffic,
storage of activations and the tree of modules are functions of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

from modelsummary.errors import InputError, printable

__all__ = ["Activations", "GivenSizes", "Operation", "Program", "Scope", "Tensor", "Traffic", "sizes_by_name"]

GivenSizes = Mapping[str | int, Sequence[int]]
"""Sizes of inputs by name, or by position."""

Kind = Literal["input", "parameter", "buffer", "activation"]


@dataclass(eq=False, slots=True)
class Tensor:
    """One tensor; operations that use the same tensor hold the same object.

    Attributes:
        shape: integers, and texts for dimensions that the file leaves open; None if nothing is known.
        size: the integers to count with: an open dimension counts as what it is bound to, or as 1. None if unknown.
        dtype: ``"float32"``.
        bits: of one element.
        kind: what it is to the model; a ``"buffer"`` is any constant that is no parameter.
        trainable: a parameter that requires a gradient.
        numel: elements; 0 where the size is unknown.
        nbytes: of storage, elements of less than a byte packed.
    """

    name: str
    shape: tuple[int | str, ...] | None
    size: tuple[int, ...] | None
    dtype: str
    bits: int
    kind: Kind = "activation"
    trainable: bool = False
    numel: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.name = printable(self.name)
        if self.shape is not None and any(isinstance(dim, str) and not dim.isprintable() for dim in self.shape):
            self.shape = tuple(printable(dim) if isinstance(dim, str) else dim for dim in self.shape)
        self.numel = prod(self.size) if self.size is not None else 0
        self.nbytes = (self.numel * self.bits + 7) // 8

    @property
    def moved(self) -> int:
        """Bytes to read or write it. A 0-d tensor is an operand of the instruction and moves nothing."""
        return self.nbytes if self.size else 0


class Scope(NamedTuple):
    """A module around operators: its row in the tree.

    Attributes:
        key: what tells it from other scopes; equal for all its operators.
        fqn: fully qualified name of the module.
    """

    key: str
    fqn: str
    class_name: str


@dataclass(eq=False)
class Operation:
    """One operator.

    Attributes:
        name: of the node; unique in the program.
        op_type: ``"Conv"``, ``"aten.conv2d"``; with its domain where that is not ONNX's.
        scopes: the modules around it, outermost first, without the model itself.
        inputs, outputs: tensors; optional inputs that are not given are left out.
        attributes: name -> value, with defaults and with what small constant inputs say.
        macs: multiply-adds, of all ``repeats``.
        macs_expr: the same as a sympy expression where dimensions are open; else None.
        elementwise_ops: as in ``LayerInfo``.
        uncounted: why ``macs`` lacks something: the name for the ledger; None if it does not.
        repeats: how often it runs: in the body of a loop, its iterations.
        is_free: moves nothing: a view, a look at shapes, or a container for other operators.
        aliases: its results live in the storage of its first input: a view, or in place.
        gathers: reads the rows that it returns, not the whole of its first input.
        executed: False in a branch that is not taken; it counts nothing then.
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

    def reads(self) -> Iterator[tuple[Tensor, int]]:
        """Each input once, with the bytes that are read of it in one run."""
        if self.is_free or not self.executed:
            return
        for position, tensor in enumerate(dict.fromkeys(self.inputs)):
            if self.gathers and position == 0:
                yield tensor, min(tensor.moved, sum(each.moved for each in self.outputs))
            else:
                yield tensor, tensor.moved

    @property
    def bytes_read(self) -> int:
        """Bytes of all inputs, without any buffer on the chip."""
        return self.repeats * sum(nbytes for _, nbytes in self.reads())

    @property
    def bytes_written(self) -> int:
        """Bytes of all outputs."""
        if self.is_free or not self.executed:
            return 0
        return self.repeats * sum(tensor.moved for tensor in self.outputs)


class Traffic(NamedTuple):
    """What one operator moves, in bytes."""

    layer: str
    read: int
    write: int


class Activations(NamedTuple):
    """Storage of activations in bytes.

    Attributes:
        total: of the outputs of all operators, as if nothing were ever freed.
        peak: the most that lives at a time: inputs until their last use, results from their operator to their last
            use, results of the model to the end.
        peak_at: the operator during which that is.
    """

    total: int
    peak: int
    peak_at: str


@dataclass(eq=False)
class Program:
    """A model as operators.

    Attributes:
        name: class of the model, or name of the graph.
        inputs, outputs: of the model.
        operations: in the order in which they run.
        unused: parameters and buffers that no operator uses.
        owned: modules that the file lists apart from operators, each with what it registers; they have rows anyway.
        constants: operators that only hold a constant, by type; they are no operations.
        notes: what is not known, and why.
    """

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    operations: list[Operation]
    unused: list[Tensor] = field(default_factory=list)
    owned: list[tuple[tuple[Scope, ...], list[Tensor]]] = field(default_factory=list)
    constants: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def histogram(self) -> Counter[str]:
        """Operator -> how often it stands in the program, most first."""
        counts = Counter(operation.op_type for operation in self.operations) + self.constants
        return Counter(dict(counts.most_common()))

    def traffic(self, buffer_bytes: int = 0) -> list[Traffic]:
        """What each operator reads and writes, in the order in which they run.

        Args:
            buffer_bytes: of a buffer on the chip, which keeps the tensors used last: what is in it is not read again.
                A tensor that does not fit as a whole passes it by; every result is written to memory.
        """
        held: OrderedDict[Tensor, int] = OrderedDict()
        free = buffer_bytes

        def keep(tensor: Tensor, nbytes: int) -> None:
            nonlocal free
            if not 0 < nbytes <= buffer_bytes:
                return
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
        """Storage of activations: all together, and the peak. A view lives in the storage that it shows."""
        executed = [operation for operation in self.operations if operation.executed]
        shown: dict[Tensor, Tensor] = {}  # a view -> whose storage it shows
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
            made = [tensor for tensor in operation.outputs if tensor not in shown and tensor not in there]
            there.update(dict.fromkeys(made))
            nbytes = sum(tensor.nbytes for tensor in made)
            total, live = total + nbytes, live + nbytes
            if live > peak:
                peak, peak_at = live, operation.name
            live -= sum(tensor.nbytes for tensor in leaving.get(position, ()) if tensor in there)
        return Activations(total, peak, peak_at)


def sizes_by_name(
    inputs: Sequence[str], given: GivenSizes, described: Mapping[str, str] | None = None
) -> dict[str, Sequence[int]]:
    """Return the given sizes by names of inputs.

    Args:
        inputs: names of all inputs of the model.
        given: some sizes by name, or all by position.
        described: name -> declared size, for messages.

    Raises:
        InputError: there is no such input, or there are more or fewer inputs.
    """
    shown = described or {}
    listed = ", ".join(f"{name[:80]!r} {shown.get(name, '')}".strip() for name in list(inputs)[:8]) or "none"
    if any(isinstance(key, int) for key in given):
        if len(given) != len(inputs):
            example = f"input={{{inputs[0][:80]!r}: {tuple(next(iter(given.values())))}}}" if inputs else "no input"
            raise InputError(
                f"{len(given)} sizes for the inputs {listed}; give one to each, or give them by name: {example}"
            )
        return dict(zip(inputs, given.values(), strict=True))
    sizes = {str(name): size for name, size in given.items()}
    for name in sizes:
        if name not in inputs:
            raise InputError(f"the model has no input {name!r}; it has {listed}")
    return sizes
