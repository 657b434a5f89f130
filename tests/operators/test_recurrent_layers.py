"""Recurrent layers of cuDNN on shapes, against allocations that torch recorded on an H100."""

from __future__ import annotations

import pytest
import torch

from modelsummary.capture.execution.shape_only import ShapeOnly
from modelsummary.capture.execution.shape_tensor import new_tensor
from modelsummary.capture.operator_mode import Operators
from modelsummary.operators.operator_calls import OperatorLog, TensorSpec
from modelsummary.operators.operator_work import work_of

CPU = torch.device("cpu")  # no operator runs: the device only has to have a thread of autograd
LSTM, GRU = 2, 3


def shape_tensor(*shape):
    strides = torch.empty(shape, device="meta").stride()
    return new_tensor(TensorSpec(tuple(shape), strides, torch.float32), CPU).requires_grad_()


def layers(features, hidden, n_layers, gates):
    weights = []
    for layer in range(n_layers):
        sizes = [(features if layer == 0 else hidden), hidden]
        weights += [shape_tensor(gates * hidden, size) for size in sizes] + [shape_tensor(gates * hidden)] * 2
    return weights


@pytest.mark.parametrize(
    ("sizes", "batch_first", "batch_sizes"),
    [
        ((64, 32, 8), False, []),
        ((32, 64, 8), True, []),
        ((32 * 64, 8), True, [32] * 64),
        ((32 * 64, 8), False, [32] * 64),
    ],
)
def test_steps_are_those_of_the_sequence(sizes, batch_first, batch_sizes):
    """64 steps of 32 sequences through two layers; each step of a layer waits for the one before."""
    x, hx = torch.empty(sizes, device="meta"), torch.empty(2, 32, 16, device="meta")
    weights = [weight.detach() for weight in layers(8, 16, 2, 4)]
    call = (x, weights, 4, None, hx, hx, LSTM, 16, 0, 2, batch_first, 0.0, True, False, batch_sizes, None)
    log = OperatorLog(id, set())
    log.note(torch.ops.aten._cudnn_rnn.default, call, {}, (x.new_empty(*sizes[:-1], 16), hx, hx, x, x))
    (work,) = work_of(log.runs[0].call)
    assert work.sizes == (2 * 64, 32, 8, 16)
    assert work.flops == 2 * 32 * 64 * 4 * 16 * (8 + 16 + 16 + 16)


@pytest.mark.parametrize(
    ("mode", "train", "nbytes"),
    # An LSTM of 2 layers, 64 steps of 32 sequences, 1024 wide: 92,274,944 bytes on the H100. Others are not measured.
    [(LSTM, True, 92_274_944), (LSTM, False, 0), (GRU, True, (2 * 4 + 1) * 64 * 32 * 1024 * 4)],
)
def test_cudnn_keeps_gates_and_states(mode, train, nbytes):
    x, weights = shape_tensor(32, 64, 512), layers(512, 1024, 2, 4 if mode == LSTM else 3)
    hx = shape_tensor(2, 32, 1024)
    cx = shape_tensor(2, 32, 1024) if mode == LSTM else None
    shapes = ShapeOnly(CPU)
    with shapes.answering(), Operators(shapes):
        call = (x, weights, 4, None, hx, cx, mode, 1024, 0, 2, True, 0.0, train, False, [], None)
        result, *states, reserve, buffer = torch._cudnn_rnn(*call)
        assert (result.shape, result.stride()) == ((32, 64, 1024), (1024, 32 * 1024, 1))  # steps first
        assert [state.shape for state in states] == [(2, 32, 1024), (2, 32, 1024) if mode == LSTM else (0,)]
        assert 0 <= nbytes - reserve.nbytes <= 256  # cuDNN's own few bytes
        assert buffer.nbytes == 0
        if not train:
            return  # without gradients, cuDNN keeps nothing for a backward
        gradients = torch.autograd.grad(result.sum(), [x, *weights])
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in [x, *weights]]


@pytest.mark.parametrize(
    ("sizes", "batch_first", "batch_sizes", "steps", "batch"),
    [
        ((64, 32, 512), False, [], 64, 32),
        ((32, 64, 512), True, [], 64, 32),
        ((90, 512), False, [32, 32, 26], 3, 30),  # packed sequences: the batch is a mean
    ],
)
def test_steps_of_cudnn_count_for_each_layer_and_direction(sizes, batch_first, batch_sizes, steps, batch):
    def meta(*shape):
        return torch.empty(shape, device="meta")

    width, weights = 2 * 128, []
    for features in (512, width):
        weights += 2 * [meta(3 * 128, features), meta(3 * 128, 128), meta(3 * 128), meta(3 * 128)]
    call = (meta(*sizes), weights, 4, None, meta(4, batch, 128), None, GRU)
    settings = (128, 0, 2, batch_first, 0.0, True, True, batch_sizes, None)
    log = OperatorLog(id, set())
    results = torch.ops.aten._cudnn_rnn.default(*call, *settings)
    log.note(torch.ops.aten._cudnn_rnn.default, (*call, *settings), {}, results)
    (work,) = work_of(log.runs[0].call)
    assert (work.op_class, work.sizes) == ("rnn", (steps * 2 * 2, batch, 512, 128))
    products = sum(weight.numel() for weight in weights if weight.dim() == 2)
    assert work.flops == 2 * products * torch.Size(sizes[:-1]).numel()
