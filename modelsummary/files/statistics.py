"""Statistics of a model that is only a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from modelsummary.errors import InputError
from modelsummary.files.formulas import FileFormulas
from modelsummary.files.program import Activations, Operation, Program, Traffic
from modelsummary.files.program_flow import dataflow_of_program
from modelsummary.files.program_tree import program_tree
from modelsummary.formulas.figures import FiguresAt
from modelsummary.statistics.model_statistics import ModelStatistics
from modelsummary.tables import table
from modelsummary.units import grouped, scaled
from modelsummary.views.flow import Dataflow

__all__ = ["Bandwidth", "FileStatistics", "UnknownTensor"]


class UnknownTensor(NamedTuple):
    """A tensor whose size is unknown."""

    operator: str
    tensor: str
    op_type: str


class Bandwidth:
    """The memory traffic of each operator, in bytes, largest reader first; ``print`` shows the table.

    Attributes:
        rows: one ``Traffic`` per operator, in the order of the table.
        read, write, total: sums of all rows, in bytes.
        unknown: tensors that count as 0 bytes because their size is unknown.
        buffer_bytes: size of the buffer on the chip; 0 for none.
    """

    def __init__(self, rows: Sequence[Traffic], unknown: Sequence[UnknownTensor], buffer_bytes: int) -> None:
        self.rows = sorted(rows, key=lambda row: row.read, reverse=True)
        self.read = sum(row.read for row in rows)
        self.write = sum(row.write for row in rows)
        self.total = self.read + self.write
        self.unknown = list(unknown)
        self.buffer_bytes = buffer_bytes

    def to_records(self) -> list[dict[str, Any]]:
        """Return one dict per row: ``layer``, and ``read_bw``, ``write_bw``, ``total_bw`` in bytes."""
        return [
            {"layer": row.layer, "read_bw": row.read, "write_bw": row.write, "total_bw": row.read + row.write}
            for row in self.rows
        ]

    def __str__(self) -> str:
        cells = [list(record.values()) for record in self.to_records()]
        buffer = f"a buffer of {grouped(self.buffer_bytes)} bytes" if self.buffer_bytes else "no buffer"
        lines = [table(cells, ["layer", "read_bw", "write_bw", "total_bw"], "lrrr", "simple")]
        lines += [f"Total with {buffer} on the chip: {self.total} bytes ({self.total / 1e6:.6f} MB)"]
        lines += [f"Size unknown: {each.tensor!r} of {each.operator} ({each.op_type})" for each in self.unknown]
        return "\n".join(lines)

    __repr__ = __str__


class FileStatistics(ModelStatistics):
    """The result of ``modelsummary.load(path)``: the tree of a model in a file, and every view of it.

    Attributes:
        path: the file.
        program: the operators, as plain data.

    ``stored_elements`` is what the file holds, ``total_params`` what the model has: a file also stores buffers,
    constants and copies of parameters.

    >>> from modelsummary.files.program import Tensor
    >>> x, y = (Tensor(name, (2, 3), (2, 3), "float32", 32) for name in "xy")
    >>> stats = FileStatistics(Program("Net", [x], [y], [Operation("relu", "Relu", (), [x], [y])]), Path("net.onnx"))
    >>> stats.operators(), stats.bandwidth().total, stats.activations().peak
    (Counter({'Relu': 1}), 48, 48)
    """

    def __init__(self, program: Program, path: Path) -> None:
        super().__init__(program_tree(program), execution="file" if program.has_forward else "none")
        self.program = program
        self.path = path
        stored = f"{grouped(self.stored_elements)} elements, {scaled(self.stored_bytes, 'B')}"
        self.remarks = [f"Stored in the file: {stored}"]

    @property
    def operations(self) -> list[Operation]:
        """The operators in the order in which they run, with tensors, attributes and multiply-adds."""
        return self.program.operations

    @property
    def stored_elements(self) -> int:
        """Elements of all tensors whose data the file or its external files hold; a copy counts again."""
        return self.program.stored.elements

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors whose data the file or its external files hold."""
        return self.program.stored.nbytes

    def operators(self) -> Counter[str]:
        """Return operator type -> number of occurrences in the file, most frequent first, constants included."""
        return self.program.histogram()

    def attributes(self, op_type: str) -> dict[str, dict[str, Any]]:
        """Return the name of each operator of this type -> its attributes.

        Included are defaults, the values of small constant inputs (such as ``min`` of a Clip), and ``channel``,
        ``height`` and ``width`` of the input of a convolution.
        """
        return {each.name: each.attributes for each in self.operations if each.op_type == op_type}

    def bandwidth(self, buffer_bytes: int = 0) -> Bandwidth:
        """Return the memory traffic: each operator reads its inputs and writes its outputs once.

        A look-up reads only the rows that it takes, and a 0-d tensor is part of the instruction. Views of torch move
        nothing; in ONNX every operator writes its result, ``Reshape`` and ``Squeeze`` included.

        Args:
            buffer_bytes: size of a buffer on the chip that keeps the tensors used last. A tensor in it is not read
                again; a tensor larger than the buffer bypasses it. Default: 0, no buffer.

        Raises:
            InputError: ``buffer_bytes`` is not an integer >= 0.
        """
        if type(buffer_bytes) is not int or buffer_bytes < 0:
            raise InputError(f"buffer_bytes must be an integer >= 0, got {buffer_bytes!r}")
        unknown = [
            UnknownTensor(operation.name, tensor.name, operation.op_type)
            for operation in self.operations
            if operation.executed
            for tensor in (*operation.inputs, *operation.outputs)
            if tensor.size is None
        ]
        return Bandwidth(self.program.traffic(buffer_bytes), list(dict.fromkeys(unknown)), buffer_bytes)

    def activations(self) -> Activations:
        """Return the storage of activations in bytes: ``total`` of all results, and the ``peak`` alive at a time."""
        return self.program.activations()

    @property
    def total_mult_adds_expr(self) -> Any:
        """``total_mult_adds`` as a sympy expression of the open dimensions; an int if there are none."""
        found = self.formula("macs")
        return found if found.free_symbols else int(found)

    def open_dimensions(self, figure: str = "macs") -> list[str]:
        """Return the names of the open dimensions that a figure depends on; empty if the figure is one number.

        A figure that depends on open dimensions counts each with 1 (ONNX) or its exported size (``.pt2``).

        Raises:
            InputError: ``figure`` is unknown.
            FormulaError: the figure has no formula.

        >>> from modelsummary.files.program import Tensor
        >>> x = Tensor("x", ("batch", 3), (1, 3), "float32", 32)
        >>> FileStatistics(Program("Net", [x], [x], []), Path("net.onnx")).open_dimensions("input_bytes")
        ['batch']
        """
        return sorted(map(str, self.formula(figure).free_symbols))

    def formula(self, figure: str = "macs", layer: str = "") -> Any:
        """Return a figure as a sympy expression of the open dimensions.

        Args:
            figure: a name in ``modelsummary.formulas.FIGURES``; files have formulas of ``macs``, ``flops``, parameters,
                ``input_bytes``, ``output_bytes`` and ``total_output_bytes``.
            layer: FQN of a module or name of an operator; ``""`` is the model.

        Raises:
            InputError: ``figure`` is unknown.
            LayerNotFoundError: ``layer`` is unknown.
            FormulaError: the figure has no formula.
        """
        return self._formulas.formula(figure, layer)

    def at(self, *, layer: str = "", **sizes: int) -> FiguresAt:
        """Return the figures for sizes of all open dimensions, such as ``at(batch=8)``.

        Args:
            layer: as for ``formula``.
            **sizes: name of an open dimension -> size.

        Raises:
            InputError: the sizes are not integers >= 1 for exactly the open dimensions.
        """
        return self._formulas.at(sizes, layer)

    @property
    def _formulas(self) -> FileFormulas:
        return FileFormulas(self.program, self.root)

    def _dataflow(self, stages: Any = None) -> Dataflow:
        return super()._dataflow(stages) if stages is not None else dataflow_of_program(self.program, self.root)

    def _not_live(self, name: str) -> str:
        return f"{name} needs a live model, got the file {str(self.path)!r}; pass the model to Statistics"
