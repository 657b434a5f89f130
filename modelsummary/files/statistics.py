"""Statistics of a model that is only a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from modelsummary.errors import FormulaError, InputError, LayerNotFoundError, check_integers
from modelsummary.files.budget import Budget
from modelsummary.files.program import Activations, Operation, Program, Tensor, Traffic
from modelsummary.files.program_tree import dataflow_of_program, program_tree
from modelsummary.formulas.expressions import dimension
from modelsummary.formulas.figures import CONSTANT, FiguresAt, check_figure
from modelsummary.keywords import nearest
from modelsummary.layer_info import LayerInfo
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
        lines += [
            f"Size unknown: {unknown.tensor!r} of {unknown.operator} ({unknown.op_type})" for unknown in self.unknown
        ]
        return "\n".join(lines)

    __repr__ = __str__


class FileStatistics(ModelStatistics):
    """The result of ``modelsummary.load(path)``: the tree of a model in a file, and every view of it.

    Attributes:
        path: the file.
        program: the operators, as plain data.

    Making it is charged to the budget of reading the file; default: a new one.

    ``stored_elements`` is what the file holds, ``total_params`` what the model has: a file also stores buffers,
    constants and copies of parameters.

    >>> from modelsummary.files.program import Tensor
    >>> x, y = (Tensor(name, (2, 3), (2, 3), "float32", 32) for name in "xy")
    >>> stats = FileStatistics(Program("Net", [x], [y], [Operation("relu", "Relu", (), [x], [y])]), Path("net.onnx"))
    >>> stats.operators(), stats.bandwidth().total, stats.activations().peak
    (Counter({'Relu': 1}), 48, 48)
    """

    def __init__(self, program: Program, path: Path, budget: Budget | None = None) -> None:
        super().__init__(program_tree(program, budget), execution="file" if program.has_forward else "none")
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

        Raises:
            InputError: the file has no operator of this type.
        """
        types = {operation.op_type: None for operation in self.operations}
        if op_type not in types:
            raise InputError(f"the file has no operator of type {op_type!r:.80}{nearest(str(op_type), types)}")
        return {operation.name: operation.attributes for operation in self.operations if operation.op_type == op_type}

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
        check_integers(0, buffer_bytes=buffer_bytes)
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
        expression = self.formula("macs")
        return expression if expression.free_symbols else int(expression)

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
    def _formulas(self) -> _Formulas:
        return _Formulas(self.program, self.root)

    def _dataflow(self, stages: Any = None) -> Dataflow:
        return super()._dataflow(stages) if stages is not None else dataflow_of_program(self.program, self.root)

    def _not_live(self, name: str) -> str:
        return f"{name} needs a live model, got the file {str(self.path)!r}; pass the model that it was made from"


class _Formulas:
    """The formulas of a program, from the formulas of its operators."""

    def __init__(self, program: Program, root: LayerInfo) -> None:
        self._program = program
        self._rows = {row.fqn: row for row in root.walk()}

    def formula(self, figure: str, layer: str = "") -> Any:
        """Return a figure of a layer as a sympy expression; see ``FileStatistics.formula``."""
        import sympy

        check_figure(figure)
        row = self._rows.get(layer)
        if row is None:
            raise LayerNotFoundError(f"no layer named {layer!r}{nearest(layer, self._rows)}")
        if figure in CONSTANT:
            return sympy.Integer(getattr(row, CONSTANT[figure]))
        if not self._program.has_forward:
            raise FormulaError(f"no formula of {figure}: the file has no forward; load a model, or ask for 'params'")
        if figure in ("macs", "flops"):
            parts = (
                operation.macs if operation.macs_expr is None else operation.macs_expr
                for operation in self._operations(row)
            )
            return sympy.Integer(2 if figure == "flops" else 1) * sympy.Add(*parts)
        if figure == "total_output_bytes":
            return sympy.Add(*(_bytes(operation.outputs) for operation in self._operations(row) if operation.executed))
        if figure in ("input_bytes", "output_bytes") and not layer:
            return _bytes(self._program.inputs if figure == "input_bytes" else self._program.outputs)
        raise FormulaError(f"no formula of {figure}{f' of {layer}' if layer else ''}: files have none")

    def at(self, sizes: Mapping[str, int], layer: str = "") -> FiguresAt:
        """Return the figures at these sizes of all open dimensions."""
        tensors = [*self._program.inputs, *self._program.outputs]
        expressions = [self.formula("macs"), *(dim for tensor in tensors for dim in _symbolic(tensor))]
        names = {symbol.name for expression in expressions for symbol in expression.free_symbols}
        if set(sizes) != names:
            wanted = ", ".join(f"{name}=" for name in sorted(names)) or "no size"
            raise InputError(f"expected {wanted} (the open dimensions of the file), got {dict(sizes)}")
        check_integers(**sizes)
        return FiguresAt(self, dict(sizes), layer)

    def evaluate(self, figure: str, sizes: Mapping[str, int], layer: str = "") -> int:
        """Return a figure at these sizes."""
        expression = self.formula(figure, layer)
        left = expression.xreplace(
            {symbol: sizes[symbol.name] for symbol in expression.free_symbols if symbol.name in sizes}
        )
        if left.free_symbols:
            raise FormulaError(
                f"{figure} depends on {', '.join(map(str, left.free_symbols))}, which follow from values"
            )
        return int(left)

    def largest(self, _figure: str, _sizes: Mapping[str, int], _layer: str = "") -> dict[str, int]:
        """Return nothing: formulas of operators need no runs, so no size is beyond one that ran."""
        return {}

    def _operations(self, row: LayerInfo) -> list[Operation]:
        inside = {layer.fqn for layer in row.walk()}
        return [operation for operation in self._program.operations if operation.name in inside]


def _symbolic(tensor: Tensor) -> list[Any]:
    """Return the sizes of a tensor as expressions. Raise ``FormulaError`` if they are unknown."""
    import sympy

    if tensor.shape is None:
        raise FormulaError(f"the size of tensor {tensor.name!r} is not known")
    return [dimension(dim) if isinstance(dim, str) else sympy.Integer(dim) for dim in tensor.shape]


def _bytes(tensors: Iterable[Tensor]) -> Any:
    """Return the bytes of distinct tensors as an expression; elements smaller than a byte are packed."""
    import sympy

    total = sympy.Integer(0)
    for tensor in dict.fromkeys(tensors):
        bits = prod(_symbolic(tensor), start=sympy.Integer(tensor.bits))
        total += bits / 8 if tensor.bits % 8 == 0 else sympy.ceiling(bits / 8)
    return total
