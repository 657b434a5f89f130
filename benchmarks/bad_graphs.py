# ruff: noqa: E501, PLR0915, B007 - a line for each bad file
"""More bad ONNX files: calls of C++ that end the process, growth, depth, and lies; ``bad_files.py`` reads them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from bad_onnx import Made, good, info, ints, node, onnx_of, scalar
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TypeProto, defs, helper

__all__ = ["graph_files"]

HUGE = (-1, 0, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))


def graph_files() -> Iterator[Made]:
    for name, model in (
        *sizes(),
        *deep(),
        *calls(),
        *wide(),
        *values(),
        *lies(),
        *contrib(),
        *sparse(),
        *functions(),
        *random_calls(),
    ):
        yield name, ".onnx", model if isinstance(model, bytes) else model.SerializeToString()
    yield from wires()


def sizes() -> Iterator[tuple[str, Any]]:
    """Shapes that a size or a list of sizes makes long or huge."""
    for number in HUGE:
        proto = onnx_of([node("ConstantOfShape", ["s"], ["y"])])
        proto.graph.input.append(info("s", 7, [number]))
        yield f"a shape of {number} numbers", proto
        yield f"a range to {number}", onnx_of([node("Range", ["a", "b", "c"], ["y"])],
            [scalar("a", 0), scalar("b", number), scalar("c", 1 if number > 0 else -1)])  # fmt: skip
        yield f"pads of {number}", onnx_of([node("Pad", ["x", "p"], ["y"])], [ints("p", number, number, 1, number)])
        yield f"split into {number}", onnx_of([node("Split", ["x"], ["y", "z"], num_outputs=number, axis=1)])
        yield f"axis {number}", onnx_of([node("Concat", ["x", "x"], ["y"], axis=number)])
        yield f"flattened at {number}", onnx_of([node("Flatten", ["x"], ["y"], axis=number)])
        yield f"permuted by {number}", onnx_of([node("Transpose", ["x"], ["y"], perm=[number, 0])])
        yield f"a stride of {number}", onnx_of([node("MaxPool", ["x4"], ["y"], kernel_shape=[2, 2],
            strides=[number, 1], dilations=[number, 1], pads=[number] * 4),], inputs=[info("x4", 1, [1, 3, 8, 8])])  # fmt: skip
        proto = onnx_of([node("Relu", ["q"], ["y"])])
        proto.graph.input.append(info("q", 1, [number] * 8))
        yield f"eight dimensions of {number}", proto
        yield f"a group of {number}", onnx_of([node("Conv", ["x4", "w"], ["y"], group=number, kernel_shape=[3, 3])],
            [], inputs=[info("x4", 1, [1, 3, 8, 8]), info("w", 1, [4, 3, 3, 3])])  # fmt: skip
        yield f"eye of {number}", onnx_of([node("EyeLike", ["x"], ["y"], k=number, dtype=number & 0xFFFF)])
        yield f"hidden {number}", onnx_of([node("LSTM", ["x3", "w", "r"], ["y"], hidden_size=number)], [],
            inputs=[info("x3", 1, [2, 1, 4]), info("w", 1, [1, 32, 4]), info("r", 1, [1, 32, 8])])  # fmt: skip
        yield f"blocks of {number}", onnx_of([node("DepthToSpace", ["x4"], ["y"], blocksize=number)],
            inputs=[info("x4", 1, [1, 4, 8, 8])])  # fmt: skip
    for scale in (float("inf"), float("nan"), -1.0, 1e300, 0.0):
        scales = helper.make_tensor("s", TensorProto.FLOAT, [2], [min(scale, 3e38), 1.0])
        yield f"resized by {scale}", onnx_of([node("Resize", ["x", "", "s"], ["y"])], [scales])
        yield f"upsampled by {scale}", onnx_of([node("Upsample", ["x", "s"], ["y"])], [scales], opset=9)
    for equation in ("", "->", ",,,,", "...->...", "ij->" + "i" * 100_000, "a" * 60 + "->", "ij,jk->zz", "é,ß->é"):
        yield f"the equation {equation[:9]!r}", onnx_of([node("Einsum", ["x"], ["y"], equation=equation)])


def deep() -> Iterator[tuple[str, Any]]:
    """Graphs in graphs, functions in functions, types in types."""
    for depth in (18, 24, 28):
        inner = helper.make_graph([node("Relu", ["x"], ["z0"])], "i", [], [info("z0", 1, None)])
        for number in range(1, depth):
            branch = node("If", ["q"], [f"z{number}"], then_branch=inner)
            inner = helper.make_graph([branch], "i", [], [info(f"z{number}", 1, None)])
        proto = onnx_of([node("If", ["q"], ["y"], then_branch=inner)])
        proto.graph.input.append(info("q", 9, []))
        yield f"branches {depth} deep", proto
    inner = helper.make_graph([node("Relu", ["x"], ["z0"])], "i", [], [info("z0", 1, None)])
    for number in range(1, 12):  # 2 ** 12 graphs
        inner = helper.make_graph([node("If", ["q"], [f"z{number}"], then_branch=inner, else_branch=inner)], "i", [],
            [info(f"z{number}", 1, None)])  # fmt: skip
    proto = onnx_of([node("If", ["q"], ["y"], then_branch=inner)])
    proto.graph.input.append(info("q", 9, []))
    yield "two branches 12 deep", proto
    for op, times in (("Loop", 2**40), ("Loop", 3), ("Scan", 1)):
        body = None
        for number in range(14):
            step = node("Relu", ["h"], ["k"]) if body is None else _loop(op, body, times, number)
            body = helper.make_graph([node("Identity", ["c"], ["d"]), step], "b",
                [info("i", 7, []), info("c", 9, []), info("h", 1, None)], [info("d", 9, []), info("k", 1, None)])  # fmt: skip
        assert body is not None
        yield f"{op} 14 deep of {times}", onnx_of([node(op, ["n", "", "x"], ["y"], body=body)], [scalar("n", times)])
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    for fan, depth in ((2, 40), (10, 6), (100, 3), (1, 70), (1, 1000)):
        functions = []
        for number in range(depth):
            calls = [node(f"F{number + 1}" if number + 1 < depth else "Relu", ["a"], [f"b{k}"],
                          domain="f" if number + 1 < depth else "") for k in range(fan)]  # fmt: skip
            functions.append(helper.make_function("f", f"F{number}", ["a"], ["b0"], calls, domains))
        yield f"{fan} calls in each of {depth} functions", _with_functions(functions)
    body = helper.make_graph([node("F0", ["a"], ["z"], domain="f")], "b", [], [info("z", 1, None)])
    inside = helper.make_function("f", "F0", ["a"], ["b"], [node("If", ["a"], ["b"], then_branch=body)], domains)
    yield "a function in its own branch", _with_functions([inside])
    functions = []
    for number in range(60):
        called = node(f"F{number + 1}", ["a"], ["z"], domain="f") if number < 59 else node("Relu", ["a"], ["z"])
        body = helper.make_graph([called], "b", [], [info("z", 1, None)])
        functions.append(helper.make_function("f", f"F{number}", ["a"], ["b"],
            [node("If", ["a"], ["b"], then_branch=body)], domains))  # fmt: skip
    yield "functions in branches 60 deep", _with_functions(functions)
    same = helper.make_function("f", "F0", ["a"], ["b"], [node("Relu", ["a"], ["b"])], domains)
    yield "a function twice", _with_functions([same, same])
    yield (
        "a function named Relu",
        _with_functions([helper.make_function("", "Relu", ["a"], ["b"], [node("Relu", ["a"], ["b"])], domains)]),
    )
    for kind in ("sequence_type", "optional_type"):
        proto = good()
        element = proto.graph.input[0].type
        for _ in range(40):
            element = getattr(element, kind).elem_type
        yield f"40 times {kind}", proto
        proto = onnx_of([node("SequenceConstruct" if "seq" in kind else "Optional",
                              ["x" if not k else f"s{k}"], [f"s{k + 1}"]) for k in range(300)])  # fmt: skip
        yield f"300 times {kind} by operators", proto


def _loop(op: str, body: Any, times: int, number: int) -> Any:
    if op == "Loop":
        return node("Loop", ["n", "", "h"], ["k"], body=body, name=f"l{number}")
    return node("Scan", ["h"], ["k"], body=body, num_scan_inputs=times, name=f"s{number}")


def _with_functions(functions: Any) -> Any:
    made = onnx_of([node("F0", ["x"], ["y"], domain="f")], functions=functions)
    made.opset_import.add(domain="f", version=1)
    return made


def calls() -> Iterator[tuple[str, Any]]:
    """Calls that end a process in the shape inference of onnx."""
    yield "a regex without a pattern", onnx_of([node("RegexFullMatch", ["t"], ["y"])], opset=20,
        inputs=[info("t", 8, [2])])  # fmt: skip
    for attribute in ("pattern",):
        yield "a regex of a number", onnx_of([node("RegexFullMatch", ["t"], ["y"], **{attribute: 3})], opset=20,
            inputs=[info("t", 8, [2])])  # fmt: skip
    for op, domain in (
        ("TreeEnsemble", "ai.onnx.ml"),
        ("LabelEncoder", "ai.onnx.ml"),
        ("DictVectorizer", "ai.onnx.ml"),
    ):
        for count in (0, 1, 3):
            made = onnx_of([node(op, ["x"] * count, ["y"] * min(count, 1), domain=domain)])
            made.opset_import.add(domain=domain, version=5)
            if not made.graph.output[0].name:
                made.graph.output[0].name = "x"
            yield f"{op} of {count}", made
    for rank in (0, 1, 8):
        yield f"a norm of rank {rank}", onnx_of([node("LayerNormalization", ["v", "v", "v"], ["y", "a", "b"],
            axis=-rank - 3)], inputs=[info("v", 1, [2] * rank)])  # fmt: skip
        yield f"gathered {rank}", onnx_of([node("GatherND", ["x", "v"], ["y"], batch_dims=2**40)],
            inputs=[info("x", 1, [2, 3]), info("v", 7, [2] * rank)])  # fmt: skip
        yield f"sliced {rank}", onnx_of([node("Slice", ["x", "a", "b", "c", "d"], ["y"])],
            [ints("a", *[-(2**63)] * rank), ints("b", *[2**63 - 1] * rank), ints("c", *[0] * rank),
             ints("d", *[-(2**63)] * rank)])  # fmt: skip


def wide() -> Iterator[tuple[str, Any]]:
    chain = [node("Relu", [f"r{n}" if n else "x"], [f"r{n + 1}"]) for n in range(30_000)]
    yield "30,000 operators", onnx_of(chain)
    for count in (300_000, 1_000_000):
        data = bytearray()
        for n in range(count):
            head, tail = (b"x" if not n else b"%x" % n), b"%x" % (n + 1)
            one = b"\x0a" + bytes([len(head)]) + head + b"\x12" + bytes([len(tail)]) + tail + b"\x22\x04Relu"
            data += b"\x0a" + bytes([len(one)]) + one
        yield f"{count} operators", _graph_bytes(bytes(data))
    yield "a node of 50,000 attributes", onnx_of([node("Relu", ["x"], ["y"], **{f"a{n}": n for n in range(50_000)})])
    yield "5,000 operators that read 2,000 others", _reads(5_000, 2_000)
    proto = good()
    for n in range(40_000):
        proto.graph.value_info.append(info(f"v{n}", 1, ["n", "m", n]))
    yield "40,000 declared values", proto
    proto = good()
    proto.opset_import.extend([helper.make_opsetid(f"d{n}", 1) for n in range(50_000)])
    yield "50,000 imported domains", proto
    proto = good()
    for n in range(100_000):
        proto.metadata_props.add(key=f"k{n}", value="v")
    yield "100,000 facts", proto
    proto = good()
    for n in range(20_000):
        proto.graph.input.append(info(f"i{n}", 1, [f"n{n}", 3]))
    yield "20,000 open inputs", proto
    proto = onnx_of([node("Add", ["x", "q"], ["y"], name="/a" * 60) for _ in range(1)])
    proto.graph.input.append(info("q", 1, ["+".join(f"n{k}" for k in range(90)), 3]))
    yield "a sum of 90 sizes", proto
    chain = [node("Add", [f"r{n}" if n else "x"] * 2, [f"r{n + 1}"], name="/m" * 50 + f"/b{n}") for n in range(3_000)]
    yield "3,000 operators 50 modules deep", onnx_of(chain)
    for count in (1_000, 7_000):  # few bytes that stand for many rows
        chain = [node("Relu", [f"r{n}" if n else "x"], [f"r{n + 1}"], name=f"/{n:x}" + "/a" * 60) for n in range(count)]
        yield f"{count} operators in 60 modules of their own", onnx_of(chain)
    chain = [
        node("Relu", [f"r{n}" if n else "x"], [f"r{n + 1}"], name=f"/{'ab'[n % 2]}" * 63 + f"/{n}")
        for n in range(5_000)
    ]
    yield "5,000 operators that take turns in two chains of modules", onnx_of(chain)
    listed = [node("Relu", [f"r{n}" if n else "x"], [f"r{n + 1}"]) for n in range(400)]
    for n, each in enumerate(listed):
        each.metadata_props.add(
            key="pkg.torch.onnx.name_scopes", value=str([f"{n:x}.{k}" for k in range(400)]).replace(" ", "")
        )
    yield "400 operators with 400 modules in their metadata", onnx_of(listed)
    chain = [
        node("Relu", [f"r{n}" if n else "x"], [f"r{n + 1}"], name=("/" + "n" * 15_000) * 62 + f"/{n}") for n in range(8)
    ]
    yield "names of a megabyte", onnx_of(chain)
    chain = [node("Relu", [f"r{n}" if n else "x"], [f"r{n + 1}"], name="same") for n in range(20_000)]
    yield "20,000 operators of one name", onnx_of(chain)
    names = [node("Relu", ["x"], [f"r{n}"], name="same" if n % 2 else f"same_{n}") for n in range(20_000)]
    yield "20,000 operators of colliding names", onnx_of(names)


def _reads(count: int, others: int) -> Any:
    nodes = [node("Relu", ["x"], [f"r{n}"]) for n in range(others)]
    inputs = [f"r{n}" for n in range(others)]
    return onnx_of([*nodes, *(node("Sum", inputs[: 200 if n else others], [f"s{n}"]) for n in range(count))])


def _graph_bytes(content: bytes) -> bytes:
    graph = content + b"\x12\x01g"
    return b"\x08\x09\x3a" + _varint(len(graph)) + graph + b"\x42\x02\x10\x12"


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def values() -> Iterator[tuple[str, Any]]:
    """Small values that are computed."""
    for op in ("Pow", "Mul", "Add", "Mod", "Div", "Sub"):
        chain = [node(op, [f"a{n}", f"a{n}"], [f"a{n + 1}"]) for n in range(300)]
        yield f"300 times {op}", onnx_of([*chain, node("Expand", ["x", "a300"], ["y"])], [ints("a0", 2**62, 3)])
    for kind, value in ((TensorProto.DOUBLE, 1e308), (TensorProto.FLOAT, float("nan")), (TensorProto.FLOAT16, 7.0)):
        base = helper.make_tensor("a", kind, [1], [value])
        yield (
            f"a cast of {value}",
            onnx_of([node("Cast", ["a"], ["b"], to=7), node("Reshape", ["x", "b"], ["y"])], [base]),
        )
        yield f"powers of {value}", onnx_of([node("Pow", ["a", "a"], ["b"]), node("Cast", ["b"], ["c"], to=7),
            node("ConstantOfShape", ["c"], ["y"])], [base])  # fmt: skip
    doubling = [node("Concat", [f"a{n}"] * 50, [f"a{n + 1}"], axis=0) for n in range(8)]
    yield "concatenated 50 ** 8 times", onnx_of([*doubling, node("Reshape", ["x", "a8"], ["y"])], [ints("a0", 1)])
    tiles = [node("Tile", [f"a{n}", "t"], [f"a{n + 1}"]) for n in range(12)]
    yield "tiled 12 times", onnx_of([*tiles, node("ConstantOfShape", ["a12"], ["y"])], [ints("a0", 2), ints("t", 9)])
    expanded = [node("Expand", ["a", "s"], ["e"]), node("ConstantOfShape", ["e"], ["y"])]
    yield "a shape of a million sizes", onnx_of(expanded, [ints("a", 1), ints("s", 10**6)])
    ranged = [node("Range", ["a", "b", "c"], ["e"]), node("ConstantOfShape", ["e"], ["y"])]
    yield "a shape of a range", onnx_of(ranged, [scalar("a", 0), scalar("b", 1000), scalar("c", 1)])
    stacked = [node("Unsqueeze", [f"r{n}" if n else "x", "u"], [f"r{n + 1}"]) for n in range(2000)]
    yield "2,000 dimensions by operators", onnx_of(stacked, [ints("u", 0)])
    unsqueezed = node("Unsqueeze", ["x", "u"], ["y"])
    yield "100,000 dimensions by one operator", onnx_of([unsqueezed], [ints("u", *range(100_000))])
    reshaped = node("Reshape", ["x", "u"], ["y"])
    yield "a shape of 100,000 ones", onnx_of([reshaped], [ints("u", *[1] * 100_000)])
    listed = node("Constant", [], ["c"], value_strings=[b"\xff\x1b[31m"] * 1000)
    yield "a constant of texts", onnx_of([listed, node("Identity", ["c"], ["y"])])
    scattered = [node("ScatterND", ["a", "i", "v"], ["b"]), node("Reshape", ["x", "b"], ["y"])]
    yield (
        "scattered far away",
        onnx_of(scattered, [ints("a", 1, 2), helper.make_tensor("i", 7, [1, 1], [2**62]), ints("v", 3)]),
    )
    loop = helper.make_graph([node("Identity", ["c"], ["d"]), node("Concat", ["h", "h"], ["k"], axis=0)], "b",
        [info("i", 7, []), info("c", 9, []), info("h", 7, None)], [info("d", 9, []), info("k", 7, None)])  # fmt: skip
    yield (
        "a list doubled in a loop",
        onnx_of(
            [node("Loop", ["n", "", "a"], ["e"], body=loop), node("Reshape", ["x", "e"], ["y"])],
            [scalar("n", 60), ints("a", 1)],
        ),
    )


def lies() -> Iterator[tuple[str, Any]]:
    for kind in (0, 8, 16, 17, 22, 99, -1):
        proto = good()
        proto.graph.initializer[0].data_type = kind
        yield f"a weight of type {kind}", proto
        proto = good()
        proto.graph.input[0].type.tensor_type.elem_type = kind
        yield f"an input of type {kind}", proto
    texts = helper.make_tensor("t", TensorProto.STRING, [3], [b"\xff\xfe", b"\x1b[31m", b""])
    yield "a weight of texts", onnx_of([node("Identity", ["t"], ["y"])], [texts])
    for dims in ([2**62, 2**62], [-1, 3], [2], [2] * 300):
        proto = good()
        sparse = proto.graph.sparse_initializer.add()
        sparse.values.CopyFrom(helper.make_tensor("sp", 1, [2], [1.0, 2.0]))
        sparse.indices.CopyFrom(helper.make_tensor("", 7, [2], [0, 2**62]))
        sparse.dims.extend(dims)
        yield f"a sparse weight of {dims[:2]}", proto
    proto = good()
    proto.graph.initializer.add().CopyFrom(proto.graph.initializer[0])
    yield "a weight twice", proto
    proto = good()
    proto.graph.node[0].output[0] = "x"
    yield "a result named as the input", proto
    proto = good()
    proto.graph.node[0].input[0] = proto.graph.node[0].output[0]
    yield "an operator that reads itself", proto
    proto = good()
    proto.ir_version, proto.opset_import[0].version = -5, -(2**63)
    yield "a negative version", proto
    proto = good()
    proto.opset_import[0].version = 2**63 - 1
    yield "a version of 2**63", proto
    proto = good()
    del proto.opset_import[:]
    yield "no version", proto
    for number in range(12):
        proto = good()
        attribute = proto.graph.node[0].attribute.add(name="kernel_shape", type=number)
        attribute.ref_attr_name = "kernel_shape"
        yield f"a reference of type {number} outside of functions", proto
    proto = onnx_of([node("If", ["q"], ["y"])])
    proto.graph.input.append(info("q", 9, []))
    yield "an If without branches", proto
    yield "a Loop without a body", onnx_of([node("Loop", [], ["y"])])
    yield "a Scan without inputs", onnx_of([node("Scan", [], ["y"], num_scan_inputs=2**40)])
    yield "no operators", onnx_of([node("Relu", ["x"], ["y"])], outputs=[info("x", 1, [2, 3])])
    proto = ModelProto()
    proto.graph.CopyFrom(GraphProto())
    yield "an empty graph", proto
    for place, length in (("file.onnx", 48), ("./file.onnx", 2**62), ("pipe", 48), ("link", 48), ("%00", 48),
                          ("zero", 48), ("a" * 5000, 48), ("nested/../../secret", 48), ("", 48), (".", 48)):  # fmt: skip
        proto = good()
        weight = proto.graph.initializer[0]
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=place)
        weight.external_data.add(key="length", value=str(length))
        weight.external_data.add(key="offset", value="9" * 5000 if length > 48 else "0")
        yield f"weights at {place[:20]!r} of {length}", proto
    proto = good()
    kind = TypeProto()
    kind.map_type.key_type = 7
    kind.map_type.value_type.CopyFrom(proto.graph.input[0].type)
    proto.graph.input[0].type.CopyFrom(kind)
    yield "an input of a map", proto
    relu = node("Relu", ["x"], ["y"])
    attribute = relu.attribute.add(name="body", type=AttributeProto.GRAPH)
    attribute.g.CopyFrom(good().graph)
    yield "a Relu with a graph", onnx_of([relu])


def contrib() -> Iterator[tuple[str, Any]]:
    """Operators of onnxruntime with attributes that make sizes negative, huge or zero."""
    x3 = [info("x", 1, [2, 8, 12])]
    for number in HUGE:
        for op, names, facts in (
            ("MatMulNBits", ["x", "w", "s"], {"N": number, "K": 12, "bits": 4, "block_size": 16}),
            ("GroupQueryAttention", ["x"], {"num_heads": number, "kv_num_heads": 1}),
            ("GroupQueryAttention", ["x"], {"num_heads": 2, "kv_num_heads": number}),
            ("Attention", ["x", "w"], {"num_heads": number, "qkv_hidden_sizes": [number, 1, number]}),
            ("Attention", ["x", "w"], {"num_heads": 2, "qkv_hidden_sizes": [1]}),
            ("DynamicQuantizeLSTM", ["x", "w", "w"], {"hidden_size": number}),
            ("MoE", ["x", "x", "w", "", "w"], {"k": number}),
        ):
            weights = [helper.make_tensor("w", 1, [12, 36], [0.0] * 432), helper.make_tensor("s", 1, [1], [1.0])]
            made = onnx_of([node(op, names, ["y"], domain="com.microsoft", **facts)], weights, inputs=x3)
            made.opset_import.add(domain="com.microsoft", version=1)
            yield f"{op} of {facts}"[:60], made
        for op, facts in (("ReorderOutput", {"channels": number}), ("Upsample", {"scales": [number] * 4})):
            made = onnx_of(
                [node(op, ["x"], ["y"], domain="com.microsoft.nchwc", **facts)], inputs=[info("x", 1, [1, 8, 4, 4])]
            )
            yield f"nchwc {op} of {number}", made
        yield f"a classifier of {number} targets", onnx_of(
            [node("LinearRegressor", ["x"], ["y"], domain="ai.onnx.ml", targets=number, coefficients=[1.0])])  # fmt: skip


def sparse() -> Iterator[tuple[str, Any]]:
    """Sparse weights and constants, texts as weights, and external data in odd places."""
    for dims in ([2**62, 2**62], [-1, 3], [2**40, 2**24], []):
        tensor = helper.make_sparse_tensor(
            helper.make_tensor("v", 1, [2], [1.0, 2.0]), helper.make_tensor("i", 7, [2, 1], [-(2**62), 2**62]), dims)  # fmt: skip
        yield (
            f"a sparse constant of {dims}",
            onnx_of([node("Constant", [], ["c"], sparse_value=tensor), node("Relu", ["c"], ["y"])]),
        )
    for dims in ([2**40], [3], [2**62, 4]):
        texts = helper.make_tensor("t", TensorProto.STRING, [1], [b"x"])
        texts.dims[:] = dims
        yield f"texts of {dims}", onnx_of([node("Reshape", ["x", "t"], ["y"])], [texts])
    yield "a text as a number", onnx_of([node("Cast", ["t"], ["c"], to=7), node("ConstantOfShape", ["c"], ["y"])],
        [helper.make_tensor("t", TensorProto.STRING, [1], [b"9" * 100_000])])  # fmt: skip
    places = {
        "a pipe": [("location", "pipe")], "a link to a device": [("location", "zero")], "a folder above": [("location", "a/../../models/file.onnx")],
        "two places": [("location", "file.onnx"), ("location", "../secret")], "other digits": [("location", "file.onnx"), ("offset", "\u0663")],
        "blanks": [("location", "file.onnx "), ("offset", " 7 ")], "a fraction": [("location", "file.onnx"), ("offset", "1e9")],
        "an address": [("location", "file:///etc/passwd")], "a process": [("location", "/proc/self/mem")], "a million keys": [("k", "v")] * 100_000,
        "no place": [("offset", "0")], "its own folder": [("location", "../models")], "a negative length": [("location", "file.onnx"), ("length", "-48")],
    }  # fmt: skip
    for name, pairs in places.items():
        proto = good()
        constant = node("Constant", [], ["c"], value=proto.graph.initializer[0])
        for weight in (proto.graph.initializer[0], constant.attribute[0].t):
            weight.ClearField("raw_data")
            weight.data_location = TensorProto.EXTERNAL
            for key, value in pairs:
                weight.external_data.add(key=key, value=value)
        yield f"weights in {name}", proto
        yield f"a constant in {name}", onnx_of([constant, node("Relu", ["c"], ["y"])])


def functions() -> Iterator[tuple[str, Any]]:
    """Functions, attributes and loops that contradict themselves."""
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]

    def function(nodes: Any, names: Any = ("a",), results: Any = ("b",), **rest: Any) -> Any:
        return _with_functions([helper.make_function("f", "F0", list(names), list(results), nodes, domains, **rest)])

    relu = node("Relu", ["a"], ["b"])
    yield "a function of 100,000 inputs", function([relu], [f"a{n}" for n in range(100_000)])
    yield "a function of one input twice", function([relu], ["a", "a"])
    yield "a function without its result", function([node("Relu", ["a"], ["c"])])
    yield "a function of 100,000 attributes", function([relu], attributes=[f"p{n}" for n in range(100_000)])
    alpha = node("Elu", ["a"], ["b"])
    alpha.attribute.add(name="alpha", type=AttributeProto.FLOAT, ref_attr_name="alpha")
    default = helper.make_attribute("alpha", 1.0)
    default.ref_attr_name = "alpha"
    yield "a default that refers to itself", function([alpha], attribute_protos=[default])
    for kind in range(15):
        wrong = node("Elu", ["x"], ["y"])
        wrong.attribute.add(name="alpha", type=kind, i=3, f=0.5, s=b"\xff", ints=[1, 2])
        yield f"an attribute of kind {kind}", onnx_of([wrong])
    twice = node("Elu", ["x"], ["y"])
    twice.attribute.extend([helper.make_attribute("alpha", 1.0), helper.make_attribute("alpha", b"x")])
    yield "an attribute twice", onnx_of([twice])
    for trips, condition in ((-(2**63), True), (2**63 - 1, False), (0, True)):
        body = helper.make_graph([node("MatMul", ["h", "h"], ["k"])], "b", [info("i", 7, []), info("c", 9, []), info("h", 1, [3, 3])],
            [info("c", 9, [])] + [info("k", 1, [3, 3])] * (5 if condition else 1))  # fmt: skip
        looped = node("Loop", ["n", "q", "x"], ["y"], body=body)
        yield (
            f"a loop of {trips} trips",
            onnx_of([looped], [scalar("n", trips), helper.make_tensor("q", 9, [], [condition])]),
        )
    for count in HUGE:
        body = helper.make_graph([node("Relu", ["h"], ["k"])], "b", [info("h", 1, None)], [info("k", 1, None)])
        yield f"a scan of {count} inputs", onnx_of([node("Scan", ["x"], ["y"], body=body, num_scan_inputs=count, scan_input_axes=[count],
            scan_output_axes=[count], scan_input_directions=[count] * 9)])  # fmt: skip
    branches = {key: helper.make_graph([node("Relu", ["x"], ["z"])], "i", [], [info("z", 1, None)] * count)
                for key, count in (("then_branch", 0), ("else_branch", 3))}  # fmt: skip
    proto = onnx_of([node("If", ["q"], ["y"], **branches)])
    proto.graph.input.append(info("q", 9, []))
    yield "branches of other numbers of results", proto
    for domain, version in (("", 1), ("ai.onnx", 2**62), ("ai.onnx", -1), ("\x1b[31m", 1)):
        proto = good()
        proto.opset_import.add(domain=domain, version=version)
        yield f"also version {version} of {domain!r}", proto
    proto = good()
    proto.training_info.add().algorithm.CopyFrom(proto.graph)
    proto.graph.quantization_annotation.add(tensor_name="none").quant_parameter_tensor_names.add(
        key="SCALE_TENSOR", value="none"
    )
    yield "a training graph", proto
    for op, values_of in (("Div", (1, 0)), ("Mod", (-(2**63), -1)), ("Div", (-(2**63), -1)), ("BitShift", (1, 2**40)), ("Pow", (0, -1)),
                          ("Neg", (-(2**63),)), ("Abs", (-(2**63),)), ("Shape", (2**62, 1)), ("Trilu", (2**62, 1)), ("Unique", (1, 1))):  # fmt: skip
        names = [f"v{n}" for n in range(len(values_of))]
        yield f"{op} of {values_of}", onnx_of([node(op, names, ["r"]), node("ConstantOfShape", ["r"], ["y"])],
            [ints(name, value) for name, value in zip(names, values_of, strict=True)])  # fmt: skip


def wires() -> Iterator[Made]:
    body = b""
    for number in range(1000):  # an If in an If: the lengths are added outside in
        name = b"%d" % number
        step = (
            b"\x12"
            + bytes([len(name)])
            + name
            + b"\x22\x02If"
            + b"\x2a"
            + _varint(len(body) + 8)
            + b"\x0a\x01t\x32"
            + _varint(len(body))
            + body
        )
        body = b"\x0a" + _varint(len(step)) + step
    yield "an If 1,000 deep", ".onnx", _graph_bytes(body)
    yield from encodings()


def encodings() -> Iterator[Made]:
    """Encodings that a parser in C++ follows."""
    for depth in (50, 1_000, 200_000):
        yield f"unknown groups {depth} deep", ".onnx", b"\xa3\x06" * depth + b"\xa4\x06" * depth
        graph = b"\xa3\x06" * depth + b"\xa4\x06" * depth
        yield f"unknown groups {depth} deep in a graph", ".onnx", b"\x3a" + _varint(len(graph)) + graph
    inner = b""
    for _ in range(600):  # sub-graphs in attributes of nodes
        for key in (0x32, 0x2A, 0x0A):
            inner = bytes([key]) + _varint(len(inner)) + inner
    yield "graphs 600 deep", ".onnx", b"\x3a" + _varint(len(inner)) + inner
    yield "a text that is not UTF-8", ".onnx", good().SerializeToString().replace(b"Relu", b"\xff\xfe\xfd\xfc")
    yield "packed dims without an end", ".onnx", b"\x3a\x06\x2a\x04\x0a\x80\x80\x80"
    yield "ten graphs", ".onnx", good().SerializeToString() * 10
    yield "two billion declared bytes", ".onnx", b"\x3a\xff\xff\xff\xff\x07" + bytes(100)


def random_calls(count: int = 150) -> Iterator[tuple[str, Any]]:
    """Every operator of onnx with arguments that nobody passes."""
    rng = random.Random(7)
    schemas = sorted(defs.get_all_schemas(), key=lambda schema: (schema.domain, schema.name))
    for number in range(count):
        nodes, weights, inputs = [], [], [info("x", 1, [2, 3])]
        for position, schema in enumerate(rng.sample(schemas, 3)):
            names = []
            for place in range(rng.randrange(max(schema.min_input - 1, 0), min(schema.max_input, 6) + 2)):
                name = f"i{position}_{place}"
                if rng.random() < 0.5:
                    weights.append(ints(name, *rng.choices([*HUGE, 1, 2, 3], k=rng.choice([0, 1, 2, 4]))))
                else:
                    dims = rng.choices([*HUGE[1:], 1, 2, 3, 8, "n"], k=rng.choice([0, 1, 2, 4, 5]))
                    inputs.append(info(name, rng.choice([1, 1, 7, 8, 9, 10]), dims))
                names.append(name)
            made = node(schema.name, names, [f"o{position}_{k}" for k in range(rng.randrange(1, 4))],
                        domain=schema.domain)  # fmt: skip
            for name, attribute in schema.attributes.items():
                if rng.random() < 0.5:
                    value: Any = rng.choice([*HUGE, 1, 2, 0.5, "x", [1, 2], [2**62, 0], [0.5], [b"a"]])
                    made.attribute.append(helper.make_attribute(name, value))
            nodes.append(made)
        proto = onnx_of(nodes, weights, inputs=inputs)
        proto.opset_import.extend([helper.make_opsetid(name, 5) for name in {each.domain for each in nodes} if name])
        proto.opset_import[0].version = rng.choice([9, 13, 18, 21])
        yield f"random calls {number}: {', '.join(each.op_type for each in nodes)}", proto
