"""Read handmade bad files: each must end with a clean error or a result, within 2 s of CPU and 500 MB, running
nothing. Reading is linear: an error may take 2 us for each byte of the file more, and a result, or code, 10 us.

    python benchmarks/bad_files.py [--seeds FOLDER] [--only onnx]

1,747 files (``bad_onnx.py``, ``bad_graphs.py``, ``bad_torch.py``, ``bad_programs.py``, ``bad_weights.py``): truncated,
bombs, loops, lies, path traversal, formulas without end, calls that crash C++, code in TorchScript and in pickles.
Each is read in a forked process that notes every file it opens (an audit hook) outside of the folder
and of Python's own. ``--seeds`` cuts and zeroes the first bytes of the ONNX files in a folder, too.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from bad_graphs import graph_files
from bad_onnx import good, onnx_files
from bad_programs import program_files
from bad_torch import exported_files, saved, script_files
from bad_weights import weight_files
from torch import nn

import modelsummary

SECONDS, MEMORY = 2.0, 500 * 2**20


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
    for name, head in (("zeros", b""), ("text", b"\x32\xf0\xff\xff\xff\x07")):  # of almost 2 GiB, without holding them
        with (folder / f"{name}.onnx").open("wb") as file:
            file.write(head)
            file.truncate(2**31 - 10)
        yield f"{folder}/{name}.onnx"


# --------------------------------------------------------------------------------------------- reading


def read_and_run(path: str | Path) -> modelsummary.Statistics:
    """Return the statistics of a file, after a run if it is TorchScript."""
    stats = modelsummary.load(path)
    return modelsummary.load(path, (2, 2), run=True) if str(path).endswith(".pt") else stats


def _figures(stats: Any) -> tuple[int, ...]:
    return stats.total_mult_adds, stats.total_params, stats.bandwidth().total, stats.activations().total


def read(path: str, folder: str, connection: Any) -> None:
    """What reading a file ends with, its seconds of CPU, its memory, and the files that it opened elsewhere."""
    opened: list[str] = []
    own = (folder, sys.prefix, sys.base_prefix, "/proc/self", str(Path(modelsummary.__file__).parents[1]))

    def hook(event: str, args: Any) -> None:
        is_other = event == "open" and isinstance(args[0], str) and not args[0].startswith(own)
        if is_other or event in ("os.system", "subprocess.Popen", "socket.connect"):
            opened.append(f"{event} {args[0]}")

    sys.addaudithook(hook)
    resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
    os.chdir(folder)
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = sum(os.times()[:4])
    try:
        stats = read_and_run(path)
        shown = f"{stats}{stats.bandwidth(2**20)}{stats.operators()}"
        said = "read" if "\x1b" not in shown else "ESCAPE CODES in the table"
        if stats.execution != "none" and min(_figures(stats)) < 0:
            said = "NEGATIVE figures"
    except modelsummary.ModelSummaryError as error:
        text = str(error)
        said = type(error).__name__ if text.isprintable() and len(text) <= 1000 else f"UNCLEAN {text[:80]!r}"
    except BaseException as error:
        said = f"ESCAPED {type(error).__name__}: {str(error)[:100]}"
    seconds = sum(os.times()[:4]) - began
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    grown = 1024 * (most - before.ru_maxrss)
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


def cases(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, the path and the content of each file."""
    in_folder = (lambda: script_files(folder), lambda: exported_files(folder))
    for maker in (onnx_files, graph_files, program_files, weight_files, *in_folder):
        for name, ending, data in maker():
            if options.only in (None, ending.rpartition(".")[2]) and options.named in name:
                yield name, str(folder / f"file{ending}"), data
    for path in sorted(options.seeds.rglob("*.onnx")) if options.seeds else ():
        data = path.read_bytes()[: 4 * 2**20]
        yield f"{path.name} cut", str(folder / "file.onnx"), data[: len(data) // 2]
        yield f"{path.name} zeroed", str(folder / "file.onnx"), bytes(64) + data[64:]
    if not options.only and not options.named:
        yield from ((f"the path {path[:30]!r}", path, b"") for path in paths(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=Path)
    parser.add_argument("--only", help="read only files with this ending: onnx, pt2, pt, safetensors, json or gguf")
    parser.add_argument("--named", default="", help="read only files with this text in their names")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    largest, bad = 0, 0
    slowest: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "models"
        folder.mkdir()
        (Path(temporary) / "secret").write_bytes(bytes(48))
        (folder / "link").symlink_to("/etc/passwd")
        (folder / "zero").symlink_to("/dev/zero")
        os.mkfifo(folder / "pipe")
        for each in (good(),):
            (folder / "warm.onnx").write_bytes(each.SerializeToString())
        (folder / "warm.pt").write_bytes(saved(nn.Linear(2, 2)))
        torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.rand(1, 2),)), folder / "warm.pt2")
        for name in ("warm.onnx", "warm.pt", "warm.pt2"):
            read_and_run(folder / name)
        n_files = 0
        for name, path, data in cases(folder, options):
            n_files += 1
            if data or path.startswith(str(folder / "file")):
                Path(path).write_bytes(data)
            said, seconds, grown, opened = outcome(path, str(folder))
            counts[said.partition(" ")[0]] += 1
            largest = max(largest, grown)
            slowest = sorted([*slowest, (seconds, f"{name}: {said}, {len(data):,} bytes")])[-5:]
            made = (folder / "made").exists()
            (folder / "made").unlink(missing_ok=True)
            if (
                said[:2].isupper()
                or seconds > SECONDS + len(data) / (100_000 if said == "read" or path.endswith(".pt") else 500_000)
                or grown > MEMORY
                or opened
                or made
            ):
                bad += 1
                print(
                    f"{name}: {said}, {seconds:.1f} s, {grown / 1e6:.0f} MB, {opened[:3]}{', MADE A FILE' * made}",
                    flush=True,
                )
    for seconds, text in slowest:
        print(f"slow: {seconds:.1f} s, {text}")
    print(f"{n_files} files: {dict(counts)}; at most {slowest[-1][0]:.1f} s and {largest / 1e6:.0f} MB; {bad} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
