"""Run the tests on every supported version of torch, one after the other, each in a virtual environment of its own.

    python3 tools/versions.py [--keep] [VERSION ...] [-- PYTEST_ARGUMENT ...]

``VERSION`` is a version of torch (default: the oldest supported one, two in between, and the newest). An environment
takes some 6 GB and is removed after its run; ``--keep`` keeps it for the next one. The extra ``test`` is installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.6.0", "2.11.0", "2.13.0", "2.15.0")


def run(version: str, pytest_arguments: list[str], *, keep: bool) -> int:
    """Run the tests on one version of torch and return their exit status."""
    place = ROOT / f".venv-torch-{version}"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir"]
    try:
        subprocess.run([*install, f"torch=={version}", "-e", ".[test]"], cwd=ROOT, check=True)
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
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help="versions of torch")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args(own)
    failed = [version for version in options.versions if run(version, pytest_arguments, keep=options.keep)]
    sys.exit(f"failed on torch {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
