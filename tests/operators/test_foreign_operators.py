"""Operators that few tools know, between two linear layers, asked every question; figures are worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modelsummary import SplitError, Statistics, register_op_cost
from modelsummary.latency.kernel_runs import workspaces_of
from modelsummary.operators.operator_calls import OperatorLog
from modelsummary.operators.tensor_bytes import storage_of
from tests.models import Call
from tests.untouched import untouched

FORWARD = 2 * 4 * 8 * 8  # multiply-adds of the two layers; x has 4 x 8 elements, 128 bytes
SQUARE = torch.ones(8, 8)  # 256 bytes
_library = torch.library.Library("seldom", "DEF")


def _define(schema, run, fake=None):
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CPU")
    if fake is not None:
        torch.library.register_fake(f"seldom::{name}", fake)


def _add_in_place(x, y):
    x.add_(y)


_define("with_fake(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
_define("without_fake(Tensor x) -> Tensor", lambda x: x * 2)
_define("raising_fake(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.no_such_attribute)
_define(
    "product(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w, lambda x, w: x.new_empty(*x.shape[:-1], w.shape[1])
)
_define("writing(Tensor(a!) x, Tensor y) -> ()", _add_in_place, lambda x, y: None)
_define("view(Tensor(a) x) -> Tensor(a)", lambda x: x.view(8, 4), lambda x: x.view(8, 4))
_define(
    "two_results(Tensor x) -> (Tensor, Tensor)",
    lambda x: (x * 2, x.sum(-1)),
    lambda x: (torch.empty_like(x), x.new_empty(x.shape[:-1])),
)
_define(
    "of_lists(Tensor[] xs) -> Tensor[]", lambda xs: [x * 2 for x in xs], lambda xs: [torch.empty_like(x) for x in xs]
)
_define("into(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", lambda x, *, out: out.copy_(x * 2), lambda x, *, out: out)
_define("row_sizes(Tensor x) -> Tensor", lambda x: x[x[:, 0] > -1e9])
_define("number(Tensor x) -> float", lambda x: float(x.sum()))
register_op_cost(torch.ops.seldom.product)(lambda x, w, *, out: x.numel() * w.shape[1])
seldom = torch.ops.seldom


def writing(x):
    y = x.detach().clone()
    seldom.writing(y, x.detach())
    return y + x


def into(x):
    return seldom.into(x.detach(), out=torch.empty_like(x)) + x


def jagged(x):
    nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    return torch.cat(list((nested * 2).unbind()))


def jagged_attention(x):
    """Two sequences of two tokens, two heads of four."""
    rows = torch.nested.nested_tensor_from_jagged(x, offsets=torch.tensor([0, 2, 4]))
    heads = rows.unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2).values()


def strided_nested(x):
    return torch.cat(torch.nested.as_nested_tensor([x[:2], x[2:]]).unbind())


def sparse(x):
    return torch.sparse.mm(torch.eye(4).to_sparse(), x)


def grouped(x):
    ends = torch.tensor([2, 4], dtype=torch.int32)
    return F.grouped_mm(x.bfloat16(), torch.ones(2, 8, 8, dtype=torch.bfloat16), offs=ends).float()


def scaled(x):
    a, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    return x + torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16).float()[:4, :8]


def integers(x):
    a, b = torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)
    return x + torch._int_mm(a, b)[:4].float()


def quantised(x):
    return torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8).dequantize() + x


def complex_product(x):
    return (torch.complex(x, x) @ torch.complex(SQUARE, SQUARE)).real


def scattered(x):
    return torch.zeros_like(x).scatter(1, torch.zeros(4, 8, dtype=torch.long), x)


def bilinear(x):
    return torch.einsum("bi,kij,bj->bk", x, torch.ones(8, 8, 8), x)


# name: function, multiply-adds, kernel, its class and bytes; in parentheses: in the ledger
CASES = {
    "with a fake": (seldom.with_fake, 0, "(seldom.with_fake)", "other", 128 + 128),
    "without a fake": (seldom.without_fake, 0, "(seldom.without_fake)", "other", 128 + 128),
    "a fake that raises": (seldom.raising_fake, 0, "(seldom.raising_fake)", "other", 128 + 128),
    "with a formula": (lambda x: seldom.product(x, SQUARE), 256, "seldom.product", "gemm", 128 + 256 + 128),
    "writes in place": (writing, 0, "(seldom.writing)", "other", 2 * 128 + 128),
    "writes into out": (into, 0, "(seldom.into)", "other", 2 * 128 + 128),
    "two results": (lambda x: seldom.two_results(x)[0], 0, "(seldom.two_results)", "other", 128 + 128 + 4 * 4),
    "lists": (lambda x: seldom.of_lists([x, x])[0], 0, "(seldom.of_lists)", "other", 128 + 2 * 128),
    "rows by values": (seldom.row_sizes, 0, "(seldom.row_sizes)", "other", 128 + 128),
    "a number": (lambda x: x * seldom.number(x), 0, "(seldom.number)", "other", 128),
    # 5 complex elements of 8 bytes for each of 4 rows
    "real Fourier transform": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), 0, "(aten._fft_r2c)", "other", 128 + 160),
    "complex product": (complex_product, 256, "aten.mm", "gemm", 2 * (128 + 256 + 128)),
    "inverse": (lambda x: x @ torch.linalg.inv(SQUARE + torch.eye(8)), 256, "(aten.linalg_inv_ex)", "other", 516),
    "sorted": (lambda x: x.sort(-1)[0], 0, "aten.sort", "index", 128 + 128 + 32 * 8),
    "summed up": (lambda x: x.cumsum(-1), 0, "aten.cumsum", "reduction", 128 + 128),
    "scattered": (scattered, 0, "aten.scatter", "index", 128 + 32 * 8 + 128 + 128),
    "einsum with odd letters": (lambda x: torch.einsum("Zq,qY->ZY", x, SQUARE), 256, "aten.bmm", "gemm", 512),
    "einsum by numbers": (lambda x: torch.einsum(x, [0, 1], SQUARE, [1, 2], [0, 2]), 256, "aten.bmm", "gemm", 512),
    # 4 x 8 by 8 x 64 first, then one row of 8 by 8 x 8 for each of 4: the kernel of the former
    "bilinear einsum": (bilinear, 4 * 8 * 64 + 4 * 8 * 8, "aten.bmm", "gemm", 128 + 2048 + 4 * 64 * 4),
    "grouped product": (grouped, 256, "aten._grouped_mm", "gemm", 64 + 2 * 128 + 2 * 4 + 64),
    # one scale of 4 bytes for both; the result in bfloat16
    "scaled product": (scaled, 16**3, "aten._scaled_mm", "gemm", 2 * 256 + 4 + 2 * 256),
    "integers": (integers, 32 * 8 * 8, "aten._int_mm", "gemm", 32 * 8 + 8 * 8 + 4 * 32 * 8),
    "quantised": (quantised, 0, "aten.quantize_per_tensor", "elementwise", 128 + 32),
    "sparse": (sparse, 4 * 8, "aten._sparse_addmm", "gemm", 128 + 4 * 4 + 128 + 128),
    "jagged": (jagged, 0, "aten.mul", "elementwise", 128 + 128),
    "jagged attention": (jagged_attention, 2 * 2 * 2 * (2 * 2 * 4), "aten.matmul", "gemm", None),
    "strided nested": (strided_nested, 0, "aten._nested_tensor_from_tensor_list", "copy", 128 + 128),
}
CANNOT_BE_CUT = {"a number": "the model decides by values of tensors"}
NEW = ("grouped product", "scaled product")


@pytest.fixture(params=CASES)
def case(request):
    if request.param in NEW and not hasattr(F, "grouped_mm"):
        pytest.skip("an operator of later versions")
    return request.param


@pytest.mark.filterwarnings("ignore")
def test_every_question_has_an_answer(case):
    function, macs, kernel, op_class, nbytes = CASES[case]
    uncounted = kernel.strip("()") if kernel.startswith("(") else None
    model = Call(lambda self, x: self.b(function(self.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with untouched(model):
        stats = Statistics(model, x)
        estimate = stats.estimate_latency("H100")
        kernels = stats.kernels("H100").to_records()
        peaks = [stats.memory("inference").peak, stats.memory().peak]
    assert stats.total_mult_adds == FORWARD + macs
    assert (uncounted in stats.uncounted_ops) == (uncounted is not None)
    assert ("a lower bound for" in " ".join(str(estimate).split())) == (uncounted is not None)
    alone = next(record for record in kernels if record["name"] == kernel.strip("()"))
    assert alone["op_class"] == op_class
    assert nbytes is None or alone["moved_bytes"] == nbytes
    assert all(record["microseconds"] > 0 for record in kernels)
    # the parameters, and at least the results of both layers during an inference
    assert min(peaks) >= 2 * (256 + 32) + 2 * 128
    if case in CANNOT_BE_CUT:
        with pytest.raises(SplitError, match=CANNOT_BE_CUT[case]):
            stats.split(2)
        return
    stages = stats.split(2)
    assert sum(fact.macs for fact in stages.facts) == stats.total_mult_adds
    assert torch.equal(stages(x), model(x))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.qint8, 1), (torch.float16, 2)])
def test_a_packed_weight_is_read(dtype, itemsize):
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 16)), {nn.Linear}, dtype=dtype)
    root = Statistics(model, torch.ones(4, 8)).root
    assert root.bytes_read == 4 * 8 * 4 + 8 * 16 * itemsize + 16 * 4  # input, weight, bias
    assert root.bytes_written == 4 * 16 * 4


def test_a_view_runs_no_kernel():
    model = Call(lambda self, x: self.b(seldom.view(self.a(x)).view(4, 8)), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    stats = Statistics(model, torch.randn(4, 8))
    assert [record["name"] for record in stats.kernels("H100").to_records()] == ["aten.addmm"] * 2
    assert not stats.uncounted_ops


def test_calls_of_several_sizes_are_several_calls():
    """Sparse and nested tensors have no sizes and strides that say what they store."""

    def doubled(x):
        parts = [torch.nested.nested_tensor([x[:rows], x[: rows // 2]], layout=torch.jagged) for rows in (2, 4)]
        matrices = [torch.eye(size).to_sparse() for size in (4, 6)]
        sums = [(matrix + matrix).to_dense().sum() for matrix in matrices]
        return torch.cat([row for part in parts for row in (part * 2).unbind()]) + sum(sums)

    model = Call(lambda self, x: doubled(self.a(x)), a=nn.Linear(8, 8))
    kernels = Statistics(model, torch.ones(4, 8)).kernels("H100").to_records()
    nested = [record["moved_bytes"] for record in kernels if record["name"] == "aten.mul"]
    assert nested == [2 * rows * 8 * 4 for rows in (2 + 1, 4 + 2)]  # read and written
    dense = [record["moved_bytes"] for record in kernels if record["name"] == "aten._to_dense"]
    assert dense == [4 * size + 4 * size * size for size in (4, 6)]


def test_the_workspace_of_a_sparse_result():
    log = OperatorLog(storage_of, set())
    x = torch.eye(4)
    log.note(torch.ops.aten._to_sparse.default, (x,), {}, x.to_sparse())
    (workspace,) = workspaces_of([log.runs[0].call], torch.device("cpu"))
    assert workspace is not None
