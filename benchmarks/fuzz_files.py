"""Read mutated model files, each in its own process, and count crashes, hangs and excessive memory.

    python benchmarks/fuzz_files.py [--files 10000] [--seed 0] [--only onnx] [--seeds FOLDER]

A mutation changes, inserts, deletes, repeats or cuts bytes, or overwrites numbers with extreme ones. A good outcome is
a result, or a one-line error of modelsummary's own classes.
"""

from __future__ import annotations

import argparse
import io
import random
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

SECONDS, MEMORY = 20, 4 * 2**30
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


def mutated_archive(data: bytes, rng: random.Random) -> bytes:
    """Return an archive with one changed entry and a valid checksum."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
        chosen = rng.choice([each for each in old.infolist() if each.file_size])
        for each in old.infolist():
            content = old.read(each)
            new.writestr(each.filename, mutated(content, rng) if each is chosen else content)
    return target.getvalue()


def outcome(path: Path, input: tuple[int, ...] | None) -> str:
    """Read the file; return "read", or the name of the error."""
    try:
        stats = modelsummary.load(path, input)
        str(stats), stats.bandwidth(2**20), stats.activations(), stats.operators()
    except modelsummary.ModelSummaryError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            raise AssertionError(f"no one line: {error!r}") from error
        return type(error).__name__
    return "read"


def worker(seeds: list[Path], first: int, last: int, seed: int, connection: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, last):
            rng = random.Random(f"{seed} {number}")
            source = rng.choice(seeds)
            path = (
                source.parent / f"mutated{''.join(source.suffixes)}"
                if source.suffix == ".json"
                else (Path(folder) / f"file{source.suffix}")
            )
            is_archive = source.suffix in (".pt", ".pt2")
            mutate = mutated_archive if is_archive and rng.random() < 0.8 else mutated
            path.write_bytes(mutate(source.read_bytes(), rng))
            connection.send((number, "began"))
            signal.alarm(SECONDS)
            try:
                found = outcome(path, None)
            except Exception as error:
                found = f"ESCAPED {type(error).__name__}: {str(error)[:200]}"
            signal.alarm(0)
            connection.send((number, found))


def fuzz(seeds: list[Path], files: int, seed: int = 0) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Return the count of each outcome, and the numbers of the files with a bad one."""
    context = get_context("fork")
    counts: Counter[str] = Counter()
    bad: list[tuple[int, str]] = []
    start = 0
    while start < files:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=worker, args=(seeds, start, files, seed, theirs))
        process.start()
        theirs.close()
        number = start
        try:
            while True:
                number, found = ours.recv()
                if found != "began":
                    counts[found.partition(":")[0]] += 1
                    if found.startswith("ESCAPED"):
                        bad.append((number, found))
        except EOFError:
            process.join()
        start = number + 1
        if process.exitcode:
            name = signal.Signals(-process.exitcode).name if process.exitcode < 0 else str(process.exitcode)
            found = "HANG" if name == "SIGALRM" else f"CRASH {name}"
            counts[found] += 1
            bad.append((number, found))
    return counts, bad


def seeds_in(folder: Path) -> list[Path]:
    """Return small files of all formats."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.files import test_onnx_files, test_torch, test_weights

    return [each for samples in (test_onnx_files, test_torch, test_weights) for each in samples.write_samples(folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--only", help="ending of the samples to use: onnx, pt2, pt, safetensors, json or gguf")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=Path, help="a folder whose small ONNX files are samples, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = [each for each in seeds_in(Path(folder)) if options.only in (None, each.suffix[1:])]
        found = sorted(options.seeds.rglob("*.onnx")) if options.seeds else []
        seeds += [each for each in found if each.stat().st_size <= LARGEST_SEED]
        began = time.perf_counter()
        counts, bad = fuzz(seeds, options.files, options.seed)
    print(f"{options.files} files of {len(seeds)} samples in {time.perf_counter() - began:.0f} s: {dict(counts)}")
    for number, found in bad[:20]:
        print(number, found)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
