"""Bad TorchScript files and exported programs: truncated, bombs, code in pickles; ``bad_files.py`` reads them."""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bad_onnx import Made
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.files.hostile_scripts import (
    DEFINITIONS,
    ENDLESS,
    LARGE,
    OTHER_ARCHIVES,
    OTHER_PICKLES,
    PICKLES,
    REACHES_OUT,
    hostile_archive,
    hostile_script,
)

__all__ = ["exported_files", "saved", "script_files"]


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


def listed_again(data: bytes, count: int) -> bytes:
    """Return an archive whose directory lists so many empty entries more."""
    end = data.rfind(b"PK\x05\x06")
    size, begin = struct.unpack("<2L", data[end + 12 : end + 20])
    directory, head, tail = data[begin : begin + size], data[begin : begin + 16], data[begin + 34 : begin + 46]
    folder = data[begin + 46 :].partition(b"/")[0]
    names = (b"%s/%x" % (folder, number) for number in range(count))
    directory += b"".join(head + struct.pack("<3L3H", 0, 0, 0, len(name), 0, 0) + tail + name for name in names)
    total, at = count + directory[:size].count(b"PK\x01\x02"), begin + len(directory)
    wide_end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, total, total, len(directory), begin)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    return data[:begin] + directory + wide_end + locator + b"PK\x05\x06" + bytes(4) + b"\xff" * 12 + bytes(2)


def changed(data: bytes, ending: str, content: bytes) -> bytes:
    found = entries_of(data)
    name = next(each for each in found if each.endswith(ending))
    return archive({**found, name: content})


def script_files(folder: Path) -> Iterator[Made]:
    data = saved(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)))
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
    for name, content in (stacks | PICKLES | OTHER_PICKLES).items():
        yield f"pickled {name}", ".pt", changed(data, "data.pkl", content)
    for name, content in {
        "an endless class": b"class A(Module):\n" * 200_000,
        "open quotes": b'class A(Module):\n  __parameters__ = ["' + b"a" * 10**6,
        "backslashes": b'class A(Module):\n  __parameters__ = ["' + b"\\" * 10**6 + b"]",
    }.items():
        yield f"code with {name}", ".pt", changed(data, ".py", content)
    for name, body in (REACHES_OUT | ENDLESS | LARGE).items():
        yield f"code with {name}", ".pt", hostile_script(body, folder / "made")
    for name, (body, definitions) in DEFINITIONS.items():
        yield f"definitions: {name}", ".pt", hostile_script(body, folder / "made", definitions=definitions)
    for name in OTHER_ARCHIVES:
        yield f"an archive with {name}", ".pt", hostile_archive(name, folder / "made")
    yield "a state that never ends", ".pt", saved(Endless())
    entries = entries_of(data)
    yield "all in a folder above", ".pt", archive({f"../{name}": content for name, content in entries.items()})
    yield (
        "a bomb",
        ".pt",
        archive({**entries, f"{next(iter(entries)).partition('/')[0]}/x.py": bytes(10**8)}, zipfile.ZIP_DEFLATED),
    )
    yield "a hundred bombs", ".pt", archive({f"a/{n}.py": bytes(10**6) for n in range(100)}, zipfile.ZIP_DEFLATED)
    end = b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 65535, 65535, 2**31, 0, 0)
    yield "a directory that is not there", ".pt", end
    yield "a million entries", ".pt", listed_again(data, 10**6)
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
