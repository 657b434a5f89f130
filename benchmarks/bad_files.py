"""Read handmade bad files: each must end with a clean error or a result, within 2 s of CPU and 500 MB, running nothing.

    python benchmarks/bad_files.py [--seeds FOLDER]

About 200 files: truncated, bombs, loops, lies, path traversal, code in TorchScript and in pickles. Each is read in a
forked process that notes every file it opens (an audit hook) outside of the folder and of Python's own. ``--seeds``
cuts and zeroes the first bytes of the ONNX files in a folder, too.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import re
import resource
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import modelsummary

SECONDS, MEMORY = 2.0, 500 * 2**20
Made = tuple[str, str, bytes]
node, info = helper.make_node, helper.make_tensor_value_info


# ------------------------------------------------------------------------------------------------ ONNX


def onnx_of(nodes: list[Any], weights: list[Any] = [], *, outputs: Any = None, opset: int = 18, **rest: Any) -> Any:  # noqa: B006
    made = helper.make_graph(
        nodes, "g", [info("x", 1, [2, 3])], outputs or [info(nodes[-1].output[0], 1, None)], weights
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9, **rest)


def ints(name: str, *numbers: int) -> Any:
    return helper.make_tensor(name, TensorProto.INT64, [len(numbers)], list(numbers))


def scalar(name: str, number: int) -> Any:
    return helper.make_tensor(name, TensorProto.INT64, [], [number])


def good() -> Any:
    weight = numpy_helper.from_array(torch.rand(3, 4).numpy(), "w")
    return onnx_of([node("MatMul", ["x", "w"], ["m"], name="m"), node("Relu", ["m"], ["y"])], [weight])


def onnx_files() -> Iterator[Made]:  # noqa: PLR0912, PLR0915 - a list of cases
    data = good().SerializeToString()
    for part in range(0, len(data), 8):
        yield f"cut at {part}", ".onnx", data[:part]
    for size in (1, 1000, 10**6, 20 * 10**6):
        yield f"{size} zeros", ".onnx", bytes(size)
        yield f"{size} ones", ".onnx", b"\xff" * size
    yield "twenty million empty nodes", ".onnx", b"\x3a\xd4\xc3\xb0\x09" + b"\x0a\x00" * 10_000_010
    yield "groups in groups", ".onnx", b"\x0b" * 100_000
    yield "messages in messages", ".onnx", b"\x3a\x7f" * 100_000
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
    ):
        proto = good()
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = text
        yield f"the dimension {text[:20]}", ".onnx", proto.SerializeToString()
    huge = 2**40
    bombs = {
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
    for op, (inputs, weights) in bombs.items():
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


# ---------------------------------------------------------------------------------------- torch archives


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def saved(module: nn.Module) -> bytes:
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), target)
    return target.getvalue()


def archive(entries: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", kind) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return target.getvalue()


def entries_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {each.filename: file.read(each) for each in file.infolist()}


def changed(data: bytes, ending: str, content: bytes) -> bytes:
    found = entries_of(data)
    name = next(each for each in found if each.endswith(ending))
    return archive({**found, name: content})


def script_files(folder: Path) -> Iterator[Made]:
    data = saved(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)))
    for part in range(0, len(data), len(data) // 20):
        yield f"script cut at {part}", ".pt", data[:part]
    trap = Trap(str(folder / "made"))
    for protocol in range(6):
        yield f"a trap of protocol {protocol}", ".pt", pickle.dumps(trap, protocol)
        yield f"a trap in data.pkl, {protocol}", ".pt", changed(data, "data.pkl", pickle.dumps(trap, protocol))
        yield (
            f"a trap in constants.pkl, {protocol}",
            ".pt",
            changed(data, "constants.pkl", pickle.dumps(trap, protocol)),
        )
    stacks = {
        "marks": b"(" * 900_000,
        "tuples": b")" + b"\x85" * 500_000 + b".",
        "doubled tuples": b")q\x00" + b"h\x00h\x00\x86q\x00" * 100_000 + b".",
        "a memo far away": b"Nr\xff\xff\xff\x7f.",
        "a long text": b"X\xff\xff\xff\x7f.",
        "a long number": b"\x8b\xff\xff\xff\x7f.",
        "a byte array": b"\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
        "a list of a million": b"](" + b"N" * 900_000 + b"e.",
        "two million steps": b"N0" * 10**6 + b"N.",
        "no stop": b"N" * 100,
        "nothing": b"",
        "an extension": b"\x82\x01.",
        "an instance": b"(ios\nsystem\n.",
        "a global in two texts": b"\x8c\x02os\x8c\x06system\x93.",
        "a tensor of 2**62": b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x3f\x85K\x01\x85\x89NtR.",
    }
    for name, content in stacks.items():
        yield f"pickled {name}", ".pt", changed(data, "data.pkl", content)
    for name, content in {
        "from_file": b'def f():\n  return torch.from_file("/etc/passwd", False, 4)\n',
        "an endless class": b"class A(Module):\n" * 200_000,
        "open quotes": b'class A(Module):\n  __parameters__ = ["' + b"a" * 10**6,
        "backslashes": b'class A(Module):\n  __parameters__ = ["' + b"\\" * 10**6 + b"]",
        "a getattr": b"getattr(" * 200_000,
        "no text": b"\xff" * 10**6,
    }.items():
        yield f"code with {name}", ".pt", changed(data, ".py", content)
    entries = entries_of(data)
    yield "two folders", ".pt", archive({**entries, "other/data.pkl": b"N."})
    yield "two cases", ".pt", archive({**entries, **{name.upper(): each for name, each in entries.items()}})
    yield "a folder above", ".pt", archive({f"../{name}": each for name, each in entries.items()})
    yield (
        "a bomb",
        ".pt",
        archive({**entries, f"{next(iter(entries)).partition('/')[0]}/x.py": bytes(10**8)}, zipfile.ZIP_DEFLATED),
    )
    yield "a hundred bombs", ".pt", archive({f"a/{n}.py": bytes(10**6) for n in range(100)}, zipfile.ZIP_DEFLATED)
    end = b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 65535, 65535, 2**31, 0, 0)
    yield "a directory that is not there", ".pt", end
    for kind in (".pt", ".pt2"):
        yield "an empty archive", kind, archive({})
        yield "only zeros", kind, bytes(10**6)


class Endless(nn.Module):
    """Its ``__setstate__`` never ends."""

    @torch.jit.export
    def __getstate__(self) -> tuple[int, bool]:
        return 1, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]) -> None:
        self.training = state[1]
        n = 1
        while n > 0:
            n = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


_FORMULA = re.compile(rb'"expr_str": "[^"]*"')


def exported_files(folder: Path) -> Iterator[Made]:
    yield "code that never ends", ".pt", saved(Endless())
    target = io.BytesIO()
    dims = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(nn.Linear(4, 4), (torch.rand(2, 4),), dynamic_shapes=dims), target)
    data = target.getvalue()
    for part in range(0, len(data), len(data) // 20):
        yield f"program cut at {part}", ".pt2", data[:part]
    model = next(each for name, each in entries_of(data).items() if name.endswith("models/model.json"))
    trap = pickle.dumps(Trap(str(folder / "made")))
    for ending in ("model.pt", "weights_config.json", "model.json", "constants_config.json"):
        if any(name.endswith(ending) for name in entries_of(data)):
            yield f"a trap in {ending}", ".pt2", changed(data, ending, trap)
            yield f"brackets in {ending}", ".pt2", changed(data, ending, b"[" * 10**6)
    for text in (b"__import__('os').system('true')", b"9**9**9", b"s77.__class__", b"(" * 5000, b"Max(" * 1000):
        said = _FORMULA.sub(b'"expr_str": "' + text + b'"', model)
        yield f"the formula {text[:20]!r}", ".pt2", changed(data, "model.json", said)
    swaps = [
        (b'"as_int": 4', b'"as_int": 99999999999999'),
        (b"aten.linear", b"aten.from_file"),
        (b"aten.linear", b"aten.nothing"),
        (b"torch.ops.aten", b"torch.ops.os"),
        (b"[", b"{"),
    ]
    for old, new in swaps:
        yield f"{old!r} as {new!r}", ".pt2", changed(data, "model.json", model.replace(old, new))


def paths(folder: Path) -> Iterator[str]:
    yield from (
        "x" * 5000 + ".onnx",
        "a\0b.onnx",
        str(folder),
        "",
        "\x1b[31m.pt",
        f"{folder}/none.pt2",
        "/dev/zero.onnx",
    )
    (folder / "round.onnx").symlink_to("round.onnx")
    yield f"{folder}/round.onnx"
    (folder / "device.onnx").symlink_to("/dev/zero")
    yield f"{folder}/device.onnx"
    os.mkfifo(folder / "pipe.onnx")
    yield f"{folder}/pipe.onnx"


# --------------------------------------------------------------------------------------------- reading


def read(path: str, folder: str, connection: Any) -> None:
    """What reading a file ends with, its seconds of CPU, its memory, and the files that it opened elsewhere."""
    opened: list[str] = []
    own = (folder, sys.prefix, sys.base_prefix, "/proc/self", str(Path(modelsummary.__file__).parents[1]))

    def hook(event: str, args: Any) -> None:
        is_other = event == "open" and isinstance(args[0], str) and not args[0].startswith(own)
        if is_other or event in ("os.system", "subprocess.Popen", "socket.connect"):
            opened.append(f"{event} {args[0]}")

    sys.addaudithook(hook)
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.process_time()
    try:
        stats = modelsummary.load(path)
        shown = f"{stats}{stats.bandwidth(2**20)}{stats.operators()}"
        said = "read" if "\x1b" not in shown else "ESCAPE CODES in the table"
    except modelsummary.ModelSummaryError as error:
        text = str(error)
        said = type(error).__name__ if text.isprintable() and len(text) <= 1000 else f"UNCLEAN {text[:80]!r}"
    except BaseException as error:
        said = f"ESCAPED {type(error).__name__}: {str(error)[:100]}"
    seconds = time.process_time() - began
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss)
    connection.send((said, seconds, grown, [each for each in opened if not each.startswith("open <")]))


def outcome(path: str, folder: str) -> tuple[str, float, int, list[str]]:
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=read, args=(path, folder, theirs))
    process.start()
    theirs.close()
    try:
        found: tuple[str, float, int, list[str]] = ours.recv()
    except EOFError:
        process.join()
        return f"CRASH {process.exitcode}", 0.0, 0, []
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    slowest, largest, bad = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "models"
        folder.mkdir()
        (Path(temporary) / "secret").write_bytes(bytes(48))
        (folder / "link").symlink_to("/etc/passwd")
        for each in (good(),):
            (folder / "warm.onnx").write_bytes(each.SerializeToString())
        (folder / "warm.pt").write_bytes(saved(nn.Linear(2, 2)))
        torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.rand(1, 2),)), folder / "warm.pt2")
        for name in ("warm.onnx", "warm.pt", "warm.pt2"):
            modelsummary.load(folder / name)
        cases = [
            (name, ending, data)
            for name, ending, data in (*onnx_files(), *script_files(folder), *exported_files(folder))
        ]
        for path in sorted(options.seeds.rglob("*.onnx")) if options.seeds else ():
            data = path.read_bytes()[: 4 * 2**20]
            cases += [
                (f"{path.name} cut", ".onnx", data[: len(data) // 2]),
                (f"{path.name} zeroed", ".onnx", bytes(64) + data[64:]),
            ]
        names = [(name, str(folder / f"file{ending}"), data) for name, ending, data in cases]
        names += [(f"the path {path[:30]!r}", path, b"") for path in paths(folder)]
        for name, path, data in names:
            if data or path.startswith(str(folder / "file")):
                Path(path).write_bytes(data)
            said, seconds, grown, opened = outcome(path, str(folder))
            counts[said.partition(" ")[0]] += 1
            slowest, largest = max(slowest, seconds), max(largest, grown)
            made = (folder / "made").exists()
            if said[:2].isupper() or seconds > SECONDS or grown > MEMORY or opened or made:
                bad += 1
                print(
                    f"{name}: {said}, {seconds:.1f} s, {grown / 1e6:.0f} MB, {opened[:3]}{', MADE A FILE' * made}",
                    flush=True,
                )
    print(f"{len(names)} files: {dict(counts)}; at most {slowest:.1f} s and {largest / 1e6:.0f} MB; {bad} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
