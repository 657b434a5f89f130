"""Classification of operators, element-wise operations, and bytes moved."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import modelsummary
from modelsummary import Statistics
from modelsummary.operators.operator_rules import NO_COST, op_cost, op_rule

aten = torch.ops.aten


def cost(func, *args, **kwargs):
    return op_cost(op_rule(func), args, kwargs, func(*args, **kwargs))


def test_views_cost_nothing():
    x = torch.rand(4, 6)
    for view in (cost(aten.view.default, x, [24]), cost(aten.t.default, x), cost(aten.slice.Tensor, x, 0, 1, 3)):
        assert view == NO_COST


def test_bytes_follow_the_dtype():
    x = torch.rand(4, 6)
    assert cost(aten.relu.default, x)[2:4] == (96, 96)
    assert cost(aten.relu.default, x.half())[2:4] == (48, 48)
    assert cost(aten.relu.default, x.double())[2:4] == (192, 192)


def test_bytes_of_a_product():
    read, written = cost(aten.mm.default, torch.rand(3, 4), torch.rand(4, 5))[2:4]
    assert (read, written) == (4 * (12 + 20), 4 * 15)


def test_the_same_tensor_is_read_once():
    x = torch.rand(4)
    assert cost(aten.mul.Tensor, x, x).bytes_read == 16


def test_an_expanded_tensor_is_as_large_as_its_memory():
    assert cost(aten.add.Tensor, torch.rand(100, 4), torch.rand(1, 4).expand(100, 4)).bytes_read == 1600 + 16


def test_in_place_reads_and_writes_itself():
    assert cost(aten.relu_.default, torch.rand(4))[2:4] == (16, 16)


def test_a_look_up_reads_the_rows_it_takes():
    table, rows = torch.rand(1000, 8), torch.tensor([3, 4])
    assert cost(aten.embedding.default, table, rows).bytes_read == 2 * 8 * 4 + 2 * 8


def test_the_likelihood_reads_one_score_per_target():
    scores, target = torch.zeros(8, 100), torch.zeros(8, dtype=torch.long)
    assert cost(aten.nll_loss_forward.default, scores, target, None, 1, -100).bytes_read == 8 * 8 + 8 * 4
    zero = torch.zeros(())
    back = cost(aten.nll_loss_backward.default, zero, scores, target, None, 1, -100, torch.zeros(()))
    assert (back.bytes_read, back.bytes_written) == (4 + 8 * 8 + 4, scores.nbytes)


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (aten.add.Tensor, (torch.rand(2, 1), torch.rand(1, 3)), 6),  # one per element of the result
        (aten.sum.dim_IntList, (torch.rand(4, 5), [1]), 20),  # one per element that is summed
        (aten.native_layer_norm.default, (torch.rand(4, 5), [5], None, None, 1e-5), 20),
        (aten._softmax.default, (torch.rand(4, 5), 1, False), 20),
        (aten.max_pool2d_with_indices.default, (torch.rand(1, 1, 4, 4), [2, 2], [2, 2]), 16),
        (aten.upsample_nearest2d.default, (torch.rand(1, 1, 2, 2), [4, 4]), 16),
        (aten.max.other, (torch.rand(3), torch.rand(3)), 3),
        (aten.max.dim, (torch.rand(3, 4), 1), 12),
        (aten.clone.default, (torch.rand(3),), 0),  # moves, computes nothing
        (aten.mm.default, (torch.rand(2, 2), torch.rand(2, 2)), 0),  # products are MACs
        (aten.cat.default, ([torch.rand(3), torch.rand(4)],), 0),
    ],
)
def test_elementwise_ops(func, args, expected):
    assert cost(func, *args).elementwise_ops == expected


def test_elementwise_work_is_never_in_the_macs():
    stats = Statistics(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), (2, 4))
    assert stats.root.macs == 40
    assert stats.root.elementwise_ops == 10
    assert stats["1"].self_elementwise_ops == 10


@pytest.mark.parametrize(
    "name", ["sqrt", "rsqrt_", "upsample_bilinear2d", "_weight_norm", "lgamma", "_thnn_fused_lstm_cell"]
)
def test_names_that_only_resemble_products_are_not_in_the_ledger(name):
    packet = getattr(aten, name)
    rule = op_rule(getattr(packet, packet.overloads()[0]))
    assert not rule.matrix_like


@pytest.mark.parametrize("name", ["linalg_qr", "_fft_c2c", "_sparse_sparse_matmul", "geqrf"])
def test_products_without_a_formula_are_in_the_ledger(name):
    packet = getattr(aten, name)
    rule = op_rule(getattr(packet, packet.overloads()[0]))
    assert rule.matrix_like
    assert rule.facts.macs is None


def test_in_place_operators_know_what_they_write():
    assert op_rule(aten.relu_.default).writes == (0,)
    assert op_rule(aten.relu_.default).keeps_shape
    assert not op_rule(aten.resize_.default).keeps_shape
    assert not op_rule(aten.unsqueeze_.default).keeps_shape
    assert op_rule(aten._native_batch_norm_legit.default).writes == (3, 4)
    assert op_rule(aten.add.out).writes == ("out",)


_CALLED_BY_NAME = ("_torch/", "files/", "latency/grid.py")  # TorchScript is interpreted; calls are measured


def _operators_named_in(path):
    """Yield the names of operators in a file: ``torch.ops.aten.add``, ``"aten.add"``, and rows of the table."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from re.findall(r"\baten\.(\w+)", ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield from re.findall(r"\baten(?:\.|::)(\w+)", node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "register" and len(node.args) > 1:
            namespace, names, *_ = node.args
            if isinstance(names, ast.Constant) and getattr(namespace, "value", "") == "aten":
                yield from names.value.split()


def test_an_operator_is_named_in_its_family_and_one_other_file():
    package = Path(modelsummary.__file__).parent
    files = {}
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if not name.startswith(_CALLED_BY_NAME):
            for operator in _operators_named_in(path):
                files.setdefault(operator.removesuffix("_"), set()).add(name)
    assert len(files) > 200
    assert {operator: names for operator, names in files.items() if len(names) > 2} == {}
