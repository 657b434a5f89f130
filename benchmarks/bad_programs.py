# ruff: noqa: E501, ARG005 - a line for each bad file
"""More bad exported programs: formulas without end, constraints, archives, operators; ``bad_files.py`` reads them."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bad_onnx import Made
from bad_torch import Trap, archive, entries_of
from torch import nn
from torch.export import Dim

__all__ = ["program_files"]

S = "Symbol('s77', positive=True, integer=True)"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(self.conv(x).mean((2, 3)))


def exported() -> dict[str, bytes]:
    target = io.BytesIO()
    sizes = {"x": {0: Dim("b", min=1, max=1024), 2: Dim("h", min=4, max=64)}}
    torch.export.save(torch.export.export(Net(), (torch.rand(2, 3, 8, 8),), dynamic_shapes=sizes), target)
    return entries_of(target.getvalue())


def formulas() -> Iterator[tuple[str, str]]:
    deep = 2000
    yield "a tower of numbers", "2**2**2**2**2**2"
    yield "a tower", "Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))"
    yield "a high power", f"Pow({S}, Integer(999999999999))"
    yield "nested powers", "Pow(" * 40 + S + ", Integer(9))" * 40
    yield (
        "the power of a sum",
        "Pow(" * 8 + f"Add({S}, Symbol('s53', positive=True, integer=True))" + ", Integer(9))" * 8,
    )
    yield "deep parentheses", "(" * deep + "s77" + ")" * deep
    yield "very deep parentheses", "(" * 90 + "s77" + ")" * 90
    yield "a huge number", "9" * 9_000
    yield "a huge product", "*".join(["9" * 19] * 450)
    for name in ("Mod", "FloorDiv", "PythonMod", "CleanDiv", "CeilDiv", "Max", "Min", "ModularIndexing", "Where"):
        count = 3 if name in ("ModularIndexing", "Where") else 2
        for depth in (30, 120):
            rest = ", Integer(7)" * (count - 1)
            yield f"{name} {depth} deep", f"{name}(" * depth + S + f"{rest})" * depth
        inner = S
        for number in range(9):  # 2 ** 9 leaves
            inner = f"{name}(Add({inner}, Integer({number + 2})), {', '.join([inner] * (count - 1))})"
        yield f"a tree of {name}", inner
    yield "a maximum of many", f"Max({', '.join(f's{n}' for n in range(900))})"
    yield "a minimum of many sums", f"Min({', '.join(f's{n} + s{n + 1}*s{n + 2}' for n in range(300))})"
    yield "a modulus of sums", "Mod(" + "*".join(f"(s{n} + {n})" for n in range(40)) + ", s1*s2*s3 + s4)"
    yield "a quotient of sums", "FloorDiv(" + "*".join(f"(s{n}**9 + {n})" for n in range(30)) + ", (s1 + s2)**9)"
    yield "a choice of many", f"Piecewise({', '.join(f'(s{n}, s{n} > {n})' for n in range(200))})"
    yield (
        "conditions",
        "Piecewise((s1, And(" + ", ".join(f"Or(s{n} > 3, s{n + 1} < s{n + 2})" for n in range(60)) + ")), (s2, True))",
    )
    yield "not not", "Not(" * 300 + "s1 > 2" + ")" * 300
    yield "a rational", "Rational(1, 0)"
    yield "a division by zero", "s77 // 0"
    yield "a modulus of zero", "Mod(s77, 0)"
    yield "negative", "-" * 4000 + "s77"
    yield "a call of nothing", "Max()"
    yield "a tuple", "Tuple(" * 80 + "s1" + ")" * 80
    yield "code", "__import__('os').system('touch made')"
    yield "an attribute", "s77.__class__"
    yield "a comparison", "s1 < s2 < s3"
    yield "a wrong symbol", "Symbol('s77', positive=True, integer=True, even=True, prime=True, odd=True)"
    yield "contradictory symbols", "Symbol('s77', positive=True, negative=True)"
    yield "nothing", ""
    yield "blanks", " " * 9_000
    yield "equal", f"Eq({S}, {S})"
    yield "an identity", "Identity(" * 200 + "s1" + ")" * 200
    yield "floats", "ToFloat(" * 30 + "IntTrueDiv(s1, s2)" + ")" * 30


def program_files() -> Iterator[Made]:
    entries = exported()
    name = next(each for each in entries if each.endswith("models/model.json"))
    weights = next(each for each in entries if each.endswith("model_weights_config.json"))
    facts = json.loads(entries[name])

    def changed(change: Callable[[Any], Any]) -> bytes:
        new = copy.deepcopy(facts)
        new = change(new) or new
        return archive({**entries, name: new if isinstance(new, bytes) else json.dumps(new).encode()})

    for title, text in formulas():

        def size(new: Any, text: str = text) -> None:
            new["graph_module"]["graph"]["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = text

        yield f"the formula {title}", ".pt2", changed(size)

        def result(new: Any, text: str = text) -> None:
            new["graph_module"]["graph"]["tensor_values"]["mean"]["strides"][0] = {
                "as_expr": {"expr_str": text, "hint": None}
            }

        yield f"a stride of the formula {title}", ".pt2", changed(result)
    for title, change in changes():
        yield title, ".pt2", changed(change)
    config = json.loads(entries[weights])
    for title, change in weight_changes():
        new = copy.deepcopy(config)
        new = change(new) or new
        data = new if isinstance(new, bytes) else json.dumps(new).encode()
        yield f"weights with {title}", ".pt2", archive({**entries, weights: data})
    yield from archives(entries, name)


def graph_of(new: Any) -> Any:
    return new["graph_module"]["graph"]


def argument(name: str, kind: str, value: Any) -> dict[str, Any]:
    return {"name": name, "arg": {kind: value}, "kind": 1}


def changes() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield (
        "200,000 constraints",
        lambda new: new["range_constraints"].update(
            {f"s{n}": {"min_val": 0, "max_val": 9} for n in range(1000, 201_000)}
        ),
    )
    for low, high in ((5, 1), (-(10**30), 10**30), (None, None), ("2", "3"), (0, 10**4000), (1.5, 2.5), (True, False)):
        yield (
            f"a range from {str(low)[:9]} to {str(high)[:9]}",
            lambda new, low=low, high=high: new["range_constraints"].update(s77={"min_val": low, "max_val": high}),
        )  # type: ignore[misc]
    yield "JSON 100,000 deep", lambda new: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield "JSON 900 deep", lambda new: new.update(extra=json.loads("[" * 900 + "]" * 900))
    yield "not a number", lambda new: json.dumps(new).replace("1024", "NaN").encode()
    yield "infinity", lambda new: json.dumps(new).replace("1024", "Infinity").encode()
    yield "a number of 5,000 digits", lambda new: json.dumps(new).replace("1024", "9" * 5000).encode()
    yield "duplicate keys", lambda new: json.dumps(new).replace('"nodes":', '"nodes": [], "nodes":').encode()
    yield "a lone surrogate", lambda new: json.dumps(new).replace("conv2d", "\\\\ud800").encode()
    yield "not an object", lambda new: b"[]"
    for value in (None, [], {}, 3, "x", [[[]]]):
        for key in ("graph_module", "range_constraints", "opset_version", "schema_version", "guards_code"):
            yield f"{key} = {value!r}", lambda new, key=key, value=value: new.update({key: value})  # type: ignore[misc]
        for key in ("nodes", "inputs", "outputs", "tensor_values", "sym_int_values"):
            yield f"graph.{key} = {value!r}", lambda new, key=key, value=value: graph_of(new).update({key: value})  # type: ignore[misc]
    for dims in ([2**62, 2**62], [-1], [2**70], [0, -5], [1] * 3_000):

        def sizes(new: Any, dims: Any = dims) -> None:
            graph_of(new)["tensor_values"]["x"]["sizes"] = [{"as_int": each} for each in dims]
            graph_of(new)["tensor_values"]["x"]["strides"] = [{"as_int": each} for each in dims]

        yield f"an input of {dims[:3]}", sizes
    for count in (20_000, 200_000):

        def many(new: Any, count: int = count) -> None:
            node = graph_of(new)["nodes"][-1]
            graph_of(new)["nodes"] += [{**node, "name": f"n{k}"} for k in range(count)]

        yield f"{count} nodes", many

    def cycle(new: Any) -> None:
        graph_of(new)["nodes"][0]["inputs"][0]["arg"]["as_tensor"]["name"] = "linear"

    yield "a cycle", cycle
    targets = {
        "from_file": ("aten.from_file.default", [argument("filename", "as_string", "made"),
                      argument("shared", "as_bool", True), argument("size", "as_int", 10)]),
        "randperm": ("aten.randperm.default", [argument("n", "as_int", 2**50)]),
        "full": ("aten.full.default", [argument("size", "as_ints", [2**40, 2**10]), argument("fill_value", "as_int", 1)]),
        "arange": ("aten.arange.default", [argument("end", "as_int", 2**60)]),
        "eye": ("aten.eye.default", [argument("n", "as_int", 2**40)]),
        "tril": ("aten.tril_indices.default", [argument("row", "as_int", 2**30), argument("col", "as_int", 2**30)]),
        "hann": ("aten.hann_window.default", [argument("window_length", "as_int", 2**40)]),
        "repeat": ("aten.repeat.default", [argument("self", "as_tensor", {"name": "x"}),
                   argument("repeats", "as_ints", [2**30] * 30)]),
        "power": ("aten.matrix_power.default", [argument("self", "as_tensor", {"name": "x"}), argument("n", "as_int", 2**62)]),
        "diff": ("aten.diff.default", [argument("self", "as_tensor", {"name": "x"}), argument("n", "as_int", 2**40)]),
        "vander": ("aten.linalg_vander.default", [argument("x", "as_tensor", {"name": "x"}), argument("N", "as_int", 2**50)]),
        "unbind": ("aten.unbind.int", [argument("self", "as_tensor", {"name": "x"})]),
        "split": ("aten.split.Tensor", [argument("self", "as_tensor", {"name": "x"}), argument("split_size", "as_int", 1)]),
        "chunk": ("aten.chunk.default", [argument("self", "as_tensor", {"name": "x"}), argument("chunks", "as_int", 2**60)]),
        "split unevenly": ("aten.split_with_sizes.default", [argument("self", "as_tensor", {"name": "x"}),
                           argument("split_sizes", "as_ints", [0] * 100_000)]),
        "print": ("aten._print.default", [argument("s", "as_string", "\x1b[31m")]),
        "item": ("aten.item.default", [argument("self", "as_tensor", {"name": "x"})]),
        "set": ("aten.set_.source_Tensor", [argument("self", "as_tensor", {"name": "x"}), argument("source", "as_tensor", {"name": "x"})]),
        "resize": ("aten.resize_.default", [argument("self", "as_tensor", {"name": "x"}), argument("size", "as_ints", [2**40, 2**20])]),
        "load": ("debugprims.load_tensor.default", [argument("name", "as_string", "made")]),
        "manual kernel": ("mkldnn._linear_pointwise.default", []),
        "quantize": ("quantized.linear.default", []),
        "python": ("_operator.pow", [argument("", "as_int", 2**20), argument("", "as_int", 2**20)]),
        "exec": ("builtins.exec", [argument("", "as_string", "open('made', 'w')")]),
        "import": ("os.system", [argument("", "as_string", "touch made")]),
        "math": ("math.factorial", [argument("", "as_int", 2**30)]),
        "shift": ("_operator.lshift", [argument("", "as_int", 1), argument("", "as_int", 2**40)]),
        "while": ("torch.ops.higher_order.while_loop", []),
        "cond": ("torch.ops.higher_order.cond", []),
        "kernel": ("torch.ops.higher_order.triton_kernel_wrapper_functional", []),
        "einsum": ("aten.einsum.default", [argument("equation", "as_string", ",".join(["ij"] * 5000)),
                   argument("tensors", "as_tensors", [{"name": "x"}] * 5000)]),
        "upsample": ("aten.upsample_nearest2d.vec", [argument("input", "as_tensor", {"name": "x"}),
                     argument("output_size", "as_ints", [2**40, 2**40]), argument("scale_factors", "as_none", True)]),
        "pad": ("aten.constant_pad_nd.default", [argument("self", "as_tensor", {"name": "x"}), argument("pad", "as_ints", [2**62] * 8)]),
        "pool": ("aten.max_pool2d.default", [argument("self", "as_tensor", {"name": "x"}), argument("kernel_size", "as_ints", [2, 2]),
                 argument("stride", "as_ints", [0, 0])]),
        "unfold": ("aten.unfold.default", [argument("self", "as_tensor", {"name": "x"}), argument("dimension", "as_int", 1),
                   argument("size", "as_int", 1), argument("step", "as_int", 0)]),
        "convolution": ("aten.conv2d.default", [argument("input", "as_tensor", {"name": "x"}), argument("weight", "as_tensor", {"name": "p_c_weight"}),
                        argument("stride", "as_ints", [0, 0]), argument("groups", "as_int", 0)]),
        "as_strided": ("aten.as_strided.default", [argument("self", "as_tensor", {"name": "x"}), argument("size", "as_ints", [2**40] * 2),
                       argument("stride", "as_ints", [2**40] * 2)]),
    }  # fmt: skip
    for title, (target, inputs) in targets.items():
        prefix = "" if target.startswith(("torch.", "_operator", "builtins", "os.", "math.")) else "torch.ops."
        for huge in (False, True):

            def call(new: Any, target: str = prefix + target, inputs: Any = inputs, huge: bool = huge) -> None:
                graph_of(new)["nodes"][0] |= {"target": target, "inputs": inputs}
                if huge:
                    for key in ("sizes", "strides"):
                        graph_of(new)["tensor_values"]["x"][key] = [{"as_int": 2**40 if key == "sizes" else 1}]

            yield f"a call of {title}{' on a long tensor' * huge}", call
    for kind in (
        "as_tensors",
        "as_ints",
        "as_graph",
        "as_custom_obj",
        "as_operator",
        "as_nested_tensors",
        "as_complex",
    ):
        yield f"an argument {kind}", lambda new, kind=kind: graph_of(new)["nodes"][0]["inputs"][0].update(arg={kind: 3})  # type: ignore[misc]
    for spec in ("[" * 5_000, '[1, {"type": "builtins.tuple", "context": "null", "children_spec": ' + "[" * 900 + "]" * 900 + "}]",
                 '[1, {"type": "collections.namedtuple", "context": "os.system", "children_spec": []}]',
                 '[1, {"type": "builtins.dict", "context": "[\\"a\\"]", "children_spec": []}]', "3"):  # fmt: skip
        yield (
            f"the spec {spec[:20]}",
            lambda new, spec=spec: new["graph_module"]["module_call_graph"][0]["signature"].update(in_spec=spec),
        )  # type: ignore[misc]
    nested = '{"type": "builtins.tuple", "context": "null", "children_spec": [%s]}'
    spec = "%s"
    for _ in range(300):
        spec %= nested
    yield (
        "a spec 300 deep",
        lambda new: new["graph_module"]["module_call_graph"][0]["signature"].update(in_spec=f"[1, {spec % ''}]"),
    )
    for stack in (
        "a" * 10**6,
        ";".join(f"k{n},f{n},c.C" for n in range(20_000)),
        "a,b",
        ",,;,,",
        "k,\x1b[31m,\u202e.\x07",
    ):
        yield (
            f"the modules {stack[:9]!r}",
            lambda new, stack=stack: graph_of(new)["nodes"][0]["metadata"].update(nn_module_stack=stack),
        )  # type: ignore[misc]

    def crowded(new: Any) -> None:
        for number, each in enumerate(graph_of(new)["nodes"]):
            names = ";".join(f"{number}_{n},f{number}.m{n},c.C" for n in range(15_000))
            each["metadata"]["nn_module_stack"] = names

    yield "15,000 modules around each operator", crowded
    yield "hostile names", lambda new: json.loads(json.dumps(new).replace('"x"', '"\\u001b[31mx\\u202e"'))
    yield from lies()
    yield "guards", lambda new: new.update(guards_code=["__import__('os').system('touch made')"])


def lies() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Descriptions that contradict the graph, and operators of other libraries."""
    for key, value in {
        "dtype": 9999, "layout": 99, "device": {"type": "\x1b[31m", "index": 10**9}, "requires_grad": "yes",
        "strides": [{"as_int": -1}] * 4, "storage_offset": {"as_int": 2**62}, "sizes": [{"as_expr": {"expr_str": "s77", "hint": {"as_int": -5}}}] * 4,
    }.items():  # fmt: skip

        def described(new: Any, key: str = key, value: Any = value) -> None:
            graph_of(new)["tensor_values"]["x"][key] = value

        yield f"an input with the {key} {str(value)[:20]}", described
    for key, value in {"schema_version": {"major": 2**70, "minor": -1}, "torch_version": "9" * 10**6, "opset_version": {"aten": 2**70},
                       "verifiers": ["os.system"] * 1000, "guards_code": ["while True: pass"] * 1000}.items():  # fmt: skip
        yield f"{key} = {str(value)[:20]}", lambda new, key=key, value=value: new.update({key: value})  # type: ignore[misc]

    def within(new: Any) -> None:
        inner: Any = copy.deepcopy(graph_of(new))
        for number in range(60):
            call = {**inner["nodes"][0], "target": "torch.ops.higher_order.wrap_with_set_grad_enabled",
                    "inputs": [argument("", "as_bool", False), argument("", "as_graph", {"name": f"g{number}", "graph": inner})]}  # fmt: skip
            inner = {**copy.copy(inner), "nodes": [call]}
        new["graph_module"]["graph"] = inner

    yield "graphs 60 deep", within

    def doubled(new: Any) -> None:
        nodes = graph_of(new)["nodes"]
        nodes += [copy.deepcopy(each) for each in nodes]

    yield "every node twice", doubled

    def unknown(new: Any) -> None:
        for each in new["graph_module"]["signature"]["input_specs"]:
            for spec in each.values():
                if isinstance(spec, dict) and "parameter_name" in spec:
                    spec["parameter_name"] = "nothing.of.this.name"

    yield "parameters that are not there", unknown
    for target in ("prim.device.default", "inductor._reinterpret_tensor.default", "image.read_file.default", "image.write_file.default",
                   "c10d.broadcast_.default", "rngprims.philox_rand.default", "profiler._record_function_enter_new.default",
                   "symm_mem.one_shot_all_reduce.default", "higher_order.call_torchbind", "higher_order.flat_apply",
                   "higher_order.auto_functionalized", "higher_order.map_impl", "higher_order.associative_scan"):  # fmt: skip
        yield (
            f"the operator {target}",
            lambda new, target=target: graph_of(new)["nodes"][0].update(target=f"torch.ops.{target}"),
        )  # type: ignore[misc]


def weight_changes() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    def first(new: Any) -> Any:
        return next(iter(new["config"].values()))

    yield "no tensors", lambda new: new.update(config={})
    yield "a config in itself", lambda new: new.update(config={"a": new["config"]})
    yield "100,000 tensors", lambda new: new.update(config={f"w{n}": first(new) for n in range(100_000)})
    yield "a path outside", lambda new: first(new).update(path_name="../../../etc/passwd")
    yield "a pickle", lambda new: first(new).update(use_pickle=True)
    yield "nothing described", lambda new: first(new).update(tensor_meta=None)
    for value in (2**62, -1, 2**80, "3", None, 1.5):
        yield (
            f"sizes of {value}",
            lambda new, value=value: first(new)["tensor_meta"].update(sizes=[{"as_int": value}] * 4),
        )  # type: ignore[misc]
        yield f"the dtype {value}", lambda new, value=value: first(new)["tensor_meta"].update(dtype=value)  # type: ignore[misc]
    yield "JSON 100,000 deep", lambda new: b"[" * 100_000
    yield "a list", lambda new: b"[]"


def archives(entries: dict[str, bytes], name: str) -> Iterator[Made]:
    folder = name.partition("/")[0]
    for size in (10**7, 10**9):
        if size < 10**8:
            yield (
                f"a bomb of {size}",
                ".pt2",
                archive({**entries, name: b"[" + b" " * size + b"]"}, zipfile.ZIP_DEFLATED),
            )
    yield "spaces", ".pt2", archive({**entries, name: entries[name] + b" " * 60_000_000}, zipfile.ZIP_DEFLATED)
    for protocol in (2, 4):
        sample = {**entries, f"{folder}/data/sample_inputs/model.pt": pickle.dumps(Trap("made"), protocol)}
        yield f"a trap in the sample inputs, {protocol}", ".pt2", archive(sample)
        yield (
            f"a trap in a constant, {protocol}",
            ".pt2",
            archive({**entries, f"{folder}/data/constants/c": pickle.dumps(Trap("made"), protocol)}),
        )
    many = {f"{folder}/models/m{n}.json": b" " * 31_000_000 for n in range(20)}
    yield "20 programs of 31 MB", ".pt2", archive({**entries, **many})
    lists = b"[" + b"[]," * 10_000_000 + b"1]"
    yield "a program of 30 MB of lists", ".pt2", archive({**entries, name: lists})
    yield "two programs", ".pt2", archive({**entries, f"{folder}/models/other.json": entries[name]})
    yield "100,000 entries", ".pt2", archive({**entries, **{f"{folder}/e{n}": b"" for n in range(100_000)}})
    yield (
        "10,000 configs",
        ".pt2",
        archive({**entries, **{f"{folder}/data/weights/{n}.json": b'{"config": {}}' for n in range(10_000)}}),
    )
    data = archive(entries)
    for part in range(0, len(data), max(1, len(data) // 15)):
        yield f"cut at {part}", ".pt2", data[:part]
    yield "a name of 60,000 characters", ".pt2", archive({**entries, f"{folder}/{'n' * 60_000}": b""})
    yield "a list of numbers", ".pt2", archive({**entries, name: json.dumps(list(range(3_000_000))).encode()})
