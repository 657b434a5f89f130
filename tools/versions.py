"""Run the tests on every supported version of torch, each in its own virtual environment.

    python3 tools/versions.py [VERSION ...] [-- PYTEST_ARGUMENT ...]

``VERSION`` is a version of torch (default: the oldest supported one, two in between, and the newest). torchvision is
not installed, so its tests skip.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ["2.6.0", "2.11.0", "2.13.0", "2.15.0"]
NEEDED = ["numpy", "pytest", "hypothesis", "pandas", "matplotlib", "squarify"]


def run(version: str, arguments: list[str]) -> int:
    """Run the tests on one version of torch and return their exit status."""
    place = ROOT / f".venv-torch-{version}"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    install = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*install, f"torch=={version}", *NEEDED, "-e", "."], cwd=ROOT, check=True)
    print(f"torch {version}", flush=True)
    return subprocess.run(
        [python, "-m", "pytest", "-q", "-m", "not slow", *arguments], cwd=ROOT, check=False
    ).returncode


def main() -> None:
    """Run the tests on all versions; exit with a message that names the failed ones."""
    given, _, arguments = (" ".join(sys.argv[1:])).partition("--")
    failed = [version for version in given.split() or VERSIONS if run(version, arguments.split())]
    sys.exit(f"failed on torch {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
