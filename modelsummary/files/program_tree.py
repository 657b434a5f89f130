"""What views show of a program: its tree of ``LayerInfo``, and its dataflow for the explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from modelsummary.capture.tree import Below, ModuleFacts, Owned, finish_tree
from modelsummary.errors import printable
from modelsummary.files.budget import Budget
from modelsummary.files.program import Operation, Program, Scope, Tensor
from modelsummary.layer_info import UNKNOWN, CallKeys, LayerInfo, Sizes
from modelsummary.views.flow import Dataflow, FlowStep, FlowTensor

__all__ = ["ROW_BYTES", "dataflow_of_program", "program_tree"]

_NO_MODULE = nn.Module()
_ROW_STEPS, ROW_BYTES = 60, 1500  # of a row with its facts, which is also printed
_CROSSING_BYTES = 250  # of a tensor that enters or leaves a module


def program_tree(program: Program, budget: Budget | None = None) -> LayerInfo:
    """Return the tree of a program: a row per module that its operators name, and per operator; the first is the model.

    Args:
        budget: what reading the file may cost: a few bytes of a name can stand for many modules. Default: a new one.

    Raises:
        ModelFileError: the tree is over the budget.

    >>> x, y = (Tensor(name, (2, 3), (2, 3), "float32", 32) for name in "xy")
    >>> relu = Operation("act.relu", "Relu", (Scope("act", "act", "ReLU"),), [x], [y])
    >>> [row.fqn for row in program_tree(Program("Net", [x], [y], [relu])).walk()]
    ['', 'act', 'act.relu']
    """
    return _Tree(program, budget or Budget()).built()


class _Tree:
    """The rows of a tree under construction."""

    def __init__(self, program: Program, budget: Budget) -> None:
        self.program = program
        self.budget = budget
        self.facts: dict[int, ModuleFacts] = {}
        self.rows: dict[str, LayerInfo] = {}  # by key of their scope
        self.keys = CallKeys()
        self.root = self._row(Scope("", "", program.name), None)
        self.root.note = printable("; ".join(program.notes))

    def built(self) -> LayerInfo:
        program = self.program
        self.root.executed = program.has_forward
        for scopes, tensors in program.owned:
            self._own(self._scope(scopes), tensors)
        for operation in program.operations:
            self._add(operation)
        self._own(self.root, program.unused)
        self._cross_borders()
        self.root.input_size, self.root.input_bytes = _sizes(program.inputs)
        self.root.output_size, self.root.output_bytes = _sizes(program.outputs)
        return finish_tree(self.root, self.facts)

    def _row(self, scope: Scope, parent: LayerInfo | None) -> LayerInfo:
        self.budget.spend(_ROW_STEPS)
        self.budget.take(ROW_BYTES + len(scope.fqn))
        prefix = f"{parent.fqn}." if parent is not None and parent.fqn else ""
        fqn = printable(scope.fqn)
        row = LayerInfo(
            fqn=fqn,
            name=fqn.removeprefix(prefix),
            class_name=printable(scope.class_name),
            layer_id=len(self.facts),
            module=None,
            parent_info=parent,
            call_index=self.keys.next_of(scope.fqn)[1],
        )
        self.facts[row.layer_id] = ModuleFacts(scope.fqn, _NO_MODULE, {}, [], [], Below({}), Below({}))
        if parent is not None:
            parent.children.append(row)
        return row

    def _scope(self, scopes: tuple[Scope, ...]) -> LayerInfo:
        row = self.root
        for scope in scopes:
            if scope.key not in self.rows:
                self.rows[scope.key] = self._row(scope, row)
            row = self.rows[scope.key]
        return row

    def _add(self, operation: Operation) -> None:
        around = self._scope(operation.scopes)
        name = operation.name
        row = self._row(Scope(name, name, operation.op_type), around)
        self.rows[name] = row
        if operation.executed:
            ancestor: LayerInfo | None = row
            while ancestor is not None and not ancestor.executed:
                ancestor.executed, ancestor = True, ancestor.parent_info
        activations = [tensor for tensor in operation.inputs if tensor.kind in ("input", "activation")]
        row.input_size, row.input_bytes = _sizes(activations)
        row.output_size, row.output_bytes = _sizes(operation.outputs)
        row.self_macs, row.self_elementwise_ops = operation.macs, operation.elementwise_ops
        row.self_bytes_read, row.self_bytes_written = operation.bytes_read, operation.bytes_written
        if operation.uncounted is not None and operation.executed:
            row.uncounted_ops[operation.uncounted] = operation.repeats
        kernel, groups = operation.attributes.get("kernel_shape"), operation.attributes.get("group")
        row.kernel_size = list(kernel) if isinstance(kernel, (list, tuple)) else []
        row.groups = groups if type(groups) is int else None
        self._own(row, [tensor for tensor in operation.inputs if tensor.kind in ("parameter", "buffer")])

    def _own(self, row: LayerInfo, tensors: list[Tensor]) -> None:
        """Add parameters and buffers to a row, and to the totals of all rows around it."""
        facts = self.facts[row.layer_id]
        for tensor in dict.fromkeys(tensors):
            size = None if tensor.size is None else list(tensor.size)
            key = id(tensor.original or tensor)
            owned = Owned(tensor.name, key, size, tensor.numel, tensor.nbytes, tensor.trainable)
            is_parameter = tensor.kind == "parameter"
            (facts.parameters if is_parameter else facts.buffers).append(owned)
            if is_parameter:
                row.inner_layers[tensor.name] = size
            ancestor: LayerInfo | None = row
            while ancestor is not None:
                ancestor_facts = self.facts[ancestor.layer_id]
                below = ancestor_facts.all_parameters if is_parameter else ancestor_facts.all_buffers
                below.tied[owned.key] = owned
                ancestor = ancestor.parent_info

    def _cross_borders(self) -> None:
        """Set inputs and outputs of the modules: tensors that operators outside them make or use."""
        made_in: dict[Tensor, tuple[Scope, ...]] = dict.fromkeys(self.program.inputs, ())
        entering: dict[str, dict[Tensor, None]] = {}
        leaving: dict[str, dict[Tensor, None]] = {}

        def use(tensor: Tensor, scopes: tuple[Scope, ...]) -> None:
            maker = made_in.get(tensor)
            if maker is None or maker == scopes:
                return
            shared = 0
            for one, other in zip(maker, scopes, strict=False):
                if one != other:
                    break
                shared += 1
            crossings = len(scopes) + len(maker) - 2 * shared
            self.budget.spend(crossings)
            self.budget.take(_CROSSING_BYTES * crossings)
            for scope in scopes[shared:]:
                entering.setdefault(scope.key, {})[tensor] = None
            for scope in maker[shared:]:
                leaving.setdefault(scope.key, {})[tensor] = None

        for operation in self.program.operations:
            for tensor in operation.inputs:
                use(tensor, operation.scopes)
            made_in.update(dict.fromkeys(operation.outputs, operation.scopes))
        for tensor in self.program.outputs:
            use(tensor, ())
        scopes = {scope.key: scope for operation in self.program.operations for scope in operation.scopes}
        for key in scopes:
            row = self.rows[key]
            row.input_size, row.input_bytes = _sizes(entering.get(key, {}))
            row.output_size, row.output_bytes = _sizes(leaving.get(key, {}))


def _sizes(tensors: Any) -> tuple[Sizes, int]:
    """Return shapes and bytes of distinct tensors; a single shape is returned without its tuple."""
    if not tensors:
        return None, 0
    distinct = list(dict.fromkeys(tensors))
    sizes = tuple(UNKNOWN if tensor.shape is None else list(tensor.shape) for tensor in distinct)
    nbytes = sum(tensor.nbytes for tensor in distinct)
    return (sizes[0] if len(sizes) == 1 else sizes), nbytes


def dataflow_of_program(program: Program, root: LayerInfo) -> Dataflow:
    """Return the operators of a program with the tensors that each takes from others, inputs and outputs included.

    Args:
        root: root of the tree of the same program.

    >>> from modelsummary.files.program import Operation
    >>> x, y, z = (Tensor(name, (2, 3), (2, 3), "float32", 32) for name in "xyz")
    >>> steps = [Operation("a", "Relu", (), [x], [y]), Operation("b", "Neg", (), [y], [z])]
    >>> program = Program("Net", [x], [z], steps)
    >>> [list(step.takes) for step in dataflow_of_program(program, program_tree(program)).steps]
    [[], [0], [1], [2]]
    """
    rows = {(row.fqn, row.class_name): row for row in root.walk() if not row.children}
    steps: list[FlowStep] = []
    maker: dict[Tensor, int] = {}
    settings: dict[LayerInfo, str] = {}
    for tensor in program.inputs:
        maker[tensor] = len(steps)
        steps.append(FlowStep("input", tensor.name, root, result=str(_passed(tensor)), result_bytes=tensor.nbytes))
    for operation in program.operations:
        row = rows.get((operation.name, operation.op_type))
        if row is None:
            continue
        step = FlowStep("module", "", row)
        for tensor in dict.fromkeys(operation.inputs):
            _take(step, tensor, maker)
        maker.update(dict.fromkeys(operation.outputs, len(steps)))
        settings[row] = _settings(operation.attributes)
        steps.append(step)
    for tensor in program.outputs:
        step = FlowStep("output", tensor.name, root, result=str(_passed(tensor)), result_bytes=tensor.nbytes)
        _take(step, tensor, maker)
        steps.append(step)
    return Dataflow(steps, settings)


def _take(step: FlowStep, tensor: Tensor, maker: Mapping[Tensor, int]) -> None:
    if tensor in maker:
        step.takes.setdefault(maker[tensor], []).append(_passed(tensor))


def _passed(tensor: Tensor) -> FlowTensor:
    return FlowTensor(tensor.shape, tensor.dtype)


def _settings(attributes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in attributes.items() if value is not None)
