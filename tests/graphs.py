"""Compare a traced graph with its model: results, gradients, buffers, bit by bit."""

from __future__ import annotations

import copy
import importlib
import sys

import torch

from modelsummary.capture.templates import leaves_of, structure_of


def tensors(value):
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def step(module, inputs, *, train):
    """Results, gradients and buffers of one forward and backward; the module is put back."""
    inputs = copy.deepcopy(inputs)
    floats = [each for each in tensors(inputs) if each.is_floating_point()]
    buffers = [(each, each.clone()) for each in module.buffers()]
    for each in floats:
        each.requires_grad_()
    module.train(train)
    module.zero_grad()
    torch.manual_seed(0)
    out = module(**inputs)
    results = tensors(out)
    with_grad = [each for each in results if each.requires_grad]
    torch.autograd.backward(with_grad, [torch.cos(torch.arange(e.numel())).view(e.shape).to(e) for e in with_grad])
    found = {
        "results": [each.detach().clone() for each in results],
        "inputs": [each.grad for each in floats],
        "gradients": {name: each.grad for name, each in module.named_parameters(remove_duplicate=False)},
        "buffers": {name: each.clone() for name, each in module.named_buffers(remove_duplicate=False)},
        "structure": structure_of(out),
    }
    module.zero_grad()
    with torch.no_grad():
        for each, saved in buffers:
            each.copy_(saved)
    return found


def assert_same(model, graph, inputs, *, train=True):
    """The graph does bit by bit what the model does; it takes those of the inputs that are tensors."""
    modes = {each: each.training for each in (*model.modules(), *graph.modules())}
    own = {name: value for name, value in inputs.items() if tensors(value)}
    of_model, of_graph = step(model, inputs, train=train), step(graph, own, train=train)
    for module, mode in modes.items():
        module.training = mode
    assert of_model["structure"] == of_graph["structure"]
    assert of_model["gradients"].keys() >= of_graph["gradients"].keys()
    for kind, name, own, other in _pairs(of_model, of_graph):
        assert (own is None) == (other is None), (kind, name)
        assert own is None or torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0)), (kind, name)


def _pairs(of_model, of_graph):
    for kind in ("results", "inputs"):
        for number, pair in enumerate(zip(of_model[kind], of_graph[kind], strict=True)):
            yield kind, number, *pair
    for kind in ("gradients", "buffers"):
        for name, own in of_model[kind].items():
            if name in of_graph[kind]:
                yield kind, name, own, of_graph[kind][name]
            elif kind == "gradients":
                assert own is None, name


def written(graph, folder, monkeypatch):
    """The graph, written and imported again."""
    graph.to_folder(folder / "written", "Written")
    monkeypatch.syspath_prepend(folder)
    for name in ("written", "written.module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("written").Written()
