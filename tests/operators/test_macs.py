"""MACs of single operators, derived by hand: one multiply-add of a product is one MAC, dense, without bias."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import modelsummary
from modelsummary import RegistrationError, Statistics
from modelsummary.operators.operator_rules import OpRule, op_cost
from modelsummary.operators.table import OperatorFacts, facts_of


class Call(nn.Module):
    """A forward that is one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def macs(module, *inputs, execution="auto"):
    stats = Statistics(module, inputs, execution=execution)
    assert stats.uncounted_ops == {}
    return stats.total_mult_adds


def rand(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


# ----------------------------------------------------------------------------------------------- layers

LAYERS = {
    # in_proj 2*128*256*768 + scores and values 2 * 2*8*128*128*32 + out_proj 2*128*256*256
    "MultiheadAttention": (lambda: nn.MultiheadAttention(256, 8, batch_first=True), [(2, 128, 256)] * 3, 83_886_080),
    # the attention above + two linears of 2*128*256*1024
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True),
        [(2, 128, 256)],
        218_103_808,
    ),
    # per step and sample 4 gates: 4*128*(64+128), then 4*128*(128+128); 2*50 of them
    "LSTM": (lambda: nn.LSTM(64, 128, 2, batch_first=True), [(2, 50, 64)], 22_937_600),
    "LSTM unbatched": (lambda: nn.LSTM(64, 128), [(50, 64)], 4_915_200),
    # 2 directions * 100 * (4*128*(64+32) + 32*128)
    "LSTM bidirectional, projected": (
        lambda: nn.LSTM(64, 128, bidirectional=True, proj_size=32, batch_first=True),
        [(2, 50, 64)],
        10_649_600,
    ),
    "GRU": (lambda: nn.GRU(64, 128, batch_first=True), [(2, 50, 64)], 7_372_800),  # 100 * 3*128*(64+128)
    "RNN": (lambda: nn.RNN(64, 128, batch_first=True), [(2, 50, 64)], 2_457_600),  # 100 * 128*(64+128)
    "LSTMCell": (lambda: nn.LSTMCell(64, 128), [(2, 64)], 196_608),  # 2 * 4*128*(64+128)
    "GRUCell": (lambda: nn.GRUCell(64, 128), [(2, 64)], 147_456),  # 2 * 3*128*(64+128)
    # every one of 2*28*28*32 input elements meets 16*4*4 weights
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(32, 16, 4, 2, 1), [(2, 32, 28, 28)], 12_845_056),
    "Conv2d groups": (lambda: nn.Conv2d(32, 64, 3, padding=1, groups=4), [(2, 32, 28, 28)], 7_225_344),
    "Conv2d depthwise": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), [(2, 32, 28, 28)], 451_584),
    "Conv2d unbatched": (lambda: nn.Conv2d(32, 64, 3, padding=1), [(32, 28, 28)], 14_450_688),
    "Conv1d": (lambda: nn.Conv1d(4, 8, 3), [(2, 4, 10)], 2 * 8 * 8 * 4 * 3),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), [(1, 2, 4, 4, 4)], 3 * 27 * 2 * 8),
    "Linear": (lambda: nn.Linear(64, 96), [(2, 50, 64)], 614_400),
    "Linear 1-d": (lambda: nn.Linear(64, 96), [(64,)], 6_144),
    "Bilinear": (lambda: nn.Bilinear(32, 48, 64), [(2, 32), (2, 48)], 196_608),
    "BatchNorm": (lambda: nn.BatchNorm2d(3), [(2, 3, 4, 4)], 0),
    "LayerNorm": (lambda: nn.LayerNorm(4), [(2, 3, 4)], 0),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), [(2, 4, 5)], 0),
    "PReLU": (nn.PReLU, [(2, 3)], 0),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), [(2, 3, 4, 4)], 0),
    "Softmax": (lambda: nn.Softmax(-1), [(2, 3)], 0),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", LAYERS)
def test_layers(case, mode, execution):
    make, shapes, expected = LAYERS[case]
    module = make().train(mode == "train")
    assert macs(module, *[torch.rand(shape) for shape in shapes], execution=execution) == expected


@pytest.mark.parametrize("module", [nn.Embedding(10, 4), nn.EmbeddingBag(10, 4)])
def test_look_ups_are_no_multiply_adds(module):
    assert macs(module, torch.zeros(2, 3, dtype=torch.long)) == 0


def test_packed_sequence_counts_each_step_once():
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(5, 2, 8), [5, 3])
    for execution in ("shape", "real"):
        stats = Statistics(nn.LSTM(8, 16), packed, execution=execution)
        assert stats.total_mult_adds == 12_288  # (5+3) * 4*16*(8+16)


# -------------------------------------------------------------------------------------------- functions

FUNCTIONS = {
    "mm": (torch.mm, [(3, 4), (4, 5)], 60),
    "addmm": (torch.addmm, [(3, 5), (3, 4), (4, 5)], 60),
    "addmm_": (lambda c, a, b: c.clone().addmm_(a, b), [(3, 5), (3, 4), (4, 5)], 60),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)], 120),
    "baddbmm": (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 120),
    "addbmm": (torch.addbmm, [(3, 5), (2, 3, 4), (2, 4, 5)], 120),
    "mv": (torch.mv, [(3, 4), (4,)], 12),
    "matrix @ vector": (torch.matmul, [(2, 3, 4), (4,)], 24),
    "vector @ matrix": (torch.matmul, [(4,), (4, 5)], 20),
    "addmv": (torch.addmv, [(3,), (3, 4), (4,)], 12),
    "dot": (torch.dot, [(7,), (7,)], 7),
    "vdot": (torch.vdot, [(7,), (7,)], 7),
    "outer": (torch.outer, [(3,), (4,)], 12),
    "addr": (torch.addr, [(3, 4), (3,), (4,)], 12),
    "einsum": (lambda x, w: torch.einsum("bshi,hio->bsho", x, w), [(2, 50, 8, 64), (8, 64, 96)], 4_915_200),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), [(2, 3, 4), (3, 4, 5)], 120),
    "cdist p=1": (lambda a, b: torch.cdist(a, b, p=1.0), [(2, 10, 8), (2, 12, 8)], 2 * 10 * 12 * 8),
    "cdist by products": (torch.cdist, [(2, 30, 8), (2, 40, 8)], 2 * 30 * 40 * 8),
    "F.linear": (F.linear, [(2, 3), (4, 3)], 24),
    # each output element: 3 taps of 4 channels
    "conv_tbc": (torch.conv_tbc, [(5, 2, 4), (3, 4, 6), (6,)], 3 * 2 * 6 * 3 * 4),
    "conv_transpose groups": (lambda x, w: F.conv_transpose1d(x, w, groups=2), [(1, 4, 5), (4, 3, 2)], 4 * 5 * 3 * 2),
}


SOLVES = {
    # the (4, 4) matrix by three right-hand sides, in each of two
    "triangular": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=True), 2 * 4 * 4 * 3),
    "triangular, from the right": (
        lambda a, b: torch.linalg.solve_triangular(a, b.mT, upper=True, left=False),
        2 * 4 * 4 * 3,
    ),
    "triangular_solve": (lambda a, b: torch.triangular_solve(b, a)[0], 2 * 4 * 4 * 3),
    "cholesky_solve": (torch.cholesky_solve, 2 * 2 * 4 * 4 * 3),
    "lu_solve": (lambda a, b: torch.linalg.lu_solve(a, torch.ones(2, 4, dtype=torch.int32), b), 2 * 2 * 4 * 4 * 3),
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize("case", SOLVES)
def test_solves_with_factors(case, execution):
    """Substitution is a product with a triangular matrix, dense; with two factors there are two."""
    function, expected = SOLVES[case]
    a, b = torch.rand(2, 4, 4), torch.rand(2, 4, 3)
    inputs = (b, a) if case == "cholesky_solve" else (a, b)
    assert macs(Call(function), *inputs, execution=execution) == expected


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support")
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # 5 stored elements by the 3 columns of b, or by a vector; 3 blocks of 2 x 2 hold 12; twice for a batch of two
        (lambda a, b: torch.sparse.mm(a.to_sparse(), b), 5 * 3),
        (lambda a, b: torch.sparse.addmm(b, a.to_sparse(), b), 5 * 3),
        (lambda a, b: torch.hspmm(a.to_sparse(), b), 5 * 3),
        (lambda a, b: torch.smm(a.to_sparse(), b), 5 * 3),
        (lambda a, b: a.to_sparse_csr() @ b, 5 * 3),
        (lambda a, b: a.to_sparse_csr() @ b[:, 0], 5),
        (lambda a, b: a.to_sparse() @ b[:, 0], 5),
        (lambda a, b: b.mT @ a.to_sparse_csr(), 5 * 3),
        (lambda a, b: a.to_sparse_bsr((2, 2)) @ b, 3 * 4 * 3),
        (lambda a, b: torch.bmm(torch.stack([a, a]).to_sparse(), torch.stack([b, b])), 2 * 5 * 3),
    ],
)
def test_matrices_of_sparse_layouts_have_the_elements_they_store(function, expected):
    a = torch.zeros(4, 4)
    a[0, 0] = a[1, 1] = a[2, 2] = a[3, 3] = a[0, 3] = 1
    assert macs(Call(function), a, torch.rand(4, 3)) == expected


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sampled_products():
    """Each of the 4 elements of the pattern is a row by a column of 5."""
    function = Call(lambda pattern, a, b: torch.sparse.sampled_addmm(pattern.to_sparse_csr(), a, b).to_dense())
    assert macs(function, torch.eye(4), torch.rand(4, 5), torch.rand(5, 4)) == 4 * 5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_products_of_nested_tensors():
    """Of 3 x 4 by 4 x 2, and of 5 x 4 by 4 x 6."""
    shapes = ((3, 4), (5, 4)), ((4, 2), (4, 6))
    left, right = (torch.nested.nested_tensor([torch.rand(shape) for shape in each]) for each in shapes)
    assert macs(Call(torch.matmul), left, right) == 3 * 4 * 2 + 5 * 4 * 6


@pytest.mark.parametrize("execution", ["shape", "real"])
def test_distances_and_their_gradients(execution):
    """3 x 2 pairs of 4 numbers; then the gradient of each set. 3 pairs among three rows."""

    def gradients(a, b):
        with torch.enable_grad():
            a, b = (each.detach().requires_grad_() for each in (a, b))
            return torch.autograd.grad(torch.cdist(a, b, p=1.0).sum(), (a, b))

    assert macs(Call(gradients), torch.rand(3, 4), torch.rand(2, 4), execution=execution) == 3 * (3 * 2 * 4)
    assert macs(Call(torch.pdist), torch.rand(3, 4), execution=execution) == 3 * 4


@pytest.mark.parametrize("execution", ["shape", "real"])
@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions(case, execution):
    function, shapes, expected = FUNCTIONS[case]
    assert macs(Call(function), *[torch.rand(shape) for shape in shapes], execution=execution) == expected


@pytest.mark.parametrize(
    "kwargs", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(128, 128)}, {"enable_gqa": True}]
)
@pytest.mark.parametrize("execution", ["shape", "real"])
def test_attention_is_counted_dense(kwargs, execution):
    """2 products of 2*8*128*128*64; a mask, causality and grouped heads do not lower them."""
    heads = 2 if "enable_gqa" in kwargs else 8
    module = Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs))
    key = torch.rand(2, heads, 128, 64)
    assert macs(module, torch.rand(2, 8, 128, 64), key, key, execution=execution) == 33_554_432


def test_two_vectors_make_an_outer_product_but_scaling_rows_is_elementwise():
    assert macs(Call(lambda a, b: a[:, None] * b), torch.rand(3), torch.rand(4)) == 12
    for shapes in [(3, 1), (1, 4)], [(3, 1), (4,)], [(3, 4), (3, 1)], [(3, 4), (4,)], [(1, 4), (1, 1)]:
        assert macs(Call(torch.mul), *map(torch.rand, shapes)) == 0
    both = Call(lambda a, b, column: (a[:, None] * b, column * b))  # the same shapes, remembered apart
    assert macs(both, torch.rand(3), torch.rand(4), torch.rand(3, 1)) == 12


@pytest.mark.parametrize("execution", ["shape", "real"])
def test_an_outer_product_of_parts_of_a_matrix(execution):
    parts = (lambda x: (x[:, 0], x[0])), (lambda x: (x[0], x[1])), (lambda x: (x[1, :2], x[:, 2]))
    for part, expected in zip(parts, (3 * 4, 4 * 4, 2 * 3), strict=True):
        assert macs(Call(lambda x, part=part: torch.outer(*part(x))), torch.rand(3, 4), execution=execution) == expected
    scaled = Call(lambda x: (x[:, :1] * x[0], x.view(6, 2)[:, 1:] * x[0]))
    assert macs(scaled, torch.rand(3, 4), execution=execution) == 0


def test_integer_products():
    int8 = torch.empty(32, 64, dtype=torch.int8, device="meta"), torch.empty(64, 48, dtype=torch.int8, device="meta")
    assert macs(Call(torch._int_mm), *int8) == 32 * 64 * 48


grouped_mm = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped_mm before 2.8")


@grouped_mm
def test_grouped_products():
    grouped = torch.empty(2, 16, 32, dtype=torch.bfloat16, device="meta")
    other = torch.empty(2, 32, 64, dtype=torch.bfloat16, device="meta")
    assert macs(Call(torch._grouped_mm), grouped, other) == 2 * 16 * 32 * 64


@grouped_mm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_and_their_gradients(dtype):
    """Each of 6 tokens meets the matrix of its expert once; so does its gradient, and makes one of the matrix."""

    def gradients(x, experts, ends):
        with torch.enable_grad():
            x, experts = (each.detach().requires_grad_() for each in (x, experts))
            out = torch._grouped_mm(x, experts, offs=ends)
            return torch.autograd.grad(out, (x, experts), torch.ones_like(out))

    shapes = torch.empty(6, 16, dtype=dtype), torch.empty(4, 16, 8, dtype=dtype), torch.tensor([1, 1, 4, 6]).int()
    stats = Statistics(Call(gradients), shapes, execution="shape")
    assert (stats.total_mult_adds, stats.uncounted_ops) == (3 * 6 * 16 * 8, {})
    assert stats.root.output_size == ([6, 16], [4, 16, 8])


@grouped_mm
def test_grouped_products_over_the_inner_dimension():
    """2-d x 2-d: each of the 4 groups sees its part of the 32 columns; together they see each once."""
    a = torch.empty(16, 32, dtype=torch.bfloat16, device="meta")
    b = torch.empty(32, 64, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    assert macs(Call(torch._grouped_mm), a, b, ends) == 16 * 32 * 64


def test_dynamically_quantized_linear():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the move of its quantisation
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(64, 96)), {nn.Linear})
    assert macs(model, torch.rand(2, 64)) == 12_288


@pytest.mark.filterwarnings("ignore")  # torch announces the move of its quantisation at each of these steps
def test_statically_quantized_convolution():
    quantization = torch.ao.quantization
    layers = nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 2, 1)
    model = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).eval()
    model.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    prepared = quantization.prepare(model)
    prepared(torch.rand(1, 4, 8, 8))
    expected = 8 * 6 * 6 * (2 * 9) + 2 * 6 * 6 * 8
    assert macs(quantization.convert(prepared), torch.rand(1, 4, 8, 8)) == expected


def test_deformable_convolution():
    ops = pytest.importorskip("torchvision.ops", exc_type=(ImportError, RuntimeError))
    x, offset = torch.rand(2, 8, 28, 28), torch.rand(2, 18, 28, 28)
    assert macs(ops.DeformConv2d(8, 16, 3, padding=1), x, offset) == 1_806_336  # 2*16*28*28 * 8*9


@pytest.mark.parametrize(
    ("shape", "channels", "groups", "expected"),
    [
        ((2, 32, 28, 28), 64, 4, 14_450_688),  # 2 x the forward's 7,225,344
        ((2, 32, 28, 28), 32, 32, 903_168),  # 2 x 451,584
    ],
)
def test_backward_of_a_grouped_convolution(shape, channels, groups, expected):
    """A forward that takes a gradient runs the backward operator; both its products respect the groups."""

    class Gradient(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(channels, shape[1] // groups, 3, 3))

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                weight = torch.ones_like(self.weight, requires_grad=True)
                y = F.conv2d(x, weight, padding=1, groups=groups)
                return torch.autograd.grad(y.sum(), (x, weight))

    assert macs(Gradient(), torch.rand(shape)) == expected // 2 + expected


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_matmul_counts_rows_times_inner_times_columns(n, k, m, batch):
    product = Call(torch.matmul)
    assert macs(product, rand(n, k), rand(k, m)) == n * k * m
    assert macs(product, rand(batch, n, k), rand(batch, k, m)) == batch * n * k * m


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_convolutions_count_products_with_the_kernel(groups, kernel, stride, dilation, batch, transposed):
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(4, 8, kernel, stride=stride, dilation=dilation, groups=groups, bias=False)
    x = torch.rand(batch, 4, 7, 9)
    positions = (x if transposed else layer(x)).shape
    per_position = 4 * 8 // groups * kernel * kernel
    assert macs(layer, x) == batch * positions[2] * positions[3] * per_position


# --------------------------------------------------------------------------------------------- registry


def test_a_custom_operator_is_in_the_ledger_until_it_has_a_formula():
    @torch.library.custom_op("modelsummary_test::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    @product.register_fake
    def _(a, b):
        return a.new_empty(a.shape[0], b.shape[1])

    module = Call(torch.ops.modelsummary_test.product)
    stats = Statistics(module, (rand(3, 4), rand(4, 5)))
    assert stats.uncounted_ops == {"modelsummary_test.product": 1}
    assert stats.total_mult_adds == 0
    assert stats.table(columns=["mult_adds"]).splitlines()[3].split() == ["Call", "?"]
    assert "modelsummary_test.product (1x)" in str(stats)

    @modelsummary.register_op_cost(torch.ops.modelsummary_test.product)
    def product_macs(a, b, *, out):
        return out.numel() * a.shape[1]

    stats = Statistics(module, (rand(3, 4), rand(4, 5)))
    assert stats.uncounted_ops == {}
    assert stats.total_mult_adds == 60


def test_torch_s_own_registry_is_honoured():
    @torch.library.custom_op("modelsummary_test::scale", mutates_args=())
    def scale(a: torch.Tensor) -> torch.Tensor:
        return a * 2

    scale.register_fake(torch.empty_like)

    @torch.utils.flop_counter.register_flop_formula(torch.ops.modelsummary_test.scale)
    def scale_flops(a_shape, *, out_shape=None):
        return 2 * a_shape[0]

    assert macs(Call(torch.ops.modelsummary_test.scale), rand(7)) == 7


def test_an_operator_cannot_be_registered_twice():
    with pytest.raises(RegistrationError, match=r"aten\.mm has a formula already"):
        modelsummary.register_op_cost(torch.ops.aten.mm)(lambda a, b, *, out: 0)


def test_only_operators_can_be_registered():
    with pytest.raises(RegistrationError, match=r"expected an operator such as torch\.ops\.mylib\.my_op"):
        modelsummary.register_op_cost(torch.mm)(lambda a, b, *, out: 0)


def test_a_refused_list_registers_nothing():
    with pytest.raises(RegistrationError):
        modelsummary.register_op_cost([torch.ops.aten.relu, torch.ops.aten.mm])(lambda *args, out: 1)
    assert facts_of(torch.ops.aten.relu.default).macs is None


def test_the_result_may_be_given():
    assert macs(Call(lambda a, b: torch.mm(a, b, out=torch.empty(3, 5))), rand(3, 4), rand(4, 5)) == 60


def test_a_formula_that_fails_leaves_the_operator_in_the_ledger():
    @torch.library.custom_op("modelsummary_test::odd", mutates_args=())
    def odd(a: torch.Tensor) -> torch.Tensor:
        return a.clone()

    odd.register_fake(torch.empty_like)

    @modelsummary.register_op_cost(torch.ops.modelsummary_test.odd)
    def odd_macs(a, *, out):
        raise ValueError("unknown arguments")

    with pytest.warns(
        UserWarning, match=r"formula of modelsummary_test\.odd failed, .*: ValueError: unknown arguments"
    ):
        stats = Statistics(Call(torch.ops.modelsummary_test.odd), rand(3))
    assert stats.uncounted_ops == {"modelsummary_test.odd": 1}


@pytest.mark.parametrize("result", [-3, 1.5, None, "3"])
def test_a_formula_gives_an_integer(result):
    rule = OpRule("x", OperatorFacts(lambda call: result, is_own=False))
    with pytest.warns(UserWarning, match="the formula of x failed, the call is not counted"):
        assert op_cost(rule, (rand(2),), {}, rand(2)).uncounted == "x"


def test_a_formula_may_decline():
    def declines(call):
        raise NotImplementedError

    assert op_cost(OpRule("x", OperatorFacts(declines, is_own=False)), (rand(2),), {}, rand(2)).uncounted == "x"


def test_a_formula_is_a_function():
    with pytest.raises(RegistrationError, match="expected a function of the operator's arguments and out=, got 5"):
        modelsummary.register_op_cost(torch.ops.aten.relu)(5)


@pytest.mark.parametrize(
    "function",
    [
        torch.fft.fft,
        torch.linalg.inv,
        torch.linalg.svd,
        torch.linalg.cholesky,
        lambda a: torch.linalg.solve(a, a),
        lambda a: torch.sparse.mm(a.to_sparse(), a.to_sparse()),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_matrix_like_operators_without_a_formula_are_never_a_silent_zero(function):
    stats = Statistics(Call(function), torch.eye(4))
    assert stats.uncounted_ops
    assert "no formula" in str(stats)
    assert ">=" in str(stats)
