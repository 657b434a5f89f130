# ruff: noqa: E501 - a line for each bad file
"""Bad files of weights (GGUF, safetensors and their indices) and of statistics; ``bad_files.py`` reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from bad_onnx import Made

__all__ = ["weight_files"]

HUGE = (0, 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1)


def text(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def gguf(pairs: bytes = b"", tensors: bytes = b"", n_pairs: int = 0, n_tensors: int = 0, data: int = 64) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs) + pairs + tensors
    return head + bytes(-len(head) % 32) + bytes(data)


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes | str, dims: Any, kind: int = 0, begin: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, begin)


def weight_files() -> Iterator[Made]:
    for name, data in (*gguf_files(), *gguf_tensors()):
        yield f"gguf: {name}", ".gguf", data
    for name, data in (*safetensors_files(), *safetensors_headers()):
        yield f"safetensors: {name}", ".safetensors", data
    for name, data in index_files():
        yield f"index: {name}", ".safetensors.index.json", data


def gguf_files() -> Iterator[tuple[str, bytes]]:
    for count in HUGE:
        yield f"{count} tensors", gguf(n_tensors=count)
        yield f"{count} pairs", gguf(n_pairs=count)
        for inner in (0, 8, 9, 12, 99):
            yield f"an array of {count} of {inner}", gguf(pair("a", 9, struct.pack("<IQ", inner, count)), n_pairs=1)
        yield f"a text of {count}", gguf(struct.pack("<Q", count) + b"abc", n_pairs=1)
        yield f"an alignment of {count}", gguf(pair("general.alignment", 10, struct.pack("<Q", count)), n_pairs=1)
    for depth in (4, 100, 100_000):
        nested = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 1) + b"\0"
        yield f"arrays {depth} deep", gguf(pair("a", 9, nested), n_pairs=1)
    wide = struct.pack("<IQ", 9, 3_000_000) + struct.pack("<IQ", 0, 0) * 3_000_000
    yield "three million empty arrays", gguf(pair("a", 9, wide), n_pairs=1)
    yield (
        "three million empty texts",
        gguf(pair("a", 9, struct.pack("<IQ", 8, 3_000_000) + bytes(24_000_000)), n_pairs=1),
    )
    yield "a million pairs", gguf(b"".join(pair(f"{n}", 0, b"\0") for n in range(1_000_000)), n_pairs=1_000_000)
    yield "the same key", gguf(pair("a", 0, b"\0") * 2, n_pairs=2)
    wide = b"a" * 120_000_000 + "\U0001f600".encode()  # decoded, each character takes four bytes
    yield "a long key of wide characters", gguf(pair(wide, 0, b"\0"), n_pairs=1)
    yield "a long text of wide characters", gguf(pair("a", 8, text(wide)), n_pairs=1)
    one_module_each = b"".join(tensor(f"blk.{n // 20}.exp_{n % 20}.weight", [0]) for n in range(400_000))
    yield "400,000 tensors in modules of their own", gguf(tensors=one_module_each, n_tensors=400_000)
    yield "a long text", gguf(pair("a", 8, text(b"x" * 50_000_000)), n_pairs=1)
    yield "a long key", gguf(pair(b"k" * 10_000_000, 0, b"\0"), n_pairs=1)
    yield "a hostile architecture", gguf(pair("general.architecture", 8, text("\x1b[31m\u202e<b>")), n_pairs=1)
    yield "not UTF-8", gguf(pair(b"\xff\xfe", 0, b"\0"), n_pairs=1)
    yield "an alignment of text", gguf(pair("general.alignment", 8, text("32")), n_pairs=1)


def gguf_tensors() -> Iterator[tuple[str, bytes]]:
    for size in HUGE:
        yield f"sizes of {size}", gguf(tensors=tensor("a", [size % 2**64] * 4), n_tensors=1)
        yield f"a place of {size}", gguf(tensors=tensor("a", [2], begin=size), n_tensors=1)
    for count in (5, 1000, 2**32 - 1):
        yield f"{count} dimensions", gguf(tensors=text("a") + struct.pack("<I", count) + bytes(100), n_tensors=1)
    yield "overlapping", gguf(tensors=tensor("a", [16]) + tensor("b", [16]), n_tensors=2)
    yield "two of a name", gguf(tensors=tensor("a", [2]) + tensor("a", [2], begin=32), n_tensors=2)
    yield "400,000 of no bytes", gguf(tensors=b"".join(tensor(f"t{n}", [0]) for n in range(400_000)), n_tensors=400_000)
    yield "900,000 of no bytes", gguf(tensors=b"".join(tensor(f"t{n}", [0]) for n in range(900_000)), n_tensors=900_000)
    deep = b"".join(tensor(".".join([f"m{n}"] * 90), [0]) for n in range(20_000))
    yield "20,000 names of 90 modules", gguf(tensors=deep, n_tensors=20_000)
    for name in ("", ".", "a" * 900, "." * 99, "\x1b[2J", "\u202ea", "=cmd|'/c calc'!A0", "</script><script>", "a\nb"):
        yield f"the name {name[:9]!r}", gguf(tensors=tensor(name, [4]), n_tensors=1)
    for kind in (4, 5, 36, 1000, 2**32 - 1):
        yield f"type {kind}", gguf(tensors=tensor("a", [256], kind), n_tensors=1)
    for version, order in ((0x03000000, "<"), (0x02000000, "<"), (2**32 - 1, "<"), (1, ">"), (0x00010003, "<")):
        head = b"GGUF" + struct.pack(f"{order}IQQ", version, 1, 0)
        yield f"version {version} in order {order}", head + tensor("a", [4]) + bytes(64)
    for value in (b"\x02", b"\xff"):
        yield f"a truth of {value!r}", gguf(pair("a", 7, value), n_pairs=1)
    for kind, value in (
        (5, struct.pack("<i", -32)),
        (6, struct.pack("<f", 32.0)),
        (7, b"\x01"),
        (9, struct.pack("<IQ", 0, 0)),
    ):
        yield f"an alignment of kind {kind}", gguf(pair("general.alignment", kind, value), n_pairs=1)
    for length in (2**63, 2**64 - 1, 2**64 - 16):
        texts = struct.pack("<IQ", 8, 3) + text("a") + struct.pack("<Q", length) + b"abc"
        yield f"a list with a text of {length}", gguf(pair("a", 9, texts), n_pairs=1)
    mixed = b"".join(struct.pack("<IQ", 9, 2) for _ in range(60)) + struct.pack("<IQ", 0, 1) + b"\0"
    yield "arrays of two arrays 60 deep", gguf(pair("a", 9, mixed), n_pairs=1)
    yield (
        "sizes of nothing and of all",
        gguf(tensors=tensor("a", [0, 2**63, 2**63]) + tensor("b", [2**63, 0]), n_tensors=2),
    )
    yield "a tensor without sizes", gguf(tensors=tensor("a", []), n_tensors=1)
    yield "names that differ in case", gguf(tensors=tensor("a.B", [2]) + tensor("A.b", [2], begin=32), n_tensors=2)
    yield "a module that is a tensor", gguf(tensors=tensor("a", [2]) + tensor("a.b", [2], begin=32), n_tensors=2)
    for part in range(0, 200, 10):
        yield f"cut at {part}", gguf(pair("a", 8, text("b")), tensor("a", [4]), 1, 1)[:part]


def safetensors(header: Any, data: int = 8, length: int | None = None) -> bytes:
    found = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(found) if length is None else length) + found + bytes(data)


def entry(shape: Any = (2,), begin: Any = 0, end: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_files() -> Iterator[tuple[str, bytes]]:
    for length in HUGE:
        yield f"a header of {length}", safetensors({"a": entry()}, length=length)
    for depth in (500, 100_000, 3_000_000):
        yield f"lists {depth} deep", safetensors(b'{"a":' + b"[" * depth + b"]" * depth + b"}")
        yield f"objects {depth} deep", safetensors(b'{"a":' * depth + b"1" + b"}" * depth)
    yield "a number of a million digits", safetensors(b'{"a":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b"]}}")
    yield "numbers of 4,000 digits", safetensors(b'{"a":[' + b",".join([b"9" * 4_000] * 5_000) + b"]}")
    yield "exponents", safetensors(b'{"a":[' + b",".join([b"1e999999999"] * 100_000) + b"]}")
    yield "five million numbers", safetensors(b'{"a":[' + b"1," * 5_000_000 + b"1]}")
    yield "five million objects", safetensors(b'{"a":[' + b"{}," * 5_000_000 + b"{}]}")
    for inner in (b"[],", b"{},", b'{"":1},'):
        yield f"30 MB of {inner!r}", safetensors(b'{"a":[' + inner * (30_000_000 // len(inner)) + b"1]}")
    yield "a million names", safetensors(b"{" + b",".join(b'"%d":1' % n for n in range(1_000_000)) + b"}")
    yield "surrogates", safetensors(b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')
    yield "a text that never ends", safetensors(b'{"' + b"\\" * 20_000_000)
    yield "blanks", safetensors(b" " * 30_000_000)
    for value in (b"NaN", b"-Infinity", b"null", b"[]", b"3", b'"x"', b"{", b"\xff\xfe{}", b"\xef\xbb\xbf{}"):
        yield f"only {value!r}", safetensors(value)
    plain = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    yield "a name and its escapes", safetensors(b'{"a":' + plain + b',"\\u0061":' + plain + b"}")
    yield (
        "a key twice in an entry",
        safetensors(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}'),
    )
    for number in (b"8.0", b"8e0", b"-0", b"08", b"0x8", b"1e999", b"true", b"8" * 300):
        yield f"the end {number[:9]!r}", safetensors(plain.replace(b"8]", number + b"]").join((b'{"a":', b"}")))
    yield "three places", safetensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}}')
    yield (
        "facts of 30 MB",
        safetensors(
            b'{"__metadata__":{' + b",".join(b'"%d":"v"' % n for n in range(2_000_000)) + b'},"a":' + plain + b"}"
        ),
    )
    yield "facts in facts", safetensors(b'{"__metadata__":' * 900 + b"{}" + b"}" * 900)
    for dtype, count in (("F4", 3), ("F4", 16), ("F6_E2M3", 4), ("F6_E2M3", 2**62)):
        yield f"{count} elements of {dtype}", safetensors({"a": entry((count,), 0, 8, dtype)})
    yield "a hole", safetensors({"a": entry((1,), 0, 4), "b": entry((1,), 8, 12)}, 12)
    yield "nothing at the end", safetensors({"a": entry(), "b": entry((0,), 8, 8), "c": entry((0, 2**62), 8, 8)})
    yield "a module that is a tensor", safetensors({"a": entry(), "a.b": entry((0,), 8, 8), "a.b.c": entry((0,), 8, 8)})
    yield "an entry twice", safetensors(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}')


def safetensors_headers() -> Iterator[tuple[str, bytes]]:
    for shape in (
        [2**62, 2**62],
        [2**63],
        [-2],
        [1] * 65,
        [0] * 64,
        [2**62] * 60 + [0],
        [1.5],
        ["2"],
        [True],
        None,
        {},
    ):
        yield f"the shape {str(shape)[:20]}", safetensors({"a": entry(shape)})
    for begin, end in ((8, 0), (-8, 0), (0, 2**63), (0, 2**64), (0.0, 8.0), ("0", "8"), (None, 8), (4, 12)):
        yield f"the place {begin} to {end}", safetensors({"a": entry(begin=begin, end=end)})
    yield "overlapping", safetensors({"a": entry(), "b": entry()})
    yield "overlapping by half", safetensors({"a": entry(), "b": entry((2,), 4, 12)}, 12)
    for dtype in ("", "F3", None, 3, "F32" * 1000, ["F32"]):
        yield f"the dtype {str(dtype)[:9]}", safetensors({"a": entry(dtype=dtype)})
    many = {f"t{n}": entry((0,), 0, 0) for n in range(300_000)}
    yield "300,000 tensors of no bytes", safetensors(many, 0)
    yield (
        "30,000 names of 90 modules",
        safetensors({".".join([f"m{n}"] * 90): entry((0,), 0, 0) for n in range(30_000)}, 0),
    )
    for name in ("", ".", "a" * 2000, "." * 99, "\x1b[2J\x9b31m", "\u202ea", "=1+1", "</script>", "a\r\nb", "\0"):
        yield f"the name {name[:9]!r}", safetensors({name: entry()})
    for metadata in (3, [], {"a": [[]]}, {"x": "\x1b[31m"}, None):
        yield f"the metadata {metadata!r}", safetensors({"__metadata__": metadata, "a": entry()})


def index_files() -> Iterator[tuple[str, bytes]]:
    for value in (b"", b"[]", b"null", b'{"weight_map": []}', b'{"weight_map": {"a": 3}}', b'{"weight_map": {"a": ""}}',
                  b'{"weight_map": {"a": "../secret"}}', b'{"weight_map": {"a": "pipe"}}', b'{"weight_map": {"a": "link"}}',
                  b'{"weight_map": {"a": "zero"}}', b'{"weight_map": {"a": "/etc/passwd"}}',
                  b'{"weight_map": {"a": "file.safetensors.index.json"}}', b'{"weight_map": {"a": "a\\u0000b"}}',
                  b'{"weight_map": {}}', b"[" * 1_000_000, b'{"a":' * 500_000,
                  b'{"weight_map": {"a": "' + b"n" * 100_000 + b'"}}'):  # fmt: skip
        yield f"{value[:40]!r}", value
    for name in ("..%2fsecret", "\u2024\u2024\u2215secret", "..\uff0fsecret", "secret ", "models", "link", "file.gguf", "n" * 255, "\ud800",
                 "file.safetensors.index.json\n", "CON", "-rf", "~", "$HOME", "*", "zero"):  # fmt: skip
        yield f"the file {name[:20]!r}", json.dumps({"weight_map": {"a": name, "b": name}}).encode()
    for total in ("NaN", "1e999", "9" * 4000, "[" * 500 + "]" * 500, '"\\u001b[31m"'):
        yield f"a total of {total[:9]}", b'{"metadata":{"total_size":%s},"weight_map":{}}' % total.encode()
    yield "30 MB of lists", b'{"weight_map":{"a":[' + b"[]," * 10_000_000 + b"1]}}"
    for count in (9_000, 300_000):
        yield f"{count} files", json.dumps({"weight_map": {f"t{n}": f"f{n}" for n in range(count)}}).encode()
    yield "9,000 times a pipe", json.dumps({"weight_map": {f"t{n}": "pipe" for n in range(9_000)}}).encode()
