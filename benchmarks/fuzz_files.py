"""Read mutated model files in processes of their own; count crashes, hangs, written files and excessive memory.

    python benchmarks/fuzz_files.py [--files 5000] [--seed 0] [--only onnx] [--seeds FOLDER]

A mutation changes, inserts, deletes, repeats or cuts bytes, overwrites numbers with extreme ones, replaces tokens of
JSON or words of the code of TorchScript, which is then run, or moves, repeats and removes fields of Protocol Buffers.
A good outcome is a result, or a one-line error of modelsummary's own classes, within 2 s of processor time and 500 MB,
without a file written.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import modelsummary
from modelsummary.files.onnx.reading import _fields

SECONDS, MEMORY = 2.0, 500 * 2**20  # of one file; a process is stopped after five times the seconds
SCRIPT_INPUT = (3, 2, 4)  # what the samples of TorchScript take
LARGEST_SEED = 2 * 2**20
EXTREMES = [
    b"\xff" * 9 + b"\x01",
    b"\x00",
    b"\x7f",
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
    b"\xff\xff\xff\xff\x07",
]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the data with a few changes; most of it stays."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        place = rng.randrange(len(changed) + 1)
        length = rng.choice([1, 1, 2, 8, 64, 1024])
        kind = rng.randrange(7)
        if kind == 0:
            changed[place : place + length] = rng.randbytes(min(length, len(changed) - place))
        elif kind == 1:
            del changed[place : place + length]
        elif kind == 2:
            changed[place:place] = rng.randbytes(length)
        elif kind == 3:
            source = rng.randrange(len(changed) + 1)
            changed[place:place] = changed[source : source + length] * rng.choice([1, 1, 10])
        elif kind == 4:
            changed[place : place + 1] = rng.choice(EXTREMES)
        elif kind == 5 and place < len(changed):
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 6 and rng.random() < 0.2:
            del changed[place:]
        if not changed:
            break
    return bytes(changed)


_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null')
_VALUES = (b"0", b"-1", b"null", b"true", b"[]", b"{}", b'""', b"1e999", b"NaN", b"9223372036854775808", b"9" * 5000,
           b'"2**2**2**9"', b'"\\u001b[31m"', b'"Mod(Max(s1, s2), s1*s2 + 3)"', b"[" * 3000, b"1.5")  # fmt: skip


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """Return JSON text with a few tokens replaced by other ones, of the same text or extreme."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        tokens = list(_TOKEN.finditer(data))
        if not tokens:
            break
        token, other = rng.choice(tokens), rng.choice(tokens)
        value = other[0] if rng.random() < 0.4 else rng.choice(_VALUES)
        data = data[: token.start()] + value + data[token.end() :]
    return data


def mutated_code(data: bytes, rng: random.Random) -> bytes:
    """Return code of TorchScript with a few words removed, repeated, or replaced by other ones."""
    words = re.findall(r"\w+|\W", data.decode(errors="replace"))
    for _ in range(rng.choice([1, 2, 8])):
        if words:
            index = rng.randrange(len(words))
            numbers = ("9" * rng.randrange(1, 25), "-1")
            words[index] = rng.choice((rng.choice(words), "", words[index] * 2, "torch", *numbers))
    return "".join(words).encode()


def fields(data: bytes, depth: int = 0) -> list[tuple[int, int]]:
    """Return begin and end of the fields of an encoded message, and of the messages in it."""
    found: list[tuple[int, int]] = []
    try:
        for _, start, content, end in _fields(data, 0, len(data)):
            found.append((start, end))
            if depth < 6 and 2 < end - content < 100_000 and data[start] & 7 == 2:
                found += [(content + first, content + last) for first, last in fields(data[content:end], depth + 1)]
    except (ValueError, IndexError):
        return []
    return found


def mutated_fields(data: bytes, rng: random.Random) -> bytes:
    """Return an encoded message with a field moved, repeated, removed, or with its number changed.

    The lengths of the messages around it stay, so that most of the rest can still be decoded.
    """
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        places = fields(bytes(changed))
        if not places:
            break
        (start, end), (other, last) = rng.choice(places), rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            changed[start] = changed[start] & 7 | rng.randrange(1, 16) << 3
        elif kind == 1 and last - other == end - start:
            changed[start:end], changed[other:last] = changed[other:last], changed[start:end]
        elif kind == 2 and changed[start] & 7 == 0 and end - start == 2:
            changed[start + 1] = rng.choice([0, 1, 2, 7, 8, 16, 127])
        elif kind == 3:
            size = min(end - start, last - other)
            changed[start : start + size] = changed[other : other + size]
    return bytes(changed)


def mutated_archive(data: bytes, rng: random.Random) -> bytes:
    """Return an archive with one changed entry and a valid checksum."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
        entries = [entry for entry in old.infolist() if entry.file_size]
        read = [entry for entry in entries if entry.filename.endswith((".json", ".py", ".pkl"))]
        chosen = rng.choice(read if read and rng.random() < 0.8 else entries)
        mutate = mutated
        if rng.random() < 0.7:
            mutate = {".json": mutated_json, ".py": mutated_code}.get(Path(chosen.filename).suffix, mutated)
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, mutate(content, rng) if entry is chosen else content)
    return target.getvalue()


def outcome(path: Path, input: tuple[int, ...] | None) -> str:
    """Read the file, and run it if it is TorchScript; return "read", or the name of the error."""
    is_script = path.suffix == ".pt"
    try:
        stats = modelsummary.load(path, input or SCRIPT_INPUT if is_script else input, run=is_script)
        str(stats), stats.bandwidth(2**20), stats.activations(), stats.operators()
    except modelsummary.ModelSummaryError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            raise AssertionError(f"no one line: {error!r}") from error
        return type(error).__name__
    return "read"


def used() -> tuple[float, int]:
    """Return the seconds and the largest memory of this process and its children."""
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(os.times()[:4]), 1024 * most


def worker(seeds: list[Path], first: int, last: int, seed: int, connection: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number in range(first, last):
            rng = random.Random(f"{seed} {number}")
            source = rng.choice(seeds)
            path = (
                source.parent / f"mutated{''.join(source.suffixes)}"
                if source.suffix == ".json"
                else (Path(folder) / f"file{source.suffix}")
            )
            path.write_bytes(mutation(source, rng))
            connection.send((number, "began", 0.0, 0))
            signal.setitimer(signal.ITIMER_PROF, 5 * SECONDS)
            before, memory = used()
            try:
                found = outcome(path, None)
            except Exception as error:
                found = f"ESCAPED {type(error).__name__}: {str(error)[:200]}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            after, most = used()
            if after - before > SECONDS:
                found = f"HANG {found}, {after - before:.1f} s"
            elif most - memory > MEMORY:
                found = f"MEMORY {found}"
            elif any(not name.startswith("file.") for name in os.listdir(folder)):
                found = f"WRITES {os.listdir(folder)}"
            connection.send((number, f"{found} ({source.name})", after - before, most - memory))


def mutation(source: Path, rng: random.Random) -> bytes:
    """Return a mutation of a file, in most cases of its structure."""
    data = source.read_bytes()
    if rng.random() < 0.3:
        return mutated(data, rng)
    if source.suffix in (".pt", ".pt2"):
        return mutated_archive(data, rng)
    if source.suffix == ".onnx":
        return mutated_fields(data, rng)
    if source.suffix == ".json":
        return mutated_json(data, rng)
    if source.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        header = mutated_json(data[8 : 8 + length], rng)
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    return mutated(data, rng)


def fuzz(seeds: list[Path], files: int, seed: int = 0) -> tuple[Counter[str], list[tuple[int, str]], float, int]:
    """Return the count of each outcome, the numbers of the files with a bad one, the most seconds and memory."""
    context = get_context("fork")
    counts: Counter[str] = Counter()
    bad: list[tuple[int, str]] = []
    start, slowest, largest = 0, 0.0, 0
    for sample in seeds:
        if sample.suffix == ".pt":
            outcome(sample, None)  # torch imports much with its first operators
    while start < files:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(seeds, start, files, seed, theirs))
        process.start()
        theirs.close()
        number = start
        try:
            while True:
                number, found, seconds, memory = ours.recv()
                slowest, largest = max(slowest, seconds), max(largest, memory)
                if found != "began":
                    counts[found.split()[0]] += 1
                    if found[:2].isupper():
                        bad.append((number, found))
        except EOFError:
            process.join()
        start = number + 1
        if process.exitcode:
            name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else str(process.exitcode)
            found = "HANG" if name == "SIGPROF" else f"CRASH {name}"
            counts[found] += 1
            bad.append((number, found))
    return counts, bad, slowest, largest


def seeds_in(folder: Path) -> list[Path]:
    """Return small files of all formats."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.files import test_onnx_files, test_torch, test_weights

    return [each for samples in (test_onnx_files, test_torch, test_weights) for each in samples.write_samples(folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument("--only", help="ending of the samples to use: onnx, pt2, pt, safetensors, json or gguf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=Path, help="a folder whose small ONNX files are samples, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = [each for each in seeds_in(Path(folder)) if options.only in (None, each.suffix[1:])]
        found = sorted(options.seeds.rglob("*.onnx")) if options.seeds else []
        seeds += [each for each in found if each.stat().st_size <= LARGEST_SEED]
        began = time.perf_counter()
        counts, bad, slowest, largest = fuzz(seeds, options.files, options.seed)
    print(f"{options.files} files of {len(seeds)} samples in {time.perf_counter() - began:.0f} s: {dict(counts)}")
    print(f"at most {slowest:.1f} s and {largest / 1e6:.0f} MB; {len(bad)} bad")
    for number, found in bad[:20]:
        print(number, found)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
