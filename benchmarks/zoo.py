"""Check models of many libraries, built small, one by one, and write docs/zoo.md and ZOO.md.

    python benchmarks/zoo.py --out results.jsonl --markdown
    python benchmarks/zoo.py --out results.jsonl --library timm --filter vit --jobs 2

Each model runs in its own process, forked from one that has imported the library, with limits of time and memory.
Results are lines of JSON. Models already in the file are skipped, unless ``--again`` is given. ``tests/zoo`` holds the
models and the checks.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.zoo.catalogues import CATALOGUES, REQUIRES
from tests.zoo.fixed import FIXED


class Worker:
    """A forked process that checks one model and reports on a pipe."""

    def __init__(self, library: str, name: str, catalogue: Any, options: argparse.Namespace) -> None:
        self.library, self.name, self.begin = library, name, time.monotonic()
        self.result: dict[str, Any] = {"library": library, "model": name, "checks": {}}
        self._buffer = b""
        self.reader, writer = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _child(writer, catalogue, name, options)
        os.close(writer)

    def read(self) -> bool:
        """Read from the pipe; return False at its end."""
        data = os.read(self.reader, 1 << 16)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            part = json.loads(line)
            self.result["checks"].update(part.pop("checks", {}))
            self.result.update(part)
        return bool(data)

    def finish(self, reason: str = "") -> dict[str, Any]:
        """Wait for the process, or end it for a reason."""
        if reason:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.reader)
        if status and not reason:
            reason = f"the process ended with status {status}"
        if reason:
            self.result["aborted"] = reason
        self.result["seconds"] = round(time.monotonic() - self.begin, 2)
        return self.result


def _child(writer: int, catalogue: Any, name: str, options: argparse.Namespace) -> None:
    """Check one model; never returns."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    if not options.verbose:
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    limit = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def say(part: dict[str, Any]) -> None:
        os.write(writer, json.dumps(part, default=str).encode() + b"\n")

    try:
        import torch

        from tests.zoo.checks import check
        from tests.zoo.example import CannotBuild

        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            begin = time.perf_counter()
            example = catalogue.make(name)
            _try(example)
            say({"built": True, "build_seconds": round(time.perf_counter() - begin, 2)})
        except CannotBuild as error:
            say({"built": False, "reason": str(error)[:400]})
            os._exit(0)
        for found, finding in check(example):
            say({"checks": {found: vars(finding)}})
        say({"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024})
    except BaseException as error:
        if options.verbose:
            traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"[:400]})
    os._exit(0)


def _try(example: Any) -> None:
    """Run a copy of an example once; a model that does not run at all is not our failure."""
    import torch

    from tests.zoo.example import CannotBuild

    try:
        with torch.no_grad():
            copy.deepcopy(example)()
    except Exception as error:
        raise CannotBuild(" ".join(f"{type(error).__name__}: {error}".split())) from error


def run(options: argparse.Namespace) -> None:
    """Check every model that is not in the file yet."""
    done = set()
    if options.out.exists() and not options.again:
        done = {(each["library"], each["model"]) for each in read(options.out)}
    for library in options.library or CATALOGUES:
        catalogue = importlib.import_module(CATALOGUES[library])
        try:
            for module in ("torch", *REQUIRES[library]):
                importlib.import_module(module)
        except (ImportError, RuntimeError) as error:
            print(f"{library}: left out, {error}", flush=True)
            continue
        names = catalogue.names()
        random.Random(0).shuffle(names)  # so that partial results are representative
        chosen = [name for name in names if options.filter in name and (not options.fixed or name in FIXED[library])]
        wanted = [name for name in chosen if (library, name) not in done][: options.limit]
        print(f"{library}: {len(names)} models, {len(wanted)} to check", flush=True)
        if not wanted:
            continue
        from tests.zoo.checks import warm_up

        warnings.simplefilter("ignore")
        warm_up()
        if hasattr(catalogue, "warm_up"):
            catalogue.warm_up()
        gc.freeze()
        _run_all(library, wanted, len(names), catalogue, options)


def _run_all(library: str, names: list[str], of: int, catalogue: Any, options: argparse.Namespace) -> None:
    waiting, running = names[::-1], []
    with options.out.open("a") as file:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                running.append(Worker(library, waiting.pop(), catalogue, options))
            ready, _, _ = select.select([worker.reader for worker in running], [], [], 0.5)
            for worker in list(running):
                ended = worker.reader in ready and not worker.read()
                late = time.monotonic() - worker.begin > options.timeout
                if ended or late:
                    running.remove(worker)
                    result = worker.finish(f"more than {options.timeout:g} s" if late and not ended else "")
                    file.write(json.dumps({**result, "of": of}) + "\n")
                    file.flush()
                    print(brief(result), flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the last result of each model."""
    found = {}
    for line in path.read_text().splitlines():
        each = json.loads(line)
        found[each["library"], each["model"]] = each
    return list(found.values())


def brief(result: dict[str, Any]) -> str:
    """Return one line with the failed checks."""
    head = f"{result['library']} {result['model']} ({result['seconds']:.1f} s)"
    if not result.get("built"):
        return f"{head}: cannot be built: {result.get('reason') or result.get('error') or result.get('aborted')}"
    bad = {name: each for name, each in result["checks"].items() if each["verdict"] not in ("yes", "none")}
    text = "".join(f"\n    {name}: {each['verdict']}: {each['reason'][:150]}" for name, each in bad.items())
    for key in ("error", "aborted"):
        text += f"\n    {key}: {result[key]}" if key in result else ""
    return head + text


def main() -> None:
    """Run the checks, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"), help="results, a line of JSON for each model")
    parser.add_argument("--library", action="append", choices=CATALOGUES, help="default: all; may be repeated")
    parser.add_argument("--filter", default="", help="only models whose name contains this")
    parser.add_argument("--limit", type=int, help="so many models of each library")
    parser.add_argument("--fixed", action="store_true", help="only the part that the tests run")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=180, help="seconds for a model")
    parser.add_argument("--memory", type=float, default=12, help="GiB of address space for a model")
    parser.add_argument("--again", action="store_true", help="check also what the file has already")
    parser.add_argument("--verbose", action="store_true", help="show what the models and libraries print")
    parser.add_argument("--report", action="store_true", help="check nothing, report what the file has")
    parser.add_argument("--markdown", action="store_true", help="write docs/zoo.md and ZOO.md")
    options = parser.parse_args()
    if not options.report:
        run(options)
    from tests.zoo.report import exceptions_page, page, reasons_of, table

    results = read(options.out)
    print(table(results))
    if options.markdown:
        here = Path(__file__)
        here.with_name("ZOO.md").write_text(exceptions_page(reasons_of(results)), encoding="utf-8")
        (here.parents[1] / "docs" / "zoo.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
