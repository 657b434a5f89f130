"""The analyser in C++ counts a TorchScript file as ``load`` does, and lists what it does not count."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.files.torchscript import run_here, scripted

SOURCE = Path(__file__).parents[1] / "examples" / "cpp"


@pytest.fixture(scope="module")
def analyse(tmp_path_factory):
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    folder = tmp_path_factory.mktemp("cpp")
    options = [f"-DTORCH={Path(torch.__file__).parent}", "-DCMAKE_CXX_FLAGS_RELEASE=-DNDEBUG"]  # not optimised: faster
    for command in (["cmake", "-S", SOURCE, "-B", folder, *options], ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "analyse"


def figures(analyse, path, *size):
    """Return name -> number, and operators without a formula -> number of their calls."""
    command = [analyse, path, ",".join(map(str, size))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    uncounted = [line.split()[1:] for line in said if line.startswith("uncounted")]
    found = dict(line.split() for line in said[:3])
    return {name: int(number) for name, number in found.items()}, {name: int(calls) for name, calls in uncounted}


@pytest.mark.slow
def test_same_figures(analyse, tmp_path):
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.ConvTranspose2d(4, 6, 2), nn.Flatten(), nn.Linear(294, 5)]
    path = scripted(nn.Sequential(*layers).eval(), tmp_path / "net.pt")
    found, uncounted = figures(analyse, path, 2, 3, 8, 8)
    stats = run_here(path, (2, 3, 8, 8))
    # 3 -> 4 by 3x3 to 6x6; 4 -> 6 by 2x2 from 6x6 to 7x7; 294 -> 5
    assert found["macs"] == stats.total_mult_adds == 2 * (36 * 108 + 144 * 24 + 294 * 5)
    assert found["weights"] == stats.total_param_bytes
    assert found["activations"] == stats.activations().total == 4 * 2 * (144 + 294 + 5)
    assert uncounted == {}
    broken = subprocess.run([analyse, tmp_path, "1"], capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert broken.stderr.startswith("error: ")


class First(nn.Module):
    """The first result of a layer that also returns its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class Scores(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


WIDE = 8 * 8  # multiply-adds of a projection of one token
LAYERS = {  # inputs of 2 samples of 5 tokens of width 8; multiply-adds of all 10 tokens
    # 4 gates of 6: from 8 and 6; from both directions, 12, and 6
    "lstm": (First(nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True)), 10 * 2 * 24 * (8 + 6 + 12 + 6)),
    "gru": (First(nn.GRU(8, 6)), 10 * 18 * (8 + 6)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 10 * (4 * WIDE + 2 * 5 * 8 + 2 * 8 * 16)),
    "attention": (Attention(), 10 * (4 * WIDE + 2 * 5 * 8)),
    "scores": (Scores(), 10 * 2 * 5 * 8),
}


@pytest.mark.slow
def test_whole_layers(analyse, tmp_path):  # one test: workers that share them would each compile
    x = torch.rand(2, 5, 8)
    for name, (model, macs) in LAYERS.items():
        for traced in (False, True):
            with torch.no_grad():
                path = scripted(model.eval(), tmp_path / "net.pt", x if traced else None)
            found, uncounted = figures(analyse, path, *x.shape)
            assert (found["macs"], uncounted) == (macs, {}), (name, traced)


@pytest.mark.slow
def test_products_that_are_not_counted_are_listed(analyse, tmp_path):
    class Dot(nn.Module):
        def forward(self, x):
            return torch.dot(x, x)

    found, uncounted = figures(analyse, scripted(Dot(), tmp_path / "net.pt"), 8)
    assert (found["macs"], uncounted) == (0, {"aten::dot": 1})
