"""TorchScript files for tests, and what interpreting them gives."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from modelsummary import load


def scripted(model, path, x=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and says so in many ways
        script = torch.jit.script(model) if x is None else torch.jit.trace(model, x, check_trace=False)
        torch.jit.save(script, path)
    return path


def run_here(path, *sizes):
    """The statistics of the module in a file on inputs of these sizes, or of the sizes of tensors."""
    return load(path, list(sizes), run=True)


class Loops(nn.Module):
    """Loops, branches, lists, dicts, texts and a recurrent layer, for mutants."""

    def __init__(self):
        super().__init__()
        self.cell, self.lstm, self.layer = nn.GRUCell(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x, scale: float = 0.5):
        h = torch.zeros(x.size(1), 4)
        steps: list[torch.Tensor] = []
        names: dict[str, int] = {"a": 1}
        for i in range(x.size(0)):
            h = self.cell(x[i], h)
            if h.dim() != 2:
                raise ValueError(f"got {h.dim()}")
            steps.append(self.layer(h) * scale + names["a"])
        out = torch.cat(steps).view(x.size(0), -1, 4)
        return self.lstm(out)[0].reshape(out.size(0), -1).max(dim=1)
