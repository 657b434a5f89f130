"""A shape rule returns exactly the shapes, strides and dtypes of torch's meta kernel, or None."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelsummary.operators.operator_rules import op_rule

aten = torch.ops.aten
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=5)


def check(func, *args):
    ours = op_rule(func).facts.shape(*args)
    if ours is None:
        return False
    kernels = func(*args)
    ours, kernels = ([each] if isinstance(each, torch.Tensor) else each for each in (ours, kernels))
    assert [(t.shape, t.stride(), t.dtype, t.device) for t in ours] == [
        (t.shape, t.stride(), t.dtype, t.device) for t in kernels
    ]
    return True


def tensor(shape, dtype, order=None):
    made = torch.empty(shape, dtype=dtype, device="meta")
    return made if order is None else made.permute([dim for dim in order if dim < len(shape)])


def is_canonical(x):
    """Return True if contiguous, also in the strides of dimensions of size 1."""
    return x.stride() == torch.empty(x.shape, device="meta").stride()


@given(SHAPES, DTYPES, DTYPES, st.permutations(range(5)), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_batch_norm(shape, dtype, weight_dtype, order, training, affine, tracked):
    x = tensor(shape, dtype, order)
    if x.dim() < 2 or not (training or tracked):
        return
    own = [tensor((x.shape[1],), weight_dtype)] * 2 if affine else [None, None]
    running = [tensor((x.shape[1],), weight_dtype)] * 2 if tracked else [None, None]
    used = check(aten.native_batch_norm.default, x, *own, *running, training, 0.1, 1e-5)
    assert used or dtype != torch.float32 or weight_dtype != dtype or not is_canonical(x) or x.numel() == x.shape[1]


@given(SHAPES, DTYPES, DTYPES, st.permutations(range(5)), st.integers(1, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_layer_norm(shape, dtype, weight_dtype, order, dims, affine):
    x = tensor(shape, dtype, order)
    normalized = list(x.shape[-dims:])
    own = [tensor(normalized, weight_dtype)] * 2 if affine else [None, None]
    used = check(aten.native_layer_norm.default, x, normalized, *own, 1e-5)
    assert used or dtype != torch.float32 or affine or dims >= x.dim() or not is_canonical(x)


def plain(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@given(SHAPES, DTYPES, st.permutations(range(5)), st.sampled_from("relu gelu silu exp rsqrt sigmoid neg".split()))
@settings(max_examples=200, deadline=None)
def test_element_by_element(shape, dtype, order, name):
    x = tensor(shape, dtype, order)
    assert check(getattr(aten, name).default, x) or not is_canonical(x)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("hardtanh", (0.0, 6.0)),
        ("leaky_relu", (0.1,)),
        ("elu", ()),
        ("softplus", ()),
        ("clamp_min", (0,)),
        ("pow", (2,)),
        ("pow", (0.5,)),
        ("mish", ()),
        ("hardswish", ()),
        ("hardsigmoid", ()),
        ("erf", ()),
        ("log", ()),
        ("abs", ()),
        ("sqrt", ()),
        ("reciprocal", ()),
        ("sin", ()),
        ("cos", ()),
        ("tanh", ()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_options(name, args, dtype):
    packet = getattr(aten, name)
    func = packet.Tensor_Scalar if name == "pow" else packet.default
    x = plain((2, 3), dtype)
    if dtype in (torch.float32, torch.bfloat16):
        assert check(func, x, *args)
    else:
        assert op_rule(func).facts.shape(x, *args) is None
    assert op_rule(func).facts.shape(x.double(), *args, 2j) is None


def test_the_order_of_dimensions_is_kept():
    x = plain((3, 4, 5, 6)).permute(0, 2, 3, 1)[:, :, ::2]
    for func, args in ((aten.gelu.default, ()), (aten.mul.Tensor, (0.5,)), (aten.add.Tensor, (x,))):
        assert check(func, x, *args)
    assert check(aten.sub.Tensor, plain((4, 1, 6)), plain((4, 6, 1)))
    assert check(aten.add.Tensor, plain((1, 4, 3, 6)), plain((1, 4, 1, 6)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_have_no_rule():
    x = torch.empty_like(torch.eye(4).to_sparse_csr(), device="meta")
    assert op_rule(aten.add.Tensor).facts.shape(x, x) is None


@given(
    SHAPES,
    st.sets(st.integers(0, 4)),
    st.integers(0, 4),
    DTYPES,
    DTYPES,
    st.booleans(),
    st.permutations(range(5)),
    st.sampled_from("add sub mul div".split()),
)
@settings(max_examples=400, deadline=None)
def test_two_operands(shape, broadcast, missing, dtype, other_dtype, swapped, order, name):
    a = tensor(shape, dtype, order)
    shape = [1 if dim in broadcast else size for dim, size in enumerate(a.shape)][min(missing, a.dim()) :]
    pair = [a, plain(shape, other_dtype)]
    used = check(getattr(aten, name).Tensor, *(pair[::-1] if swapped else pair))
    assert used or dtype != other_dtype or 1 in a.shape or not is_canonical(a)


@pytest.mark.parametrize("name", ["add.Tensor", "mul.Tensor", "div.Tensor"])
@pytest.mark.parametrize("number", [2, 0.5, True])
def test_a_tensor_and_a_number(name, number):
    packet, overload = name.split(".")
    func = getattr(getattr(aten, packet), overload)
    assert check(func, plain((2, 3), torch.float16), number)
    assert not check(func, plain((2, 3), torch.int32), number)
    assert op_rule(func).facts.shape(plain((2, 3)), 2j) is None


def test_what_is_too_different_is_left_to_the_kernel():
    assert op_rule(aten.gelu.default).facts.shape(plain((2, 3)), approximate="sigmoid") is None
    assert op_rule(aten.relu.default).facts.shape(plain((2, 3)), plain((2, 3))) is None
    assert op_rule(aten.add.Tensor).facts.shape(plain((2, 3)), plain((4, 3))) is None
    assert op_rule(aten.add.Tensor).facts.shape(plain((2, 3)), plain((3,)), alpha=2j) is None
    assert op_rule(aten.roll.default).facts.shape(plain((2, 3)), [1, 1], [1, -1]) is None
    assert op_rule(aten.addmm.default).facts.shape(plain((4,)), plain((2, 3)), plain((3, 5))) is None


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans(), DTYPES)
@settings(max_examples=200, deadline=None)
def test_products(rows, inner, columns, transposed, dtype):
    a = plain((inner, rows), dtype).t() if transposed else plain((rows, inner), dtype)
    b = plain((columns, inner), dtype).t()
    assert check(aten.addmm.default, plain((columns,), dtype), a, b)


@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_convolution(groups, sizes, width, kernel, stride, padding, dilation, with_bias, channels_last):
    x = plain((2, groups * width, *sizes))
    if channels_last and len(sizes) == 2:
        x = x.to(memory_format=torch.channels_last)
    weight = plain((2 * groups, width, *[kernel] * len(sizes)))
    bias = plain((2 * groups,)) if with_bias else None
    each = [[number] * len(sizes) for number in (stride, padding, dilation)]
    args = (x, weight, bias, *each, False, [0] * len(sizes), groups)
    try:
        result = aten.convolution.default(*args)
    except RuntimeError:
        assert op_rule(aten.convolution.default).facts.shape(*args) is None  # the kernel raises the error
        return
    assert check(aten.convolution.default, *args) or not is_canonical(x) or not result.numel()


@given(SHAPES, DTYPES, st.permutations(range(5)), st.integers(-5, 4), st.integers(-5, 4))
@settings(max_examples=300, deadline=None)
def test_roll(shape, dtype, order, dim, other):
    x = tensor(shape, dtype, order)
    if not (-x.dim() <= dim < x.dim() and -x.dim() <= other < x.dim()):
        return
    dims = [dim] if (dim - other) % x.dim() == 0 else [dim, other]
    assert check(aten.roll.default, x, [1] * len(dims), dims) == is_canonical(x)


grouped_mm = pytest.mark.skipif(not hasattr(aten, "_grouped_mm"), reason="torch has no grouped_mm before 2.8")


@grouped_mm
@given(
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 3),
    st.integers(1, 20),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["2d3d", "3d2d", "2d2d", "3d3d"]),
)
@settings(max_examples=200, deadline=None)
def test_grouped_products(groups, rows, inner, columns, a_transposed, b_transposed, kind):
    """The meta kernel accepts only bfloat16."""
    inner *= 8

    def factor(first, second, is_2d, transposed):
        sizes = (first, second) if is_2d else (groups, first, second)
        made = plain(sizes[:-2] + sizes[:-3:-1] if transposed else sizes, torch.bfloat16)
        return made.mT if transposed else made

    a, b = factor(rows, inner, kind[0] == "2", a_transposed), factor(inner, columns, kind[2] == "2", b_transposed)
    offs = None if kind == "3d3d" else plain((groups,), torch.int32)
    try:
        aten._grouped_mm.default(a, b, offs)
    except RuntimeError:  # rows that are not aligned
        assert op_rule(aten._grouped_mm.default).facts.shape(a, b, offs) is None
        return
    assert check(aten._grouped_mm.default, a, b, offs)


def grouped_on_cpu(dtype, kind, rows, columns):
    step = 16 // dtype.itemsize
    a = torch.rand(*((rows,) if kind[0] == "2" else (2, rows)), 2 * step).to(dtype)
    b = torch.rand(*((columns,) if kind[2] == "2" else (2, columns)), 2 * step).to(dtype).mT
    if kind == "3d3d":
        return a, b, None
    whole = {"2d3d": rows, "3d2d": columns, "2d2d": 2 * step}[kind]
    return a, b, torch.tensor([whole // 2, whole], dtype=torch.int32)


@grouped_mm
@pytest.mark.parametrize("kind", ["2d3d", "3d2d", "2d2d", "3d3d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [3, 8])
def test_grouped_products_of_a_cpu(kind, dtype, columns):
    a, b, offs = grouped_on_cpu(dtype, kind, 6, columns)
    try:
        real = aten._grouped_mm.default(a, b, offs)
    except (RuntimeError, NotImplementedError):  # no kernel before torch 2.9
        pytest.skip("this torch has no kernel for it")
    ours = op_rule(aten._grouped_mm.default).facts.shape(
        *(None if each is None else each.to("meta") for each in (a, b, offs))
    )
    assert (ours.shape, ours.stride(), ours.dtype) == (real.shape, real.stride(), real.dtype)


@grouped_mm
def test_grouped_products_that_no_kernel_takes():
    rule, offs = op_rule(aten._grouped_mm.default).facts.shape, plain((3,), torch.int32)
    a, b = plain((6, 8)), plain((3, 8, 4))
    assert rule(a, b, offs).shape == (6, 4)
    for wrong in [
        (a, b),
        (a, b, plain((2,), torch.int32)),
        (a, b, plain((3,), torch.int64)),
        (a, b.bfloat16(), offs),
        (a.double(), b.double(), offs),
        (plain((6, 4)), b, offs),
        (plain((6, 9))[:, :8], b, offs),
        (a, b, offs, plain((4,))),
        (a, b, offs, None, torch.bfloat16),
        (plain((3, 6, 8)), b, offs),
        (plain((2, 6, 8)), b),
        (plain((8,)), b, offs),
    ]:
        assert rule(*wrong) is None
