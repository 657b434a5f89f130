"""Run two ONNX models on the same inputs and compare their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from os import PathLike
from typing import Any, NamedTuple

from modelsummary.errors import InputError, is_number
from modelsummary.extras import needs
from modelsummary.files.onnx.reading import import_onnx
from modelsummary.tiling.onnx_linear import ModelLike, proto_of

__all__ = ["Verification", "verify"]


class Verification(NamedTuple):
    """The differences between the outputs of two models.

    Attributes:
        max_abs_error: largest absolute difference of two elements, over all outputs. NaN in both, or the same infinity
            in both, differ by 0; either beside another value, or a different shape, by infinity; unequal strings by 1.
        mse: mean of the squared differences, over all elements of all outputs.
        equal: True if no element differs by more than the tolerance.
        first_diverging: name of the first operator in ``a`` whose result differs by more than the tolerance from the
            result of the same name in ``b``; None if the models are equal or share no such result.
    """

    max_abs_error: float
    mse: float
    equal: bool
    first_diverging: str | None


def verify(
    a: ModelLike,
    b: ModelLike,
    inputs: Mapping[str, Any] | None = None,
    *,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> Verification:
    """Run both models on onnxruntime, on the CPU and without graph optimization, and compare their outputs.

    Args:
        a, b: ``onnx.ModelProto`` or paths of files, with the same inputs and outputs.
        inputs: name -> array or tensor. Default: random numbers from a fixed seed; integers are 0 or 1, and open
            dimensions have size 1.
        rtol, atol: tolerance of an element: ``atol`` + ``rtol`` x the largest absolute element of its tensor.

    Raises:
        InputError: outputs or inputs do not match, a tolerance is not a number >= 0, or onnxruntime rejects a model.
        ModelFileError: a file is broken.
        MissingExtraError: onnx or onnxruntime is not installed.

    >>> from modelsummary.onnx import linear_graph, tiled_matmul_graph, verify
    >>> verify(linear_graph(8, 8, 8), tiled_matmul_graph(8, 8, 8, tile=4)).equal
    True
    """
    for argument, tolerance in (("rtol", rtol), ("atol", atol)):
        if not is_number(tolerance) or tolerance < 0:
            raise InputError(f"{argument} must be a number >= 0, got {tolerance!r:.80}")
    models = [proto_of(a), proto_of(b)]
    if inputs is not None and not isinstance(inputs, Mapping):
        raise InputError(f"inputs must be a dict of names and arrays, got {inputs!r:.80}")
    feeds = (
        _random_inputs(models[0].graph) if inputs is None else {name: _array(array) for name, array in inputs.items()}
    )
    names, others = ([output.name for output in model.graph.output] for model in models)
    if names != others:
        raise InputError(f"both models must have the same outputs, got {names!r:.200} and {others!r:.200}")
    # run a path from its file: serialized models are limited to 2 GiB
    sources = [
        source if isinstance(source, (str, PathLike)) else proto for source, proto in zip((a, b), models, strict=True)
    ]
    first, second = (_run(source, feeds, names) for source in sources)
    errors = [_error(array, other) for array, other in zip(first, second, strict=True)]
    equal = all(_close(array, other, rtol, atol) for array, other in zip(first, second, strict=True))
    count = sum(error.size for error in errors)
    return Verification(
        max((float(error.max()) for error in errors if error.size), default=0.0),
        float(sum((error**2).sum() for error in errors)) / max(count, 1),
        equal,
        None if equal else _first_diverging(models, feeds, rtol, atol),
    )


def _error(array: Any, other: Any) -> Any:
    """Return the absolute differences of the elements of two arrays."""
    import numpy as np

    if array.shape != other.shape:
        return np.array([np.inf])
    if array.dtype.kind not in "biuf":  # strings
        return (array != other).astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.abs(np.subtract(array, other, dtype=np.float64))
        return np.where(
            (array == other) | (np.isnan(array) & np.isnan(other)), 0.0, np.nan_to_num(error, nan=np.inf, posinf=np.inf)
        )


def _close(array: Any, other: Any, rtol: float, atol: float) -> bool:
    import numpy as np

    finite = array[np.isfinite(array)].astype(np.float64) if array.dtype.kind in "biuf" else np.zeros(0)
    return bool((_error(array, other) <= atol + rtol * np.abs(finite).max(initial=0.0)).all())


def _array(value: Any) -> Any:
    import numpy as np

    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _random_inputs(graph: Any) -> dict[str, Any]:
    import numpy as np

    onnx = import_onnx()
    generator = np.random.default_rng(0)
    weights = {initializer.name for initializer in graph.initializer}
    feeds = {}
    for tensor in graph.input:
        if tensor.name in weights:
            continue
        if tensor.type.tensor_type.elem_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            raise InputError(f"cannot make random values for the input {tensor.name!r}; pass inputs={{...}}")
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.type.tensor_type.elem_type)
        size = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in tensor.type.tensor_type.shape.dim]
        is_float = np.issubdtype(dtype, np.floating)
        feeds[tensor.name] = (generator.standard_normal(size) if is_float else generator.integers(0, 2, size)).astype(
            dtype
        )
    return feeds


def _run(model: Any, feeds: Mapping[str, Any], outputs: list[str]) -> list[Any]:
    with needs("onnxruntime", "onnx"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    # with thousands of tiles split from weights, folding constants takes ten times as long as running
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    source = str(model) if isinstance(model, (str, PathLike)) else model.SerializeToString()
    try:
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        results: list[Any] = session.run(outputs, dict(feeds))
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise InputError(f"onnxruntime rejects the model: {' '.join(str(error).split())[:300]}") from error
    non_tensors = [name for name, result in zip(outputs, results, strict=True) if not hasattr(result, "dtype")]
    if non_tensors:
        raise InputError(f"only tensors can be compared, but the output {non_tensors[0]!r} is something else")
    return results


def _first_diverging(models: list[Any], feeds: Mapping[str, Any], rtol: float, atol: float) -> str | None:
    """Return the first operator of ``a`` whose result differs from the result of the same name in ``b``."""
    produced = [{name for node in model.graph.node for name in node.output if name} for model in models]
    makers = [(node.name or node.op_type, name) for node in models[0].graph.node for name in node.output]
    shared = [(maker, name) for maker, name in makers if name in produced[1]]
    names = [name for _, name in shared]
    first, second = (_run(_with_outputs(model, names), feeds, names) for model in models)
    pairs = zip(shared, first, second, strict=True)
    return next((maker for (maker, _), array, other in pairs if not _close(array, other, rtol, atol)), None)


def _with_outputs(model: Any, names: list[str]) -> Any:
    copy = deepcopy(model)
    output_names = {output.name for output in copy.graph.output}
    copy.graph.output.extend(import_onnx().ValueInfoProto(name=name) for name in names if name not in output_names)
    return copy
