"""The package says at its import what is wrong with its installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import modelsummary

PACKAGE = Path(modelsummary.__file__).parent


def _install(folder: Path, name: str, version: str, *requirements: str) -> None:
    """Write the metadata of a distribution, as pip does."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requirements), ""]))


def _imported(*folders: Path) -> subprocess.CompletedProcess[str]:
    """Import the package in a process of its own, with folders at the head of ``sys.path``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", "import modelsummary; print(modelsummary.__version__)"]
    return subprocess.run(command, env=environment, cwd=folders[0], capture_output=True, text=True, check=False)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder that holds the package, as ``site-packages`` does."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "modelsummary").symlink_to(PACKAGE, target_is_directory=True)
    return folder


def _error(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 1
    return run.stderr.splitlines()[-1]


def test_files_of_another_project_in_the_folder_are_refused(site):
    _install(site, "modelsummary", "1.1.7")
    assert _error(_imported(site)) == (
        f"ImportError: {PACKAGE.resolve()} holds files of torch-modelsummary and of modelsummary 1.1.7, which is "
        "another project; pip uninstall both, then install torch-modelsummary again"
    )


def test_another_project_in_another_folder_is_no_concern(site, tmp_path):
    other = tmp_path / "other"
    (other / "modelsummary").mkdir(parents=True)
    (other / "modelsummary" / "__init__.py").touch()
    _install(other, "modelsummary", "1.1.7")
    _install(site, "torch-modelsummary", "9.8.7")
    run = _imported(site, other)
    assert (run.stdout, run.stderr) == ("9.8.7\n", "")


@pytest.mark.parametrize("installed", ["2.5.1", "2.5.1+cpu", "1.13.0"])
def test_a_torch_that_is_too_old_is_refused(site, installed):
    _install(site, "torch-modelsummary", "9.8.7", "torch>=2.6")
    _install(site, "torch", installed)
    message = f"ImportError: torch must be 2.6 or newer, got {installed}; pip install 'torch>=2.6'"
    assert _error(_imported(site)) == message


@pytest.mark.parametrize("installed", ["2.6.0", "2.6.0a0+gitdead", "2.10.0", "3.0"])
def test_other_versions_of_torch_are_not(site, installed):
    _install(site, "torch-modelsummary", "9.8.7", "torchvision>=9; extra == 'plot'", "torch>=2.6")
    _install(site, "torch", installed)
    run = _imported(site)
    assert (run.stdout, run.stderr) == ("9.8.7\n", "")


def test_the_metadata_alone_say_which_torch_is_needed(site):
    _install(site, "torch-modelsummary", "9.8.7", "torch>=3.10")
    _install(site, "torch", "3.9.1")
    assert "torch must be 3.10 or newer, got 3.9.1" in _error(_imported(site))
