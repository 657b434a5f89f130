"""What ONNX files from the wild do that clean exports do not: each figure by hand, beside its graph."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
import torch

from modelsummary import InputError, ModelFileError, load
from modelsummary.cli.commands import run
from modelsummary.formulas.expressions import dimension
from tests.onnx_models import TensorProto, graph, helper, model, onnx, saved, value, weight

node, numpy_helper = helper.make_node, onnx.numpy_helper
INT64 = TensorProto.INT64


def constant(name, *numbers, scalar=False):
    array = np.array(numbers[0] if scalar else numbers, dtype=np.int64)
    return node("Constant", [], [name], value=numpy_helper.from_array(array))


# -------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("opset", [9, 11, 12, 13, 20])
def test_sizes_are_computed_at_the_opset_of_the_file(tmp_path, opset):
    """Halves of a dimension decide on a shape; ``Unsqueeze`` takes its axes otherwise since opset 13."""
    axes = {"axes": [0]} if opset < 13 else {}
    made = model(
        [
            node("Shape", ["x"], ["s"]), constant("one", 1, scalar=True), constant("two", 2, scalar=True),
            node("Gather", ["s", "one"], ["n"]), node("Div", ["n", "two"], ["h"]), constant("zero", 0),
            node("Unsqueeze", ["h"] if opset < 13 else ["h", "zero"], ["u"], **axes), constant("rest", -1),
            node("Concat", ["u", "rest"], ["to"], axis=0), node("Reshape", ["x", "to"], ["r"]),
            node("MatMul", ["r", "w"], ["y"]),
        ],
        [value("x", 4, 6)], [value("y", None, None)], [weight("w", 8, 5)], opset=opset,
    )  # fmt: skip
    stats = load(saved(made, tmp_path))
    assert stats.total_mult_adds == 3 * 8 * 5
    assert stats.root.output_size == [3, 5]


@pytest.mark.parametrize("open_dim", [-1, "?", None])
def test_dimensions_without_a_name_are_bound_each(tmp_path, open_dim):
    made = model([node("MatMul", ["x", "w"], ["y"])], [value("x", 1, 1, 4)], [value("y", 1, 1, 5)], [weight("w", 4, 5)])
    for each in (made.graph.input[0], made.graph.output[0]):
        for dim in each.type.tensor_type.shape.dim[:2]:
            dim.Clear()
            if isinstance(open_dim, int):
                dim.dim_value = open_dim
            elif open_dim:
                dim.dim_param = open_dim
    path = saved(made, tmp_path)
    stats = load(path, {"x": (2, 3, 4)})
    assert (stats.total_mult_adds, stats.root.output_size) == (2 * 3 * 4 * 5, [2, 3, 5])
    assert load(path).root.input_size == ["x_0", "x_1", 4]
    assert load(path).total_mult_adds_expr.subs({"x_0": 2, "x_1": 3}) == 120
    with pytest.raises(InputError, match=r"no input 'z'; it has 'x' \(x_0, x_1, 4\)"):
        load(path, {"z": (2, 3, 4)})


@pytest.mark.parametrize("op", ["Gather", "Slice", "Add", "Concat"])
def test_long_lists_of_integers(tmp_path, op):
    """More than 1,024 bytes of an initializer are left out; inference must not look for them."""
    long = helper.make_tensor("long", INT64, [200], list(range(200)))
    long = numpy_helper.from_array(numpy_helper.to_array(long), "long")  # as raw data
    calls = {
        "Gather": [node("Gather", ["long", "i"], ["a"])],
        "Slice": [constant("from", 0), constant("to", 2), node("Slice", ["long", "from", "to"], ["a"])],
        "Add": [node("Add", ["long", "i"], ["a"])],
        "Concat": [node("Concat", ["long", "i"], ["a"], axis=0)],
    }
    floats = [node("Cast", ["a"], ["f"], to=1), constant("shape", -1, 1), node("Reshape", ["f", "shape"], ["r"])]
    made = model(
        [*calls[op], *floats, node("MatMul", ["r", "w"], ["y"])],
        [value("i", 1, kind=INT64)], [value("y", None, 3)], [long, weight("w", 1, 3)],
    )  # fmt: skip
    length = {"Gather": 1, "Slice": 2, "Add": 200, "Concat": 201}[op]
    assert load(saved(made, tmp_path)).total_mult_adds == 3 * length


def test_what_files_leave_out_or_say_wrongly(tmp_path):
    made = model([node("MatMul", ["x", "w"], ["y"])], [value("x", 2, 4)], [value("y", 7, 7)], [weight("w", 4, 5)])
    stats = load(saved(made, tmp_path))
    assert (stats.total_mult_adds, stats.root.output_size) == (40, [2, 5])
    assert "the shapes that the file declares differ from the shapes that its operators make" in stats.root.note
    made = model([node("MatMul", ["x", "w"], ["y"])], [value("x", 2, 4)], [value("y", 2, 5)], [weight("w", 4, 5)])
    del made.opset_import[:]
    made.ir_version = 3  # which wants weights among the inputs
    assert load(saved(made, tmp_path)).total_mult_adds == 40
    made = model([node("MatMul", ["x", "w"], ["y"])], [value("x", 2, 3)], [value("y", 2, 5)], [weight("w", 4, 5)])
    with pytest.raises(ModelFileError, match="its shapes do not fit"):
        load(saved(made, tmp_path))


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("(((hh - 3)//2)) + 1", {"hh": 9}, 4),
        ("floor(h/2) + 1", {"h": 9}, 5),
        ("2*s0*(s1 % 4)", {"s0": 3, "s1": 6}, 12),
        ("Max(1, -a)", {"a": 5}, 1),
        ("s0**2", {"s0": 3}, 9),
    ],
)
def test_dimensions_are_formulas(text, names, expected):
    assert dimension(text).subs(names) == expected


@pytest.mark.parametrize("text", ["batch size", "9**9**9", "a/0", "__import__('os')", "x.y", "(" * 500, "unk__0"])
def test_other_dimensions_are_names(text):
    assert dimension(text) == sympy.Symbol(text)


def test_formulas_of_dimensions_in_a_file(tmp_path):
    made = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", "n", "(((hh - 3)//2)) + 1", 4)], [value("y", "n", None, 5)], [weight("w", 4, 5)],
    )  # fmt: skip
    expression = load(saved(made, tmp_path)).total_mult_adds_expr
    assert expression.subs({"n": 2, "hh": 9}) == 2 * 4 * 4 * 5


# --------------------------------------------------------------------------------- branches and values


def product(name, width, rows="x"):
    return [node("MatMul", [rows, f"w{width}"], [f"m{width}"]), node("Flatten", [f"m{width}"], [name])]


def branches(condition):
    """16000 samples a second take the wide product, others the narrow one."""
    then, other = (
        graph(product(name, width), [], [value(name, None, None)]) for name, width in (("t", 5), ("e", 3))
    )  # fmt: skip
    return model(
        [*condition, node("If", ["c"], ["y"], name="rate", then_branch=then, else_branch=other),
         node("MatMul", ["y", "v"], ["z"])],
        [value("x", 2, 4), value("sr", kind=INT64)], [value("z", None, None)],
        [weight("w5", 4, 5), weight("w3", 4, 3), weight("v", 5, 7)],
    )  # fmt: skip


def test_branches_that_values_decide(tmp_path):
    """The graph's constant is seen in the branch, and given values of inputs decide."""
    path = saved(branches([constant("k", 16000, scalar=True), node("Equal", ["sr", "k"], ["c"])]), tmp_path)
    for given in ({"sr": 16000}, {"sr": torch.tensor(16000)}):
        stats = load(path, given)
        assert (stats.total_mult_adds, stats.root.output_size) == (2 * 4 * 5 + 2 * 5 * 7, [2, 7])
        assert stats.uncounted_ops == {}
    with pytest.raises(InputError, match="its shapes do not fit"):  # the narrow product does not fit what follows
        load(path, {"sr": 8000})
    stats = load(path)
    assert stats.total_mult_adds == 40  # of the wide branch; what follows is unknown
    assert stats.uncounted_ops == {"MatMul (size unknown)": 1}
    assert "values decide which branch of 'rate' runs" in stats.root.note
    assert "the file does not say enough: MatMul (size unknown) (1x)" in str(stats)


def test_values_on_the_command_line(tmp_path, capsys):
    path = saved(branches([constant("k", 16000, scalar=True), node("Equal", ["sr", "k"], ["c"])]), tmp_path)
    assert run([str(path), "--input", "sr==16000"]) == 0
    assert "Total mult-adds: 110" in capsys.readouterr().out


def test_values_of_another_type(tmp_path):
    made = model([node("Identity", ["x"], ["y"])], [value("x", kind=TensorProto.STRING)], [value("y", kind=8)])
    with pytest.raises(InputError, match="input 'x' takes values of string, got"):
        load(saved(made, tmp_path), {"x": 3})


def loop(condition_nodes, condition, carried=("c0",)):
    body = graph(
        [*condition_nodes, node("MatMul", ["h", "w"], ["h1"])],
        [value("i", kind=INT64), value("c0", kind=TensorProto.BOOL), value("h", 2, 4)],
        [value(condition, kind=TensorProto.BOOL), value("h1", 2, 4), value("h1", 2, 4)],
    )
    return model(
        [
            node("Shape", ["x"], ["s"]), constant("one", 1, scalar=True), node("Gather", ["s", "one"], ["n"]),
            constant("two", 2, scalar=True), node("Mul", ["n", "two"], ["times"]),
            node("Loop", ["times", "", "x"], ["y", "all"], name="loop", body=body),
            node("MatMul", ["all", "w"], ["z"]),
        ],
        [value("x", 2, 4)], [value("y", 2, 4), value("z", None, None, None)], [weight("w", 4, 4)],
    )  # fmt: skip


def test_loops_with_a_computed_number_of_runs(tmp_path):
    stats = load(saved(loop([node("Identity", ["c0"], ["c1"])], "c1"), tmp_path))
    assert stats.total_mult_adds == 8 * (2 * 4 * 4) + 8 * 2 * 4 * 4
    assert stats.root.output_size == ([2, 4], [8, 2, 4])
    assert stats.uncounted_ops == {}


def test_loops_that_values_end(tmp_path):
    ends = [node("ReduceMax", ["h"], ["m"], keepdims=0), node("Cast", ["m"], ["c1"], to=TensorProto.BOOL)]
    stats = load(saved(loop(ends, "c1"), tmp_path))
    assert stats.total_mult_adds == 2 * 4 * 4  # one run
    assert stats.uncounted_ops == {"Loop (unknown number of runs)": 1, "MatMul (size unknown)": 1}
    assert "sizes are unknown from 'loop'" in stats.root.note


# --------------------------------------------------------------------------------- operators of onnxruntime

MS = "com.microsoft"
FOLLOWED = {  # operators, inputs, what is multiplied with v, multiply-adds before that
    "transposed": (
        [node("FusedMatMul", ["x", "w"], ["a"], domain=MS, transA=1, transB=1)],
        [value("x", 3, 4, 2)], (5, 4), [3, 2, 5], 3 * 2 * 4 * 5,
    ),
    "norms": (
        [node("SimplifiedLayerNormalization", ["x", "w"], ["b"]), node("LayerNormalization", ["b", "w"], ["c"]),
         node("SkipLayerNormalization", ["c", "x", "w"], ["d", "", "", "e"], domain=MS),
         node("Add", ["d", "e"], ["a"])],
        [value("x", 2, 3, 4)], (4,), [2, 3, 4], 0,
    ),
    "lstm": (
        [node("DynamicQuantizeLSTM", ["x", "w", "r"], ["a"], domain=MS, hidden_size=6, direction="bidirectional")],
        [value("x", 5, 2, 4), value("r", 2, 6, 24)], (2, 4, 24), [5, 2, 2, 6], 5 * 2 * 2 * 24 * (4 + 6),
    ),
    "blocks": (
        [node("Conv", ["x", "w"], ["b"], domain=f"{MS}.nchwc"),
         node("Upsample", ["b"], ["c"], domain=f"{MS}.nchwc", scales=[1, 1, 2, 2]),
         node("ReorderOutput", ["c"], ["a"], domain=f"{MS}.nchwc", channels=5)],
        [value("x", 1, 4, 6, 6)], (8, 4, 3, 3), [1, 5, 8, 8], 8 * 16 * 4 * 9,
    ),
    "16 bits": (
        [node("QuantizeLinear", ["x", "w"], ["q"], domain=MS), node("DequantizeLinear", ["q", "w"], ["a"], domain=MS)],
        [value("x", 2, 3, 4)], (1,), [2, 3, 4], 0,
    ),
    "rows of 4 bits": (
        [node("GatherBlockQuantized", ["t", "i", "w"], ["a"], domain=MS, block_size=16)],
        [value("t", 10, 8, kind=TensorProto.UINT8), value("i", 2, 3, kind=INT64)], (10, 1), [2, 3, 16], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_sizes_behind_operators_of_onnxruntime(tmp_path, name):
    nodes, inputs, size, made_size, before = FOLLOWED[name]
    made = model(
        [*nodes, node("MatMul", ["a", "v"], ["y"])], inputs, [helper.make_tensor_value_info("y", 1, None)],
        [weight("w", *size), weight("v", made_size[-1], 7)], domains=[MS, f"{MS}.nchwc"], opset=11,
    )  # fmt: skip
    stats = load(saved(made, tmp_path))
    assert stats.root.output_size == [*made_size[:-1], 7]
    assert stats.total_mult_adds == before + 7 * torch.Size(made_size).numel()
    assert stats.uncounted_ops == {}


def test_linear_models(tmp_path):
    """Three classes of two features each, for five samples."""
    made = helper.make_model(
        graph(
            [node("LinearClassifier", ["x"], ["y", "p"], domain="ai.onnx.ml", coefficients=[0.5] * 6,
                  intercepts=[0.0] * 3, classlabels_ints=[0, 1, 2])],
            [value("x", 5, 2)], [value("y", 5, kind=INT64), value("p", 5, 3)],
        ),
        opset_imports=[helper.make_opsetid("ai.onnx.ml", 1)],
    )  # fmt: skip
    stats = load(saved(made, tmp_path))
    assert (stats.total_mult_adds, stats.uncounted_ops) == (30, {})
