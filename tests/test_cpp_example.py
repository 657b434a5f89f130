"""The analyser in C++ says what we say of a TorchScript file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from modelsummary import load
from tests.files.test_torch import scripted

SOURCE = Path(__file__).parents[1] / "examples" / "cpp"


@pytest.fixture(scope="module")
def analyse(tmp_path_factory):
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    folder = tmp_path_factory.mktemp("cpp")
    place = f"-DTORCH={Path(torch.__file__).parent}"
    for command in (["cmake", "-S", SOURCE, "-B", folder, place], ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "analyse"


@pytest.mark.slow
def test_same_figures(analyse, tmp_path):
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 6, 2), nn.Flatten(), nn.Linear(294, 5)]
    path = scripted(nn.Sequential(*layers).eval(), tmp_path / "net.pt")
    said = subprocess.run([analyse, path, "2,3,8,8"], capture_output=True, text=True, check=True).stdout
    found = dict(line.split() for line in said.splitlines())
    stats = load(path, (2, 3, 8, 8))
    # 3 -> 4 by 3x3 to 6x6; 4 -> 6 by 2x2 from 6x6 to 7x7; 294 -> 5
    assert int(found["macs"]) == stats.total_mult_adds == 2 * (36 * 108 + 144 * 24 + 294 * 5)
    assert int(found["weights"]) == stats.total_param_bytes
    assert int(found["activations"]) == stats.activations().total == 4 * 2 * (144 + 294 + 5)
    broken = subprocess.run([analyse, tmp_path, "1"], capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert broken.stderr.startswith("error: ")
