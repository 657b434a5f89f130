"""The work of operators; every expected number is derived by hand."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from modelsummary.costs.operator_calls import OperatorLog
from modelsummary.costs.operator_work import work_of

aten = torch.ops.aten


def call(func, *args, **kwargs):
    log = OperatorLog(id, set())
    log.note(func, args, kwargs, func(*args, **kwargs))
    return log.runs[0].call


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, device="meta", dtype=dtype)


def facts(work):
    return work.op_class, work.sizes, work.flops, work.nbytes


def test_product():
    (work,) = work_of(call(aten.addmm.default, meta(5), meta(3, 4), meta(4, 5)))
    # 2 x 3 x 5 x 4 FLOPs; reads 5 + 12 + 20 floats, writes 15
    assert facts(work) == ("gemm", (1, 3, 5, 4), 120, 4 * 52)
    (work,) = work_of(call(aten.bmm.default, meta(2, 3, 4), meta(2, 4, 5)))
    assert work.sizes == (2, 3, 5, 4)


def test_convolution():
    arguments = (meta(2, 6, 8, 8), meta(10, 6, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    (work,) = work_of(call(aten.convolution.default, *arguments))
    # 2 x 64 positions x 10 channels x 54 products each; reads 768 + 540 floats, writes 1,280
    assert work.name.endswith("(3x3)")
    assert facts(work) == ("conv", (1, 128, 10, 54, 8, 8), 2 * 128 * 10 * 54, 4 * (768 + 540 + 1280))
    arguments = (meta(2, 6, 8, 8), meta(6, 1, 3, 3), meta(6), [2, 2], [1, 1], [1, 1], False, [0, 0], 6)
    work, bias = work_of(call(aten.convolution.default, *arguments))
    assert facts(work)[:3] == ("depthwise", (2 * 6 * 16, 9), 2 * 192 * 9)
    assert (bias.op_class, bias.nbytes) == ("elementwise", 2 * 4 * 192)


def test_backward_of_a_convolution():
    grad, x, weight = meta(2, 10, 8, 8), meta(2, 6, 8, 8), meta(10, 6, 3, 3)
    arguments = (grad, x, weight, [10], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    of_input, of_weight, of_bias = work_of(call(aten.convolution_backward.default, *arguments))
    assert of_input.sizes[:4] == (1, 128, 6, 90)
    assert of_weight.sizes[:4] == (1, 10, 54, 128)
    assert of_input.flops == of_weight.flops == 2 * 128 * 10 * 54
    assert of_bias.op_class == "reduction"


def test_batch_norm_in_training_reads_its_input_twice():
    x, one = meta(2, 3, 4, 4), meta(3)
    (inference,) = work_of(call(aten.native_batch_norm.default, x, one, one, one, one, False, 0.1, 1e-5))
    (training,) = work_of(call(aten.native_batch_norm.default, x, one, one, one, one, True, 0.1, 1e-5))
    assert inference.name.endswith("(inference)")
    assert training.nbytes - inference.nbytes >= 96 * 4


@pytest.mark.parametrize(
    ("func", "arguments", "op_class"),
    [
        (aten.relu.default, (meta(4, 8),), "elementwise"),
        (aten.gelu_backward.default, (meta(4, 8), meta(4, 8)), "elementwise"),
        (aten._to_copy.default, (meta(4, 8),), "copy"),
        (aten._softmax.default, (meta(4, 8), -1, False), "softmax"),
        (aten.native_layer_norm.default, (meta(4, 8), [8], None, None, 1e-5), "norm"),
        (aten.mean.dim, (meta(4, 8), [1]), "reduction"),
        (aten.avg_pool2d.default, (meta(1, 2, 8, 8), [2, 2]), "pool"),
        (aten.embedding.default, (meta(9, 8), meta(4, dtype=torch.long)), "index"),
    ],
)
def test_classes(func, arguments, op_class):
    (work,) = work_of(call(func, *arguments))
    assert work.op_class == op_class


@pytest.mark.parametrize(
    ("func", "arguments"),
    [  # what stands between value and is_causal differs
        (aten._scaled_dot_product_flash_attention.default, (0.0,)),
        (aten._scaled_dot_product_efficient_attention.default, (None, True, 0.0)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True, 0.0)),
    ],
)
def test_each_fused_attention_says_whether_it_is_causal(func, arguments):
    tensors = [meta(2, 4, 16, 8, dtype=torch.float16) for _ in range(3)]
    names = []
    for is_causal in (False, True):
        (work,) = work_of(call(func, *tensors, *arguments, is_causal))
        assert work.sizes == (8, 16, 16, 8)
        names.append(work.name)
    assert names == [f"{func._schema.name.replace('::', '.')}{part}" for part in ("", " (causal)")]


def test_views_and_allocations_are_no_kernels():
    assert work_of(call(aten.t.default, meta(4, 8))) == ()
    assert work_of(call(aten.empty_like.default, meta(4, 8))) == ()


def test_equal_calls_are_one_object_with_a_stable_key():
    tensors = (meta(4, 8), meta(4, 8), meta(8, 4).t())
    log = OperatorLog(id, set(map(id, tensors)))
    for x in tensors:
        log.note(aten.relu.default, (x,), {}, x)
    first, second, turned = (run.call for run in log.runs)
    assert first is second
    assert first.key == "aten.relu.default(f32[4x8]p)"
    assert turned.key == "aten.relu.default(f32[4x8/1x4]p)"


def test_nodes_of_a_backward_in_another_thread():
    """Autograd numbers the nodes of each thread by themselves; a backward on CUDA runs in a thread of its own."""
    x = torch.ones(2, requires_grad=True)
    x.sin().cos()  # the numbers of this thread are beyond those of a new one
    log = OperatorLog(id, set())

    def note():
        log.note(aten.relu.default, (x,), {}, x)

    x.sin()
    note()
    backward = Thread(target=note)
    backward.start()
    backward.join()
    note()
    assert [run.nodes for run in log.runs] == [1, 0, 0]
