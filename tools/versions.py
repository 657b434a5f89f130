"""Run the tests on every torch that is supported, each in an environment of its own.

    python3 tools/versions.py [VERSION ...]

Versions are those of torch (default: the oldest that is declared, some between, and the newest). Without torchvision,
whose tests skip then; arguments behind ``--`` go to pytest.
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
    """The exit status of the tests on this torch."""
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
    """Exit with the versions that failed."""
    given, _, arguments = (" ".join(sys.argv[1:])).partition("--")
    failed = [version for version in given.split() or VERSIONS if run(version, arguments.split())]
    sys.exit(f"failed on torch {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
