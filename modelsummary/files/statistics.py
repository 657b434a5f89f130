"""``FileStatistics``: what is known of a model that is only a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from modelsummary.errors import InputError
from modelsummary.files.program import Activations, Operation, Program, Traffic
from modelsummary.files.program_tree import program_tree
from modelsummary.statistics.model_statistics import ModelStatistics

__all__ = ["Bandwidth", "FileStatistics", "UnknownTensor"]


class UnknownTensor(NamedTuple):
    """A tensor whose size the file does not tell."""

    operator: str
    tensor: str
    op_type: str


class Bandwidth:
    """What each operator reads from memory and writes to it, most reading first; ``print`` shows the table.

    Attributes:
        rows: in the order of the table.
        read, write, total: of all rows, in bytes.
        unknown: tensors that count nothing because their size is not known.
        buffer_bytes: of the buffer on the chip, 0 for none.
    """

    def __init__(self, rows: Sequence[Traffic], unknown: Sequence[UnknownTensor], buffer_bytes: int) -> None:
        self.rows = sorted(rows, key=lambda row: row.read, reverse=True)
        self.read = sum(row.read for row in rows)
        self.write = sum(row.write for row in rows)
        self.total = self.read + self.write
        self.unknown = list(unknown)
        self.buffer_bytes = buffer_bytes

    def to_records(self) -> list[dict[str, Any]]:
        """One dict a row: ``layer``, ``read_bw``, ``write_bw``, ``total_bw`` in bytes."""
        return [
            {"layer": row.layer, "read_bw": row.read, "write_bw": row.write, "total_bw": row.read + row.write}
            for row in self.rows
        ]

    def __str__(self) -> str:
        cells = [list(record.values()) for record in self.to_records()]
        table = tabulate(
            cells, headers=["layer", "read_bw", "write_bw", "total_bw"], disable_numparse=[0] if cells else False
        )
        buffer = f"a buffer of {self.buffer_bytes:,} bytes" if self.buffer_bytes else "no buffer"
        lines = [table, f"Total with {buffer} on the chip: {self.total} bytes ({self.total / 1e6:.6f} MB)"]
        lines += [f"Not found: {each.tensor!r} of {each.operator} ({each.op_type})" for each in self.unknown]
        return "\n".join(lines)

    __repr__ = __str__


class FileStatistics(ModelStatistics):
    """What ``modelsummary.load(path)`` gives: the tree of a model that is a file, and every view of it.

    Attributes:
        path: of the file.
        program: its operators, as plain data.
    """

    def __init__(self, program: Program, path: Path) -> None:
        super().__init__(program_tree(program), execution="file" if program.operations else "none")
        self.program = program
        self.path = path

    @property
    def operations(self) -> list[Operation]:
        """The operators in the order in which they run: tensors, attributes, multiply-adds."""
        return self.program.operations

    def operators(self) -> Counter[str]:
        """Operator -> how often it stands in the file, most first, with those that only hold a constant."""
        return self.program.histogram()

    def attributes(self, op_type: str) -> dict[str, dict[str, Any]]:
        """Name of each operator of this type -> its attributes.

        With the defaults of the operator, with what small constant inputs say (``min`` of a Clip), and for a
        convolution ``channel``, ``height`` and ``width`` of its input.
        """
        return {each.name: each.attributes for each in self.operations if each.op_type == op_type}

    def bandwidth(self, buffer_bytes: int = 0) -> Bandwidth:
        """Memory traffic, each operator reading its inputs and writing its outputs once.

        Views move nothing, a look-up reads the rows that it takes, a 0-d tensor counts as part of the instruction.

        Args:
            buffer_bytes: of a buffer on the chip that keeps the tensors used last: what it holds is not read again. A
                tensor larger than the buffer passes it by. 0: none.

        Raises:
            InputError: ``buffer_bytes`` is no integer >= 0.
        """
        if type(buffer_bytes) is not int or buffer_bytes < 0:
            raise InputError(f"buffer_bytes={buffer_bytes!r}; expected an integer >= 0")
        unknown = [
            UnknownTensor(operation.name, tensor.name, operation.op_type)
            for operation in self.operations
            if operation.executed
            for tensor in (*operation.inputs, *operation.outputs)
            if tensor.size is None
        ]
        return Bandwidth(self.program.traffic(buffer_bytes), list(dict.fromkeys(unknown)), buffer_bytes)

    def activations(self) -> Activations:
        """Storage of activations in bytes: ``total`` of all results, and ``peak`` by when each is used last."""
        return self.program.activations()

    @property
    def total_mult_adds_expr(self) -> Any:
        """``total_mult_adds`` in the dimensions that the file leaves open: a sympy expression, or an int."""
        parts = [each.macs if each.macs_expr is None else each.macs_expr for each in self.operations]
        return sum(parts)

    def _not_live(self, name: str) -> str:
        return f"{name} needs a live model; {str(self.path)!r} is only a file: pass the model to Statistics"
