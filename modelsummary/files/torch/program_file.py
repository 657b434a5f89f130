"""Turn an exported program into a ``Program``: costs come from the described sizes, nothing is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch import fx

from modelsummary._torch import HigherOrderOperator, OpOverload
from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.operator_mode import Costs, Operators
from modelsummary.errors import InputError, ModelFileError
from modelsummary.files.budget import Budget
from modelsummary.files.contained import contained
from modelsummary.files.program import (
    GivenSizes,
    Operation,
    Program,
    Scope,
    Tensor,
    count_one_branch,
    sizes_by_name,
)
from modelsummary.files.statistics import FileStatistics
from modelsummary.files.torch.archive import Archive
from modelsummary.files.torch.exported import prepare, read_exported, stored_in
from modelsummary.operators.operator_rules import NO_COST, OpCost, OpRule, op_rule

__all__ = ["load_exported"]


def load_exported(path: Path, sizes: GivenSizes) -> FileStatistics:
    """Return the statistics of the exported program in a ``.pt2`` file; weights and pickles are not read.

    Args:
        sizes: sizes of inputs by name or position; default: the exported sizes.

    Raises:
        InputError: a size does not fit.
        ModelFileError: the file is broken.
    """
    archive = Archive(path)
    prepare(archive)
    budget = Budget.of_size(sum(archive.size(name) for name in archive.names if name.endswith(".json")))
    return FileStatistics(contained(lambda: _program(archive, sizes), budget), path, budget)


def _program(archive: Archive, sizes: GivenSizes) -> Program:
    exported = read_exported(archive)
    try:
        program = _Builder(exported, sizes).built()
        program.stored = stored_in(archive)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # any error of torch on an inconsistent graph
        raise ModelFileError(f"it contradicts itself: {type(error).__name__} {error}") from None
    return program


class _Symbols:
    """The values of symbols: given sizes, else the sizes of the exported example.

    Args:
        inputs: name -> fake tensor of the program's inputs.
        sizes: sizes of inputs by name or position; default: the exported sizes.

    Attributes:
        open: symbol -> exported size, for the symbols used so far that no given size binds.

    Raises:
        InputError: a size does not fit.
    """

    def __init__(self, inputs: Mapping[str, Any], sizes: GivenSizes) -> None:
        self._values: dict[Any, int] = {}
        self.open: dict[str, int] = {}
        for name, size in sizes_by_name(list(inputs), sizes).items():
            self._bind(inputs[name].shape, size)

    def _bind(self, shape: Sequence[Any], size: Sequence[int]) -> None:
        shown = [str(dim) for dim in shape]
        if len(shape) != len(size):
            raise InputError(f"an input takes size [{', '.join(shown)}], got {list(size)}")
        for dim, length in zip(shape, size, strict=True):
            if isinstance(dim, torch.SymInt):
                self._values |= _solved(self._bound(dim), length)
            if self.integer(dim) != length:
                raise InputError(f"an input was exported with size [{', '.join(shown)}], got {list(size)}")

    def integer(self, size: Any) -> int:
        """Return the integer to count with; raise ``ValueError`` if the size depends on values."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = self._bound(size)
        example_sizes = size.node.shape_env.backed_var_to_val if size.node.shape_env is not None else {}
        if not expression.free_symbols <= example_sizes.keys():
            raise ValueError(f"{expression} depends on values")
        hints = {symbol: int(example_sizes[symbol]) for symbol in expression.free_symbols}
        self.open |= {str(symbol): hint for symbol, hint in hints.items()}
        return int(expression.xreplace(hints))

    def _bound(self, size: torch.SymInt) -> Any:
        """Return the size as a sympy expression of the symbols without a given value."""
        return size.node.expr.subs(self._values)

    def tensor(self, name: str, value: TorchTensor, **facts: Any) -> Tensor:
        """Describe a fake tensor as plain data."""
        try:
            size = tuple(self.integer(dim) for dim in value.shape)
        except ValueError:
            size = None
        bound = (self._bound(dim) if isinstance(dim, torch.SymInt) else dim for dim in value.shape)
        shape = tuple(str(dim) if getattr(dim, "free_symbols", None) else int(dim) for dim in bound)
        dtype = str(value.dtype).removeprefix("torch.")
        return Tensor(name, shape, size, dtype, 8 * value.dtype.itemsize, **facts)

    def meta(self, value: Any) -> Any:
        """Return a meta tensor for a fake tensor, an integer for a symbolic size, and other values unchanged."""
        if isinstance(value, TorchTensor):
            sizes = [self.integer(dim) for dim in value.shape]
            strides = [self.integer(dim) for dim in value.stride()]
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
        return self.integer(value) if isinstance(value, torch.SymInt) else value


def _solved(expression: Any, length: int) -> dict[Any, int]:
    """Solve a size such as 2*s for its symbol; return {symbol: value}, or {} without an integer solution."""
    if len(expression.free_symbols) != 1:
        return {}
    (symbol,) = expression.free_symbols
    slope = expression.diff(symbol)
    start = (expression - slope * symbol).expand()
    if not (slope.is_Integer and slope and start.is_Integer) or (length - int(start)) % int(slope):
        return {}
    return {symbol: (length - int(start)) // int(slope)}


class _Builder:
    """A program under construction."""

    def __init__(self, exported: Any, sizes: GivenSizes) -> None:
        self.exported = exported
        self.signature = exported.graph_signature
        self.parameters = dict(self.signature.inputs_to_parameters)  # the property builds a new dict each time
        self.buffers = dict(self.signature.inputs_to_buffers)
        self.state = dict(exported.state_dict)
        self.user_inputs = set(self.signature.user_inputs)
        self.nodes = {node.name: node for node in exported.graph.nodes}
        inputs = {name: self.nodes[name].meta["val"] for name in self.signature.user_inputs if name in self.nodes}
        self.symbols = _Symbols(
            {name: value for name, value in inputs.items() if isinstance(value, TorchTensor)}, sizes
        )
        self.tensors: dict[fx.Node, list[Tensor]] = {}
        self.tied: dict[int, Tensor] = {}  # by identity of the tensors in the state_dict
        self.operations: list[Operation] = []
        self.undecided: list[str] = []  # names of the cond whose cost depends on values
        self.name = ""

    def built(self) -> Program:
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self._add_input(node)
        self._add(self.exported.graph_module, self.exported.graph.nodes, "", ())
        used = {tensor for operation in self.operations for tensor in operation.inputs}
        placeholders = [
            tensor for node, tensors in self.tensors.items() if node.op == "placeholder" for tensor in tensors
        ]
        output = next(node for node in self.exported.graph.nodes if node.op == "output")
        returned = {name for name in self.signature.user_outputs if name in self.nodes}
        results = [
            tensor for node in output.all_input_nodes if node.name in returned for tensor in self.tensors.get(node, [])
        ]
        return Program(
            self.name or "ExportedProgram",
            [tensor for tensor in placeholders if tensor.kind == "input"],
            results,
            self.operations,
            [tensor for tensor in placeholders if tensor.kind != "input" and tensor not in used],
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.symbols.open:
            listed = ", ".join(f"{name} = {size}" for name, size in list(self.symbols.open.items())[:4])
            notes.append(f"open dimensions count with their exported sizes: {listed}")
        if self.undecided:
            listed = ", ".join(repr(name[:80]) for name in self.undecided[:4])
            notes.append(f"values decide which branch of {listed} runs: the branch with more multiply-adds counts")
        return notes

    def _add_input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, TorchTensor):
            return
        if node.name in self.user_inputs:
            self.tensors[node] = [self.symbols.tensor(node.name, value, kind="input")]
            return
        facts: dict[str, Any] = {"kind": "buffer"}
        name = self.parameters.get(node.name)
        if name is not None:
            facts = {"kind": "parameter", "trainable": self.state[name].requires_grad}
        name = name or self.buffers.get(node.name)
        held = self.state.get(name, node)
        if id(held) not in self.tied:
            self.tied[id(held)] = self.symbols.tensor(name or node.name, value, **facts)
        self.tensors[node] = [self.tied[id(held)]]

    def _add(self, owner: Any, nodes: Any, prefix: str, around: tuple[Scope, ...]) -> None:
        for node in nodes:
            if node.op != "call_function":
                continue
            if node.target.__name__ == "getitem" and isinstance(node.args[0], fx.Node):
                self.tensors[node] = self.tensors.get(node.args[0], [])[node.args[1] : node.args[1] + 1]
            elif isinstance(node.target, HigherOrderOperator) and node.target.name().startswith("wrap_with"):
                self._add_wrapped(owner, node, prefix, around)
            elif isinstance(node.target, (OpOverload, HigherOrderOperator)):
                operation = self._add_operation(node, prefix, around)
                if operation is not None and node.target is torch.ops.higher_order.cond:
                    self._add_branches(owner, node, operation)

    def _add_wrapped(self, owner: Any, node: fx.Node, prefix: str, around: tuple[Scope, ...]) -> None:
        """Add the operators under ``torch.no_grad`` or autocast, which are in a graph of their own."""
        position = next(n for n, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
        passed = node.args[position + 1 :]
        inner = self._add_graph(owner, node.args[position], passed, f"{prefix}{node.name}.", around)
        self.tensors[node] = [tensor for source in inner[-1].all_input_nodes for tensor in self.tensors.get(source, [])]

    def _add_graph(
        self, owner: Any, name: Any, passed: Sequence[Any], prefix: str, around: tuple[Scope, ...]
    ) -> list[fx.Node]:
        """Add the operators of a graph that a node calls with these arguments; return the nodes of the graph."""
        graph = getattr(owner, str(name.target))
        inner = list(graph.graph.nodes)
        inputs = [self.tensors.get(argument, []) for argument in passed if isinstance(argument, fx.Node)]
        self.tensors |= dict(zip((node for node in inner if node.op == "placeholder"), inputs, strict=True))
        self._add(graph, inner, prefix, around)
        return inner

    def _add_branches(self, owner: Any, node: fx.Node, operation: Operation) -> None:
        """Add the operators of both branches of a ``torch.cond`` below it; one of them counts."""
        operation.is_free, operation.uncounted = True, None
        branches: dict[str, list[Operation]] = {}
        for key, name in zip(("true", "false"), node.args[1:3], strict=True):
            start = len(self.operations)
            fqn = f"{operation.name}.{key}"
            below = (Scope(operation.name, operation.name, operation.op_type), Scope(fqn, fqn, key))
            self._add_graph(owner, name, node.args[3], f"{fqn}.", (*operation.scopes, *below))  # type: ignore[arg-type]
            branches[key] = self.operations[start:]
        operation.attributes["counted"], is_undecided = count_one_branch(branches)
        if is_undecided:
            self.undecided.append(operation.name)

    def _add_operation(self, node: fx.Node, prefix: str, around: tuple[Scope, ...]) -> Operation | None:
        value = node.meta.get("val")
        results = [
            tensor
            for tensor in (value if isinstance(value, (tuple, list)) else [value])
            if isinstance(tensor, TorchTensor)
        ]
        inputs = [tensor for source in node.all_input_nodes for tensor in self.tensors.get(source, [])]
        if not results:  # computed sizes, assertions
            return None
        name = prefix + node.name
        names = [name] if len(results) == 1 else [f"{name}_{index}" for index in range(len(results))]
        outputs = [self.symbols.tensor(result_name, result) for result_name, result in zip(names, results, strict=True)]
        self.tensors[node] = outputs
        operation = Operation(name, _type_of(node.target), (*around, *self._scopes(node)), inputs, outputs)
        if isinstance(node.target, OpOverload):
            operation.attributes = _constants_of(node)
            self._count(operation, node)
        else:
            operation.uncounted = operation.op_type
        self.operations.append(operation)
        return operation

    def _scopes(self, node: fx.Node) -> tuple[Scope, ...]:
        scopes = []
        for key, (fqn, kind) in node.meta.get("nn_module_stack", {}).items():
            name = kind if isinstance(kind, str) else kind.__name__
            if fqn and fqn != key:
                scopes.append(Scope(key, fqn.partition("@")[0], name.rpartition(".")[2]))
            elif not fqn:
                self.name = name.rpartition(".")[2]
        return tuple(scopes)

    def _count(self, operation: Operation, node: fx.Node) -> None:
        """Run the operator on meta tensors of the described sizes."""
        rule = op_rule(node.target)
        counted = Costs()
        try:
            args, kwargs = fx.map_arg(
                (node.args, node.kwargs), lambda source: self.symbols.meta(source.meta.get("val"))
            )
            if _reaches_outside(node.target):
                raise InputError("an operator on files is not run")
            with torch.no_grad(), Operators(ShapeOnly(), counted.add):
                node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # the operator needs values, or has no meta kernel
            operation.uncounted = operation.op_type if rule.facts.macs is not None or rule.matrix_like else None
            if rule.facts.macs is not None and any(tensor.size is None for tensor in operation.inputs):
                operation.macs_expr = _expression(node)
            return
        operation.macs, operation.elementwise_ops = counted.macs, counted.elementwise_ops
        operation.uncounted = next(iter(counted.uncounted), None)
        operation.gathers = rule.gathers
        operation.is_free = counted.bytes_read == counted.bytes_written == 0
        operation.aliases = bool(operation.inputs) and (operation.is_free or 0 in rule.writes)
        if counted.macs and any(
            isinstance(dim, str) for tensor in (*operation.inputs, *operation.outputs) for dim in tensor.shape or ()
        ):
            operation.macs_expr = _expression(node)


def _reaches_outside(target: Any) -> bool:
    """Return True for an operator that takes a text, which may name a file: ``aten.from_file`` makes files."""
    types = {str(argument.type) for argument in target._schema.arguments}
    return any("str" in kind for kind in types) and (target.namespace != "aten" or "Tensor" not in " ".join(types))


def _type_of(target: Any) -> str:
    return op_rule(target).name if isinstance(target, OpOverload) else str(target.name())


def _constants_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of the operator other than tensors, by name, with defaults."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    values |= dict(zip((argument.name for argument in schema), node.args, strict=False))
    values |= node.kwargs
    return {name: _plain(value) for name, value in values.items() if _is_plain(value)}


def _plain(value: Any) -> Any:
    """Return the immutable lists of torch.fx as lists."""
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (int, float, str, bool)) or value is None


_PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)


class _Symbolic:
    """An execution that adds up multiply-adds as expressions."""

    def __init__(self) -> None:
        self.total: Any = 0

    def run(self, func: Any, rule: OpRule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OpCost]:
        """Run one operator and add its multiply-adds; return its result."""
        out = func(*args, **kwargs)
        if rule.facts.macs is not None:
            self.total = self.total + rule.macs(args, kwargs, out)
        return out, NO_COST


def _expression(node: fx.Node) -> Any:
    """Return multiply-adds of a node as an expression of the symbols in its sizes."""
    import sympy

    values: Any = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    args, kwargs = values
    counted = _Symbolic()
    try:
        if node.target in _PRODUCTS:  # in their kernels, torch 2.11 replaces symbols by numbers
            counted.total = node.meta["val"].numel() * args[0].shape[-1]
        else:
            with torch.no_grad(), Operators(counted):
                node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # not a formula of sizes: keep the name
        return sympy.Symbol(f"macs({node.name})")
    total = counted.total
    if not isinstance(total, torch.SymInt):
        return sympy.Integer(total)
    expression = total.node.expr  # torch's symbols are positive, which makes them differ from plain ones
    return expression.xreplace({symbol: sympy.Symbol(symbol.name) for symbol in expression.free_symbols})
