"""Quantised weights: elements of the original tensor, bytes of the stored one, multiply-adds of the layers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelsummary import Statistics
from modelsummary.operators.operator_rules import op_rule
from modelsummary.operators.tensor_bytes import inner_tensors, nbytes_of, numel_of, shape_of
from tests.models import Call
from tests.untouched import untouched

PARAMS = 128 * 256 + 256 + 256 * 64 + 64
MACS = 128 * 256 + 256 * 64  # per row of the input


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)).to(dtype).eval()


def test_bytes_of_wrappers():
    a, b = torch.ones(2, 3), torch.ones(2, 3)
    assert nbytes_of(TwoTensor(a, b)) == 6 * 4 + 6 * 4
    assert nbytes_of(TwoTensor(a, a)) == 6 * 4  # one tensor, held twice
    assert nbytes_of(TwoTensor(TwoTensor(a, b), TwoTensor(a, a.clone()))) == 3 * 6 * 4
    assert inner_tensors(a) == [a]


class Packed(nn.Parameter):
    """Two elements of 4 bits per byte and the state to decode them, as bitsandbytes keeps its weights."""


def packed(weight):
    stored = torch.empty(weight.numel() // 2, 1, dtype=torch.uint8)
    parameter = stored.as_subclass(Packed)
    scales = SimpleNamespace(absmax=torch.ones(2), code=torch.ones(256), shape=torch.Size([8]), state2=None)
    parameter.quant_state = SimpleNamespace(
        absmax=torch.ones(weight.numel() // 64, dtype=torch.uint8),
        shape=weight.shape,
        code=torch.ones(16),
        state2=scales,
    )
    return parameter


def test_packed_weights_stand_for_what_they_were_made_of():
    weight = packed(torch.empty(16, 32))
    assert (shape_of(weight), numel_of(weight)) == ((16, 32), 512)
    # 512 elements of half a byte, 8 scales of one byte, 16 codes; for the scales: 2 scales and 256 codes
    assert nbytes_of(weight) == 256 + 8 + 16 * 4 + 2 * 4 + 256 * 4
    row = Statistics(Call(lambda self, x: x, weight=weight), (2, 3)).root
    assert (row.num_params, row.params_bytes, row.inner_layers) == (512, nbytes_of(weight), {"weight": [16, 32]})


@pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="this torch hides higher-order operators from dispatch modes",
)
@pytest.mark.parametrize("execution", ["shape", "real"])
def test_products_in_a_wider_dtype(execution):
    """The higher-order operator that int8 layers call costs as much as the operator inside it."""
    from torch._higher_order_ops.out_dtype import out_dtype

    a, b = torch.ones(3, 4, dtype=torch.int8), torch.ones(4, 5, dtype=torch.int8)
    model = Call(lambda self, a, b: out_dtype(torch.ops.aten.mm.default, torch.int32, a, b))
    stats = Statistics(model, (a, b), execution=execution)
    assert (stats.total_mult_adds, stats.uncounted_ops) == (3 * 4 * 5, {})
    scaled = Call(lambda self, a, b: out_dtype(torch.ops.aten.mul.Tensor, torch.int32, a, a))
    assert Statistics(scaled, (a, b), execution=execution).total_mult_adds == 0


def defined(name, schema):
    library = torch.library.Library("modelsummary_quant", "FRAGMENT")
    library.define(name + schema)
    return getattr(torch.ops.modelsummary_quant, name).default, library


@pytest.mark.parametrize(
    ("name", "may_multiply"),
    [("dequantize_rows", False), ("choose_qparams", False), ("quantize_and_linear", True), ("rows", True)],
)
def test_operators_of_libraries_that_convert_are_not_in_the_ledger(name, may_multiply):
    func, _library = defined(name, "(Tensor x) -> Tensor")
    assert op_rule(func).matrix_like == may_multiply


def test_operators_of_torch_s_quantisation_are_named_as_in_aten():
    assert not op_rule(torch.ops.quantized.add.default).matrix_like
    assert op_rule(torch.ops.quantized.linear_unpack.default).matrix_like is False
    assert op_rule(torch.ops.quantized.matmul.default).matrix_like


@pytest.mark.filterwarnings("ignore")  # torchao announces its future API
@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao(config, execution):
    """49,152 weights of 1 byte; 320 rows with a bias and a scale of 4 bytes, and a zero point of 0, 1 or 4 bytes."""
    quantization = pytest.importorskip("torchao.quantization")
    if not hasattr(quantization, config):
        pytest.skip("another version of torchao")
    model, x = net(), torch.rand(4, 128)
    quantization.quantize_(model, getattr(quantization, config)())
    with untouched(model):
        stats = Statistics(model, x, execution=execution)
    assert (stats.total_params, stats.total_mult_adds, stats.uncounted_ops) == (PARAMS, 4 * MACS, {})
    assert stats.total_param_bytes - 49_152 - 2 * 320 * 4 in (0, 320, 320 * 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize("rows", [1, 4])
def test_bitsandbytes(rows, execution):
    layers = pytest.importorskip("bitsandbytes").nn
    torch.manual_seed(0)
    parts = (layers.Linear4bit(*sizes, compute_dtype=torch.float32) for sizes in ((128, 256), (256, 64)))
    first, second = parts
    model = nn.Sequential(first, nn.ReLU(), second).eval().to("cpu")
    stats = Statistics(model, torch.rand(rows, 128), execution=execution)
    assert (stats.total_params, stats.total_mult_adds, stats.uncounted_ops) == (PARAMS, rows * MACS, {})
    assert stats["0"].inner_layers["weight"] == [256, 128]
    # The first call on a CPU repacks the weights: a scale of two bytes per block of 64, a code of 16 and an offset
    # per layer, and biases.
    assert stats.total_param_bytes == 24_576 + 768 * 2 + 2 * (16 + 1) * 4 + 1_280
