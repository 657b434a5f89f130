"""The dataflow of a program, for the explorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelsummary.files.program import Program, Tensor
from modelsummary.layer_info import LayerInfo
from modelsummary.views.flow import Dataflow, FlowStep, FlowTensor

__all__ = ["dataflow_of_program"]


def dataflow_of_program(program: Program, root: LayerInfo) -> Dataflow:
    """Return the operators of a program with the tensors that each takes from others, inputs and outputs included.

    Args:
        root: root of the tree of the same program.

    >>> from modelsummary.files.program import Operation
    >>> from modelsummary.files.program_tree import program_tree
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
