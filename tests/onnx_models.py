"""Small ONNX graphs, and models of torchvision exported to files."""

from __future__ import annotations

import warnings

import pytest
import torch

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper  # noqa: E402


def value(name, *shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, list(shape))


def weight(name, *shape, kind=TensorProto.FLOAT):
    numel = torch.Size(shape).numel()
    data = [(7 * position) % 13 / 13 for position in range(numel)] if kind == TensorProto.FLOAT else [1] * numel
    return helper.make_tensor(name, kind, list(shape), data)


def graph(nodes, inputs, outputs, weights=(), **rest):
    return helper.make_graph(nodes, "main", inputs, outputs, list(weights), **rest)


def model(nodes, inputs, outputs, weights=(), functions=(), domains=(), opset=20, **rest):
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    made = graph(nodes, inputs, outputs, weights, **rest)
    return helper.make_model(made, opset_imports=opsets, ir_version=10, functions=list(functions))


def saved(proto, folder, name="model.onnx"):
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def distinct_values(module):
    """Values as after training: an exporter merges tensors that are equal and drops a bias that is zero."""
    torch.manual_seed(0)
    for each in module.modules():
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                tensor.data.uniform_(0.5, 1.5)
    return module.eval()


def export(module, x, path, *, dynamo=True, opset=20):
    norms = isinstance(module, torch.nn.Module) and any("BatchNorm" in type(each).__name__ for each in module.modules())
    if dynamo and norms and torch.__version__ < "2.11":
        pytest.skip("the exporter of torch 2.6 does not know the batch norms of newer versions of onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporters, about themselves
        rest = {"dynamo": True, "external_data": False, "verbose": False} if dynamo else {"dynamo": False}
        torch.onnx.export(module, (x,), str(path), opset_version=opset, **rest)
    return path
