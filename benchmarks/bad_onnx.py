"""Bad ONNX files: truncated, bombs, loops, lies, and paths to elsewhere; ``bad_files.py`` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from onnx import TensorProto, helper, numpy_helper

__all__ = ["Made", "good", "info", "ints", "node", "onnx_files", "onnx_of", "scalar"]

Made = tuple[str, str, bytes]
node, info = helper.make_node, helper.make_tensor_value_info


def onnx_of(
    nodes: list[Any],
    weights: list[Any] = [],  # noqa: B006
    *,
    inputs: Any = None,
    outputs: Any = None,
    opset: int = 18,
    **rest: Any,
) -> Any:
    last = nodes[-1].output[0] if nodes[-1].output else ""
    made = helper.make_graph(nodes, "g", inputs or [info("x", 1, [2, 3])], outputs or [info(last, 1, None)], weights)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9, **rest)


def ints(name: str, *numbers: int) -> Any:
    return helper.make_tensor(name, TensorProto.INT64, [len(numbers)], list(numbers))


def scalar(name: str, number: int) -> Any:
    return helper.make_tensor(name, TensorProto.INT64, [], [number])


def good() -> Any:
    weight = numpy_helper.from_array(torch.rand(3, 4).numpy(), "w")
    return onnx_of([node("MatMul", ["x", "w"], ["m"], name="m"), node("Relu", ["m"], ["y"])], [weight])


def onnx_files() -> Iterator[Made]:
    yield from truncated()
    yield from lies()
    yield from paths_to_elsewhere()
    yield from texts()
    yield from bombs()
    yield from nested()
    yield from many()


def truncated() -> Iterator[Made]:
    data = good().SerializeToString()
    for part in range(0, len(data), 8):
        yield f"cut at {part}", ".onnx", data[:part]
    for size in (1, 1000, 10**6, 20 * 10**6):
        yield f"{size} zeros", ".onnx", bytes(size)
        yield f"{size} ones", ".onnx", b"\xff" * size
    yield "twenty million empty nodes", ".onnx", b"\x3a\xd4\xc3\xb0\x09" + b"\x0a\x00" * 10_000_010
    yield "groups in groups", ".onnx", b"\x0b" * 100_000
    yield "messages in messages", ".onnx", b"\x3a\x7f" * 100_000


def lies() -> Iterator[Made]:
    for bad in (-1, 2**31, 2**62, -(2**63)):
        proto = good()
        proto.graph.initializer[0].dims[0] = bad
        yield f"a weight of {bad} rows", ".onnx", proto.SerializeToString()
        proto = good()
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = bad
        yield f"an input of {bad} rows", ".onnx", proto.SerializeToString()
        proto = good()
        proto.opset_import[0].version = bad
        yield f"opset {bad}", ".onnx", proto.SerializeToString()
        proto = good()
        proto.ir_version = bad
        yield f"ir version {bad}", ".onnx", proto.SerializeToString()


def paths_to_elsewhere() -> Iterator[Made]:
    for place in (
        "../secret",
        "/etc/passwd",
        "a/../../secret",
        "\0",
        "x" * 5000,
        "~/.bashrc",
        ".",
        "",
        "link",
        "\x1b[31m",
    ):
        proto = good()
        weight = proto.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=place)
        yield f"weights at {place[:20]!r}", ".onnx", proto.SerializeToString()
        weight.external_data.add(key="offset", value="99999999999999999999")
        weight.external_data.add(key="length", value="-1")
        yield f"weights at an offset of {place[:20]!r}", ".onnx", proto.SerializeToString()


def texts() -> Iterator[Made]:
    for name in ("\x1b[2J\x1b[31m", "\u202eabc", "a\nb\r", "n" * 10**6, "\x07" * 100):
        proto = good()
        proto.graph.node[0].name = proto.graph.node[0].output[0] = proto.graph.node[1].input[0] = name
        yield f"the name {name[:10]!r}", ".onnx", proto.SerializeToString()
        proto.graph.node[1].input[0] = name + "?"
        yield f"the missing name {name[:10]!r}", ".onnx", proto.SerializeToString()
        proto = good()
        proto.graph.node[0].op_type = name
        yield f"the operator {name[:10]!r}", ".onnx", proto.SerializeToString()
    for text in (
        "9**9**9**9",
        "(" * 90 + "n" + ")" * 90,
        "n/0",
        "1//0",
        "__import__('os').getpid()",
        "-" * 250 + "n",
        "n**4" * 50,
        "max(n," * 40 + "n" + ")" * 40,
        "max(" + ",".join(f"n{number}" for number in range(70)) + ")",
        "floor(" * 40 + "n/2" + ")" * 40,
        "((n+m)**4)**4",
        "%".join("abcdefghijklmnopqrstuvwxyz" * 5),
    ):
        proto = good()
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
        yield f"the dimension {text[:20]}", ".onnx", proto.SerializeToString()


def bombs() -> Iterator[Made]:
    huge = 2**40
    operators = {
        "Range": (["a", "b", "c"], [scalar("a", 0), scalar("b", huge), scalar("c", 1)]),
        "ConstantOfShape": (["a"], [ints("a", huge, huge)]),
        "Expand": (["x", "a"], [ints("a", huge, 2, 3)]),
        "Tile": (["x", "a"], [ints("a", huge, huge)]),
        "Reshape": (["x", "a"], [ints("a", -1, -1)]),
        "Pad": (["x", "a"], [ints("a", huge, huge, huge, huge)]),
        "Pow": (["a", "b"], [ints("a", 9), ints("b", huge)]),
        "OneHot": (["a", "b", "c"], [ints("a", 1), scalar("b", huge), ints("c", 0, 1)]),
        "Resize": (["x", "", "", "a"], [ints("a", huge, huge)]),
        "TopK": (["x", "a"], [ints("a", huge)]),
        "Slice": (["x", "a", "b"], [ints("a", -huge, -huge), ints("b", huge, huge)]),
        "Squeeze": (["x", "a"], [ints("a", huge)]),
        "Split": (["x", "a"], [ints("a", huge, -huge)]),
        "Gather": (["x", "a"], [ints("a", huge)]),
        "Einsum": (["x"] * 3, []),
    }
    for op, (inputs, weights) in operators.items():
        facts = {"equation": "ij,kl,mn->ijklmn"} if op == "Einsum" else {}
        made = onnx_of([node(op, inputs, ["b"], **facts), node("Identity", ["b"], ["y"])], weights)
        yield f"a bomb of {op}", ".onnx", made.SerializeToString()
    doubling = [node("Concat", [f"a{n}", f"a{n}"], [f"a{n + 1}"], axis=0) for n in range(60)]
    yield "doubled 60 times", ".onnx", onnx_of(doubling, [ints("a0", 1)]).SerializeToString()
    powers = [node("Mul", [f"a{n}", f"a{n}"], [f"a{n + 1}"]) for n in range(60)]
    yield "squared 60 times", ".onnx", onnx_of(powers, [ints("a0", 9)]).SerializeToString()
    grown = [node("Concat", [f"x{n}"] * 2, [f"x{n + 1}"], axis=0) for n in range(1, 70)]
    yield "a tensor of 2**70", ".onnx", onnx_of([node("Relu", ["x"], ["x1"]), *grown]).SerializeToString()
    chain = [node("Relu", ["x" if not n else f"r{n}"], [f"r{n + 1}"]) for n in range(5_000)]
    yield "a chain of 5,000", ".onnx", onnx_of(chain).SerializeToString()
    yield "a node of 100,000 inputs", ".onnx", onnx_of([node("Max", ["x"] * 100_000, ["y"])]).SerializeToString()
    yield "a cycle", ".onnx", onnx_of([node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"])]).SerializeToString()


def nested() -> Iterator[Made]:
    for times in (2**62, -1, 0):
        body = helper.make_graph(
            [node("Identity", ["c"], ["d"]), node("MatMul", ["h", "h"], ["k"])], "b",
            [info("i", 7, []), info("c", 9, []), info("h", 1, [3, 3])], [info("d", 9, []), info("k", 1, [3, 3])],
        )  # fmt: skip
        loop = [node("MatMul", ["t", "x"], ["s"]), node("Loop", ["n", "", "s"], ["y"], body=body)]
        weights = [scalar("n", times), numpy_helper.from_array(torch.rand(3, 2).numpy(), "t")]
        yield f"a loop of {times}", ".onnx", onnx_of(loop, weights).SerializeToString()
    inner = helper.make_graph([node("Relu", ["x"], ["z0"])], "i", [], [info("z0", 1, None)])
    for depth in range(1, 21):
        branch = node("If", ["q"], [f"z{depth}"], then_branch=inner, else_branch=inner if depth < 12 else None)
        inner = helper.make_graph([branch], "i", [], [info(f"z{depth}", 1, None)])
        if depth in (8, 11, 20):
            proto = onnx_of([node("If", ["q"], ["y"], then_branch=inner)])
            proto.graph.input.append(info("q", 9, []))
            yield f"branches {depth} deep", ".onnx", proto.SerializeToString()
    body = helper.make_graph(
        [node("Identity", ["c"], ["d"]), node("Relu", ["h"], ["k0"])], "b",
        [info("i", 7, []), info("c", 9, []), info("h", 1, None)], [info("d", 9, []), info("k0", 1, None)],
    )  # fmt: skip
    for depth in range(1, 14):
        body = helper.make_graph(
            [node("Identity", ["c"], ["d"]), node("Loop", ["n", "", "h"], [f"k{depth}"], body=body)], "b",
            [info("i", 7, []), info("c", 9, []), info("h", 1, None)], [info("d", 9, []), info(f"k{depth}", 1, None)],
        )  # fmt: skip
    yield (
        "loops in loops",
        ".onnx",
        onnx_of([node("Loop", ["n", "", "x"], ["y"], body=body)], [scalar("n", 99)]).SerializeToString(),
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    for name, calls in {
        "itself": [[0]],
        "in a circle": [[1], [0]],
        "2**64 times": [[n + 1] * 2 for n in range(64)],
    }.items():
        functions = []
        for place, called in enumerate(calls):
            nodes = [node(f"F{each}", ["a"], ["b"], domain="f") for each in called][:1]
            nodes += [node(f"F{each}", ["b"], ["c"], domain="f") for each in called[1:]]
            functions.append(helper.make_function("f", f"F{place}", ["a"], [nodes[-1].output[0]], nodes, opsets))
        made = onnx_of([node("F0", ["x"], ["y"], domain="f")], functions=functions)
        made.opset_import.add(domain="f", version=1)
        yield f"a function that calls {name}", ".onnx", made.SerializeToString()


def many() -> Iterator[Made]:
    """Few bytes that stand for many things, or many things in one place."""
    proto = good()
    proto.graph.initializer[0].dims.extend([1] * 100_000)
    yield "a weight of 100,000 dimensions", ".onnx", proto.SerializeToString()
    proto = good()
    for _ in range(50_000):
        proto.graph.input[0].type.tensor_type.shape.dim.add(dim_value=1)
    yield "an input of 50,000 dimensions", ".onnx", proto.SerializeToString()
    proto = good()
    for _ in range(20_000):
        proto.graph.input[0].type.tensor_type.shape.dim.add()
    yield "an input of 20,000 open dimensions", ".onnx", proto.SerializeToString()
    equation = ",".join(["ij"] * 3_000) + "->ij"
    product = node("Einsum", ["x"] * 3_000, ["y"], equation=equation)
    yield "a product of 3,000 operands", ".onnx", onnx_of([product]).SerializeToString()
    product = node("Einsum", ["x"], ["y"], equation="i" * 1_000_000)
    yield "a product with a million indices", ".onnx", onnx_of([product]).SerializeToString()
    weights = [helper.make_tensor(f"w{number}", 1, [1, 1], [1.0]) for number in range(30_000)]
    yield "30,000 weights", ".onnx", onnx_of([node("Relu", ["x"], ["y"])], weights).SerializeToString()
    values = torch.rand(20, 20).numpy()
    for names in ("w{0}", "onnx::MatMul_{0}"):
        weights = [numpy_helper.from_array(values, names.format(number)) for number in range(9_000)]
        weights.append(numpy_helper.from_array(values.T.copy(), "onnx::MatMul_99999"))
        weights.append(numpy_helper.from_array(values, "words"))
        made = onnx_of([node("Relu", ["x"], ["y"])], weights).SerializeToString()
        yield f"9,000 equal weights {names[:6]}", ".onnx", made
    proto = onnx_of([node("Relu", ["x"], ["y"])])
    for number in range(9_000):  # overlapping parts of one file: the model itself
        weight = proto.graph.initializer.add(name=f"onnx::MatMul_{number}", data_type=2, dims=[300, 1000])
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="file.onnx")
        weight.external_data.add(key="offset", value=str(number % 7))
    proto.graph.initializer.add().CopyFrom(proto.graph.initializer[0])
    proto.graph.initializer[-1].name = "words"
    yield "9,000 weights in one place", ".onnx", proto.SerializeToString()
    yield (
        "a node of 50,000 results",
        ".onnx",
        onnx_of([node("Split", ["x"], [f"y{n}" for n in range(50_000)])]).SerializeToString(),
    )
    listed = node("Constant", [], ["c"], value_ints=list(range(500_000)))
    yield (
        "a list of 500,000 numbers",
        ".onnx",
        onnx_of([listed, node("Reshape", ["x", "c"], ["y"])]).SerializeToString(),
    )
    for numbers in ([2**62] * 16, [-(2**63)], [0] * 3, [3, -5]):
        made = onnx_of([node("Reshape", ["x", "s"], ["r"]), node("Relu", ["r"], ["y"])], [ints("s", *numbers)])
        yield f"a shape of {numbers[:2]}", ".onnx", made.SerializeToString()
    relu = node("Relu", ["x"], ["y"], name="/a.b" * 50_000)
    yield "a name of 50,000 parts", ".onnx", onnx_of([relu]).SerializeToString()
    relu = node("Relu", ["x"], ["y"])
    relu.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="[" * 4_000)
    yield "open brackets", ".onnx", onnx_of([relu]).SerializeToString()
    proto = good()
    kind = proto.graph.output[0].type
    for _ in range(80):
        kind = kind.sequence_type.elem_type
    yield "sequences in sequences", ".onnx", proto.SerializeToString()
