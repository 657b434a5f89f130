"""Files of weights: what the writing libraries stored, matched with the model; nothing in a header is trusted."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.fuzz_files import mutated, outcome
from modelsummary import InputError, ModelFileError, Statistics, load
from modelsummary.files.comparing import compare
from modelsummary.files.weights.gguf import TYPES
from modelsummary.files.weights.matching import _named_alike

safetensors = pytest.importorskip("safetensors.torch")
gguf = pytest.importorskip("gguf")


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False)).to(torch.bfloat16)


def saved(tensors, path, metadata=None):
    safetensors.save_file(tensors, path, metadata=metadata)
    return path


def sharded(folder):
    """Write two files and their index, as transformers does; return the path of the index."""
    state = net().state_dict()
    parts = {"model-00001-of-00002.safetensors": ["0.", "1."], "model-00002-of-00002.safetensors": ["2."]}
    places = {}
    for name, begins in parts.items():
        part = {fqn: each for fqn, each in state.items() if fqn.startswith(tuple(begins))}
        saved(part, folder / name)
        places |= dict.fromkeys(part, name)
    total = sum(each.nbytes for each in state.values())
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return index


def quantised(path, rows=6):
    """Write a GGUF file with tensors of several types and a vocabulary."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_token_list([f"token {number}" for number in range(100)])
    writer.add_tensor("token_embd.weight", np.zeros((rows, 64), np.float16))
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.Q8_0, kinds.Q4_0):
        data = gguf.quants.quantize(np.ones((rows, 64), np.float32), kind)
        writer.add_tensor(f"blk.0.{kind.name.lower()}.weight", data, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_samples(folder):
    return [saved(net().state_dict(), folder / "net.safetensors"), sharded(folder), quantised(folder / "net.gguf")]


# ------------------------------------------------------------------------------------------- real files


def test_tensors_of_a_safetensors_file(tmp_path):
    model = net()
    stats = load(saved(model.state_dict(), tmp_path / "net.safetensors", {"format": "pt"}))
    found = {name: (each.shape, each.dtype, each.nbytes) for name, each in stats.tensors.items()}
    expected = {
        name: (tuple(each.shape), str(each.dtype).removeprefix("torch."), each.nbytes)
        for name, each in model.state_dict().items()
    }
    assert found == expected
    assert stats.execution == "none"
    assert stats.total_params == sum(each.numel() for each in model.parameters()) == 4 * 8 + 8 + 16 + 16
    assert stats.total_param_bytes == 2 * stats.total_params
    assert stats.total_buffer_bytes == 2 * 16 + 8  # running statistics, and the counter of batches
    assert stats["0"].num_params == 40
    assert stats.bytes_by_dtype() == {"bfloat16": 2 * 88, "int64": 8}
    assert "Stored in the file: 89 elements, 184 B\nBy dtype: bfloat16 176 B, int64 8 B\n" in str(stats)
    assert "weight" in stats["2"].inner_layers


def test_every_dtype_that_torch_can_save(tmp_path):
    names = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64"
    names += " float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz"
    dtypes = {name: getattr(torch, name) for name in names.split() if hasattr(torch, name)}  # torch 2.6 has no e8m0fnu
    tensors = {name: torch.zeros(3, 2, dtype=dtype) for name, dtype in dtypes.items()}
    stats = load(saved(tensors, tmp_path / "all.safetensors"))
    assert {name: each.dtype for name, each in stats.tensors.items()} == {name: name for name in tensors}
    assert {name: each.nbytes for name, each in stats.tensors.items()} == {n: t.nbytes for n, t in tensors.items()}


def test_an_index_reads_all_its_files(tmp_path):
    stats = load(sharded(tmp_path))
    assert list(stats.tensors) == list(net().state_dict())
    assert stats.total_params == 72
    assert "declares" not in stats.root.note


def test_tensors_of_a_gguf_file(tmp_path):
    path = quantised(tmp_path / "net.gguf")
    stats = load(path)
    assert stats.root.class_name == "llama"
    found = {name: (each.dtype, each.nbytes) for name, each in stats.tensors.items()}
    read = gguf.GGUFReader(path)
    assert {name: nbytes for name, (_, nbytes) in found.items()} == {each.name: each.n_bytes for each in read.tensors}
    assert stats.tensors["blk.0.q4_0.weight"].shape == (6, 64)
    # 6 x 64 elements: 12 blocks of 32 with 18 or 34 bytes
    assert found["blk.0.q4_0.weight"] == ("Q4_0", 12 * 18)
    assert found["blk.0.q8_0.weight"] == ("Q8_0", 12 * 34)
    assert stats.total_params == 3 * 6 * 64 + 64


def test_block_sizes_are_those_of_the_library():
    sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    known = {number: (elements, nbytes) for number, (_, elements, nbytes) in TYPES.items()}
    assert known == {number: sizes[number] for number in known}
    assert {number: name for number, (name, elements, _) in TYPES.items() if elements > 1}.items() <= {
        kind.value: kind.name for kind in gguf.GGML_QUANT_SIZES
    }.items()
    assert sizes.keys() == known.keys()


# --------------------------------------------------------------------------------------------- matching


def test_matched_with_the_live_model(tmp_path):
    model = net().float()
    state = {f"model.{name}": each for name, each in net().state_dict().items()}
    del state["model.2.weight"]
    state["model.0.bias"] = torch.zeros(9, dtype=torch.bfloat16)
    state["extra"] = torch.zeros(1)
    file = load(saved(state, tmp_path / "net.safetensors"))
    found = compare({"live": Statistics(model), "file": file})
    assert found.reasons == [
        "file: 1 tensors of the model are missing: '2.weight'",
        "file: 1 tensors of the file are not in the model: 'extra'",
        "file: 1 tensors have other shapes: '0.bias' is [9] in the file, [8] in the model",
        "file: 6 tensors are bfloat16 in the file and float32 in the model",
    ]
    assert [form.macs for form in found.forms] == [None, None]
    assert "--" in str(found)
    same = compare({"live": Statistics(net()), "file": load(sharded(tmp_path))})
    assert same.reasons == []
    assert same.forms[0].param_bytes == same.forms[1].param_bytes == 144


def test_what_all_names_of_a_file_begin_with_need_not_match(tmp_path):
    """Checkpoints of two loops: one holds a state dict, the other the one of a wrapped model, by more names."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    other = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 5)).half()
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "a.ckpt")
    wrapped = {f"module.{name}": tensor for name, tensor in other.state_dict().items()}
    torch.save({"model": wrapped}, tmp_path / "b.pth")
    a, b = (load(tmp_path / name) for name in ("a.ckpt", "b.pth"))
    for name, reference in (("a", a), ("model", Statistics(model))):
        assert [line.replace("the model", name) for line in compare({name: reference, "b": b}).reasons] == [
            f"b: 2 tensors have other shapes: '2.weight' is [5, 3] in the file, [1, 3] in {name}",
            f"b: 4 tensors are float16 in the file and float32 in {name}",
        ]
    assert compare({"model": Statistics(model), "a": a}).reasons == []


def test_tied_weights_and_other_names(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.words.weight
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    model = Tied()
    file = load(saved({"words.weight": model.words.weight.detach()}, tmp_path / "tied.safetensors"))
    assert compare({"live": Statistics(model), "file": file}).reasons == []
    other = load(saved({"token_embd": torch.zeros(10, 4), "norm": torch.zeros(7)}, tmp_path / "other.safetensors"))
    (reason,) = compare({"live": Statistics(model), "file": other}).reasons
    expected = "file: names differ from the model's; 1 of 2 tensors have the shape of one of the model's 1"
    assert reason == expected  # without the buffer, which is never saved


class Lookups(dict[str, torch.Tensor]):
    """A dict that counts how often a name is looked up."""

    count = 0

    def __contains__(self, name: object) -> bool:
        Lookups.count += 1
        return super().__contains__(name)


@pytest.mark.parametrize(
    ("stored", "own", "matched"),
    [
        (["a", "b"], ["m.a", "m.b", "k.a"], ["m.a", "m.b"]),
        (["m.a", "m.b", "c"], ["a", "b", "c"], ["a", "b", "c"]),
        (["m.a", "a"], ["a", "b"], ["m.a", "a"]),  # without m. two names would be equal
        (["m.a", "k.b"], ["a", "b"], ["m.a", "b"]),  # one each: the first prefix in order
        ([f"m{number}.w" for number in range(2000)], ["w"], ["w" if n == 0 else f"m{n}.w" for n in range(2000)]),
    ],
)
def test_prefixes_of_names(stored, own, matched):
    Lookups.count = 0
    found = _named_alike(dict.fromkeys(stored, ((), "")), Lookups(dict.fromkeys(own)))
    assert list(found) == matched
    assert Lookups.count <= 4 * len(stored)  # each name has its own prefix, and all are tried in one pass


# -------------------------------------------------------------------------------------------- untrusted


def stored(path, header, data=b""):
    """Write a safetensors file with this header, a text or a value."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BROKEN = {
    "truncated": ({"a": entry([2], 0, 8)}, b"1234567", "ends at byte 8 of the data, which has 7 bytes"),
    "left over": ({"a": entry([2], 0, 8)}, b"123456789", "do not fill the 9 bytes"),
    "hole": ({"a": entry([1], 4, 8)}, b"12345678", "do not fill"),
    "overlap": ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, b"12345678", "'a' and 'b' overlap"),
    "size": ({"a": entry([3], 0, 8)}, b"12345678", "does not need the 8 bytes"),
    "huge": ({"a": entry([2**62, 2**62, 4], 0, 0)}, b"", "does not need the 0 bytes"),
    "backwards": ({"a": entry([2], 8, 0)}, b"12345678", "does not need the -8 bytes"),
    "negative": ({"a": entry([-2], 0, 8)}, b"12345678", "must have a shape"),
    "bits": ({"a": entry([3], 0, 1, "F4")}, b"1", "does not need"),
    "dtype": ({"a": entry([2], 0, 8, "F33")}, b"12345678", "unknown dtype 'F33'"),
    "no entry": ({"a": 7}, b"", "must have a shape"),
    "floats": ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, b"12345678", "must have a shape"),
    "twice": ('{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": 1}', b"", "have the name 'a'"),
    "list": ([1], b"", "must be a JSON object, got list"),
    "deep": ("[" * 100_000, b"", "not JSON"),
    "digits": ('{"a": ' + "9" * 5000 + "}", b"", "not JSON"),
    "text": ("\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), b"", "not JSON"),
    "dots": ({"." * 200: entry([1], 0, 4)}, b"1234", "at most 100 dots"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_safetensors(tmp_path, case):
    header, data, message = BROKEN[case]
    with pytest.raises(ModelFileError, match=message):
        load(stored(tmp_path / "bad.safetensors", header, data))


def test_headers_longer_than_the_file(tmp_path):
    path = tmp_path / "bad.safetensors"
    for data in (b"", b"123", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"):
        path.write_bytes(data)
        with pytest.raises(ModelFileError, match="not a safetensors file, or is truncated"):
            load(path)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**26))
        file.truncate(2**26 + 8)
    with pytest.raises(ModelFileError, match="67,108,864 bytes; more than 33,554,432 are not read"):
        load(path)


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "c:\\x", "x" * 300])
def test_an_index_names_files_beside_it_only(tmp_path, name):
    folder = tmp_path / "inside"
    folder.mkdir()
    saved({"a": torch.zeros(1)}, tmp_path / "out.safetensors")
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelFileError, match="files must lie beside the index"):
        load(index)


def test_an_index_that_contradicts_its_files(tmp_path):
    index = sharded(tmp_path)
    facts = json.loads(index.read_text())

    def reading(**changes):
        index.write_text(json.dumps({**facts, **changes}))
        return load(index)

    places = facts["weight_map"]
    with pytest.raises(ModelFileError, match="'nothing' is not in 'model-00002"):
        reading(weight_map={**places, "nothing": places["2.weight"]})
    with pytest.raises(ModelFileError, match=r"'0.bias' is in 'model-00001.*which the index denies"):
        reading(weight_map={name: each for name, each in places.items() if name != "0.bias"})
    with pytest.raises(ModelFileError, match="'weight_map' must map names"):
        reading(weight_map=[1])
    with pytest.raises(ModelFileError, match=r"'gone\.safetensors', which does not exist"):
        reading(weight_map={"a": "gone.safetensors"})
    assert "declares 7 bytes, the files have 184" in reading(metadata={"total_size": 7}).root.note


def test_broken_gguf(tmp_path):
    data = quantised(tmp_path / "net.gguf").read_bytes()
    path = tmp_path / "bad.gguf"
    count = struct.pack("<Q", 4)
    cases = {
        b"GGUX" + data[4:]: "not a GGUF file",
        data[:4] + struct.pack("<I", 1) + data[8:]: "version 1",
        data[:100]: "truncated",
        data[:-100]: "ends at byte",
        data[:8] + struct.pack("<Q", 2**60) + data[16:]: "declares 1,152,921,504,606,846,976 tensors",
        data[:8] + count + struct.pack("<Q", 2**40) + data[24:]: "key-value pairs",
        data.replace(b"blk.0.q4_0.weight", b"blk.0.q8_0.weight"): "two tensors have the name",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=message):
            load(path)


def test_bombs_in_gguf(tmp_path):
    path = tmp_path / "bomb.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(1000))
    for array, message in {
        struct.pack("<IIQ", 9, 8, 2**40): "truncated",
        struct.pack("<IIQ", 9, 0, 2**62): "truncated",
        struct.pack("<I", 9) + nested: "nested more than 64 deep",
        struct.pack("<IQ", 8, 2**63): "truncated",
        struct.pack("<I", 99): "unknown type 99",
    }.items():
        path.write_bytes(head + array)
        with pytest.raises(ModelFileError, match=message):
            load(path)
    key = b"k" * 2**16  # one byte more than GGUF allows
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + bytes(8))
    with pytest.raises(ModelFileError, match="a name has 65,536 bytes"):
        load(path)


def test_long_values_of_gguf_are_skipped(tmp_path):
    value = "a" * 200_000 + "\U0001f600"  # in memory, one such character makes four bytes of each
    writer = gguf.GGUFWriter(tmp_path / "long.gguf", "llama")
    writer.add_string("general.description", value)
    writer.add_array("scores", [0.5] * 100_000)
    writer.add_tensor("a", np.zeros((2, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tracemalloc.start()
    try:
        assert load(tmp_path / "long.gguf").total_params == 8
        assert tracemalloc.get_traced_memory()[1] < len(value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("inner", [b"[],", b"{},", b'{"":1},', b"1,"])
def test_values_of_a_header_are_counted_before_they_are_made(tmp_path, inner):
    header = b'{"a":[' + inner * (20_000_000 // len(inner)) + b"1]}"
    path = tmp_path / "bomb.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelFileError, match="bytes of memory"):
        load(path)


def test_mutated_files(tmp_path):
    samples = write_samples(tmp_path)
    found = set()
    for number in range(300):
        rng = random.Random(number)
        source = rng.choice(samples)
        path = tmp_path / f"fuzz{''.join(source.suffixes)}"
        path.write_bytes(mutated(source.read_bytes(), rng))
        found.add(outcome(path, None))
    assert found <= {"read", "ModelFileError"}
    assert "read" in found


def test_an_input_is_refused(tmp_path):
    path = saved(net().state_dict(), tmp_path / "net.safetensors")
    with pytest.raises(InputError, match=r"which the weights in .* do not have"):
        load(path, (1, 4))
