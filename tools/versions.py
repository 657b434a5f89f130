"""Run the tests on every supported version of torch, one after the other, each in a virtual environment of its own.

    python3 tools/versions.py [--keep] [VERSION ...] [-- PYTEST_ARGUMENT ...]
    python3 tools/versions.py --list

``VERSION`` is a version of torch, or ``newest`` for the one that pip resolves (default: the ones in ``setup.cfg``). An
environment takes some 6 GB and is removed after its run; ``--keep`` keeps it for the next one. The extra ``test`` is
installed. ``--list`` prints the versions in ``setup.cfg`` as JSON, each with its version of Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import venv
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PYTHON = "Programming Language :: Python :: 3."


def supported() -> list[dict[str, str]]:
    """Return the versions of torch and Python that are tested together, the oldest first."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["metadata"]["classifiers"].split("\n")
    pythons = [line.rpartition(" ")[2] for line in lines if line.startswith(_PYTHON)]
    torches = setup["tool:versions"]["torch"].split()
    return [{"torch": torch, "python": python} for torch, python in zip(torches, pythons, strict=True)]


def run(version: str, pytest_arguments: list[str], *, keep: bool) -> int:
    """Run the tests on one version of torch and return their exit status."""
    place = ROOT / f".venv-torch-{version}"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
    torch = ["--upgrade", "torch"] if version == "newest" else [f"torch=={version}"]
    try:
        subprocess.run([*install, *torch, "-e", ".[test]"], cwd=ROOT, check=True)
        print(f"torch {version}", flush=True)
        tests = [python, "-m", "pytest", "-n", "auto", *pytest_arguments]
        return subprocess.run(tests, cwd=ROOT, check=False).returncode
    finally:
        if not keep:
            shutil.rmtree(place)


def main() -> None:
    """Run the tests on all versions; exit with a message that names the failed ones."""
    own, pytest_arguments = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, pytest_arguments = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="versions of torch")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--list", action="store_true", help="print the supported versions as JSON")
    options = parser.parse_args(own)
    if options.list:
        print(json.dumps(supported()))
        return
    versions = options.versions or [pair["torch"] for pair in supported()]
    failed = [version for version in versions if run(version, pytest_arguments, keep=options.keep)]
    sys.exit(f"failed on torch {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
